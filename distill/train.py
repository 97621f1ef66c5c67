"""The one training loop: distils a drafter from stored answers, on any number of processes, exactly resumable.

What varies enters as data (`Rows`), as weights of the losses, or as settings. Masking is in `batches`, the reduction
is here: gradients are those of sum of losses / number of supervised tokens, both over the whole optimizer window, all
accumulation steps and all ranks (fault D11).
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from distill.batches import Batch, Ints, Rows, collate, windows
from distill.checkpoint import load_checkpoint, save_checkpoint
from distill.emphasis import starts, survival_weights, worth_learning
from distill.evaluate import score_prompts, summary
from distill.guards import finite_or_stop, spike_or_stop
from distill.head import REPORTED, AnySignal, Head, Scores, Weigh, head_loss, head_scores
from distill.losses import LOSSES, Loss, jsd
from distill.objective import DraftSampling, Weight, require_losses, weights_at, without_answers
from distill.on_policy import continued
from distill.options import checkpoint_layers, compile_layers, decoder_autocast
from distill.parallel import (
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
from distill.signals import GetSignal, Target, get_signal, require_plain_target
from distill.student import Trainable, freeze, require_plain_head, supervised_hidden
from pairing.acceptance import replay
from pairing.errors import InputError, PartFailedError
from pairing.files import append_jsonl, read_jsonl, write_text
from pairing.progress import bar

AGREEMENT = ("top1", "alpha", "alpha_low", "alpha_high")  # what a step's log says beside its losses


@dataclass(frozen=True)
class Settings:
    """At least one of epochs, max_steps and minutes; the first that is reached ends the run."""

    seed: int
    batch_size: int  # rows per rank and accumulation step
    accumulation: int
    lr: float
    warmup: float  # part of the run
    weight_decay: float
    beta2: float
    clip: float
    trainable: Trainable
    losses: Mapping[str, Weight]
    chunk: int  # positions whose logits exist at one time
    epochs: float | None
    max_steps: int | None
    minutes: float | None
    eval_every: int
    eval_prompts: int
    checkpoint_every: int
    keep: int
    block: int = 1 << 17  # vocabulary rows whose logits exist at one time
    jsd_beta: float = 0.5
    top_logprobs: int | None = None  # ids used of the cache's; None: all
    num_speculative_tokens: int = 4  # K of what is served
    survival: DraftSampling | None = None  # weights positions by their chance to be reached, for this drafting
    keep_share: float = 1.0  # of an answer's positions, those where a reference drafter is ahead the most
    selection: Literal["gap", "random"] = "gap"  # random: the control that does the same work
    on_policy: float = 0.0  # share of steps whose answers the drafter writes
    on_policy_temperature: float = 1.0
    gradient_checkpointing: bool = False
    compile: bool = False

    @property
    def reported(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys([*REPORTED, *self.losses]))


@dataclass
class Position:
    """Where the run stands; with the data's order a pure function of (seed, epoch), all that a resume needs."""

    step: int = 0
    tokens: int = 0  # supervised
    seconds: float = 0.0
    rows_per_step: int = 0
    best: float | None = None  # the highest mean τ of the held-out sets so far


def steps_of(settings: Settings, rows: Rows, size: int) -> tuple[int, int | None]:
    """Optimizer steps of `size` rows in an epoch, and in the run where epochs or max_steps limit it."""
    per_epoch = math.ceil(int((rows.supervised_P > 0).sum()) / size)
    limits = [math.ceil(per_epoch * settings.epochs)] if settings.epochs is not None else []
    limits += [settings.max_steps] if settings.max_steps is not None else []
    return per_epoch, min(limits, default=None)


def learning_rate(settings: Settings, progress: float) -> float:
    """Linear warm-up, then a linear way down to 0 at progress 1: measured in parts of the run, so that a limit in
    minutes ends at the same rate as one in steps.
    """
    up = progress / settings.warmup if settings.warmup else 1.0
    return settings.lr * max(0.0, min(up, (1 - progress) / (1 - settings.warmup)))


