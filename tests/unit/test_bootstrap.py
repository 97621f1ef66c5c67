"""The paired bootstrap over prompts: its interval covers the truth as often as it says, and pairs."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pairing.bootstrap import Array, interval


def mean_of(values: Array) -> tuple[float, float]:
    return interval(lambda w: (w @ values) / w.sum(axis=1), len(values), resamples=1000)


def test_ninety_five_of_a_hundred_intervals_hold_the_truth() -> None:
    """300 samples of 60 draws of mean 2: binomial(300, .95) is 285 ± 3·3.8, less a little for small samples."""
    rng, held = np.random.default_rng(1), 0
    for _ in range(300):
        low, high = mean_of(rng.exponential(2.0, 60))
        held += low <= 2.0 <= high
    assert 268 <= held <= 297


def test_the_interval_of_a_coin_is_the_binomials() -> None:
    """100 prompts, half 1: the standard error is 0.05, so 95 % is 0.5 ± 1.96·0.05."""
    low, high = interval(lambda w: (w @ np.repeat([0.0, 1.0], 50)) / w.sum(axis=1), 100, resamples=20000)
    assert low == pytest.approx(0.402, abs=0.011)
    assert high == pytest.approx(0.598, abs=0.011)


def test_prompts_are_drawn_not_tokens() -> None:
    """10 prompts of 100 equal tokens each: by token the interval would be 10 times too narrow."""
    per_prompt = np.repeat([0.0, 1.0], 5)
    low, high = mean_of(per_prompt)
    assert high - low > 0.5


@given(st.lists(st.floats(-5.0, 5.0), min_size=2, max_size=20), st.integers(0, 5))
def test_it_lies_within_the_data_and_is_the_same_each_time(values: list[float], seed: int) -> None:
    data = np.array(values)

    def mean(w: Array) -> Array:
        return (w @ data) / w.sum(axis=1)

    low, high = interval(mean, len(data), resamples=200, seed=seed)
    assert min(values) - 1e-9 <= low <= high <= max(values) + 1e-9
    assert (low, high) == interval(mean, len(data), resamples=200, seed=seed)


def test_a_wider_level_is_a_wider_interval() -> None:
    data = np.random.default_rng(0).normal(size=30)

    def at(level: float) -> float:
        low, high = interval(lambda w: w @ data, 30, level=level)
        return high - low

    assert at(0.5) < at(0.9) < at(0.99)


def test_one_prompt_has_no_interval() -> None:
    assert all(math.isnan(v) for v in interval(lambda w: w[:, 0], 1))
