"""Parallel drafts counted offline: from every start the drafts of one pass over prefix and masks, and nothing else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator

from distill import evaluate_parallel
from distill.answers import open_answers
from distill.batches import Rows, check_rows
from distill.evaluate import score_prompts
from distill.evaluate_parallel import PromptRounds, compare_rounds, rounds_summary, score_rounds
from pairing.acceptance import replay
from tests import tiny
from tests.stored_answers import made_up, store, tossed, two_turns

K = 4
MASK = tiny.REAL_TOKENS + 2
SIZES = {"batch_size": 3, "chunk": 16}


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Rows:
    """Answers that a random model sometimes says: tokens in turns what it would draft first, and second by a mask."""
    place = tmp_path_factory.mktemp("place")
    model, target = tiny.model(), tiny.folder(place / "target")
    answers = [*made_up([9, 1, 14]), *two_turns([(6, 5), (1, 3)])]
    for answer in answers:
        for start, end in answer.spans:
            for t in range(start + 2, end):
                prefix = answer.input_ids[:t] if t % 2 else [*answer.input_ids[: t - 1], MASK]
                with torch.no_grad():
                    logits = model(torch.tensor([prefix])).logits[0, -1, : tiny.REAL_TOKENS]
                answer.input_ids[t] = int(logits.argmax())
    limits = {"rows": tiny.ROWS, "real": tiny.REAL_TOKENS, "context": 512}
    return check_rows(open_answers(store(place / "answers", answers, target)), "data", **limits)


@torch.no_grad()
def one_by_one(rows: Rows, index: int) -> list[np.ndarray]:  # type: ignore[type-arg]
    """The same by running each round by itself: the text so far, then K − 1 masks."""
    model, row, found = tiny.model(), rows.data[index], []
    text = row["input_ids"].tolist()
    for start, end in row["spans"].reshape(-1, 2).tolist():
        w = np.zeros((end - start, K))
        for s in range(1, end - start):
            ids = [*text[: start + s], *[MASK] * (K - 1)]
            drafts = model(torch.tensor([ids])).logits[0, -K:, : tiny.REAL_TOKENS].argmax(-1).tolist()
            for j, draft in enumerate(drafts[: end - start - s]):
                w[s, j] = draft == text[start + s + j]
        found.append(w)
    return found


@pytest.mark.parametrize("masks", [1024, 5])
def test_every_round_is_the_round_alone(rows: Rows, masks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one pass over a row, and in several where it has more starts than a pass takes."""
    monkeypatch.setattr(evaluate_parallel, "MASKS", masks)
    scores, hits = score_rounds(Accelerator(cpu=True), tiny.model(), rows, MASK, K, **SIZES), 0.0
    assert [s.id for s in scores] == list(rows.data["id"])
    for i, score in enumerate(scores):
        for got, expected in zip(score.accepted, one_by_one(rows, i), strict=True):
            np.testing.assert_array_equal(got, expected)
            hits += float(expected[:, 1:].sum())
    assert hits > 5  # masks are right sometimes, so that the comparison says something


def test_the_first_draft_is_the_plain_one(rows: Rows) -> None:
    accelerator, model = Accelerator(cpu=True), tiny.model()
    plain = score_prompts(accelerator, model, rows, **SIZES)
    rounds = score_rounds(accelerator, model, rows, MASK, K, **SIZES)
    for p, r in zip(plain, rounds, strict=True):
        assert [w[1:] for w in p.accepted] == [w[1:, 0].tolist() for w in r.accepted]


