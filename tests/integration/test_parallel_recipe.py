"""`init`, `distill` and `quantize` of a parallel drafter: what is trained, said and written; what is refused."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator

from distill.answers import Answer, open_answers
from distill.batches import Rows, check_rows
from distill.evaluate_parallel import rounds_summary, score_rounds
from distill.inputs import choose_mask
from distill.mask_blocks import Parallel
from distill.quantize import quantize_drafter
from distill.train import Settings, fit
from pairing.acceptance import replay_rounds
from pairing.errors import InputError
from pairing.files import read_json, read_jsonl, write_json
from pairing.mask_token import Mask, mask_id_of, with_mask
from pairing.pair import read_pair
from pairing.rows import mean_row
from pairing.source import load_model
from recipes import distill, init, serve
from tests import tiny
from tests.integration.test_distill import BASE
from tests.stored_answers import answered, made_up, store

MASK = tiny.REAL_TOKENS  # the first padding row: this tokenizer has no spare special token


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """target/, draft/ (its layers 0 and 3, with a mask prepared), plain/ (without one), train/ and held/."""
    place = tmp_path_factory.mktemp("place")
    target = tiny.folder(place / "target", layers=4)
    for name, more in (("draft", ["mask_token=auto"]), ("plain", [])):
        assert init.main([f"target={target}", "layers=[0,3]", f"out={place / name}", *more]) == 0
    store(place / "train", answered(target, 24, seed=1), target)
    store(place / "held", answered(target, 8, seed=2), target)
    return place


def words(place: Path, out: str, **more: Any) -> list[str]:
    given = {"draft": place / "draft", "data": place / "train", "heldout.own": place / "held", "out": place / out,
             "max_steps": 6, "parallel_drafting": 4, "num_speculative_tokens": 3, "threads": 1, **more}  # fmt: skip
    return [f"{k}={v}" for k, v in given.items()]


def rows_of(folder: Path) -> Rows:
    return check_rows(open_answers(folder), "data", rows=tiny.ROWS, real=tiny.REAL_TOKENS, context=512)


def test_from_init_to_the_line_that_serves(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert distill.main(words(place, "run")) == 0
    assert "own, all drafts in one pass: acceptance length at K=3" in capsys.readouterr().out
    drafter = place / "run" / "drafter"
    assert read_json(drafter / "config.json")["pard_token"] == MASK
    said = {"num_speculative_tokens": 4, "mask_id": MASK, "mask_token": None}
    assert read_pair(drafter)["parallel_drafting"] == said
    found = read_json(place / "run" / "evaluation.json")["sets"]["own"]["parallel"]
    assert found["num_speculative_tokens"] == 3
    assert list(found["after"]["tau"]) == ["1", "2", "3", "4"]
    assert len(found["after"]["top1_by_offset"]) == 4
    assert found["after"]["mask_share"] == 0, "a padding row is never drafted"
    log = read_jsonl(place / "run" / "metrics.jsonl")
    assert all(0 <= row[f"top1_{i}"] <= 1 for row in log if row["kind"] == "train" for i in range(4))
    assert [row["parallel"]["tau"].keys() for row in log if row["kind"] == "eval"] == [found["after"]["tau"].keys()] * 2
    assert serve.main([str(drafter), "max_model_len=256", "--dry-run"]) == 0
    assert '"num_speculative_tokens": 4, "parallel_drafting": true' in capsys.readouterr().out
    assert serve.main([str(drafter), "max_model_len=256", "parallel_drafting=false", "--dry-run"]) == 0
    assert "parallel_drafting" not in capsys.readouterr().out
    assert serve.main([str(drafter), "max_model_len=256", "num_speculative_tokens=7", "--dry-run"]) == 0
    assert "trained to draft 4 in one pass" in capsys.readouterr().err
    quantize_drafter(drafter, place / "nf4")
    assert read_json(place / "nf4" / "config.json")["pard_token"] == MASK
    assert read_pair(place / "nf4")["parallel_drafting"] == said


def counted(count: int, seed: int) -> list[Answer]:
    """Answers that go round and round five ids: masks are learnt to be said rightly in a few steps."""
    found = []
    for i, one in enumerate(made_up([12] * count, seed=seed)):
        said = np.array([70 + (i + t) % 5 for t in range(12)], np.int32)
        head_ids = np.column_stack([said, np.tile(np.arange(3, 10, dtype=np.int32), (12, 1))])
        logp = np.tile(np.log([0.93, *[0.01] * 7]).astype(np.float32), (12, 1))
        found.append(Answer(one.prompt, [*one.input_ids[:20], *said.tolist()], one.spans, "length", head_ids, logp))
    return found


@pytest.mark.parametrize("named", ["by key", "in config.json"])
def test_the_mask_row_that_is_trained_and_scored_is_the_one_that_is_served(
    place: Path, tmp_path: Path, named: str
) -> None:
    """A padding row that nobody prepared, a wild one: a drafter's padding rows are written as the mean of the real ones, so
    that is what must be read at a mask from the first step on."""
    mask, draft = MASK + 3, tmp_path / "draft"
    model = load_model(place / "plain")
    with torch.no_grad():
        rows_VH = model.get_input_embeddings().weight
        rows_VH[mask] = 30 * rows_VH[61]
    shutil.copytree(place / "plain", draft)
    model.save_pretrained(draft)
    for name, count in (("train", 40), ("held", 10)):
        store(tmp_path / name, counted(count, seed=count), place / "target")
    more: dict[str, Any] = {"draft": draft, "max_steps": 60, "masks.keep": 0.9, "lr": 3e-3}
    if named == "by key":
        more["masks.token"] = mask
    else:
        write_json(draft / "config.json", with_mask(read_json(draft / "config.json"), mask))
    assert distill.main(words(tmp_path, "run", **more)) == 0
    found = read_json(tmp_path / "run" / "evaluation.json")["sets"]["own"]["parallel"]
    drafter, held, taus = tmp_path / "run" / "drafter", rows_of(tmp_path / "held"), {}
    with torch.no_grad():
        rows_VH[mask] = mean_row(rows_VH, range(tiny.REAL_TOKENS))
    for when, one in (("before", model), ("after", load_model(drafter))):
        assert mask_id_of(read_json(drafter / "config.json")) == mask
        scores = score_rounds(Accelerator(cpu=True), one, held, mask, 4, batch_size=8)
        taus[when] = found[when]["tau"]
        assert rounds_summary(scores) == found[when]
    assert taus["after"]["3"] > taus["after"]["1"] + 0.1, (
        "masks are right at times, so that the comparison says something"
    )


def test_more_drafts_served_than_were_trained_are_measured(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Warned of, and τ counted for every K that is served."""
    assert distill.main(words(place, "more", max_steps=2, parallel_drafting=3, num_speculative_tokens=5)) == 0
    assert "num_speculative_tokens=5 is more than that: the drafts past 3 are not trained" in capsys.readouterr().err
    found = read_json(place / "more" / "evaluation.json")["sets"]["own"]["parallel"]
    assert found["num_speculative_tokens"] == 5
    drafter, held = load_model(place / "more" / "drafter"), rows_of(place / "held")
    rounds = [w for s in score_rounds(Accelerator(cpu=True), drafter, held, MASK, 5, batch_size=8) for w in s.w]
    expected = {str(K): replay_rounds(rounds, K).acceptance_length for K in range(1, 6)}
    assert found["after"]["tau"] == pytest.approx(expected)
    assert [len(found[when]["top1_by_offset"]) for when in ("before", "after")] == [5, 5]
    assert found["change"][0] == pytest.approx(expected["5"] - found["before"]["tau"]["5"])
    evals = [row["parallel"]["tau"] for row in read_jsonl(place / "more" / "metrics.jsonl") if row["kind"] == "eval"]
    assert [list(tau) for tau in evals] == [list(expected)] * 2


