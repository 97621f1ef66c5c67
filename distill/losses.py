"""What is minimised: functions of per-position log-probabilities, one line each in a literal dict.

Shapes: N supervised positions, K ids of the target's head. The target's signal is its exact probability on K ids and
one exact mass for all others. The head is never renormalised: at the optimum of a renormalised loss α is only the
head's mass (shared notes, "Sparse cache"). Reverse KL and Jensen-Shannon cannot be had from such a cache.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Signal:
    """The target at N positions, at temperature 1."""

    answer_N: torch.Tensor  # int64, the token that the target wrote
    head_ids_NK: torch.Tensor  # int64, its K most likely ids, most likely first
    head_logp_NK: torch.Tensor  # float32, their log-probabilities
    tail_N: torch.Tensor  # float32, the mass of all other ids
    tail_ids_NM: torch.Tensor | None = None  # int64, M ids drawn from these others; None where none were
    tail_logp_NM: torch.Tensor | None = None  # float32, log p of each, not given that it is outside the head


@dataclass(frozen=True)
class Student:
    """The drafter's log-probabilities at the same positions, over the real vocabulary."""

    answer_N: torch.Tensor
    head_NK: torch.Tensor
    tail_N: torch.Tensor  # log of its mass outside the target's head, from its full log-sum-exp


Loss = Callable[[Student, Signal], torch.Tensor]


def forward_kl(student: Student, signal: Signal) -> torch.Tensor:
    """KL(p ‖ q) in nats per position [N], the ids outside the head taken together as one outcome.

    By the data-processing inequality at most the KL over the whole vocabulary, and zero only where head and tail mass
    agree.
    """
    p_NK = signal.head_logp_NK.exp()
    head_N = (p_NK * (signal.head_logp_NK - student.head_NK)).sum(-1)
    tail_N = torch.xlogy(signal.tail_N, signal.tail_N) - signal.tail_N * student.tail_N
    return head_N + tail_N


def cross_entropy(student: Student, signal: Signal) -> torch.Tensor:
    """−log q(answer token) in nats per position [N]."""
    return -student.answer_N


LOSSES: dict[str, Loss] = {
    "forward_kl": forward_kl,
    "cross_entropy": cross_entropy,
}
