"""The one training loop: distils a drafter from stored answers, on any number of processes, exactly resumable.

What varies enters as data (`Rows`), as weights of the losses, or as `Settings`; what one step does is in `step`.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from distill.batches import Rows, collate, windows
from distill.checkpoint import load_checkpoint, save_checkpoint
from distill.evaluate import score_prompts, summary
from distill.evaluate_parallel import rounds_summary, score_rounds
from distill.fake_quantize import quantized
from distill.guards import spike_or_stop
from distill.objective import weights_at
from distill.options import checkpoint_layers, compile_layers
from distill.parallel import whole
from distill.settings import Settings, on_policy, quantizer_at, require_possible, steps_of
from distill.signals import Target, get_signal, require_plain_target
from distill.step import Run, optimizer_step, ready
from distill.student import freeze, require_plain_head
from pairing.acceptance import replay
from pairing.errors import PartFailedError
from pairing.files import append_jsonl, read_jsonl, write_text
from pairing.progress import bar

__all__ = ["Position", "Send", "Settings", "fit"]


@dataclass
class Position:
    """Where the run stands; with the data's order a pure function of (seed, epoch), all that a resume needs."""

    step: int = 0
    tokens: int = 0  # supervised, of the text
    mask_tokens: int = 0  # supervised besides, where parallel drafting is trained
    seconds: float = 0.0
    rows_per_step: int = 0
    best: float | None = None  # the highest mean τ of the held-out sets so far


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
    if reference is not None:
        require_plain_head(reference, first, "reference")
    if settings.gradient_checkpointing:
        checkpoint_layers(model)
    if settings.compile:
        compile_layers(model)
    run = ready(accelerator, model, rows, settings, signal, reference)
    out_at = _Out(accelerator, out, dict(digests or {}), send)
    at, history = _resume(run, out_at)
    size = at.rows_per_step
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
            row = optimizer_step(run, window, at.step, progress)
            history.add(at.step + 1, row["loss"], progress)
            history.judge(at.step + 1)
            now = _agree(accelerator, before + time.monotonic() - start)
            last, at.seconds = now - at.seconds, now
            at.step, at.tokens = at.step + 1, at.tokens + int(row["supervised"])
            at.mask_tokens += int(row.get("masks", 0))
            rate = float(rows.tokens_P[window].sum()) / max(last, 1e-9)
            counted = {"tokens": at.tokens} | ({"mask_tokens": at.mask_tokens} if settings.parallel is not None else {})
            row = {"kind": "train", "step": at.step, "epoch": epoch, "progress": progress} | counted | row
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
        **({"mask_tokens": at.mask_tokens} if settings.parallel is not None else {}),
        "minutes": round(at.seconds / 60, 2),
    }


def _done(at: Position, total: int | None, budget: float) -> bool:
    return (total is not None and at.step >= total) or (budget > 0 and at.seconds >= budget)


def _agree(accelerator: Accelerator, seconds: float) -> float:
    """The main process's clock, so that all ranks end at the same step."""
    if accelerator.num_processes == 1:
        return seconds
    return float(broadcast_object_list([seconds])[0])


@dataclass
class History:
    """Losses since the weights last changed and the warm-up ended: what a spike is judged against.

    Those of steps on the drafter's own answers are apart: what such a step minimises, and over which positions it takes the mean,
    is another thing, so the two kinds have levels of their own.
    """

    settings: Settings
    losses: dict[bool, list[float]] = field(default_factory=dict)  # on-policy or not
    weights: dict[str, float] = field(default_factory=dict)

    def add(self, step: int, loss: float, progress: float) -> None:
        """The loss of step `step`, counted from 1."""
        weights = weights_at(self.settings.losses, progress)
        # 4 bits may raise the loss for good
        weights |= {"quantizer": float(quantizer_at(self.settings, progress) is not None)}
        if weights != self.weights or progress <= self.settings.warmup:
            self.losses.clear()
        self.weights = weights
        self.losses.setdefault(on_policy(self.settings, step - 1), []).append(loss)

    def judge(self, step: int) -> None:
        """Raises PartFailedError where the loss of step `step`, the last that was added, ends a spike."""
        kind = on_policy(self.settings, step - 1)
        of = "" if not self.settings.on_policy else "on-policy " if kind else "plain "
        spike_or_stop(step, self.losses[kind], 0, of)