def test_a_resumed_run_draws_the_same_masks(place: Path, tmp_path: Path) -> None:
    """D14: the draws are a function of (seed, step, prompt)."""
    rows, more = rows_of(place / "train"), {"max_steps": 4, "checkpoint_every": 2, "parallel": Parallel(4, MASK)}
    at = Settings(**{**BASE, **more})
    fit(Accelerator(cpu=True), load_model(place / "draft"), rows, {}, at, tmp_path / "whole")
    half = tmp_path / "half"
    fit(Accelerator(cpu=True), load_model(place / "draft"), rows, {}, dataclasses.replace(at, epochs=2 / 6), half)
    assert len(read_jsonl(half / "metrics.jsonl")) == 2
    fit(Accelerator(cpu=True), load_model(place / "draft"), rows, {}, dataclasses.replace(at, epochs=4 / 6), half)
    whole, resumed = (read_jsonl(tmp_path / name / "metrics.jsonl") for name in ("whole", "half"))
    assert [r["masks"] for r in whole] == [r["masks"] for r in resumed]
    assert len({r["masks"] for r in whole}) > 1
    assert whole[-1]["mask_tokens"] == resumed[-1]["mask_tokens"] == sum(r["masks"] for r in whole)


def test_the_plan_counts_masks(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plans = []
    for more in ({}, {"parallel_drafting": "null"}):
        assert distill.main([*words(place, "plan", **more), "--dry-run", "--json"]) == 0
        plans.append(json.loads(capsys.readouterr().out)["plan"])
    assert plans[0]["supervised_tokens"] == plans[1]["supervised_tokens"]
    assert plans[0]["mask_tokens"] == round(plans[0]["supervised_tokens"] * (0.5 + 0.25 + 0.125))
    assert plans[1]["mask_tokens"] == 0
    assert not (place / "plan").exists()


def test_which_mask(place: Path) -> None:
    texts = [rows_of(place / "train"), rows_of(place / "held")]
    assert choose_mask(place / "draft", texts, None, rows_learn=False) == Mask(MASK, None)
    assert choose_mask(place / "plain", texts, MASK + 3, rows_learn=False) == Mask(MASK + 3, None)
    held = int(texts[1].data[0]["input_ids"][-1])

    def said(draft: str, named: str | int | None, rows_learn: bool = False) -> str:
        with pytest.raises(InputError) as e:
            choose_mask(place / draft, texts, named, rows_learn)
        assert "\n" not in str(e.value)
        return str(e.value)

    nothing = said("plain", None)
    assert "`draftsmith init mask_token=auto` may prepare a padding row" in nothing
    assert nothing.endswith("no text here holds: masks.token=…")
    assert said("draft", held).startswith(f"masks.token={held}: not free, texts here hold it")
    tied = said("draft", None, rows_learn=True)
    says = " is a padding row of a tied head, which does not learn: train with trainable=layers, or name a spare special token"
    assert tied == f"masks.token={MASK} (as the draft's config.json says){says}: masks.token=…"


def test_keys_that_do_not_go_together(place: Path) -> None:
    for more, what in (
        ({"keep_share": 0.5, "reference": place / "plain"}, "keep_share compares with a reference that knows no masks"),
        ({"parallel_drafting": "null", "masks.keep": 0.7}, "masks is for parallel_drafting"),
    ):
        with pytest.raises(InputError, match=what):
            distill.main(words(place, "refused", **more))
    assert not (place / "refused").exists()
