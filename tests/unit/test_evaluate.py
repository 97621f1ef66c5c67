"""Evaluation: figures by hand, pairs, groups, and a verdict that says so when nothing changed (D15)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator

from distill import train
from distill.answers import open_answers
from distill.batches import Rows, check_rows
from distill.checkpoint import load_weights
from distill.evaluate import (
    PromptScore,
    acceptance,
    compare,
    drafting,
    groups,
    replay_prompts,
    score_prompts,
    summary,
    verdict,
)
from distill.settings import Settings
from distill.step import Run
from distill.student import freeze
from pairing.acceptance import acceptance_length_of, replay
from pairing.errors import PartFailedError
from pairing.files import read_jsonl
from pairing.source import load_model
from tests import tiny
from tests.stored_answers import store, tossed, two_turns


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


def test_scores_of_a_row_are_its_answers_one_by_one(tmp_path: Path) -> None:
    """w against the drafter's plain argmax over the whole row."""
    target = tiny.folder(tmp_path / "target")
    model = load_model(target)
    rows_of = {a.prompt.id: a for a in two_turns([(3, 5), (9, 1), (1, 4)])}
    # some tokens are the drafter's own choice, so that w is not always 0
    for one in rows_of.values():
        for start, end in one.spans:
            for at in range(start, end, 2):
                logits = model(torch.tensor([one.input_ids[:at]])).logits[0, -1, : tiny.REAL_TOKENS]
                one.input_ids[at] = int(logits.argmax())
    answers = open_answers(store(tmp_path / "a", list(rows_of.values()), target))
    rows = check_rows(answers, "data", rows=tiny.ROWS, real=tiny.REAL_TOKENS, context=512)
    found = score_prompts(Accelerator(cpu=True), model, rows, batch_size=2, chunk=4)
    assert [s.id for s in found] == sorted(rows_of)
    for s in found:
        one = rows_of[s.id]
        guess = model(torch.tensor([one.input_ids])).logits[0, :, : tiny.REAL_TOKENS].argmax(-1).tolist()
        expected = [[int(guess[t - 1] == one.input_ids[t]) for t in range(*span)] for span in one.spans]
        assert s.accepted == expected
        assert any(map(any, expected))


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


A, B, C = 70, 71, 72
P = {A: 0.9, B: 0.1}


def tossed_rows(folder: Path, temperature: float) -> Rows:
    """Answers drawn from P, said to be drawn at `temperature`."""
    answers = store(folder / "a", tossed(24, 40, P), tiny.folder(folder / "target"), temperature=temperature)
    return check_rows(open_answers(answers), "data", rows=tiny.ROWS, real=tiny.REAL_TOKENS, context=512)


def test_drafts_are_counted_as_they_are_chosen(tmp_path: Path) -> None:
    """p = (.9, .1) and q = (.6, .4): argmax drafts are accepted where the text goes on with A, which is .9; drawn ones with
    min(1, q/p), 2/3 at A and 1 at B, which on p's own text is .7 = Σ min(p, q)."""
    rows, drafter = tossed_rows(tmp_path, 1.0), tiny.says({A: 0.6, B: 0.4})
    taus = {}
    for method, at in (("greedy", {A: 1.0, B: 0.0}), ("probabilistic", {A: 2 / 3, B: 1.0})):
        found = score_prompts(Accelerator(cpu=True), drafter, rows, batch_size=5, draft_sample_method=method)  # type: ignore[arg-type]
        texts = [rows.data[i]["input_ids"][slice(*rows.data[i]["spans"])].tolist() for i in range(len(rows))]
        expected = [[at[t] for t in text] for text in texts]
        for s, w in zip(found, expected, strict=True):
            assert s.w[0] == pytest.approx(w, abs=2e-3)  # the record has half precision
        taus[method] = summary(found)["tau"]
        assert taus[method]["4"] == pytest.approx(replay(expected, 4).acceptance_length, rel=2e-3)
        assert acceptance(found, 4)["tau"] == taus[method]["4"]
        assert compare(found, found)["after"]["tau"] == taus[method]
    for method, alpha in (("greedy", 0.9), ("probabilistic", 0.7)):
        assert taus[method]["1"] == pytest.approx(1 + alpha, abs=0.04)  # 920 draws


