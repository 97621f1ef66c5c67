"""`init`, `distill` and `quantize` of a parallel drafter: what is trained, said and written; what is refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from accelerate import Accelerator

from distill.answers import open_answers
from distill.batches import Rows, check_rows
from distill.inputs import choose_mask
from distill.mask_blocks import Parallel
from distill.quantize import quantize_drafter
from distill.train import Settings, fit
from pairing.errors import InputError
from pairing.files import read_json, read_jsonl
from pairing.mask_token import Mask
from pairing.pair import read_pair
from pairing.source import load_model
from recipes import distill, init, serve
from tests import tiny
from tests.integration.test_distill import BASE
from tests.stored_answers import answered, store

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

    assert "`draftsmith init mask_token=auto` may prepare a padding row" in said("plain", None)
    assert "texts here hold it" in said("draft", held)
    assert "is a padding row of a tied head, which does not learn" in said("draft", None, rows_learn=True)


def test_keys_that_do_not_go_together(place: Path) -> None:
    for more, what in (
        ({"keep_share": 0.5, "reference": place / "plain"}, "keep_share compares with a reference that knows no masks"),
        ({"parallel_drafting": "null", "masks.keep": 0.7}, "masks is for parallel_drafting"),
    ):
        with pytest.raises(InputError, match=what):
            distill.main(words(place, "refused", **more))
    assert not (place / "refused").exists()
