"""A run of `distill` with mask tokens: what it counts, says and plans, what of it is refused; the same after a stop."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator

from distill.answers import open_answers
from distill.batches import Rows, check_rows, collate, windows
from distill.evaluate import verdict
from distill.mask_blocks import Parallel, drawn
from distill.plan import plan_run
from distill.settings import Settings
from distill.train import fit
from pairing.errors import InputError
from pairing.files import read_json, read_jsonl, write_json
from pairing.init import init_drafter
from pairing.pair import read_pair
from pairing.source import load_model, resolve
from recipes import distill
from recipes.distill_config import DistillConfig
from tests import tiny
from tests.sample_run import evaluation, with_one_pass
from tests.stored_answers import answered, made_up, store

MASK = tiny.REAL_TOKENS + 2  # a padding row
LIMITS = {"rows": tiny.ROWS, "real": tiny.REAL_TOKENS, "context": 512}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """target/, draft/ (its layers 0 and 2), train/ and held/ (its own answers), four/ (of 3, 12, 1 and 7 tokens)."""
    place = tmp_path_factory.mktemp("place")
    target = tiny.folder(place / "target", layers=3)
    init_drafter(resolve(str(target)), place / "draft", [0, 2])
    store(place / "train", answered(target, 12, seed=1), target)
    store(place / "held", answered(target, 4, seed=2), target)
    store(place / "four", made_up([3, 12, 1, 7]), target)
    return place


def rows_of(folder: Path) -> Rows:
    return check_rows(open_answers(folder), "data", **LIMITS)


def settings(**more: Any) -> Settings:
    given: dict[str, Any] = {
        "seed": 0, "batch_size": 4, "accumulation": 1, "lr": 1e-3, "warmup": 0.1, "weight_decay": 0.0, "beta2": 0.98, "clip": 1.0,
        "trainable": "layers", "losses": {"forward_kl": 1.0}, "chunk": 32, "epochs": None, "max_steps": 4, "minutes": None,
        "eval_every": 1000, "eval_prompts": 8, "checkpoint_every": 1000, "keep": 2, "parallel": Parallel(4, MASK),
    }  # fmt: skip
    return Settings(**given | more)


def words(place: Path, out: Path, **more: Any) -> list[str]:
    given = {"draft": place / "draft", "data": place / "train", "heldout.own": place / "held", "out": out, "max_steps": 4,
             "batch_size": 4, "threads": 1, "num_speculative_tokens": 3, **more}  # fmt: skip
    return [f"{k}={v}" for k, v in given.items()]


@pytest.mark.parametrize(
    ("given", "survival"),
    [({}, False), ({"parallel_drafting": 4}, True), ({"parallel_drafting": 4, "survival": False}, False)],
)
def test_offsets_are_weighted_by_their_survival_unless_told_otherwise(given: dict[str, Any], survival: bool) -> None:
    assert DistillConfig(draft=Path("d"), data=Path("a"), out=Path("o"), **given).survival is survival


ONE_PASS = {"parallel_drafting": 4, "masks.token": MASK}


def test_equal_steps_are_equal_tokens_with_masks_or_without(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Masks are counted by themselves, in the log, the summary, pair.json and the card, which gives τ of both ways too."""
    said, logs = {}, {}
    for name, more in (("one", {}), ("both", ONE_PASS)):
        assert distill.main([*words(place, tmp_path / name, **more), "--json"]) == 0
        said[name] = json.loads(capsys.readouterr().out)
        logs[name] = [r for r in read_jsonl(tmp_path / name / "metrics.jsonl") if r["kind"] == "train"]
    rows = rows_of(place / "train")
    order = [w for epoch in (0, 1) for w in windows(rows, 0, epoch, 4)][:4]
    text = [int(rows.supervised_P[w].sum()) for w in order]
    parallel = Parallel(4, MASK)
    masks = [
        len(drawn(collate(rows, w), parallel, step).row_N) - n
        for step, (w, n) in enumerate(zip(order, text, strict=True))
    ]
    assert sum(masks) > 10
    for name, log in logs.items():
        assert [r["supervised"] for r in log] == text
        assert [r["tokens"] for r in log] == np.cumsum(text).tolist()
        assert said[name]["training"]["supervised_tokens"] == sum(text)
        assert read_pair(tmp_path / name / "drafter")["training"]["supervised_tokens"] == sum(text)
    assert [r["masks"] for r in logs["both"]] == masks
    assert [r["mask_tokens"] for r in logs["both"]] == np.cumsum(masks).tolist()
    training = read_pair(tmp_path / "both" / "drafter")["training"]
    assert training["mask_tokens"] == said["both"]["training"]["mask_tokens"] == sum(masks)
    taus = {key: training[key] for key in ("tau K=4 on own", "tau K=3 in one pass on own")}
    found = said["both"]["sets"]["own"]
    assert list(taus.values()) == [found["after"]["tau"]["4"], found["parallel"]["after"]["tau"]["3"]]
    card = (tmp_path / "both" / "drafter" / "README.md").read_text()
    for line in (f"| supervised_tokens | {sum(text)} |", f"| mask_tokens | {sum(masks)} |",
                 *(f"| {key} | {tau:.4g} |" for key, tau in taus.items())):  # fmt: skip
        assert line in card
    assert '"mask' not in json.dumps([logs["one"], said["one"], read_pair(tmp_path / "one" / "drafter")["training"]])