Send = Callable[[dict[str, Any], int], None]


def fit(
    accelerator: Accelerator,
    model: Any,
    rows: Rows,
    heldout: Mapping[str, Rows],
    settings: Settings,
    out: Path,
    target: Target | None = None,
    reference: Any = None,
    digests: Mapping[str, str] | None = None,
    send: Send = lambda row, step: None,
) -> dict[str, Any]:
    """Trains `model` in place and returns the summary. Goes on from the newest checkpoint in `out`, where it also leaves the
    trained weights (the only place where they are whole if the model is sharded).

    The signal is `target`'s whole distribution where one is given, else the answers' own record. `reference` is a drafter that
    was distilled before, for `keep_share` < 1. Writes `out`/metrics.jsonl and `out`/checkpoints/, and gives each row of
    the former to `send` too. Under a limit in steps or epochs a run that was killed and started again, on as many processes or
    on others, has the same losses as one that was not. Raises PartFailedError where a loss is not finite or leaps, with all good
    checkpoints left as they are; InputError for losses, shares or a target that cannot be had, or where the checkpoint is of
    other `digests`.
    """
    require_possible(settings, online=target is not None, reference=reference is not None)
    signal = get_signal(rows, target, settings.top_logprobs)
    model.to(accelerator.device)
    freeze(model, settings.trainable)
    first = collate(rows, windows(rows, settings.seed, 0, 2)[0], accelerator.device)
    require_plain_head(model, first)
    if target is not None:
        require_plain_target(target, first)
    if settings.gradient_checkpointing:
        checkpoint_layers(model)
    if settings.compile:
        compile_layers(model)
    run = ready(accelerator, model, rows, settings, signal, reference)
    out_at = _Out(accelerator, out, dict(digests or {}), send)
    at = _resume(run, out_at)
    size, history = at.rows_per_step, _History()
    per_epoch, total = steps_of(settings, rows, size)
    order, ordered = windows(rows, settings.seed, at.step // per_epoch, size), at.step // per_epoch
    start, before, last, budget = time.monotonic(), at.seconds, 0.0, (settings.minutes or 0) * 60
    if at.step == 0:
        _evaluate(run, heldout, 0, out_at)
    length = int(budget) if budget else total or 0
    with _bar(accelerator, length, int(at.seconds) if budget else at.step) as advance:
        while not _done(at, total, budget):
            at.seconds = _agree(accelerator, before + time.monotonic() - start)
            # half a step ahead: the rate of the step's middle, so that neither the first nor the last step is wasted
            parts = [(at.step + 0.5) / total] if total else []
            parts += [(at.seconds + last / 2) / budget] if budget else []
            progress = min(1.0, max(parts))
            epoch, index = divmod(at.step, per_epoch)
            if epoch != ordered:
                order, ordered = windows(rows, settings.seed, epoch, size), epoch
            window = order[index]
            shown = at.seconds
            row = _step(run, window, at.step, progress)
            history.add(at.step + 1, row["loss"], weights_at(settings.losses, progress), progress > settings.warmup)
            now = _agree(accelerator, before + time.monotonic() - start)
            last, at.seconds = now - at.seconds, now
            at.step, at.tokens = at.step + 1, at.tokens + int(row["supervised"])
            rate = float(rows.tokens_P[window].sum()) / max(last, 1e-9)
            row = {"kind": "train", "step": at.step, "epoch": epoch, "tokens": at.tokens} | row
            _log(out_at, row | {"tokens_per_s": round(rate, 1), "seconds": round(at.seconds, 2)})
            note = f"loss {row['loss']:.3f}  top-1 {row['top1']:.3f}  {rate:.0f} tok/s"
            advance(int(at.seconds) - int(shown) if budget else 1, note)
            due = at.step % settings.eval_every == 0 or _done(at, total, budget)  # the last step may be the best one
            figure = _evaluate(run, heldout, at.step, out_at) if due else None
            better = figure is not None and (at.best is None or figure > at.best)
            at.best = figure if better else at.best
            at.seconds = _agree(accelerator, before + time.monotonic() - start) if due else at.seconds
            if at.step % settings.checkpoint_every == 0 or better or _done(at, total, budget):
                _save(run, out_at, at, figure)
    return {
        "steps": at.step,
        "epochs": round(at.step / per_epoch, 3),
        "supervised_tokens": at.tokens,
        "minutes": round(at.seconds / 60, 2),
    }


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
    accelerator: Accelerator, model: Any, rows: Rows, settings: Settings, signal: GetSignal, reference: Any = None
) -> Run:
    """Prepares `model`, whose requires_grad flags say what learns, for steps on this accelerator's processes."""
    known: dict[str, Loss] = {**LOSSES, "jsd": partial(jsd, beta=settings.jsd_beta)}
    head = Head(rows.real, settings.chunk, settings.block, {name: known[name] for name in settings.reported})

    def loss_of(model: Any, batch: Batch, weights: Mapping[str, float], step: int) -> tuple[torch.Tensor, Scores]:
        with decoder_autocast(accelerator.device, accelerator.mixed_precision == "bf16"):
            hidden_NH = supervised_hidden(model, batch)
        return batch_loss(hidden_NH, model.get_output_embeddings().weight, signal(batch), batch, weights, step, settings, head,
                          reference)  # fmt: skip

    kind = kind_of(accelerator)
    zero: Literal[2, 3] = 3 if kind == "deepspeed" and accelerator.deepspeed_plugin.zero_stage == 3 else 2
    config = deepspeed_config(zero, settings.batch_size, settings.clip) if kind == "deepspeed" else None
    prepared = prepare(kind, model, loss_of, partial(optimizer_of, settings), config)
    return Run(accelerator, model, rows, settings, signal, head, prepared)


