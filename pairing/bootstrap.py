"""Paired bootstrap over prompts: the one way in which this project puts an interval on anything."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def interval(
    statistic: Callable[[Array], Array], prompts: int, *, level: float = 0.95, resamples: int = 4000, seed: int = 0
) -> tuple[float, float]:
    """Percentile interval of `statistic` when whole prompts are drawn with replacement (never tokens: they depend).

    `statistic` takes weights [resamples, prompts] (how often each prompt was drawn) and gives [resamples]. Pairing
    comes from using the same weights for both arms, e.g. `lambda w: (w @ time_a) / (w @ time_b)`.
    """
    if prompts < 2:
        return float("nan"), float("nan")
    weights = np.random.default_rng(seed).multinomial(prompts, [1 / prompts] * prompts, size=resamples)
    with np.errstate(divide="ignore", invalid="ignore"):
        values = statistic(weights.astype(np.float64))
    low, high = np.nanquantile(values, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)
