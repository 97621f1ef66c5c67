"""What a training run may be set to, what of it is refused, and what follows from it at a step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from distill.batches import Rows
from distill.fake_quantize import Quantizer
from distill.head import REPORTED
from distill.mask_blocks import Parallel
from distill.objective import DraftSampling, Weight, require_losses
from distill.student import Trainable
from pairing.errors import InputError


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
    chunk: int | None  # positions whose logits exist at one time; None: `head.positions_at_once`
    epochs: float | None
    max_steps: int | None
    minutes: float | None
    eval_every: int
    eval_prompts: int
    checkpoint_every: int
    keep: int
    block: int = 1 << 19  # vocabulary rows whose logits exist at one time
    jsd_beta: float = 0.5
    top_logprobs: int | None = None  # ids used of the cache's; None: all
    num_speculative_tokens: int = 4  # K of what is served
    draft_sample_method: DraftSampling = "greedy"  # how what is served drafts: whose τ evaluations give
    survival: DraftSampling | None = None  # weights positions by their chance to be reached, for this drafting
    keep_share: float = 1.0  # of an answer's positions, those where a reference drafter is ahead the most
    selection: Literal["gap", "random"] = "gap"  # random: the control that does the same work
    on_policy: float = 0.0  # share of steps whose answers the drafter writes
    on_policy_temperature: float = 1.0
    gradient_checkpointing: bool = False
    compile: bool = False
    parallel: Parallel | None = None  # trains mask tokens too, so that all drafts of a round come from one pass
    quantizer: Quantizer | None = None  # in the forward pass of the run's last part, and in every evaluation
    quantizer_from: float = 0.9  # the part of the run after which it is

    @property
    def reported(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys([*REPORTED, *self.losses]))


def require_possible(settings: Settings, *, online: bool, reference: bool) -> None:
    """Raises InputError where the losses or shares need a target online, or a reference, that is not there."""
    require_losses(settings.losses, whole=online)
    if settings.on_policy and not online:
        raise InputError(
            f"on_policy={settings.on_policy:g}: what the drafter writes has no stored signal, so the target must be online: give "
            "signal=online and target=…"
        )
    if settings.keep_share < 1 and settings.parallel is not None:
        raise InputError("keep_share compares with a reference that knows no masks: leave it or parallel_drafting out")
    if settings.keep_share < 1 and not reference:
        raise InputError(
            f"keep_share={settings.keep_share:g} compares with a drafter that was distilled before: give reference=…"
        )
    if settings.top_logprobs is not None and online:
        raise InputError(
            "top_logprobs cuts the cache: with the target online its whole distribution is used; leave it out"
        )


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


def quantizer_at(settings: Settings, progress: float) -> Quantizer | None:
    """What is in the forward pass at this part of the run."""
    return settings.quantizer if progress >= settings.quantizer_from else None


def on_policy(settings: Settings, step: int) -> bool:
    """Whether the drafter writes this step's answers: a function of (seed, step), the same on every rank and after a resume."""
    if not settings.on_policy:
        return False
    draw = torch.rand((), generator=torch.Generator().manual_seed(settings.seed * 1_000_003 + step))
    return float(draw) < settings.on_policy