def window_gradients(run: Run, window: Ints, weights: Mapping[str, float], step: int) -> dict[str, float]:
    """Leaves the window's gradient in every parameter, on every rank, and returns token means by name: the losses, AGREEMENT,
    and "tokens", how many positions were supervised.
    """
    accelerator, settings, prepared = run.accelerator, run.settings, run.prepared
    rank, ranks = accelerator.process_index, accelerator.num_processes
    todo = passes(prepared.kind, window, settings.batch_size, rank, ranks)
    batches = [(collate(run.rows, indices, accelerator.device), weight) for indices, weight in todo]
    if equal_graphs(prepared.kind) or settings.gradient_checkpointing:
        batches = [(replace(batch, shared=0), weight) for batch, weight in batches]
    tokens = int(run.rows.supervised_P[window].sum())
    if on_policy(settings, step):
        with whole(prepared):
            batches = [(_continued(run, batch, step), weight) for batch, weight in batches]
        counted = torch.tensor(sum(len(b.row_N) for b, weight in batches if weight), device=accelerator.device)
        tokens = int(accelerator.reduce(counted, "sum"))  # what was written, not what it replaces
    names = (*settings.reported, *AGREEMENT)
    sums = torch.zeros(len(names), dtype=torch.float64, device=accelerator.device)
    for i, (batch, weight) in enumerate(batches):
        loss, scores = prepared.root(batch, weights, step)
        backward(prepared, loss * (weight / max(tokens, 1)), i == len(batches) - 1, ranks)
        sums += weight * _sums(scores, settings.reported)
    sum_gradients(prepared, accelerator)
    sums = accelerator.reduce(sums, "sum")
    return dict(zip(names, (sums / max(tokens, 1)).tolist(), strict=True)) | {"tokens": tokens}


