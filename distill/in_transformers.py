"""The target answers in transformers, where vLLM is not installed: left-padded batches, one forward a token.

Shape legend: B sequences in a batch, S positions, V vocabulary rows, K recorded tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from distill.requests import Answerer, Completion, Request, Sampling, dtype, ending_ids, request_seed
from pairing.source import ModelSource, load_model

BATCH = 32
WINDOW = 16  # batches that are sorted by length together


def open_transformers(target: ModelSource, *, max_num_seqs: int) -> Answerer:
    """Loads the target and returns its Answerer."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, endings = load_model(target.path, getattr(torch, dtype())).to(device).eval(), ending_ids(target.path)

    def answer(waiting: deque[Request], sampling: Sampling) -> Iterator[Completion]:
        size = min(max_num_seqs, BATCH)
        while waiting:
            # alike lengths together: less padding; rows are read by id, so their order is free. Not all at once, or no
            # chat of several turns would be finished before every first turn is
            taken = [waiting.popleft() for _ in range(min(len(waiting), WINDOW * size))]
            ordered = sorted(taken, key=lambda r: len(r.prompt_ids))
            for start in range(0, len(ordered), size):
                with torch.inference_mode():
                    batch = _answer_batch(model, ordered[start : start + size], sampling, endings)
                yield from batch

    return answer


def _answer_batch(model: Any, requests: Sequence[Request], sampling: Sampling, endings: list[int]) -> list[Completion]:
    """Finished sequences leave the batch, so their last pads cost nothing."""
    longest, size = max(len(r.prompt_ids) for r in requests), len(requests)
    ids_BS, mask_BS = torch.zeros(size, longest, dtype=torch.long), torch.zeros(size, longest, dtype=torch.long)
    for row, r in enumerate(requests):
        ids_BS[row, longest - len(r.prompt_ids) :] = torch.tensor(r.prompt_ids)
        mask_BS[row, longest - len(r.prompt_ids) :] = 1
    ids_BS, mask_BS = ids_BS.to(model.device), mask_BS.to(model.device)
    position_BS = (mask_BS.cumsum(1) - 1).clamp(min=0)
    draws = [torch.Generator().manual_seed(request_seed(sampling.seed, r.key)) for r in requests]
    said: list[list[int]] = [[] for _ in requests]
    heads: list[list[tuple[NDArray[np.int32], NDArray[np.float32]]]] = [[] for _ in requests]
    alive, cache = list(range(size)), None
    for _ in range(sampling.max_tokens):
        out = model(ids_BS, attention_mask=mask_BS, position_ids=position_BS, past_key_values=cache, use_cache=True,
                    logits_to_keep=1)  # fmt: skip
        cache = out.past_key_values
        logits_BV = out.logits[:, -1].float()
        top = logits_BV.log_softmax(-1).topk(sampling.top_logprobs)
        head_ids_BK, head_logprobs_BK = top.indices.int().cpu().numpy(), top.values.cpu().numpy()
        if sampling.temperature:
            p_BV = (logits_BV / sampling.temperature).softmax(-1).cpu()
            # of what is not a number nothing can be drawn; its row goes on, and is refused by its recorded head
            p_BV = torch.where(p_BV.isnan().any(-1, keepdim=True), 1.0, p_BV)
            next_B = torch.cat([torch.multinomial(p_BV[i], 1, generator=draws[row]) for i, row in enumerate(alive)])
        else:
            next_B = logits_BV.argmax(-1).cpu()
        for i, row in enumerate(alive):
            said[row].append(int(next_B[i]))
            heads[row].append((head_ids_BK[i], head_logprobs_BK[i]))
        keep = [i for i, row in enumerate(alive) if said[row][-1] not in endings]
        if not keep:
            break
        if len(keep) < len(alive):
            alive = [alive[i] for i in keep]
            kept = torch.tensor(keep, device=model.device)
            cache.batch_select_indices(kept)
            mask_BS, position_BS = mask_BS[kept], position_BS[kept]
        ids_BS = next_B[keep].to(model.device)[:, None]
        mask_BS = torch.cat([mask_BS, mask_BS.new_ones(len(keep), 1)], dim=1)
        position_BS = position_BS[:, -1:] + 1
    return [
        Completion(r, ids, "stop" if ids[-1] in endings else "length",
                   np.stack([i for i, _ in head]), np.stack([p for _, p in head]))
        for r, ids, head in zip(requests, said, heads, strict=True)
    ]  # fmt: skip
