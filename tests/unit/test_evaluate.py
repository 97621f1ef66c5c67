"""Evaluation: figures by hand, pairs, groups, and a verdict that says so when nothing changed (D15)."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from distill.evaluate import PromptScore, compare, groups, replay_prompts, summary, verdict
from pairing.acceptance import acceptance_length_of


def score(i: int, accepted: list[int], **tags: Any) -> PromptScore:
    n = len(accepted)
    return PromptScore(f"{i:016x}", tags, n, float(sum(accepted)), 0.5 * n, 0.6 * n, [accepted])


def drafter(rate: float, seed: int, prompts: int = 60) -> list[PromptScore]:
    rng = np.random.default_rng(seed)
    return [score(i, (rng.random(20 + i % 10) < rate).astype(int).tolist(), seen=i % 3 != 0) for i in range(prompts)]


def test_summary_by_hand() -> None:
    """Tokens count alike, whatever prompt they are in; at K = 1 the rounds accept 1 of 2 drafts and 0 of 1."""
    figures = summary([score(0, [0, 1, 1, 0]), score(1, [1, 0])])
    assert figures["top1"] == pytest.approx(3 / 6)
    assert (figures["alpha_low"], figures["alpha_high"]) == pytest.approx((0.5, 0.6))
    assert list(figures["tau"]) == [str(k) for k in range(1, 9)]
    assert figures["tau"]["1"] == pytest.approx(1 + 1 / 3)


def test_no_round_runs_from_one_answer_into_the_next() -> None:
    """A row of two answers has the rounds of both, counted as one prompt: at K = 1, 1 of 2 drafts and 0 of 1."""
    both = PromptScore("0", {}, 6, 3.0, 3.0, 3.6, [[0, 1, 1, 0], [1, 0]])
    assert summary([both])["tau"]["1"] == pytest.approx(1 + 1 / 3)
    assert summary([score(0, [0, 1, 1, 0, 1, 0])])["tau"]["1"] != pytest.approx(1 + 1 / 3)  # glued, another number
    alone = score(1, [1, 1, 1])
    found = replay_prompts([both.accepted, alone.accepted], 1)
    assert found.rounds_P.tolist() == [3, 1]
    assert found.accepted_PK.tolist() == [[1], [1]]
    assert found.acceptance_length == pytest.approx(1 + 2 / 4)
    weights = np.array([[2.0, 0.0], [1.0, 1.0]])
    assert acceptance_length_of(found, weights).tolist() == pytest.approx([1 + 1 / 3, 1 + 2 / 4])


def test_figures_that_do_not_exist_are_null_and_the_whole_is_strict_json() -> None:
    one = compare([score(0, [1])], [score(0, [1])])
    assert one["after"]["tau"]["4"] is None
    assert one["change"]["tau_4"] == [None, None, None]
    assert one["change"]["top1"] == [0.0, None, None]
    json.dumps(one, allow_nan=False)
    assert verdict({"set": one}).startswith("no measurable change")


def test_a_training_that_changed_nothing_is_not_a_success() -> None:
    """D15: learning rate 0 gives the same scores, and two equally good drafters an interval that holds 0."""
    same = compare(drafter(0.5, 0), drafter(0.5, 0))
    assert same["change"] == {"top1": [0.0, 0.0, 0.0], "tau_4": [0.0, 0.0, 0.0]}
    assert verdict({"a": same}).startswith("no measurable change")
    alike = compare(drafter(0.5, 0), drafter(0.5, 1))
    assert alike["change"]["top1"][0] != 0
    assert verdict({"a": same, "b": alike}).startswith("no measurable change")


def test_real_changes_are_named_with_their_set_and_direction() -> None:
    better, worse = compare(drafter(0.3, 0), drafter(0.7, 1)), compare(drafter(0.7, 0), drafter(0.3, 1))
    point, low, high = better["change"]["top1"]
    assert 0.3 < low < point < high < 0.5
    said = verdict({"orders": better, "other": worse})
    assert "top-1 agreement on orders rose" in said
    assert "acceptance length at K=4 on other FELL" in said


def test_pairing_narrows_the_interval() -> None:
    """Prompts differ far more from each other than drafters do on one prompt; pairing takes that out."""
    rng = np.random.default_rng(0)
    before = [score(i, (rng.random(200) < rng.random()).astype(int).tolist()) for i in range(50)]
    after = []
    for i, s in enumerate(before):
        row = list(s.accepted[0])
        for t in rng.integers(0, 200, 8):
            row[t] = 1
        after.append(score(i, row))
    low, high = compare(before, after)["change"]["top1"][1:]
    assert high - low < 0.02
    assert low > 0


def test_groups_by_tag() -> None:
    scores = [score(i, [1, 1, 0], seen=i % 2 == 0, kind="ab"[i % 2], task=str(i)) for i in range(20)]
    found = groups(scores)
    assert set(found) == {"seen", "kind"}  # `task` has a value per prompt: it names prompts, not groups
    assert set(found["seen"]) == {"true", "false"}
    assert set(found["kind"]) == {"a", "b"}
    assert found["seen"]["true"]["prompts"] == 10
    assert found["seen"]["true"]["top1"] == pytest.approx(2 / 3)
    assert groups([score(0, [1]), score(1, [1])]) == {}


def test_no_set_is_no_verdict() -> None:
    assert verdict({}).startswith("not evaluated")