def _continued(run: Run, batch: Batch, step: int) -> Batch:
    settings = run.settings
    return continued(run.model, batch, run.rows.real, settings.seed + step, settings.on_policy_temperature)


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
    survive = _survival(settings, starts(batch.row_N, batch.column_N), step)
    if settings.keep_share == 1:
        return head_loss(hidden_NH, matrix_VH, signal, weights, head, survive)
    # the losses of all positions first, without gradient; then the gradient of those that are kept
    scores = head_scores(hidden_NH, matrix_VH, signal, head)
    with torch.no_grad():
        theirs_NH = supervised_hidden(reference, batch)
    theirs = head_scores(theirs_NH, reference.get_output_embeddings().weight, signal, head)
    gap_N = scores.losses["forward_kl"] - theirs.losses["forward_kl"]
    if settings.selection == "random":
        gap_N = _noise(batch, settings.seed + step).to(gap_N.device)
    keep_N = worth_learning(gap_N, batch.row_N, settings.keep_share)
    factor_N = torch.ones_like(gap_N) if survive is None else survive(scores.accepted_N, scores.alpha_N, 0)
    kept_N = factor_N[keep_N]
    loss, _ = head_loss(hidden_NH[keep_N], matrix_VH, signal[keep_N], weights, head, lambda w, a, i: kept_N[i : len(w)])
    return loss, scores


def on_policy(settings: Settings, step: int) -> bool:
    """Whether the drafter writes this step's answers: a function of (seed, step), the same on every rank and after a resume."""
    if not settings.on_policy:
        return False
    draw = torch.rand((), generator=torch.Generator().manual_seed(settings.seed * 1_000_003 + step))
    return float(draw) < settings.on_policy


def _survival(settings: Settings, first_N: torch.Tensor, step: int) -> Weigh | None:
    if settings.survival is None:
        return None
    # 1[argmax q = answer] says what the target accepts only where the answer is the target's own
    by_answer = settings.survival == "greedy" and not on_policy(settings, step)

    def weigh(accepted_N: torch.Tensor, alpha_N: torch.Tensor, start: int) -> torch.Tensor:
        w_N = accepted_N if by_answer else alpha_N
        return survival_weights(w_N, first_N[: len(w_N)], settings.num_speculative_tokens)[start:]

    return weigh


def _noise(batch: Batch, seed: int) -> torch.Tensor:
    """A random number per position, the same however rows are batched."""
    rows = [int.from_bytes(id_.encode()[:7], "big") for id_ in batch.ids]
    counts = torch.bincount(batch.row_N.cpu(), minlength=len(rows)).tolist()
    draws = [
        torch.rand(n, generator=torch.Generator().manual_seed(row + seed)) for row, n in zip(rows, counts, strict=True)
    ]
    return torch.cat(draws)


def require_possible(settings: Settings, *, online: bool, reference: bool) -> None:
    """Raises InputError where the losses or shares need a target online, or a reference, that is not there."""
    require_losses(settings.losses, whole=online)
    if settings.on_policy and not online:
        raise InputError(
            f"on_policy={settings.on_policy:g}: what the drafter writes has no stored signal, so the target must be online: give "
            "signal=online and target=…"
        )
    if settings.keep_share < 1 and not reference:
        raise InputError(
            f"keep_share={settings.keep_share:g} compares with a drafter that was distilled before: give reference=…"
        )
    if settings.top_logprobs is not None and online:
        raise InputError(
            "top_logprobs cuts the cache: with the target online its whole distribution is used; leave it out"
        )


def _sums(scores: Scores, losses: tuple[str, ...]) -> torch.Tensor:
    columns = [scores.losses[name] for name in losses]
    columns += [scores.top1_N, scores.alpha_N, scores.alpha_low_N, scores.alpha_high_N]
    return torch.stack([c.double().sum() for c in columns])


def _step(run: Run, window: Ints, step: int, progress: float) -> dict[str, Any]:
    """One optimizer step; returns its row for metrics.jsonl."""
    settings = run.settings
    # dropout, if the drafter has any, is a function of the position too, so a resume needs no saved generator
    torch.manual_seed((settings.seed * 1_000_003 + step) * 1009 + run.accelerator.process_index)
    run.model.train()
    weights, lr = weights_at(settings.losses, progress), learning_rate(settings, progress)
    if on_policy(settings, step):
        weights = without_answers(weights)
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
    return named | {"lr": lr, "grad_norm": norm}


def _done(at: Position, total: int | None, budget: float) -> bool:
    return (total is not None and at.step >= total) or (budget > 0 and at.seconds >= budget)


