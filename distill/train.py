"""The one training loop: distils a drafter from stored answers, on any number of processes, exactly resumable.

What varies enters as data (`Rows`), as weights of the losses, or as settings. Masking is in `batches`, the reduction
is here: gradients are those of sum of losses / number of supervised tokens, both over the whole optimizer window, all
accumulation steps and all ranks (fault D11).
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from distill.batches import Ints, Rows, collate, micro_batches, windows
from distill.checkpoint import Named, load_checkpoint, save_checkpoint
from distill.evaluate import score_prompts, summary
from distill.head import Scores, head_loss
from distill.losses import LOSSES
from distill.student import Trainable, freeze, require_plain_head, supervised_hidden
from pairing.errors import InputError, PartFailedError
from pairing.files import append_jsonl, read_jsonl, write_text
from pairing.progress import bar

STATS = (*LOSSES, "top1", "alpha_low", "alpha_high")


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
    losses: Mapping[str, float]
    chunk: int
    epochs: float | None
    max_steps: int | None
    minutes: float | None
    eval_every: int
    eval_prompts: int
    checkpoint_every: int
    keep: int


@dataclass
class Position:
    """Where the run stands; with the data's order a pure function of (seed, epoch), all that a resume needs."""

    step: int = 0
    tokens: int = 0  # supervised
    seconds: float = 0.0
    rows_per_step: int = 0


def steps_of(settings: Settings, rows: Rows, ranks: int) -> tuple[int, int | None]:
    """Optimizer steps in an epoch, and in the run where epochs or max_steps limit it."""
    per_epoch = math.ceil(int((rows.supervised_P > 0).sum()) / (settings.batch_size * settings.accumulation * ranks))
    limits = [math.ceil(per_epoch * settings.epochs)] if settings.epochs is not None else []
    limits += [settings.max_steps] if settings.max_steps is not None else []
    return per_epoch, min(limits, default=None)


def learning_rate(settings: Settings, progress: float) -> float:
    """Linear warm-up, then a linear way down to 0 at progress 1: measured in parts of the run, so that a limit in
    minutes ends at the same rate as one in steps.
    """
    up = progress / settings.warmup if settings.warmup else 1.0
    return settings.lr * max(0.0, min(up, (1 - progress) / (1 - settings.warmup)))


def fit(
    accelerator: Accelerator, model: Any, rows: Rows, heldout: Mapping[str, Rows], settings: Settings, out: Path
) -> dict[str, Any]:
    """Trains `model` in place and returns the training summary. Goes on from the newest checkpoint in `out`.

    Writes `out`/metrics.jsonl and `out`/checkpoints/. Under a limit in steps or epochs a run that was killed and
    started again has the same losses as one that was not. Raises PartFailedError where a loss is not finite, with all
    good checkpoints left as they are; InputError where the checkpoint was made with another number of rows per step.
    """
    model.to(accelerator.device)
    params = freeze(model, settings.trainable)
    optimizer = optimizer_of(settings, params)
    size = settings.batch_size * settings.accumulation * accelerator.num_processes
    at = _resume(accelerator, out, params, optimizer, size)
    per_epoch, total = steps_of(settings, rows, accelerator.num_processes)
    order, ordered = windows(rows, settings.seed, at.step // per_epoch, size), at.step // per_epoch
    require_plain_head(model, collate(rows, order[0][:2], accelerator.device))
    run = Run(accelerator, model, rows, settings, params, optimizer)
    start, before, last, budget = time.monotonic(), at.seconds, 0.0, (settings.minutes or 0) * 60
    if at.step == 0:
        _evaluate(run, heldout, 0, out)
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
            row = _step(run, window, at.step, learning_rate(settings, progress))
            now = _agree(accelerator, before + time.monotonic() - start)
            last, at.seconds = now - at.seconds, now
            at.step, at.tokens = at.step + 1, at.tokens + int(rows.supervised_P[window].sum())
            rate = float(rows.tokens_P[window].sum()) / max(last, 1e-9)
            row = {"kind": "train", "step": at.step, "epoch": epoch, "tokens": at.tokens} | row
            _log(accelerator, out, row | {"tokens_per_s": round(rate, 1), "seconds": round(at.seconds, 2)})
            note = f"loss {row['loss']:.3f}  top-1 {row['top1']:.3f}  {rate:.0f} tok/s"
            advance(int(at.seconds) - int(shown) if budget else 1, note)
            if at.step % settings.eval_every == 0:
                _evaluate(run, heldout, at.step, out)
            at.seconds = _agree(accelerator, before + time.monotonic() - start)
            if at.step % settings.checkpoint_every == 0 or _done(at, total, budget):
                _save(accelerator, out, at, params, optimizer, settings.keep)
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
    model: Any
    rows: Rows
    settings: Settings
    params: Named
    optimizer: torch.optim.Optimizer


def window_gradients(run: Run, window: Ints) -> dict[str, float]:
    """Leaves the window's gradient in every parameter, on every rank, and returns the token means of STATS."""
    accelerator, settings = run.accelerator, run.settings
    tokens = int(run.rows.supervised_P[window].sum())
    sums = torch.zeros(len(STATS), dtype=torch.float64, device=accelerator.device)
    for indices in micro_batches(window, settings.batch_size, accelerator.process_index, accelerator.num_processes):
        batch = collate(run.rows, indices, accelerator.device)
        with accelerator.autocast():
            hidden = supervised_hidden(run.model, batch)
        weight = run.model.get_output_embeddings().weight
        loss, scores = head_loss(hidden, weight, batch.signal, settings.losses, run.rows.real, settings.chunk)
        (loss / tokens).backward()
        sums += _sums(scores)
    if accelerator.num_processes > 1:
        # not DistributedDataParallel: it averages per backward pass, and asks every rank for the same number of them
        flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for _, p in run.params])
        flat = accelerator.reduce(flat, "sum")
        for (_, p), g in zip(run.params, flat.split([p.numel() for _, p in run.params]), strict=True):
            p.grad = g.view_as(p)
        sums = accelerator.reduce(sums, "sum")
    return dict(zip(STATS, (sums / max(tokens, 1)).tolist(), strict=True))


