"""One optimizer step on any number of processes: which rows, which losses with which factor, and the update.

Masking is in `batches`, the reduction is here: gradients are those of sum of losses / number of supervised tokens and mask
tokens, both over the whole optimizer window, all accumulation steps and all ranks (fault D11).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from accelerate import Accelerator

from distill.batches import Batch, Ints, Rows, collate
from distill.emphasis import noise, starts, survival_weights, worth_learning
from distill.fake_quantize import quantized, require_whole
from distill.guards import finite_or_stop
from distill.head import REPORTED, AnySignal, Head, Scores, Weigh, head_loss, head_scores
from distill.losses import LOSSES, Loss, jsd
from distill.mask_blocks import drawn, reach_weights, signal_of
from distill.objective import weights_at, without_answers
from distill.on_policy import continued
from distill.options import decoder_autocast
from distill.parallel import (
    Kind,
    Named,
    Prepared,
    backward,
    deepspeed_config,
    equal_graphs,
    kind_of,
    passes,
    prepare,
    sum_gradients,
    update,
    whole,
)
from distill.settings import Settings, learning_rate, on_policy, quantizer_at
from distill.signals import GetSignal
from distill.student import supervised_hidden

AGREEMENT = ("top1", "alpha", "alpha_low", "alpha_high")  # what a step's log says beside its losses


@dataclass(frozen=True)
class Run:
    """What a step needs, made once."""

    accelerator: Accelerator
    model: Any  # the drafter itself, inside `prepared.root`
    rows: Rows
    settings: Settings
    signal: GetSignal
    head: Head
    prepared: Prepared


def ready(
    accelerator: Accelerator,
    model: Any,
    rows: Rows,
    settings: Settings,
    signal: GetSignal,
    reference: Any = None,
    layout: tuple[Kind, Literal[2, 3]] | None = None,
) -> Run:
    """Prepares `model`, whose requires_grad flags say what learns, for steps on this accelerator's processes.

    `layout`: how the weights lie, and ZeRO's stage where they are DeepSpeed's; None: as accelerate was launched.
    """
    known: dict[str, Loss] = {**LOSSES, "jsd": partial(jsd, beta=settings.jsd_beta)}
    head = Head(rows.real, settings.chunk, settings.block, {name: known[name] for name in settings.reported})
    signal = signal_of(signal)

    def loss_of(model: Any, batch: Batch, weights: Mapping[str, float], step: int) -> tuple[torch.Tensor, Scores]:
        with decoder_autocast(accelerator.device, accelerator.mixed_precision == "bf16"):
            hidden_NH = supervised_hidden(model, batch)
        return batch_loss(hidden_NH, model.get_output_embeddings().weight, signal(batch), batch, weights, step, settings, head,
                          reference)  # fmt: skip

    kind, zero = layout or _launched(accelerator)
    if settings.quantizer is not None:
        require_whole(kind)
    config = deepspeed_config(zero, settings.batch_size, settings.clip) if kind == "deepspeed" else None
    prepared = prepare(kind, model, loss_of, partial(optimizer_of, settings), config)
    return Run(accelerator, model, rows, settings, signal, head, prepared)


def _launched(accelerator: Accelerator) -> tuple[Kind, Literal[2, 3]]:
    kind = kind_of(accelerator)
    return kind, 3 if kind == "deepspeed" and accelerator.deepspeed_plugin.zero_stage == 3 else 2


def optimizer_of(settings: Settings, params: Named) -> torch.optim.Optimizer:
    """AdamW; norms and biases do not decay."""
    decayed = [p for _, p in params if p.ndim > 1]
    plain = [p for _, p in params if p.ndim <= 1]
    return torch.optim.AdamW(
        [{"params": decayed, "weight_decay": settings.weight_decay}, {"params": plain, "weight_decay": 0.0}],
        lr=settings.lr,
        betas=(0.9, settings.beta2),
        fused=True,
    )


def optimizer_step(run: Run, window: Ints, step: int, progress: float) -> dict[str, Any]:
    """One optimizer step; returns its row for metrics.jsonl."""
    settings = run.settings
    # dropout, if the drafter has any, is a function of the position too, so a resume needs no saved generator
    torch.manual_seed((settings.seed * 1_000_003 + step) * 1009 + run.accelerator.process_index)
    run.model.train()
    weights, lr = weights_at(settings.losses, progress), learning_rate(settings, progress)
    if on_policy(settings, step):
        weights = without_answers(weights)
    with quantized(run.model, quantizer_at(settings, progress)):
        stats = window_gradients(run, window, weights, step)
    loss = sum(w * stats[name] for name, w in weights.items())
    ids = [str(run.rows.data[int(i)]["id"]) for i in window[:4]]
    finite_or_stop(step + 1, {"the loss": loss}, ids)
    norm = update(
        run.prepared, lr, settings.clip, lambda norm: finite_or_stop(step + 1, {"the gradient's norm": norm}, ids)
    )
    named = {"loss": loss, "kl": stats["forward_kl"], "ce": stats["cross_entropy"]}
    named |= {name: stats[name] for name in weights if name not in REPORTED}
    named |= {"top1": stats["top1"], "alpha": stats["alpha"], "supervised": stats["tokens"]}
    named |= {"masks": stats["masks"]} if settings.parallel is not None else {}
    named |= {name: value for name, value in stats.items() if name.startswith("top1_") and name not in LOSSES}
    return named | {"lr": lr, "grad_norm": norm}


def window_gradients(run: Run, window: Ints, weights: Mapping[str, float], step: int) -> dict[str, float]:
    """Leaves the window's gradient in every parameter, on every rank, and returns token means by name: the losses, AGREEMENT,
    "tokens" and "masks", how many of the text's tokens and of mask tokens were supervised (means are over both), and with masks
    "top1_0" (the plain next token), "top1_1", …
    """
    accelerator, settings, prepared = run.accelerator, run.settings, run.prepared
    rank, ranks = accelerator.process_index, accelerator.num_processes
    todo = passes(prepared.kind, window, settings.batch_size, rank, ranks)
    batches = [(collate(run.rows, indices, accelerator.device), weight) for indices, weight in todo]
    if equal_graphs(prepared.kind) or settings.gradient_checkpointing:
        batches = [(replace(batch, shared=0), weight) for batch, weight in batches]
    tokens, masks = int(run.rows.supervised_P[window].sum()), 0
    if on_policy(settings, step):
        with whole(prepared):
            batches = [(_continued(run, batch, step), weight) for batch, weight in batches]
    parallel, offsets = settings.parallel, 0
    if parallel is not None:
        batches = [(drawn(batch, parallel, settings.seed + step), weight) for batch, weight in batches]
        offsets = parallel.num_speculative_tokens
    if on_policy(settings, step) or parallel is not None:
        mine = [(_text_tokens(b), len(b.row_N)) for b, weight in batches if weight]
        counted = torch.tensor([sum(n) for n in zip(*mine, strict=True)] or [0, 0], device=accelerator.device)
        tokens, positions = accelerator.reduce(counted, "sum").tolist()  # what was written, not what it replaces
        masks = positions - tokens
    count = max(tokens + masks, 1)
    names = (*settings.reported, *AGREEMENT)
    sums = torch.zeros(len(names) + 2 * offsets, dtype=torch.float64, device=accelerator.device)
    for i, (batch, weight) in enumerate(batches):
        loss, scores = prepared.root(batch, weights, step)
        backward(prepared, loss * (weight / count), i == len(batches) - 1, ranks)
        sums += weight * torch.cat([_sums(scores, settings.reported), _by_offset(scores, batch, offsets)])
    sum_gradients(prepared, accelerator)
    sums = accelerator.reduce(sums, "sum")
    means, (hits, counts) = sums[: len(names)] / count, sums[len(names) :].view(2, offsets)
    by_offset = {f"top1_{i}": float(h / n) for i, (h, n) in enumerate(zip(hits, counts.clamp(min=1), strict=True))}
    return dict(zip(names, means.tolist(), strict=True)) | {"tokens": tokens, "masks": masks} | by_offset


def _text_tokens(batch: Batch) -> int:
    """Supervised positions that are no masks: equal steps over equal rows have equally many, with masks or without."""
    return len((batch if batch.blocks is None else batch.blocks.plain).row_N)


def batch_loss(
    hidden_NH: torch.Tensor,
    matrix_VH: torch.Tensor,
    signal: AnySignal,
    batch: Batch,
    weights: Mapping[str, float],
    step: int,
    settings: Settings,
    head: Head,
    reference: Any = None,
) -> tuple[torch.Tensor, Scores]:
    """The weighted loss summed over the batch's positions, each with its factor; and the scores of all positions."""
    survive = _survival(settings, batch, step)
    if settings.keep_share == 1:
        return head_loss(hidden_NH, matrix_VH, signal, weights, head, survive)
    # the losses of all positions first, without gradient; then the gradient of those that are kept
    scores = head_scores(hidden_NH, matrix_VH, signal, head)
    with torch.no_grad():
        theirs_NH = supervised_hidden(reference, batch)
    theirs = head_scores(theirs_NH, reference.get_output_embeddings().weight, signal, head)
    gap_N = scores.losses["forward_kl"] - theirs.losses["forward_kl"]
    if settings.selection == "random":
        gap_N = noise(batch.ids, batch.row_N, settings.seed + step)
    keep_N = worth_learning(gap_N, batch.row_N, settings.keep_share)
    factor_N = torch.ones_like(gap_N) if survive is None else survive(scores.accepted_N, scores.alpha_N, 0)
    kept_N = factor_N[keep_N]
    loss, _ = head_loss(hidden_NH[keep_N], matrix_VH, signal[keep_N], weights, head, lambda w, a, i: kept_N[i : len(w)])
    return loss, scores


