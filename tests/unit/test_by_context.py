"""τ from chunks by context and against the counters; every figure worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest

from eval.by_context import figures
from eval.counters import Counts
from eval.verdict import judge

K = 3


def request(prompt: int, *chunks: int) -> dict[str, Any]:
    return {"prompt_tokens": prompt, "chunk_tokens": list(chunks)}


def counts(rounds: int, accepted: int) -> Counts:
    return Counts(rounds, rounds * K, accepted, (), 0, 0, 0, 0, 0)


def test_by_the_length_of_the_context() -> None:
    """A prompt of 13 and its first token: rounds begin at 14 (2 tokens), 16 (4), 20 (3); one of 60: at 61 (1), 62 (3), 65 (1)."""
    got = figures([request(13, 1, 2, 4, 3), request(60, 1, 1, 3, 1)], counts(6, 8), K)
    assert got["acceptance_length_by_context"] == [
        {"from": 8, "to": 16, "rounds": 1, "acceptance_length": 2.0},
        {"from": 16, "to": 32, "rounds": 2, "acceptance_length": 3.5},
        {"from": 32, "to": 64, "rounds": 2, "acceptance_length": 2.0},
        {"from": 64, "to": 128, "rounds": 1, "acceptance_length": 1.0},
    ]
    assert got["emitted_check"] == {"rounds": 6, "accepted_tokens": 8, "cut_at_most": 1 + 3, "merged": 0, "alarm": None}


def test_what_the_end_of_an_answer_cut_off_is_no_difference() -> None:
    """The last round emitted 3 of its 4 tokens: the engine counted 3 accepted there, the client saw 2."""
    assert figures([request(9, 1, 4, 3)], counts(2, 6), K)["emitted_check"]["alarm"] is None
    alarm = figures([request(9, 1, 4, 3)], counts(2, 7), K)["emitted_check"]["alarm"]
    assert alarm == "5 accepted tokens were emitted and 7 counted, of which the ends of answers cut off at most 1"
    assert "emitted and 4 counted" in figures([request(9, 1, 4, 3)], counts(2, 4), K)["emitted_check"]["alarm"]


def test_chunks_that_were_merged_are_said_and_give_no_bands() -> None:
    """Two rounds of 4 and 3 tokens came as one chunk of 7."""
    got = figures([request(9, 1, 7)], counts(2, 5), K)
    assert got["acceptance_length_by_context"] is None
    assert "1 chunks brought 2 rounds: the client was late" in got["emitted_check"]["alarm"]
    row = {
        **got,
        "arm": "d",
        "kind": "draft_model",
        "workload": "w",
        "group": None,
        "temperature": 0.0,
        "concurrency": 1,
    }
    assert "Emitted and counted disagree: d on w: 1 chunks" in judge([row])["alarms"][0]


def test_rounds_without_a_draft_are_counted_by_the_client_alone() -> None:
    """N-gram: of three rounds two found nothing to draft."""
    got = figures([request(9, 1, 1, 3, 1)], counts(1, 2), K)
    assert got["emitted_check"]["alarm"] is None
    assert got["acceptance_length_by_context"] == [
        {"from": 8, "to": 16, "rounds": 3, "acceptance_length": pytest.approx(5 / 3)}
    ]


@pytest.mark.parametrize("rows", [[], [request(9, 5)]])
def test_an_answer_of_one_chunk_has_no_round(rows: list[dict[str, Any]]) -> None:
    assert figures(rows, counts(0, 0), K)["acceptance_length_by_context"] == []


def test_nothing_is_said_of_the_target_alone_or_of_rows_that_lack_it() -> None:
    nothing = {"acceptance_length_by_context": None, "emitted_check": None}
    assert figures([request(9, 1, 1)], None, 0) == nothing
    assert figures([{"output_tokens": 4}], counts(1, 1), K) == nothing