def test_gradient_checkpointing_changes_no_loss_of_masks(place: Path, tmp_path: Path) -> None:
    logs = []
    for on in (False, True):
        at = settings(max_steps=3, trainable="all", gradient_checkpointing=on)
        fit(Accelerator(cpu=True), load_model(place / "draft"), rows_of(place / "train"), {}, at, tmp_path / str(on))
        logs.append(read_jsonl(tmp_path / str(on) / "metrics.jsonl"))
    for plain, other in zip(*logs, strict=True):
        assert other["masks"] == plain["masks"] > 0
        assert other["loss"] == pytest.approx(plain["loss"], rel=1e-4)
        assert other["grad_norm"] == pytest.approx(plain["grad_norm"], rel=1e-3)


def test_verdict_of_both_ways() -> None:
    """Each is said where it changed measurably; and where only one pass did, training was not for nothing (D15)."""
    sets = with_one_pass(evaluation())["sets"]
    said = verdict(sets)
    assert (
        "acceptance length at K=4 on orders rose from 1.020 to 3.190 (95 % interval of the change +2.020 to +2.310)"
        in said
    )
    one_pass = "acceptance length at K=6, all drafts in one pass, on orders rose from 1.013 to 3.380 "
    assert one_pass + "(95 % interval of the change +2.214 to +2.509)" in said
    for s in sets.values():
        s["change"] = {"top1": [0.0, -0.1, 0.1], "tau_4": [0.0, -0.1, 0.1]}
    assert verdict(sets).startswith(one_pass)
    for s in sets.values():
        s["parallel"]["change"] = [None, None, None]
    assert verdict(sets).startswith("no measurable change")


def test_every_offset_is_printed_in_its_place() -> None:
    """Also one that is never right, or of which nothing is known."""
    sets = with_one_pass(evaluation())["sets"]
    sets["orders"]["parallel"]["after"]["top1_by_offset"] = [0.9, 0.0, 0.20004, None]
    shown = distill._plain({"verdict": "", "sets": sets, "drafter": "runs/d"})
    assert "top-1 by offset [0.9, 0.0, 0.2, None]" in shown
    assert "orders, all drafts in one pass: acceptance length at K=6 1.013 -> 3.380" in shown


def test_layers_that_are_not_trained_with_masks_are_refused_before_anything_is_made(
    place: Path, tmp_path: Path
) -> None:
    draft = tmp_path / "draft"
    shutil.copytree(place / "draft", draft)
    kinds = ["sliding_attention", "full_attention"]
    write_json(draft / "config.json", read_json(draft / "config.json") | {"layer_types": kinds, "sliding_window": 16})
    given = words(place, tmp_path / "out", draft=draft, **ONE_PASS)
    for more in ([], ["--dry-run"]):
        with pytest.raises(
            InputError, match="has layers of the kinds full_attention, sliding_attention, and masks are"
        ):
            distill.main([*given, *more])
    assert not (tmp_path / "out").exists()


def test_the_plan_has_the_attention_masks_memory(place: Path, tmp_path: Path) -> None:
    """Prompts of 20 tokens, so the longest row has 31 columns as input, and 12 · (.5 + .25 + .125 + .1) = 11.7 masks; an
    evaluation of an answer of 300 has 319 columns and 1024 masks of its 1200 in one pass."""
    held = rows_of(store(tmp_path / "held", made_up([7, 300], seed=1), place / "target"))
    at = settings(parallel=Parallel(5, MASK))

    def memory(at: Settings, heldout: dict[str, Rows]) -> int:
        model, rows = load_model(place / "draft"), rows_of(place / "four")
        found = plan_run(model, place / "draft", {}, at, rows, heldout, 1, torch.device("cpu"))["memory_bytes"]
        assert isinstance(found, int)
        return found

    plain = memory(replace(at, parallel=None), {"own": held})
    assert memory(at, {}) - plain == 4 * 4 * (31 + 12) ** 2
    assert memory(at, {"own": held}) - plain == 4 * 4 * (319 + 1024) ** 2
    eight = replace(at, num_speculative_tokens=8)  # 7 masks of a start: 147 starts in one pass
    assert memory(eight, {"own": held}) - plain == 4 * 4 * (319 + 1029) ** 2