@pytest.mark.parametrize(("temperature", "by"), [(0.0, "accepted"), (1.0, "ratio"), (0.5, None)])
def test_no_tau_where_the_record_does_not_tell_it(tmp_path: Path, temperature: float, by: str | None) -> None:
    """Recorded log-probs are at temperature 1, so min(1, q/p) at another does not follow; at 0 every draft is an argmax."""
    rows, drafter = tossed_rows(tmp_path, temperature), tiny.says({A: 0.6, B: 0.4})
    found = score_prompts(Accelerator(cpu=True), drafter, rows, batch_size=8, draft_sample_method="probabilistic")
    assert [s.by for s in found] == [by] * 24
    one = compare(found, found) | {"drafting": drafting(rows, "probabilistic")}
    assert (one["after"]["tau"]["4"] is None) == (one["change"]["tau_4"][0] is None) == (by is None)
    assert one["after"]["top1"] == pytest.approx(1.0)  # A is what both find likeliest
    assert ("on own, τ of drafts that are drawn is not known" in verdict({"own": one})) == (by is None)
    assert drafting(rows, "greedy") == {"draft_sample_method": "greedy", "temperature": temperature, "note": None}
    json.dumps(one, allow_nan=False)


def test_the_best_checkpoint_is_the_best_as_it_is_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On p = (.9, .1), step 1's q = (.4, .3, .3) is accepted with .9 by argmax and .5 drawn, step 2's (.45, .55) with .1 and
    .55. (A stand-in writes the steps; what is scored, logged and kept is the loop's own.)"""

    def step(run: Run, window: Any, at: int, progress: float) -> dict[str, Any]:
        for _, p in run.prepared.params:
            p.grad = torch.zeros_like(p)
        run.prepared.optimizer.step()
        tiny.say(run.model, ({A: 0.4, B: 0.3, C: 0.3}, {A: 0.45, B: 0.55})[at])
        return {"loss": 1.0, "supervised": 1, "top1": 0.0}

    monkeypatch.setattr(train, "optimizer_step", step)
    rows = tossed_rows(tmp_path, 1.0)
    common: dict[str, Any] = {
        "seed": 0, "batch_size": 8, "accumulation": 1, "lr": 1e-3, "warmup": 0.1, "weight_decay": 0.0, "beta2": 0.98, "clip": 1.0,
        "trainable": "layers", "losses": {"forward_kl": 1.0}, "chunk": None, "epochs": None, "max_steps": 2, "minutes": None,
        "eval_every": 1, "eval_prompts": 24, "checkpoint_every": 1, "keep": 2,
    }  # fmt: skip
    for method, best, others in (("greedy", 1, 1.1), ("probabilistic", 2, 1.55)):
        model, out = tiny.says(P), tmp_path / method
        settings = Settings(**common, num_speculative_tokens=1, draft_sample_method=method)  # type: ignore[arg-type]
        train.fit(Accelerator(cpu=True), model, rows, {"own": rows}, settings, out)
        held = load_weights(out / "checkpoints", "best", freeze(model, "layers"))
        log = [r for r in read_jsonl(out / "metrics.jsonl") if r["kind"] == "eval"]
        assert (held["step"], held["figure"]) == (best, log[best]["tau"]["1"])
        assert log[2]["tau"]["1"] == pytest.approx(others, abs=0.05)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("method", ["greedy", "probabilistic"])
def test_a_figure_that_is_not_finite_names_place_and_prompt(tmp_path: Path, method: Any, value: float) -> None:
    """A damaged weight that one prompt alone meets: the embedding's row of a token that no other holds, head untied."""
    answers = two_turns([(6, 4), (5, 5), (7, 3)])
    odd, *others = answers
    lone = next(i for i in odd.input_ids[:20] if not any(i in other.input_ids for other in others))
    stored = store(tmp_path / "a", answers, tiny.folder(tmp_path / "target"), temperature=1.0)
    rows = check_rows(open_answers(stored), "data", rows=tiny.ROWS, real=tiny.REAL_TOKENS, context=512)
    how: dict[str, Any] = {"batch_size": 3, "draft_sample_method": method, "where": "step 3, heldout.own"}
    drafter = tiny.model(tied=False)
    assert len(score_prompts(Accelerator(cpu=True), drafter, rows, **how)) == 3
    with torch.no_grad():
        drafter.get_input_embeddings().weight[lone, 0] = value
    with pytest.raises(
        PartFailedError, match=rf"^step 3, heldout\.own: .* not finite on prompt {odd.prompt.id}; "
    ) as e:
        score_prompts(Accelerator(cpu=True), drafter, rows, **how)
    assert "\n" not in str(e.value)
