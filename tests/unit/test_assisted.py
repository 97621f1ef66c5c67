"""Transformers' assisted generation and prompt lookup on a tiny pair: rounds counted by hand, outputs its own greedy ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from eval import assisted
from eval.assisted import assisted_results, markdown, measure_assisted, ways
from eval.measure import Request
from eval.verdict import judge, latest
from pairing.files import read_jsonl, write_jsonl
from tests import tiny

K = 3


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The target as its own assistant, another model, and prompt lookup; prompts that repeat themselves."""
    place = tmp_path_factory.mktemp("assisted")
    target = tiny.folder(place / "target", layers=2)
    other = tiny.folder(place / "other", layers=1, seed=9)
    words = tiny.tokenizer()
    workloads = {"w": [Request(t, words(t * 3).input_ids, 24, None) for t in ("abcd ", "red and ")]}
    tried = ways({"self": target, "other": other}, K)
    void = measure_assisted(target, tried, workloads, place, 2, "float32")
    rows = assisted_results(place, tried, workloads, void, {})
    return {"place": place, "target": target, "workloads": workloads, "ways": tried, "rows": rows, "void": void}


def test_rounds_by_hand(measured: dict[str, Any]) -> None:
    """Alone a pass a token; with itself as assistant 24 tokens in rounds of K + 1: six passes, unless an answer ends before."""
    assert measured["void"] == {}
    requests = read_jsonl(measured["place"] / assisted.FILE)
    alone = {(r["id"], r["repeat"]): r for r in requests if r["arm"] == "target-transformers"}
    assert all(r["target_passes"] == r["output_tokens"] for r in alone.values())
    assert {r["output_tokens"] for r in alone.values()} == {24}  # else the six passes below say nothing
    for r in requests:
        assert r["output_ids"] == alone[r["id"], r["repeat"]]["output_ids"], r["arm"]
    by_arm = {r["arm"]: r for r in measured["rows"]}
    assert {r["target_passes"] for r in requests if r["arm"] == "self-transformers"} == {6}
    assert by_arm["self-transformers"]["acceptance_length"] == K + 1
    assert 1.0 <= by_arm["other-transformers"]["acceptance_length"] < K + 1
    assert 1.0 <= by_arm["prompt-lookup-transformers"]["acceptance_length"] <= K + 1
    assert by_arm["self-transformers"]["exact_match"] == 1.0
    assert by_arm["self-transformers"]["speedup_interval"]
    assert by_arm["target-transformers"]["speedup"] is None


def test_they_are_never_ranked_against_served_arms(measured: dict[str, Any]) -> None:
    fast = [{**r, "speedup": 9.0, "speedup_interval": [8.0, 10.0]} for r in measured["rows"]]
    assert latest(fast) == []
    assert judge(fast)["answer"] == "not measurable"
    assert "over transformers' own target" in markdown(measured["rows"])


def test_stopped_and_started_again_measures_the_rest_only(measured: dict[str, Any], tmp_path: Path) -> None:
    rows = read_jsonl(measured["place"] / assisted.FILE)
    write_jsonl(tmp_path / assisted.FILE, rows[:-1])  # killed before the last way's row of the last prompt
    measure_assisted(measured["target"], measured["ways"], measured["workloads"], tmp_path, 2, "float32")
    again = read_jsonl(tmp_path / assisted.FILE)
    assert again[: len(rows) - 4] == rows[:-4]
    key = ("arm", "id", "repeat", "output_ids", "target_passes")
    assert sorted([str([r[k] for k in key]) for r in again]) == sorted([str([r[k] for k in key]) for r in rows])


def test_a_drafter_that_transformers_does_not_take_is_void_and_the_rest_goes_on(
    measured: dict[str, Any], tmp_path: Path
) -> None:
    """Other rows: `generate` refuses it."""
    wrong = tiny.folder(tmp_path / "wrong", rows=tiny.ROWS + 16)
    tried = ways({"wrong": wrong}, K)
    workloads = {"w": measured["workloads"]["w"][:1]}
    void = measure_assisted(measured["target"], tried, workloads, tmp_path, 1, "float32")
    rows = {r["arm"]: r for r in assisted_results(tmp_path, tried, workloads, void, {})}
    assert "transformers does not draft with it" in rows["wrong-transformers"]["void"]
    assert rows["prompt-lookup-transformers"]["void"] is None
    assert rows["prompt-lookup-transformers"]["output_tokens"] == 24