def _agree(accelerator: Accelerator, seconds: float) -> float:
    """The main process's clock, so that all ranks end at the same step."""
    if accelerator.num_processes == 1:
        return seconds
    return float(broadcast_object_list([seconds])[0])


@dataclass
class _History:
    """Losses since the weights last changed and the warm-up ended: what a spike is judged against."""

    losses: list[float] = field(default_factory=list)
    weights: dict[str, float] = field(default_factory=dict)

    def add(self, step: int, loss: float, weights: dict[str, float], warm: bool) -> None:
        if weights != self.weights or not warm:
            self.losses.clear()
        self.weights = weights
        self.losses.append(loss)
        spike_or_stop(step, self.losses, 0)


@dataclass(frozen=True)
class _Out:
    """Where a run writes."""

    accelerator: Accelerator
    folder: Path
    digests: dict[str, str]
    send: Send


def _resume(run: Run, out: _Out) -> Position:
    """Where the newest checkpoint stood, or a beginning. Rows per step stay what they were, whatever the processes now."""
    prepared, settings, accelerator = run.prepared, run.settings, run.accelerator
    state = load_checkpoint(out.folder / "checkpoints", prepared.params, prepared.optimizer, digests=out.digests)
    size = settings.batch_size * settings.accumulation * accelerator.num_processes
    at = Position(**state) if state else Position(rows_per_step=size)
    if accelerator.is_main_process:
        # what was logged after the checkpoint is done again
        kept = [row for row in read_jsonl(out.folder / "metrics.jsonl") if state and row["step"] <= at.step]
        write_text(out.folder / "metrics.jsonl", "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in kept))
    accelerator.wait_for_everyone()
    return at


def _save(run: Run, out: _Out, at: Position, figure: float | None) -> None:
    prepared, folder, main = run.prepared, out.folder / "checkpoints", run.accelerator.is_main_process
    save_checkpoint(
        folder,
        vars(at),
        prepared.params,
        prepared.optimizer,
        run.settings.keep,
        figure=figure,
        digests=out.digests,
        main=main,
    )
    run.accelerator.wait_for_everyone()


def _evaluate(run: Run, heldout: Mapping[str, Rows], step: int, out: _Out) -> float | None:
    """Scores and logs every held-out set; returns the mean of their τ at the served K, None where there is none."""
    settings, found = run.settings, []
    with whole(run.prepared):
        for name, rows in heldout.items():
            scores = score_prompts(
                run.accelerator,
                run.model,
                rows,
                batch_size=settings.batch_size,
                chunk=settings.chunk,
                block=settings.block,
                most=settings.eval_prompts,
            )
            _log(out, {"kind": "eval", "step": step, "set": name} | summary(scores))
            accepted = [w for s in scores for w in s.accepted]
            found.append(replay(accepted, settings.num_speculative_tokens).acceptance_length)
    known = [tau for tau in found if math.isfinite(tau)]  # of answers of one token there is no round
    return sum(known) / len(known) if known else None


def _log(out: _Out, row: dict[str, Any]) -> None:
    """One line in metrics.jsonl, and the same to the tracker, where one is on."""
    if not out.accelerator.is_main_process:
        return
    try:
        append_jsonl(out.folder / "metrics.jsonl", row)
    except OSError as e:
        raise PartFailedError(
            f"step {row['step']}: {out.folder / 'metrics.jsonl'} could not be written ({e.strerror}); checkpoints are as they "
            "were: make room and start the same command again"
        ) from e
    prefix = f"{row['kind']}/{row['set']}" if "set" in row else row["kind"]
    flat = {f"{prefix}/{k}": v for k, v in row.items() if isinstance(v, int | float)}
    flat |= {f"{prefix}/tau_{K}": v for K, v in row.get("tau", {}).items() if v is not None}
    out.send(flat, row["step"])


def _bar(accelerator: Accelerator, length: int, done: int) -> Any:
    if accelerator.is_main_process:
        return bar("distill", length, done)
    return nullcontext(_silent)


def _silent(steps: int, note: str) -> None:
    """What the other ranks' bar does."""
