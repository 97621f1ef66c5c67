"""Answers that the drafter writes itself, for the share λ of steps that train on them (GKD, Agarwal et al. 2024).

The drafter continues each row from where its last answer begins; the target, which must be online, then gives its distribution
at what was written. Only that continuation is supervised. Shapes: B rows, S columns so far, T new tokens, V vocabulary rows.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from distill.batches import Batch
from distill.emphasis import starts
from distill.losses import Signal
from pairing.errors import InputError


def continued(model: Any, batch: Batch, real: int, seed: int, temperature: float, mask_id: int | None = None) -> Batch:
    """The same prompts, answered by `model` at `temperature` (0: greedily) over its `real` ids, each at most as long as the
    answer that it replaces. Its signal has the written tokens and no distribution. `mask_id`, the mask token of parallel
    drafting, is never written: a text that holds it would teach what no text shows.

    What is drawn depends on (seed, prompt) alone, so it is the same however rows are batched and after a resume.
    """
    device = batch.input_BL.device
    prompts = _prompts(batch)
    longest_B = [int(batch.column_N[batch.row_N == b].max()) - len(p) + 2 for b, p in enumerate(prompts)]
    draws = [torch.rand(n, generator=_generator(seed, id_)) for n, id_ in zip(longest_B, batch.ids, strict=True)]
    uniform_BT = torch.nn.utils.rnn.pad_sequence(draws, batch_first=True).to(device)
    endings = torch.tensor(_endings(model), device=device)
    training = model.training
    model.eval()
    with torch.no_grad():
        longest = torch.tensor(longest_B, device=device)
        said = _write(model, prompts, uniform_BT, longest, endings, real, temperature, mask_id)
    model.train(training)
    texts = [torch.cat([p, a]) for p, a in zip(prompts, said, strict=True)]
    input_BL = batch.input_BL.new_zeros(len(texts), max(len(t) for t in texts) - 1)
    for b, text in enumerate(texts):
        input_BL[b, : len(text) - 1] = text[:-1]
    counts = [len(a) for a in said]
    answer_N = torch.cat(said)
    none = torch.zeros(len(answer_N), 0, device=device)
    first = min(len(p) for p in prompts) - 1
    return replace(
        batch,
        input_BL=input_BL,
        shared=min(batch.shared, first),
        row_N=torch.repeat_interleave(torch.arange(len(texts), device=device), torch.tensor(counts, device=device)),
        column_N=torch.cat([len(p) - 1 + torch.arange(n, device=device) for p, n in zip(prompts, counts, strict=True)]),
        signal=Signal(answer_N, none.long(), none, none.sum(-1)),
    )


def _prompts(batch: Batch) -> list[torch.Tensor]:
    """Each row up to where its last answer begins; its first supervised column is the last one of the prompt."""
    first_N = starts(batch.row_N, batch.column_N)
    last = {int(r): int(c) for r, c in zip(batch.row_N[first_N], batch.column_N[first_N], strict=True)}
    return [batch.input_BL[b, : last[b] + 1] for b in range(len(batch.ids))]


def _write(
    model: Any,
    prompts: list[torch.Tensor],
    uniform_BT: torch.Tensor,
    longest_B: torch.Tensor,
    endings: torch.Tensor,
    real: int,
    temperature: float,
    mask_id: int | None,
) -> list[torch.Tensor]:
    """One forward a token over left-padded rows, until all have ended."""
    B, width = len(prompts), max(len(p) for p in prompts)
    ids_BS = prompts[0].new_zeros(B, width)
    mask_BS = torch.zeros_like(ids_BS)
    for b, p in enumerate(prompts):
        ids_BS[b, width - len(p) :], mask_BS[b, width - len(p) :] = p, 1
    position_BS = (mask_BS.cumsum(1) - 1).clamp(min=0)
    written: list[torch.Tensor] = []
    done_B, cache = torch.zeros(B, dtype=torch.bool, device=ids_BS.device), None
    length_B = torch.zeros(B, dtype=torch.long, device=ids_BS.device)
    for t in range(uniform_BT.shape[1]):
        out = model(
            input_ids=ids_BS,
            attention_mask=mask_BS,
            position_ids=position_BS,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        cache = out.past_key_values
        logits_BV = out.logits[:, -1, :real].float()
        if mask_id is not None:
            logits_BV[:, mask_id : mask_id + 1] = -torch.inf  # nothing where it is a padding row
        next_B = _draw(logits_BV, uniform_BT[:, t], temperature)
        written.append(next_B)
        length_B += ~done_B
        done_B = done_B | torch.isin(next_B, endings) | (length_B >= longest_B)
        if bool(done_B.all()):
            break
        ids_BS = next_B[:, None]
        mask_BS = torch.cat([mask_BS, mask_BS.new_ones(B, 1)], dim=1)
        position_BS = position_BS[:, -1:] + 1
    return [torch.stack(written)[:n, b] for b, n in enumerate(length_B.tolist())]


def _draw(logits_BV: torch.Tensor, uniform_B: torch.Tensor, temperature: float) -> torch.Tensor:
    """By inverting the cumulative distribution: one uniform number decides a token, on any device."""
    if not temperature:
        return logits_BV.argmax(-1)
    cumulative_BV = (logits_BV / temperature).softmax(-1).cumsum(-1)
    at_B1 = torch.searchsorted(cumulative_BV, (uniform_B * cumulative_BV[:, -1])[:, None], right=True)
    return at_B1.squeeze(-1).clamp(max=logits_BV.shape[-1] - 1)


def _endings(model: Any) -> list[int]:
    for config in (getattr(model, "generation_config", None), model.config):
        ids = getattr(config, "eos_token_id", None)
        if ids is not None:
            return list(ids) if isinstance(ids, list) else [ids]
    raise InputError(
        "on_policy: the draft's config names no eos_token_id, so its answers would not end: see `draftsmith repair`"
    )


def _generator(seed: int, id_: str) -> torch.Generator:
    row = int.from_bytes(id_.encode()[:6].ljust(6, b"0"), "big")
    return torch.Generator().manual_seed(row + seed * 7919)
