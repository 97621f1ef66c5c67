"""`check` in a process of its own: without torch wherever transformers reads the pair alike without it, and the same report."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pairing.without_torch import transformers_without_torch
from recipes import check
from tests import architectures, tiny
from tests.conftest import ROOT
from tests.unit.test_alignment import edit, found

CHILD = """
import json, sys
from recipes.check import CheckConfig, run
reports = [run(CheckConfig(target=t, draft=d, preflight="skip")) for t, d in json.loads(sys.argv[1])]
print(json.dumps({"reports": reports, "torch": "torch" in sys.modules}))
"""
Pairs = list[tuple[str, str]]


def alone(pairs: Pairs) -> tuple[dict[str, Any], str]:
    """What a new process makes of the pairs, and what it says on standard error."""
    words = [sys.executable, "-c", CHILD, json.dumps(pairs)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    return json.loads(done.stdout), done.stderr


def here(pairs: Pairs) -> list[dict[str, Any]]:
    """The same in this process, which has torch."""
    assert not transformers_without_torch(*(Path(name) for pair in pairs for name in pair))
    return [check.run(check.CheckConfig(target=t, draft=d, preflight="skip")) for t, d in pairs]


def test_the_same_report_with_and_without_torch(tmp_path: Path) -> None:
    target = tiny.folder(tmp_path / "target")
    drafters = {
        "same": tiny.folder(tmp_path / "same", layers=1),
        "swapped": tiny.folder(tmp_path / "swapped", swap=(50, 60)),
        "padded": tiny.folder(tmp_path / "padded", rows=288),
        "merges": tiny.folder(tmp_path / "merges"),
        "template": tiny.folder(tmp_path / "template"),
        "flag": tiny.folder(tmp_path / "flag"),
    }
    edit(drafters["merges"] / "tokenizer.json", lambda v: v["model"].update(merges=[["t", "h"]]))
    edit(drafters["merges"] / "tokenizer.json", lambda v: v["model"]["vocab"].update(th=259))
    edit(drafters["flag"] / "tokenizer_config.json", lambda v: v.update(split_special_tokens=True))
    (drafters["template"] / "chat_template.jinja").write_text(tiny.CHATML.replace("assistant", "model"))
    for kind in architectures.CLASSES:
        architectures.model(kind, layers=1).save_pretrained(tmp_path / kind)
        tiny.tokenizer().save_pretrained(tmp_path / kind)
        drafters[kind] = tmp_path / kind
    pairs = [(str(target), str(drafter)) for drafter in drafters.values()]
    child, said = alone(pairs)
    assert not child["torch"]
    assert "PyTorch" not in said
    assert child["reports"] == here(pairs)
    by_name = dict(zip(drafters, child["reports"], strict=True))
    assert by_name["same"]["aligned"]
    # one tokenizer.json, but one side cuts special tokens into pieces
    assert "texts are cut differently" in found(by_name["flag"], "segmentation", "repairable")[0]["what"]


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_a_type_that_is_looked_up_in_torch(tmp_path: Path, key: str) -> None:
    """transformers refuses the config where torch has no such type, and would take it where there is no torch."""
    pairs = [(str(tiny.folder(tmp_path / "target")), str(tiny.folder(tmp_path / "drafter")))]
    edit(tmp_path / "drafter" / "config.json", lambda v: (v.pop("dtype"), v.update({key: "bf16"})))
    child, _ = alone(pairs)
    assert child["torch"]
    assert child["reports"] == here(pairs)
    assert "config.json is not one that transformers takes" in found(child["reports"][0], "layers", "blocks")[0]["what"]
