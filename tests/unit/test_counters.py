"""Counters: two scrapes of /metrics, recorded or written by hand in the format of vLLM 0.32; rates worked out by hand."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eval.counters import difference, parse
from pairing.errors import PartFailedError

RECORDED = Path(__file__).parent / "recorded"


def line(name: str, value: float, engine: int = 0, **labels: str) -> str:
    extra = "".join(f',{k}="{v}"' for k, v in labels.items())
    return f'{name}{{engine="{engine}"{extra},model_name="SmolLM2-135M"}} {float(value)}\n'


def metrics(engines: dict[int, tuple[int, int, list[int], int]], created: float = 1.7644e9) -> str:
    """engine -> (drafts, drafted, accepted per position, generation tokens). Gauges and histograms stand in between."""
    text = "# HELP vllm:num_requests_running Number of requests in model execution batches.\n"
    text += "# TYPE vllm:num_requests_running gauge\n" + line("vllm:num_requests_running", 7)
    families = {
        "vllm:spec_decode_num_drafts": lambda e: e[0],
        "vllm:spec_decode_num_draft_tokens": lambda e: e[1],
        "vllm:spec_decode_num_accepted_tokens": lambda e: sum(e[2]),
        "vllm:generation_tokens": lambda e: e[3],
        "vllm:prompt_tokens": lambda e: 100,
        "vllm:prefix_cache_queries": lambda e: 1000,
        "vllm:prefix_cache_hits": lambda e: 0,
    }
    for family, pick in families.items():
        text += f"# HELP {family}_total Something.\n# TYPE {family}_total counter\n"
        text += "".join(line(f"{family}_total", pick(e), i) for i, e in engines.items())
        text += f"# HELP {family}_created Something.\n# TYPE {family}_created gauge\n"
        text += "".join(line(f"{family}_created", created, i) for i in engines)
    family = "vllm:spec_decode_num_accepted_tokens_per_pos"
    text += f"# HELP {family}_total Accepted tokens per draft position.\n# TYPE {family}_total counter\n"
    text += "".join(
        line(f"{family}_total", n, i, position=str(p)) for i, e in engines.items() for p, n in enumerate(e[2])
    )
    text += f"# HELP {family}_created Accepted tokens per draft position.\n# TYPE {family}_created gauge\n"
    text += "".join(
        line(f"{family}_created", created, i, position=str(p)) for i, e in engines.items() for p in range(len(e[2]))
    )
    # A histogram whose own name ends in _total: not a counter.
    text += "# HELP vllm:iteration_tokens_total Tokens per step.\n# TYPE vllm:iteration_tokens_total histogram\n"
    text += line("vllm:iteration_tokens_total_bucket", 9, le="+Inf")
    text += line("vllm:iteration_tokens_total_count", 9) + line("vllm:iteration_tokens_total_sum", 99)
    return text


def test_ten_rounds_on_top_of_earlier_traffic_in_two_engines() -> None:
    """D22: 10 rounds, 30 drafted, 15 accepted, over two engines that had worked before.

    By hand: rate 15/30 = 0.5; τ = 1 + 15/10 = 2.5, bonus token included. Per position 8, 5, 2 of 10 rounds survive:
    .8, .5, .2; of those that stood before: 8/10, 5/8, 2/5.
    """
    before = parse(metrics({0: (100, 300, [90, 80, 70], 340), 1: (7, 21, [1, 0, 0], 8)}))
    after = parse(metrics({0: (106, 318, [95, 83, 71], 355), 1: (11, 33, [4, 2, 1], 18)}))
    counts = difference(before, after)
    assert (counts.num_drafts, counts.num_draft_tokens, counts.num_accepted_tokens) == (10, 30, 15)
    assert counts.num_accepted_tokens_per_pos == (8, 5, 2)
    assert counts.draft_acceptance_rate == 0.5
    assert counts.acceptance_length == 2.5
    assert counts.survival_per_pos == [0.8, 0.5, 0.2]
    assert counts.conditional_per_pos == [0.8, 0.625, 0.4]
    assert counts.generation_tokens == 25
    assert counts.prefix_cache_hit_rate is None  # nothing was asked of it in between


def test_a_recorded_pair_gives_the_values_worked_out_by_hand() -> None:
    """Of vLLM 0.32 itself, with K = 3, around six answers of 24 tokens that came after others; only the lines that are read here.

    By hand: 162 - 58 = 104 rounds, 486 - 174 = 312 = 3 · 104 drafted, 45 - 11 = 34 accepted; by position 32 - 9, 12 - 2 and
    1 - 0. The client of that run saw, after each answer's first chunk, 16 + 16 + 17 + 19 + 17 + 19 = 104 chunks and 6 · 23 = 138
    tokens: 138 - 104 = 34 accepted.
    """
    before, after = (parse((RECORDED / f"metrics_{name}.txt").read_text()) for name in ("before", "after"))
    counts = difference(before, after)
    assert (counts.num_drafts, counts.num_draft_tokens, counts.num_accepted_tokens) == (104, 312, 34)
    assert counts.num_accepted_tokens_per_pos == (23, 10, 1)
    assert counts.draft_acceptance_rate == 34 / 312
    assert counts.acceptance_length == pytest.approx(138 / 104)
    assert counts.conditional_per_pos == [23 / 104, 10 / 23, 1 / 10]
    assert (counts.generation_tokens, counts.prompt_tokens, counts.preemptions) == (6 * 24, 29, 0)
    assert (counts.prefix_cache_queries, counts.prefix_cache_hits, counts.prefix_cache_hit_rate) == (
        0,
        0,
        None,
    )  # it was off
    with pytest.raises(PartFailedError, match=r"num_drafts_total of engine target/0 went from 162 to 58 .*restarted"):
        difference(after, before)


def test_nothing_drafted_is_none_not_a_division_by_zero() -> None:
    still = parse(metrics({0: (100, 300, [90, 80, 70], 340)}))
    counts = difference(still, still)
    assert counts.draft_acceptance_rate is None
    assert counts.acceptance_length is None
    assert counts.survival_per_pos is None
    assert counts.conditional_per_pos is None


def test_a_position_that_no_round_reached_has_no_conditional() -> None:
    counts = difference(parse(metrics({0: (0, 0, [0, 0, 0], 1)})), parse(metrics({0: (4, 12, [1, 0, 0], 6)})))
    assert counts.conditional_per_pos == [0.25, 0.0, None]


def test_an_engine_without_a_drafter_has_tokens_but_no_rates() -> None:
    text = "# TYPE vllm:generation_tokens_total counter\n"
    counts = difference(
        parse(text + line("vllm:generation_tokens_total", 5)), parse(text + line("vllm:generation_tokens_total", 47))
    )
    assert counts.generation_tokens == 42
    assert counts.acceptance_length is None


def test_a_reset_of_one_engine_is_seen_though_the_sum_grew() -> None:
    """D22: engine 1 restarted (20 -> 3 rounds), engine 0 did 50 more: the sum hides it."""
    before = parse(metrics({0: (10, 30, [5, 0, 0], 15), 1: (20, 60, [9, 0, 0], 29)}))
    after = parse(metrics({0: (60, 180, [40, 0, 0], 100), 1: (3, 9, [1, 0, 0], 4)}))
    with pytest.raises(PartFailedError, match=r"engine SmolLM2-135M/1 went from 20 to 3 .*restarted"):
        difference(before, after)


def test_a_restart_that_has_overtaken_the_old_count_is_seen_by_its_start_time() -> None:
    before = parse(metrics({0: (10, 30, [5, 0, 0], 15)}, created=1.7644e9))
    after = parse(metrics({0: (60, 180, [40, 0, 0], 100)}, created=1.7645e9))
    with pytest.raises(PartFailedError, match="began anew"):
        difference(before, after)


def test_an_engine_that_vanished_is_a_reset() -> None:
    before = parse(metrics({0: (1, 3, [1, 0, 0], 2), 1: (1, 3, [1, 0, 0], 2)}))
    with pytest.raises(PartFailedError, match="went from 1 to nothing"):
        difference(before, parse(metrics({0: (1, 3, [1, 0, 0], 2)})))


def test_acceptance_above_one_is_void() -> None:
    """D22: no rate above 1 ever leaves here."""
    zero = parse(metrics({0: (0, 0, [0, 0, 0], 1)}))
    with pytest.raises(PartFailedError, match="4 accepted of 3 drafted"):
        difference(zero, parse(metrics({0: (2, 3, [2, 2, 0], 9)})))
    with pytest.raises(PartFailedError, match="impossible"):
        difference(zero, parse(metrics({0: (2, 6, [3, 0, 0], 9)})))


def test_positions_that_do_not_add_up_are_void() -> None:
    zero = parse(metrics({0: (0, 0, [0, 0, 0], 1)}))
    text = metrics({0: (4, 12, [3, 2, 0], 9)}).replace(
        'spec_decode_num_accepted_tokens_total{engine="0",model_name="SmolLM2-135M"} 5.0',
        'spec_decode_num_accepted_tokens_total{engine="0",model_name="SmolLM2-135M"} 6.0',
    )
    with pytest.raises(PartFailedError, match="add up to 5, not to its total of 6"):
        difference(zero, parse(text))


@pytest.mark.parametrize("text", ["", "<html>404</html>", "up 1\n"])
def test_something_else_than_vllms_metrics_is_refused(text: str) -> None:
    with pytest.raises(PartFailedError, match="/metrics"):
        parse(text)


rounds = st.lists(st.integers(0, 4), min_size=1, max_size=40)


@given(earlier=rounds, first=rounds, second=rounds)
def test_counts_of_any_rounds_are_recovered_whatever_came_before(
    earlier: list[int], first: list[int], second: list[int]
) -> None:
    """`first` and `second` list how many of 4 drafted tokens each round of engine 0 and 1 accepted."""

    def engine(accepted: list[int]) -> tuple[int, int, list[int], int]:
        per_pos = [sum(a > p for a in accepted) for p in range(4)]
        return len(accepted), 4 * len(accepted), per_pos, sum(accepted) + len(accepted)

    counts = difference(
        parse(metrics({0: engine(earlier), 1: engine(earlier)})),
        parse(metrics({0: engine(earlier + first), 1: engine(earlier + second)})),
    )
    both = first + second
    assert counts.acceptance_length == pytest.approx(sum(a + 1 for a in both) / len(both))
    assert counts.draft_acceptance_rate == pytest.approx((counts.acceptance_length - 1) / 4)
    survival, conditional = counts.survival_per_pos, counts.conditional_per_pos
    assert survival is not None
    assert conditional is not None
    assert all(a >= b for a, b in pairwise(survival))
    assert 1 + sum(survival) == pytest.approx(counts.acceptance_length)
    standing = 1.0
    for s, c in zip(survival, conditional, strict=True):
        standing *= c if c is not None else 0.0
        assert standing == pytest.approx(s)
    assert counts.generation_tokens == sum(a + 1 for a in both)