def test_drafts_that_are_the_mask_are_counted(rows: Rows) -> None:
    """A spare token as mask, whose row is so long that a model of tied weights says it where it reads it."""
    model, mask, said, drafts = tiny.model(), 80, 0, 0
    with torch.no_grad():
        model.get_input_embeddings().weight[mask] *= 3
    for i in range(len(rows)):
        row = rows.data[i]
        text = row["input_ids"].tolist()
        for start, end in row["spans"].reshape(-1, 2).tolist():
            for s in range(start + 1, end):
                with torch.no_grad():
                    logits = model(torch.tensor([[*text[:s], *[mask] * (K - 1)]])).logits
                found = logits[0, -K:, : tiny.REAL_TOKENS].argmax(-1)[: end - s]
                said, drafts = said + int((found == mask).sum()), drafts + len(found)
    assert 0 < said < drafts
    scores = score_rounds(Accelerator(cpu=True), model, rows, mask, K, **SIZES)
    assert rounds_summary(scores)["mask_share"] == pytest.approx(said / drafts)
    padding = score_rounds(Accelerator(cpu=True), model, rows, MASK, K, **SIZES)
    assert rounds_summary(padding)["mask_share"] == 0


def test_summary_and_change_by_hand() -> None:
    """K = 2: one prompt of 4 tokens (rounds at 1 and 3), one of 2 (a round at 1)."""
    none = [PromptRounds("a", [np.zeros((4, 2), np.int8)]), PromptRounds("b", [np.zeros((2, 2), np.int8)])]
    no_mask = [np.zeros((2, 2), np.int8)]
    some = [
        PromptRounds("a", [np.array([[0, 0], [1, 0], [0, 1], [1, 0]], np.int8)],
                     masks=[np.array([[0, 0], [0, 1], [1, 0], [0, 0]], np.int8)]),
        PromptRounds("b", [np.array([[0, 0], [0, 0]], np.int8)], masks=no_mask),
    ]  # fmt: skip
    found = rounds_summary(some)
    assert found["mask_share"] == 2 / 6  # the four firsts and two seconds that are drafts of a known text
    assert rounds_summary(none)["mask_share"] is None
    assert found["top1_by_offset"] == [2 / 4, 1 / 2]  # four starts; two of them have a second token to draft
    assert found["tau"] == {"1": 1 + 2 / 3, "2": 1 + 2 / 3}
    assert found["survival"] == [2 / 3, 0.0]
    change = compare_rounds(none, some, 2)
    assert change["before"]["tau"]["2"] == 1.0
    assert change["change"][0] == pytest.approx(2 / 3)
    assert change["change"][1] <= 2 / 3 <= change["change"][2]


def test_drawn_drafts_of_one_pass_are_counted_by_their_ratio(tmp_path: Path) -> None:
    """A drafter that never looks drafts alike both ways, so its rounds are those of one-by-one drafting, drawn or not."""
    p, q = {70: 0.9, 71: 0.1}, {70: 0.6, 71: 0.4}
    folder = store(tmp_path / "a", tossed(6, 12, p), tiny.folder(tmp_path / "target"), temperature=1.0)
    rows = check_rows(open_answers(folder), "data", rows=tiny.ROWS, real=tiny.REAL_TOKENS, context=512)
    accelerator, model, taus = Accelerator(cpu=True), tiny.says(q), []
    for method in ("greedy", "probabilistic"):
        how: dict[str, Any] = SIZES | {"draft_sample_method": method}
        rounds = score_rounds(accelerator, model, rows, MASK, K, **how)
        plain = score_prompts(accelerator, model, rows, **how)
        found = rounds_summary(rounds)
        taus.append(found["tau"][str(K)])
        assert taus[-1] == pytest.approx(replay([w for s in plain for w in s.w], K).acceptance_length)
        assert compare_rounds(rounds, rounds, K)["after"] == found
        assert found["top1_by_offset"][0] > 0.8  # of the likeliest draft, however it is served
    assert taus[0] > taus[1] + 0.1
    cold = score_rounds(accelerator, model, replace(rows, temperature=0.5), MASK, K, **how)
    found = compare_rounds(cold, cold, K)
    assert (found["change"], found["after"]["survival"]) == ([None] * 3, [None] * K)
    assert found["after"]["tau"] == {str(k): None for k in range(1, K + 1)}