def _sums(scores: Scores) -> torch.Tensor:
    columns = [*(scores.losses[name] for name in LOSSES), scores.top1_N, scores.alpha_low_N, scores.alpha_high_N]
    return torch.stack([c.double().sum() for c in columns])


def _step(run: Run, window: Ints, step: int, lr: float) -> dict[str, Any]:
    """One optimizer step; returns its row for metrics.jsonl."""
    settings = run.settings
    # dropout, if the drafter has any, is a function of the position too, so a resume needs no saved generator
    torch.manual_seed((settings.seed * 1_000_003 + step) * 1009 + run.accelerator.process_index)
    run.model.train()
    stats = window_gradients(run, window)
    loss = sum(w * stats[name] for name, w in settings.losses.items())
    norm = float(torch.nn.utils.clip_grad_norm_([p for _, p in run.params], settings.clip))
    if not (math.isfinite(loss) and math.isfinite(norm)):
        ids = ", ".join(str(run.rows.data[int(i)]["id"]) for i in window[:4])
        raise PartFailedError(
            f"step {step + 1}: the loss is {loss}, the gradient's norm {norm} (prompts {ids} …); checkpoints are as "
            "they were: lower lr or look at these prompts, and start the same command again"
        )
    for group in run.optimizer.param_groups:
        group["lr"] = lr
    run.optimizer.step()
    run.optimizer.zero_grad(set_to_none=True)
    named = {"loss": loss, "kl": stats["forward_kl"], "ce": stats["cross_entropy"], "top1": stats["top1"]}
    return named | {"lr": lr, "grad_norm": norm}


def _done(at: Position, total: int | None, budget: float) -> bool:
    return (total is not None and at.step >= total) or (budget > 0 and at.seconds >= budget)


def _agree(accelerator: Accelerator, seconds: float) -> float:
    """The main process's clock, so that all ranks end at the same step."""
    if accelerator.num_processes == 1:
        return seconds
    return float(broadcast_object_list([seconds])[0])


def _resume(accelerator: Accelerator, out: Path, params: Named, optimizer: Any, size: int) -> Position:
    state = load_checkpoint(out / "checkpoints", params, optimizer)
    at = Position(**state) if state else Position(rows_per_step=size)
    if at.rows_per_step != size:
        raise InputError(
            f"{out}: its checkpoint has {at.rows_per_step} rows per step, this start {size} (batch_size x accumulation "
            "x processes): start it with as many processes as before"
        )
    if accelerator.is_main_process:
        # what was logged after the checkpoint is done again
        kept = [row for row in read_jsonl(out / "metrics.jsonl") if state and row["step"] <= at.step]
        write_text(out / "metrics.jsonl", "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in kept))
    accelerator.wait_for_everyone()
    return at


def _save(accelerator: Accelerator, out: Path, at: Position, params: Any, optimizer: Any, keep: int) -> None:
    if accelerator.is_main_process:
        save_checkpoint(out / "checkpoints", vars(at), params, optimizer, keep)
    accelerator.wait_for_everyone()


def _evaluate(run: Run, heldout: Mapping[str, Rows], step: int, out: Path) -> None:
    for name, rows in heldout.items():
        scores = score_prompts(
            run.accelerator,
            run.model,
            rows,
            batch_size=run.settings.batch_size,
            chunk=run.settings.chunk,
            most=run.settings.eval_prompts,
        )
        _log(run.accelerator, out, {"kind": "eval", "step": step, "set": name} | summary(scores))


def _log(accelerator: Accelerator, out: Path, row: dict[str, Any]) -> None:
    """One line in metrics.jsonl, and the same to accelerate's trackers, where one is on."""
    if not accelerator.is_main_process:
        return
    append_jsonl(out / "metrics.jsonl", row)
    prefix = f"{row['kind']}/{row['set']}" if "set" in row else row["kind"]
    flat = {f"{prefix}/{k}": v for k, v in row.items() if isinstance(v, int | float)}
    flat |= {f"{prefix}/tau_{K}": v for K, v in row.get("tau", {}).items() if v is not None}
    accelerator.log(flat, step=row["step"])


def _bar(accelerator: Accelerator, length: int, done: int) -> Any:
    if accelerator.is_main_process:
        return bar("distill", length, done)
    return nullcontext(_silent)


def _silent(steps: int, note: str) -> None:
    """What the other ranks' bar does."""