def _continued(run: Run, batch: Batch, step: int) -> Batch:
    settings = run.settings
    mask_id = None if settings.parallel is None else settings.parallel.mask_id
    return continued(run.model, batch, run.rows.real, settings.seed + step, settings.on_policy_temperature, mask_id)


def _survival(settings: Settings, batch: Batch, step: int) -> Weigh | None:
    if settings.survival is None:
        return None
    first_N, blocks, parallel = starts(batch.row_N, batch.column_N), batch.blocks, settings.parallel
    # 1[argmax q = answer] says what the target accepts only where the answer is the target's own
    by_answer = settings.survival == "greedy" and not on_policy(settings, step)

    def weigh(accepted_N: torch.Tensor, alpha_N: torch.Tensor, start: int) -> torch.Tensor:
        w_N = accepted_N if by_answer else alpha_N
        if blocks is not None and parallel is not None:
            return reach_weights(w_N, blocks, parallel)[start:]
        return survival_weights(w_N, first_N[: len(w_N)], settings.num_speculative_tokens)[start:]

    return weigh


def _sums(scores: Scores, losses: tuple[str, ...]) -> torch.Tensor:
    columns = [scores.losses[name] for name in losses]
    columns += [scores.top1_N, scores.alpha_N, scores.alpha_low_N, scores.alpha_high_N]
    return torch.stack([c.double().sum() for c in columns])


def _by_offset(scores: Scores, batch: Batch, offsets: int) -> torch.Tensor:
    """Of each offset: positions whose most likely token is the target's, then all of them [2 · offsets]."""
    if batch.blocks is None:
        return scores.top1_N.new_zeros(0)
    offset_N = batch.blocks.offset_N
    return torch.cat(
        [torch.bincount(offset_N, w, offsets) for w in (scores.top1_N.double(), torch.ones_like(scores.top1_N))]
    )
