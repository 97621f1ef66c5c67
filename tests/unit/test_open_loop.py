"""Open loop: Poisson arrivals that all arms share, and who falls behind; expected figures worked out by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from eval.open_loop import arrival_times, fell_behind, figures
from eval.verdict import judge


def rows(arrivals: list[float], e2e: list[float], repeat: int = 0) -> list[dict[str, Any]]:
    return [
        {"id": f"p{i}", "group": None, "repeat": repeat, "started_at": 1e9 + at, "e2e_s": took}
        for i, (at, took) in enumerate(zip(arrivals, e2e, strict=True))
    ]


def test_arrivals_are_poisson_and_the_same_for_every_arm() -> None:
    times = arrival_times(2.0, 4001, seed=1, repeat=0)
    assert times == arrival_times(2.0, 4001, seed=1, repeat=0)
    assert times[0] == 0.0
    gaps = np.diff(times)
    assert gaps.mean() == pytest.approx(0.5, abs=4 * 0.5 / 4000**0.5)  # four standard errors
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.1)  # exponential: as wide as it is long
    assert times[:3] != arrival_times(2.0, 3, seed=1, repeat=1)
    assert times[:3] != arrival_times(2.0, 3, seed=2, repeat=0)
    assert arrival_times(1.0, 3, seed=1, repeat=0) == pytest.approx([2 * t for t in times[:3]])
    assert arrival_times(1.0, 1, seed=1, repeat=0) == [0.0]


def test_an_arm_that_keeps_up() -> None:
    """Nine requests, one a second, each 1.5 s: 8 arrivals after the first in 8 s; all done at 9.5 s; one unfinished."""
    got = figures(rows([float(i) for i in range(9)], [1.5] * 9))
    assert got["offered_requests_per_s"] == pytest.approx(1.0)
    assert got["completed_requests_per_s"] == pytest.approx(9 / 9.5)
    assert got["unfinished_at_last_arrival"] == pytest.approx(1 / 9)
    assert got["e2e_growth"] == pytest.approx(1.0)
    assert got["kept_up"] is True


def test_an_arm_that_falls_behind_is_named() -> None:
    """One a second arrives, one in two seconds is answered: request i waits i s and takes 2: 2 to 10 s, done at 18 s."""
    slow = figures(rows([float(i) for i in range(9)], [2.0 + i for i in range(9)]))
    assert slow["completed_requests_per_s"] == pytest.approx(0.5)
    assert slow["unfinished_at_last_arrival"] == pytest.approx(4 / 9)  # done by 8 s: 0 to 3; the last one itself aside
    assert slow["e2e_growth"] == pytest.approx(9.0 / 3.0)
    assert slow["kept_up"] is False
    said = fell_behind({**slow, "rate": 1.0})
    assert said == (
        "it does not keep up with 1 requests/s: 0.50 were completed a second, 44% of all were unfinished when the last one "
        "came, and the last third took 3.0 times as long as the first"
    )


def test_a_slow_last_answer_alone_is_not_falling_behind() -> None:
    assert figures(rows([float(i) for i in range(9)], [1.0] * 6 + [9.0] * 3))["kept_up"] is True  # 2 of 9 unfinished
    assert figures(rows([0.0, 1.0], [5.0, 9.0]))["kept_up"] is None  # two requests tell nothing


def test_repeats_are_streams_of_their_own() -> None:
    """A second repeat an hour later is no gap between arrivals."""
    arrivals = [float(i) for i in range(9)]
    late = [at + 3600 for at in arrivals]
    got = figures(rows(arrivals, [1.5] * 9) + rows(late, [1.5] * 9, repeat=1))
    assert got["offered_requests_per_s"] == pytest.approx(1.0)
    assert got["completed_requests_per_s"] == pytest.approx(18 / 19)


def test_the_verdict_says_who_does_not_keep_up_and_ranks_the_others() -> None:
    kept, lost = figures(rows([float(i) for i in range(9)], [1.5] * 9)), figures(rows(
        [float(i) for i in range(9)], [2.0 + i for i in range(9)]))  # fmt: skip
    shared: dict[str, Any] = {"workload": "w", "group": None, "temperature": 0.0, "num_speculative_tokens": 4}
    closed = {
        **shared,
        "concurrency": 1,
        "rate": None,
        "speedup": 1.2,
        "speedup_interval": [1.1, 1.3],
        "exact_match": 1.0,
    }
    at_rate = {**closed, "concurrency": None, "rate": 1.0}
    found = judge([
        {**at_rate, **kept, "arm": "target", "kind": "target"},
        {**at_rate, **kept, "arm": "a", "kind": "ngram"},
        {**at_rate, **lost, "arm": "b", "kind": "draft_model", "speedup": None},
        {**closed, "arm": "target", "kind": "target"},
        {**closed, "arm": "a", "kind": "ngram"},
    ])  # fmt: skip
    assert [(c["concurrency"], c["rate"]) for c in found["cells"]] == [(1, None), (None, 1.0)]
    a, b = found["cells"][1]["arms"]
    assert (a["arm"], a["answer"]) == ("a", "faster")
    assert (b["arm"], b["answer"]) == ("b", "not measurable")
    assert "does not keep up with 1 requests/s" in b["reason"]
