"""The batch-size schedule from measured cells: D25's own input, noise, gaps, and vLLM's own checker on all of it."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eval.schedule import Ratio, engine_lookup, extended, filled, gaps, ignored, k_at, winner
from pairing.speculative_config import schedule_fault

MEASURED = st.dictionaries(st.integers(1, 300), st.integers(0, 8), max_size=8)


def test_d25() -> None:
    """K = 4, 2, 0 win at 1, 8, 64; 16-32 unmeasured: nothing is assumed that the neighbours do not both show."""
    best = {1: 4, 8: 2, 64: 0}
    assert filled(best, 64) == [[1, 1, 4], [2, 8, 2], [9, 64, 0]]
    assert filled(best, 256) == [[1, 1, 4], [2, 8, 2], [9, 256, 0]]
    assert filled(best, 8) == [[1, 1, 4], [2, 8, 2]]
    assert gaps(list(best), 64) == [(2, 7), (9, 63)]


def test_gaps_are_filled_by_the_smaller_neighbour_and_above_all_by_none() -> None:
    assert filled({4: 3, 8: 5}, 16) == [[1, 7, 3], [8, 8, 5], [9, 16, 0]]
    assert filled({2: 0, 8: 5}, 8) == [[1, 7, 0], [8, 8, 5]]
    assert filled({}, 8) == [[1, 8, 0]]
    assert filled({16: 2}, 8) == [[1, 8, 2]]


@pytest.mark.parametrize(
    ("pairs", "k"),
    [
        ({(2, 0): (1.30, 1.20, 1.40)}, 2),
        ({(2, 0): (1.30, 0.99, 1.60)}, 0),  # not told from none
        ({(2, 0): (0.90, 0.80, 0.95)}, 0),
        # faster, but not measurably faster than a smaller K
        ({(1, 0): (1.2, 1.1, 1.3), (2, 0): (1.25, 1.1, 1.4), (2, 1): (1.04, 0.98, 1.1)}, 1),
        # paired, a small difference can be told though both intervals against the target overlap
        ({(1, 0): (1.2, 1.1, 1.3), (2, 0): (1.25, 1.15, 1.35), (2, 1): (1.04, 1.01, 1.07)}, 2),
        # 1 can't be told from none, 2 can
        ({(1, 0): (1.05, 0.97, 1.1), (2, 0): (1.3, 1.2, 1.4), (2, 1): (1.2, 0.9, 1.5)}, 2),
        ({(2, 1): (1.2, 1.1, 1.3)}, 0),  # the target was not measured
        ({}, 0),
    ],
)
def test_noise_is_respected(pairs: dict[tuple[int, int], Ratio], k: int) -> None:
    assert winner(pairs) == k


@given(MEASURED, st.integers(1, 300))
@settings(deadline=None, max_examples=200)
def test_every_schedule_is_one_that_vllm_reads_as_it_is_meant(best: dict[int, int], max_num_seqs: int) -> None:
    made = filled(best, max_num_seqs)
    assert schedule_fault(made, 8) is None
    assert (made[0][0], made[-1][1]) == (1, max_num_seqs)
    assert all(b[0] == a[1] + 1 and b[2] != a[2] for a, b in pairwise(made))
    dense = [k_at(made, size) for size in range(1, max_num_seqs + 1)]
    assert engine_lookup(made, max_num_seqs) == dense
    for size, k in enumerate(dense, 1):
        assert k == best.get(size, k)
        above = [s for s in best if s >= size]
        assert k == 0 if not above else k <= best[min(above)]
        below = [s for s in best if s <= size]
        assert not below or k <= best[max(below)]


@given(MEASURED, st.integers(1, 300), st.integers(1, 300))
@settings(deadline=None, max_examples=100)
def test_served_with_a_larger_batch_than_measured_nothing_is_drafted_there(
    best: dict[int, int], max_num_seqs: int, served: int
) -> None:
    made = extended(filled(best, max_num_seqs), served)
    assert schedule_fault(made, 8) is None
    looked_up = engine_lookup(made, served) or []
    assert all(k == 0 for k in looked_up[max_num_seqs:])
    assert (
        looked_up[:max_num_seqs]
        == [k_at(filled(best, max_num_seqs), s) for s in range(1, len(looked_up) + 1)][:max_num_seqs]
    )


RATIO = st.tuples(st.floats(0.5, 2), st.floats(0, 1)).map(lambda p: (p[0], p[0] * (1 - p[1] / 2), p[0] * (1 + p[1])))


@given(st.dictionaries(st.tuples(st.integers(1, 6), st.integers(0, 5)).filter(lambda p: p[0] > p[1]), RATIO))
def test_a_winner_is_measurably_faster_than_none_and_than_what_won_before(
    pairs: dict[tuple[int, int], Ratio],
) -> None:
    k = winner(pairs)
    before = winner({pair: r for pair, r in pairs.items() if pair[0] < k})
    assert k == 0 or (pairs[k, 0][1] > 1 and pairs[k, before][1] > 1)


def test_vllm_refuses_what_is_no_schedule() -> None:
    with pytest.raises(ValueError, match="start at 1"):
        engine_lookup([[2, 8, 4]], 8)


def test_whether_a_runner_ignores_it() -> None:
    made = [[1, 1, 4], [2, 8, 2], [9, 64, 0]]
    assert ignored(made, 1, 4.0) is None  # 4 is what it asks for
    assert ignored(made, 8, 4.0) is True
    assert ignored(made, 8, 2.6) is False  # 2, and 4 once a single request is left
    assert ignored(made, 64, 0.2) is False
    assert ignored(made, 64, 4.0) is True
