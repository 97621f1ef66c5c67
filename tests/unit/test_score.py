"""Scoring texts that exist: the target's own distribution, chunk by chunk, and draws from outside the head."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import distill.score as module
from distill.answers import open_answers
from distill.generate import Given, Job, new_job, unanswered
from distill.prompts import prompt
from distill.requests import Sampling
from distill.score import head_and_tail, score
from distill.turns import Text, given_texts
from pairing.errors import InputError
from pairing.source import load_model, load_tokenizer, resolve
from recipes.generate import main
from tests import tiny

K, M = 6, 5


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.folder(tmp_path_factory.mktemp("target") / "tiny")


def given(target: Path, count: int = 12) -> list[Given]:
    words, out = load_tokenizer(target), []
    for i in range(count):
        turns = [("user", f"{i} " + "word " * (i % 4)), ("assistant", "yes " * (i % 3) + str(i))] * (1 + i % 2)
        one = prompt([{"role": role, "content": text} for role, text in turns], {"i": i})
        out.append(Given(one, given_texts(one, words, [2])))
    return out


def scored(target: Path, what: list[Given], **kwargs: int) -> dict[str, Any]:
    sizes = {"top_logprobs": K, "tail_samples": M, "real": tiny.REAL_TOKENS, "seed": 0} | kwargs
    return {row.prompt.id: row for rows in score(resolve(str(target)), what, **sizes) for row in rows}


def test_scores_are_the_targets_own_whatever_the_chunks(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against one whole forward per text, cut to the real vocabulary; chunks of 3 columns, a batch's and one text's alike."""
    what, model = given(target), load_model(target)
    whole = scored(target, what)
    monkeypatch.setattr(module, "LOGITS", 3 * 8 * tiny.ROWS)
    small = scored(target, what)
    monkeypatch.setattr(module, "BATCH", 1)
    alone = scored(target, what)
    assert set(whole) == {one.prompt.id for one in what}
    for one in what:
        (text,) = one.texts
        row = whole[one.prompt.id]
        assert (row.input_ids, row.spans) == (text.input_ids, text.spans)
        with torch.inference_mode():
            logits = model(torch.tensor([text.input_ids])).logits[0, :, : tiny.REAL_TOKENS].double()
        places = [t - 1 for start, end in text.spans for t in range(start, end)]
        logp = logits.log_softmax(-1)[places]
        top = logp.topk(K)
        assert row.head_ids_NK.tolist() == top.indices.tolist()
        np.testing.assert_allclose(row.head_logprobs_NK, top.values, atol=2e-5)
        np.testing.assert_allclose(
            row.tail_logprobs_NM, logp.gather(-1, torch.tensor(row.tail_ids_NM).long()), atol=2e-5
        )
        assert row.tail_ids_NM.max() < tiny.REAL_TOKENS
        assert not (row.tail_ids_NM[:, :, None] == row.head_ids_NK[:, None, :]).any()
        for other in (small, alone):
            np.testing.assert_array_equal(other[one.prompt.id].head_ids_NK, row.head_ids_NK)
            np.testing.assert_allclose(other[one.prompt.id].head_logprobs_NK, row.head_logprobs_NK, atol=2e-5)
            assert (
                other[one.prompt.id].tail_ids_NM == row.tail_ids_NM
            ).mean() > 0.99  # up to rounding at a step's edge
    assert (scored(target, what, seed=1)[one.prompt.id].tail_ids_NM != row.tail_ids_NM).any()
    assert scored(target, what, tail_samples=0)[one.prompt.id].tail_ids_NM is None


def test_draws_follow_the_tail_and_make_unbiased_sums() -> None:
    """Against the exact conditional distribution: frequencies within 5 sigma, and (mass / M) Σ f(id) the exact Σ p f."""
    rng = np.random.default_rng(0)
    logits = torch.tensor(rng.normal(size=(2, 30)) * 2, dtype=torch.float32)
    logits[1] -= 40  # any constant
    logits[1, :4] += 60  # and a tail of 1e-26
    head_ids, head_logp, ids, logp = head_and_tail(logits, 4, rng.random((2, 100_000)))
    p = logits.double().softmax(-1).numpy()
    for s in range(2):
        outside = np.setdiff1d(np.arange(30), head_ids[s])
        exact = p[s, outside] / p[s, outside].sum()
        counts = np.array([(ids[s] == i).sum() for i in outside])
        assert counts.sum() == 100_000  # nothing from inside the head
        assert (np.abs(counts - 1e5 * exact) < 5 * np.sqrt(1e5 * exact * (1 - exact)) + 1e-9).all()
        np.testing.assert_allclose(np.exp(logp[s].astype(np.float64)), p[s, ids[s]], rtol=1e-4)
        np.testing.assert_allclose(head_logp[s], np.log(p[s, head_ids[s]]), atol=1e-4)
        f = np.cos(np.arange(30))
        assert p[s, outside].sum() * f[ids[s]].mean() == pytest.approx((p[s, outside] * f[outside]).sum(), rel=0.05)


