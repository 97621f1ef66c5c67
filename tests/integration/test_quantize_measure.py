"""`quantize --measure` on tiny models in real vLLM: the forms side by side, a verdict, and where it is written."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from pairing.errors import InputError
from pairing.files import read_json
from pairing.init import init_drafter
from pairing.pair import read_pair
from pairing.source import resolve
from recipes.quantize import main
from tests import tiny
from tests.stored_answers import answered, store


def test_the_forms_of_a_drafter_side_by_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", str(min(os.sched_getaffinity(0))))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    target, drafter, out = tiny.folder(tmp_path / "target", layers=4), tmp_path / "drafter", tmp_path / "out"
    init_drafter(resolve(str(target)), drafter, [0, 3])
    held = store(tmp_path / "held", answered(target, 6, seed=2), target)
    words = [str(drafter), str(out), "--measure", f"answers={held}", "group_size=32", "measure.limit=4", "measure.max_tokens=12",
             "measure.serving.repeats=1", "measure.serving.enforce_eager=true", "measure.serving.max_model_len=256",
             "measure.memory_gib=0.1", "--json"]  # fmt: skip
    code = main(words)
    found = json.loads(capsys.readouterr().out)
    rows = {row["form"]: row for row in found["rows"]}
    assert list(rows) == ["drafter", "nf4", "w4a16"]
    assert code == int(found["serve"] == "target")
    assert found["serve"] in ("target", *rows)
    for name, row in rows.items():
        assert row["why_not"] is None, row
        assert row["bits"] == 32
        low, high = row["speedup"][1:]
        assert low <= row["speedup"][0] <= high
        assert row["step_ms"] > 0
        assert (row["against_drafter"] is None) == (row["top1_change"] is None) == (name == "drafter")
        assert name == "drafter" or row["weights_mib"] < rows["drafter"]["weights_mib"]
        assert name == "drafter" or row["kv_blocks"] > rows["drafter"]["kv_blocks"]
        assert name == "drafter" or f"{name} saves" in found["sentence"]
    change = rows["nf4"]["top1_change"]
    assert change[0] == pytest.approx(rows["nf4"]["top1"] - rows["drafter"]["top1"])
    assert read_json(out / "formats.json") == found
    for folder in (drafter, out / "nf4", out / "w4a16"):
        pair = read_pair(folder)
        assert pair["formats"] == found
        assert pair["measurements"][0]["workload"] == "heldout"
        assert "## Which form to serve" in (folder / "README.md").read_text()
    assert main(words) == code  # all is there: nothing is served again
    assert json.loads(capsys.readouterr().out)["serve"] == found["serve"]


def test_answers_are_asked_for_first(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--measure needs the target's answers to held-out prompts"):
        main([str(tmp_path / "drafter"), str(tmp_path / "out"), "--measure"])
