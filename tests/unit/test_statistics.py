"""Statistics from per-request rows: speedup, percentiles, gaps, exact match; expected figures worked out by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eval.statistics import exact_match, gaps, percentiles, speedup, tokens_per_s
from pairing.errors import PartFailedError


def row(
    id: str, tokens: int = 10, seconds: float = 1.0, repeat: int = 0, ids: list[int] | None = None
) -> dict[str, Any]:
    return {"id": id, "repeat": repeat, "output_tokens": tokens, "e2e_s": seconds, "output_ids": ids or []}


def test_speedup_is_the_ratio_of_totals_not_the_mean_of_ratios() -> None:
    """Arm: 10 tokens in 1 s and 90 in 3 s: 25/s. Target: 10 in 4 s and 90 in 6 s: 10/s. 2.5 (mean of ratios: 3)."""
    got = speedup([row("a", 10, 1), row("b", 90, 3)], [row("a", 10, 4), row("b", 90, 6)])
    assert got is not None
    assert got.ratio == pytest.approx(2.5)
    assert (got.prompts, got.unpaired) == (2, 0)


def test_only_prompts_that_both_arms_answered_count() -> None:
    got = speedup([row("a", 10, 1), row("slow", 10, 100)], [row("a", 10, 2), row("b", 10, 50)])
    assert got is not None
    assert got.ratio == pytest.approx(2.0)
    assert (got.prompts, got.unpaired) == (1, 2)
    assert got.interval is None  # one prompt says nothing about spread


def test_no_common_prompt_gives_no_speedup() -> None:
    assert speedup([row("a")], [row("b")]) is None
    assert speedup([], []) is None


def test_repeats_are_averaged_so_a_prompt_asked_thrice_weighs_no_more() -> None:
    """Arm: a 10 tokens in mean(1, 2, 3) = 2 s, b 30 in 2 s: 10/s. Target: 40 in 8 s: 5/s. 2 (pooled: 7.5/5 = 1.5)."""
    arm = [row("a", 10, 1, 0), row("a", 10, 2, 1), row("a", 10, 3, 2), row("b", 30, 2)]
    got = speedup(arm, [row("a", 10, 4), row("b", 30, 4)])
    assert got is not None
    assert got.ratio == pytest.approx(2.0)


def test_the_interval_is_paired() -> None:
    """Prompts differ tenfold in length, yet each is exactly 1.5 times faster: the interval has no width."""
    target = [row(f"p{i}", 10 * (i + 1), float(i + 1)) for i in range(10)]
    got = speedup([{**r, "e2e_s": r["e2e_s"] / 1.5} for r in target], target)
    assert got is not None
    assert got.interval == pytest.approx((1.5, 1.5))


@given(st.lists(st.tuples(st.integers(1, 400), st.floats(0.01, 60.0)), min_size=2, max_size=12))
def test_equal_arms_give_one_exactly(requests: list[tuple[int, float]]) -> None:
    rows = [row(f"p{i}", tokens, seconds) for i, (tokens, seconds) in enumerate(requests)]
    got = speedup(rows, rows)
    assert got is not None
    assert got.interval is not None
    assert got.ratio == pytest.approx(1.0)
    assert got.interval == pytest.approx((1.0, 1.0))


def test_a_pair_of_equal_arms_on_a_noisy_machine_holds_one_in_its_interval() -> None:
    """The A/A arm: same speeds, noise of 10 % drawn independently; of 100 such runs 95 ± 3·2.2 hold 1."""
    rng, held = np.random.default_rng(7), 0
    for _ in range(100):
        work = rng.uniform(0.5, 5.0, 25)
        a, b = (work * rng.normal(1.0, 0.1, 25) for _ in range(2))
        got = speedup([row(f"p{i}", 20, t) for i, t in enumerate(a)], [row(f"p{i}", 20, t) for i, t in enumerate(b)])
        assert got is not None
        assert got.interval is not None
        held += got.interval[0] <= 1.0 <= got.interval[1]
    assert 87 <= held <= 100


def test_tokens_per_s() -> None:
    assert tokens_per_s([row("a", 10, 1), row("b", 20, 2), row("c", 30, 3)]) == 10.0
    assert tokens_per_s([]) is None


def test_percentiles_by_hand() -> None:
    """Of 0..100 the p-th percentile is p."""
    assert percentiles([float(i) for i in range(100, -1, -1)]) == {"p50": 50.0, "p90": 90.0, "p99": 99.0}
    assert percentiles([0.002, 0.004], scale=1000)["p50"] == pytest.approx(3.0)
    assert percentiles([]) == {"p50": None, "p90": None, "p99": None}


def test_chunks_of_one_four_and_two_tokens() -> None:
    """D21: chunks of 1, 4, 2 tokens at 0.10, 0.30, 0.44 s. Per chunk: 200 and 140 ms. Per token: 4 x 50 and 2 x 70 ms.

    TPOT: 0.34 s for the 6 tokens after the first chunk. Read per chunk, "time per token" would be 170 ms, 3 times that.
    """
    got = gaps([(0.10, 1), (0.30, 4), (0.44, 2)], output_tokens=7)
    assert got.per_chunk == pytest.approx([0.20, 0.14])
    assert got.per_token == pytest.approx([0.05] * 4 + [0.07] * 2)
    assert got.tpot == pytest.approx(0.34 / 6)


def test_chunks_without_tokens_are_no_arrival() -> None:
    """The first (role) and last (usage) messages of a stream carry no token."""
    got = gaps([(0.01, 0), (0.10, 1), (0.30, 4), (0.90, 0)], output_tokens=5)
    assert got.per_chunk == pytest.approx([0.20])
    assert got.tpot == pytest.approx(0.05)


def test_one_chunk_has_no_gap() -> None:
    assert gaps([(0.1, 3)], 3).tpot is None
    assert gaps([], 0).per_token == []


def test_chunks_that_disagree_with_usage_are_refused() -> None:
    """D21: a client that counts chunks as tokens."""
    with pytest.raises(PartFailedError, match="chunks hold 3 tokens, the server's usage says 7"):
        gaps([(0.10, 1), (0.30, 1), (0.44, 1)], output_tokens=7)


@given(st.lists(st.tuples(st.floats(0.0, 1.0), st.integers(1, 5)), min_size=2, max_size=20))
def test_per_token_and_per_chunk_gaps_fill_the_same_time(chunks: list[tuple[float, int]]) -> None:
    at = np.cumsum([gap for gap, _ in chunks])
    got = gaps([(float(t), n) for t, (_, n) in zip(at, chunks, strict=True)], sum(n for _, n in chunks))
    assert sum(got.per_token) == pytest.approx(sum(got.per_chunk), abs=1e-9)
    assert len(got.per_token) == sum(n for _, n in chunks[1:])


def test_exact_match_names_the_first_differing_position() -> None:
    base = [row("a", ids=[5, 6, 7, 2]), row("b", ids=[5, 6, 2]), row("c", ids=[9, 2]), row("d", ids=[1, 2, 3, 4])]
    arm = [row("a", ids=[5, 6, 7, 2]), row("b", ids=[5, 6, 8, 2]), row("c", ids=[9]), row("d", ids=[1, 0, 3, 4])]
    got = exact_match(arm, base)
    assert (got.fraction, got.compared) == (0.25, 4)
    assert got.mismatches == [
        {"id": "b", "repeat": 0, "position": 2, "target_token": 2, "arm_token": 8},
        {"id": "c", "repeat": 0, "position": 1, "target_token": 2, "arm_token": None},
        {"id": "d", "repeat": 0, "position": 1, "target_token": 2, "arm_token": 0},
    ]


def test_exact_match_compares_repeat_with_repeat_else_with_the_first() -> None:
    base = [row("a", repeat=0, ids=[1]), row("a", repeat=1, ids=[2])]
    assert exact_match([row("a", repeat=1, ids=[2]), row("a", repeat=5, ids=[1])], base).fraction == 1.0
    assert exact_match([row("z", ids=[1])], base).fraction is None