def test_the_smallest_number_draws_the_first_id_outside_the_head() -> None:
    """Ids 0 and 1 are the head: an id without probability outside it is never drawn, by 0 neither, nor by all but 1."""
    logits = torch.tensor([[9.0, 8.0, 1.0, 0.0, -2.0, 8.5]])
    *_, ids, _ = head_and_tail(logits, 3, np.array([[0.0, 1 - 2**-53]]))
    assert ids.tolist() == [[2, 4]]


def test_a_head_that_holds_everything_has_no_tail(target: Path) -> None:
    with pytest.raises(InputError, match="holds the whole vocabulary of 259 ids"):
        scored(target, given(target, 2), top_logprobs=259)
    assert scored(target, given(target, 2), top_logprobs=259, tail_samples=0)
    with pytest.raises(InputError, match="top_logprobs=260 is more than the target's 259 ids"):
        scored(target, given(target, 2), top_logprobs=260, tail_samples=0)


def test_other_answers_of_the_same_prompts_are_not_mixed_in(target: Path, tmp_path: Path) -> None:
    """A scoring was stopped, and what it scores was generated anew meanwhile: under the same ids stand other tokens."""

    def job(answer: list[int]) -> Job:
        one = prompt([{"role": "user", "content": "x"}])
        what = [Given(one, [Text(one, [1, 5, *answer], [(2, 2 + len(answer))])])]
        return new_job("a", tmp_path / "a", what, Sampling(1, 0, K, 0), target={}, rows=tiny.ROWS,
                       backend="transformers", prompts_source="text", turns="given")  # fmt: skip

    assert len(unanswered(job([6, 7]))) == 1
    assert len(unanswered(job([6, 7]))) == 1
    with pytest.raises(InputError, match="they differ in prompts_digest"):
        unanswered(job([6, 8]))


def test_a_text_that_is_cut_is_no_ended_answer(target: Path) -> None:
    one = prompt([{"role": "user", "content": "x"}])
    row = scored(target, [Given(one, [Text(one, [1, 5, 6, 7], [(2, 4)])])])[one.id]
    assert row.finish_reason == "length"


def words_of(target: Path, out: Path, source: Path, *more: str) -> list[str]:
    return [
        f"target={target}",
        f"out={out}",
        "backend=transformers",
        "top_logprobs=6",
        f"sets.text.prompts={source}",
        *more,
    ]


def test_the_command_scores_a_file_and_what_was_generated(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Existing answers with draws; then answers that the target wrote, taken token by token and scored again."""
    file = tmp_path / "chats.jsonl"
    file.write_text("".join(json.dumps({"messages": one.prompt.messages}) + "\n" for one in given(target)))
    argv = words_of(target, tmp_path / "a", file, "sets.text.answers=given", "tail_samples=5")
    assert main([*argv, "--dry-run", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)["sets"]["text"]
    assert main([*argv, "--json"]) == 0
    stats = json.loads(capsys.readouterr().out)["sets"]["text"]
    found = open_answers(tmp_path / "a" / "text")
    assert found.meta["tail_samples"] == 5
    assert found.meta["turns"] == "given"
    assert found.meta["sampling"] is None
    assert stats["answer_tokens"]["total"] == plan["answer_tokens_at_most"]
    assert stats["answers"] == 12 + 6
    one = {row["id"]: row for row in found.data}
    for id_, row in scored(target, given(target)).items():
        assert one[id_]["tail_ids"] == row.tail_ids_NM.ravel().tolist()

    assert (
        main(words_of(target, tmp_path / "b", file, "sets.text.max_tokens=9", "temperature=1", "top_logprobs=6")) == 0
    )
    generated = open_answers(tmp_path / "b" / "text")
    again = words_of(target, tmp_path / "c", tmp_path / "b" / "text", "sets.text.answers=given", "tail_samples=2")
    assert main(again) == 0
    capsys.readouterr()
    rescored = open_answers(tmp_path / "c" / "text")
    assert rescored.meta["sampling"] == {"max_tokens": 9, "temperature": 1.0}
    assert rescored.meta["turns"] == "every"
    keys = ("id", "messages", "tags", "input_ids", "spans")
    assert [[row[k] for k in keys] for row in rescored.data] == [[row[k] for k in keys] for row in generated.data]
    with pytest.raises(InputError, match=r"vLLM gives the largest probabilities alone: .*score what was generated"):
        main(words_of(target, tmp_path / "d", file, "tail_samples=2"))
    (tmp_path / "q.jsonl").write_text('{"prompt": "a"}\n')
    with pytest.raises(InputError, match=r"chat 1: no assistant's message, so there is no answer to score"):
        main(words_of(target, tmp_path / "d", tmp_path / "q.jsonl", "sets.text.answers=given"))