@dataclass(frozen=True)
class _Out:
    """Where a run writes."""

    accelerator: Accelerator
    folder: Path
    digests: dict[str, str]
    send: Send


def _resume(run: Run, out: _Out) -> tuple[Position, History]:
    """Where the newest checkpoint stood and the losses until then, or a beginning. Rows per step stay what they were, whatever
    the processes now."""
    prepared, settings, accelerator = run.prepared, run.settings, run.accelerator
    state = load_checkpoint(out.folder / "checkpoints", prepared.params, prepared.optimizer, digests=out.digests)
    size = settings.batch_size * settings.accumulation * accelerator.num_processes
    at = Position(**state) if state else Position(rows_per_step=size)
    kept: list[dict[str, Any]] = []
    if accelerator.is_main_process:
        # what was logged after the checkpoint is done again
        kept = [row for row in read_jsonl(out.folder / "metrics.jsonl") if state and row["step"] <= at.step]
        write_text(out.folder / "metrics.jsonl", "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in kept))
    accelerator.wait_for_everyone()
    history = History(settings)
    if accelerator.num_processes > 1:  # the folder may be the main process's alone, and all ranks must stop alike
        (kept,) = broadcast_object_list([kept])
    for row in kept:
        if "progress" in row:  # a step's
            history.add(row["step"], row["loss"], row["progress"])
    return at, history


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
    """Scores and logs every held-out set; returns the mean of their τ at the served K, None where there is none. Drafts are
    chosen as served; where parallel drafting is trained, they come from one pass.

    With a quantizer it is the 4-bit copy that is scored, from the first evaluation on: it is what will be served, and the
    best checkpoint is to be its best.
    """
    settings, parallel, found = run.settings, run.settings.parallel, []
    sizes: dict[str, Any] = {"batch_size": settings.batch_size, "chunk": settings.chunk, "block": settings.block,
             "most": settings.eval_prompts, "draft_sample_method": settings.draft_sample_method}  # fmt: skip
    with whole(run.prepared), quantized(run.model, settings.quantizer):
        for name, rows in heldout.items():
            sizes["where"] = f"step {step}, heldout.{name}"
            scores = score_prompts(run.accelerator, run.model, rows, **sizes)
            row: dict[str, Any] = {"kind": "eval", "step": step, "set": name} | summary(scores)
            tau = replay([w for s in scores for w in s.w], settings.num_speculative_tokens).acceptance_length
            if parallel is not None:
                K = max(settings.num_speculative_tokens, parallel.num_speculative_tokens)
                rounds = rounds_summary(score_rounds(run.accelerator, run.model, rows, parallel.mask_id, K, **sizes))
                row["parallel"] = rounds
                served = rounds["tau"][str(settings.num_speculative_tokens)]
                tau = math.nan if served is None else served
            _log(out, row)
            found.append(tau)
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
    taus = {f"tau_{K}": v for K, v in row.get("tau", {}).items()}
    taus |= {f"parallel_tau_{K}": v for K, v in row.get("parallel", {}).get("tau", {}).items()}
    flat |= {f"{prefix}/{name}": v for name, v in taus.items() if v is not None}
    out.send(flat, row["step"])


def _bar(accelerator: Accelerator, length: int, done: int) -> Any:
    if accelerator.is_main_process:
        return bar("distill", length, done)
    return nullcontext(_silent)


def _silent(steps: int, note: str) -> None:
    """What the other ranks' bar does."""
