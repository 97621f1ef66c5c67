"""Which losses, with which weight, at which point of the run; and the choice for those who name none.

A loss's weight is a number, or points [progress, weight] between which it runs in straight lines: KL first and LK after
warm-up is {"forward_kl": [[0, 1], [0.3, 1], [0.4, 0]], "lk_hybrid": [[0.3, 0], [0.4, 1]]}.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Literal

from distill.losses import LOSSES, NEED_ALL
from pairing.errors import InputError

Weight = float | Sequence[tuple[float, float]]
DraftSampling = Literal["greedy", "probabilistic"]


def weights_at(losses: Mapping[str, Weight], progress: float) -> dict[str, float]:
    """Each loss's weight at this part of the run (0 to 1); before its first point and after its last a weight stays."""
    return {name: _at(weight, progress) for name, weight in losses.items()}


def _at(weight: Weight, progress: float) -> float:
    if isinstance(weight, int | float):
        return float(weight)
    for (x0, y0), (x1, y1) in pairwise(weight):
        if x0 <= progress < x1:
            return y0 + (y1 - y0) * (progress - x0) / (x1 - x0)
    return float(weight[0][1] if progress < weight[0][0] else weight[-1][1])


def without_answers(weights: Mapping[str, float]) -> dict[str, float]:
    """The weights where the drafter wrote the answers (on-policy): cross-entropy on its own tokens would teach it itself.

    Over the target's answers its mean is forward KL and a constant that does not learn, so that takes its weight.
    """
    answers = weights.get("cross_entropy", 0.0)
    if not answers:
        return dict(weights)
    return {**weights, "forward_kl": weights.get("forward_kl", 0.0) + answers, "cross_entropy": 0.0}


def require_losses(losses: Mapping[str, Weight], *, whole: bool, key: str = "losses") -> None:
    """Raises InputError for an unknown loss, points out of order, no weight at all, or a loss that the signal cannot give.

    `whole`: the target's whole distribution is known (a target online), not only what a cache holds.
    """
    for name, weight in losses.items():
        if name not in LOSSES:
            raise InputError(f"{key}.{name}: no such loss: one of {', '.join(LOSSES)}")
        points = [(0.0, float(weight))] if isinstance(weight, int | float) else list(weight)
        if not points or any(not (0 <= x <= 1 and 0 <= y < math.inf) for x, y in points):
            raise InputError(
                f"{key}.{name}: give a weight of 0 or more, or points [progress, weight] with progress 0 to 1"
            )
        if any(a[0] >= b[0] for a, b in pairwise(points)):
            raise InputError(f"{key}.{name}: its points must rise in progress: [[0, 1], [0.3, 1], [0.4, 0]]")
        if name in NEED_ALL and not whole and any(y for _, y in points):
            raise InputError(
                f"{key}.{name} is a mean over the drafter's own distribution, which stored answers cannot give: train with the "
                "target online (signal=online), or take another loss"
            )
    if not any(y for w in losses.values() for y in ([w] if isinstance(w, int | float) else [y for _, y in w])):
        raise InputError(f"every weight in {key} is 0, so nothing would be learnt")


def auto(temperature: float, draft_sampling: DraftSampling) -> tuple[dict[str, Weight], str]:
    """The losses for a pair that is served like this, and why in one sentence.

    Sources: the target's argmax is what greedy verification accepts, and of all argmax drafts what sampling accepts most, with
    max p; LK after a warm-up on KL where drafts are drawn (arXiv 2602.23881), whose gradient is TV's once drafter and target
    overlap.
    """
    if temperature == 0:
        return {"forward_kl": 0.5, "top1_ce": 0.5}, (
            "served greedily, a draft is accepted where it is the target's most likely token: half forward KL, half "
            "cross-entropy on that token"
        )
    if draft_sampling == "greedy":
        return {"forward_kl": 0.5, "top1_ce": 0.5}, (
            f"drafted by argmax at temperature {temperature:g}, a draft is accepted with the target's probability of it, which "
            "is largest for its most likely token: half forward KL, half cross-entropy on that token"
        )
    return {"forward_kl": [(0.0, 1.0), (0.3, 1.0), (0.4, 0.0)], "lk_hybrid": [(0.3, 0.0), (0.4, 1.0)]}, (
        f"drafted from its own distribution at temperature {temperature:g}, a draft is accepted with Σ min(p, q): forward KL "
        "for the first third, then the LK hybrid, which turns from KL to that sum as it grows"
    )
