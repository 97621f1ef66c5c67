"""The whole pipeline on a tiny target: real vLLM, real accelerate, every stage; killed in the middle and started again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from pairing.files import read_json, read_jsonl
from pairing.pair import read_pair
from tests import tiny
from tests.conftest import ROOT


def pipeline(folder: Path, **overrides: Any) -> Path:
    """A pipeline of seconds a stage, on a target with random weights."""
    prompts = folder / "heldout.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"name {i} things"}) + "\n" for i in range(6)))
    values: dict[str, Any] = {
        "run_dir": str(folder / "run"),
        "target": str(tiny.folder(folder / "target", layers=3, rows=tiny.REAL_TOKENS)),
        "generate": {
            "sets": {
                "train": {"prompts": "orders", "split": "train", "limit": 24, "max_tokens": 12, "system": ""},
                "mine": {"prompts": str(prompts), "limit": 6, "max_tokens": 12},
            },
            "top_logprobs": 8,
            "backend": "transformers",
        },
        "init": {"layers": [0, 2]},
        "distill": {"max_steps": 12, "eval_every": 6, "checkpoint_every": 4, "batch_size": 4},
        "measure": {
            "num_speculative_tokens": 2,
            "max_model_len": 256,
            "enforce_eager": True,
            "repeats": 1,
            "warmup": 1,
            "workloads": {"mine": {"limit": 4, "max_tokens": 12}},
        },
    } | overrides
    file = folder / "pipeline.yaml"
    file.write_text(yaml.safe_dump(values))
    return file


def draftsmith(*words: str, **kwargs: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "recipes.cli", *words], cwd=ROOT, capture_output=True, text=True, check=False, **kwargs
    )


def test_killed_in_the_middle_the_same_command_goes_on_to_a_whole_report(tmp_path: Path) -> None:
    file = pipeline(tmp_path)
    run = tmp_path / "run"
    first = subprocess.Popen([sys.executable, "-m", "recipes.cli", "run", str(file)], cwd=ROOT)
    deadline = time.monotonic() + 240
    while not (run / "distill" / "checkpoints").exists() or not any((run / "distill" / "checkpoints").iterdir()):
        assert time.monotonic() < deadline
        assert first.poll() is None
        time.sleep(0.05)
    below = psutil.Process(first.pid).children(recursive=True)
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    _, alive = psutil.wait_procs(below, timeout=20)
    assert [p for p in alive if p.status() != psutil.STATUS_ZOMBIE] == []
    made = (run / "init" / "model.safetensors").stat().st_mtime_ns

    second = draftsmith("run", str(file), "--json")
    assert second.returncode == 0, second.stderr[-3000:]
    assert (run / "init" / "model.safetensors").stat().st_mtime_ns == made  # a stage that was done is not done again
    assert set(read_json(run / "stages.json")) >= {"distill", "check", "quantize", "measure"}
    rows = {(r["arm"], r["workload"]): r for r in read_jsonl(run / "measure" / "results.jsonl")}
    assert {arm for arm, _ in rows} == {"target", "drafter", "untrained", "drafter-nf4", "ngram"}
    assert {r["void"] for r in rows.values()} == {None}
    assert {r["exact_match"] for (arm, _), r in rows.items() if arm != "target"} == {1.0}
    assert "<svg" in (run / "report.html").read_text()
    assert json.loads(second.stdout)["sentence"]
    pair = read_pair(run / "distill" / "drafter")
    assert pair["serve"]["num_speculative_tokens"] == 2
    assert pair["measurements"][0]["acceptance_length"] == rows["drafter", "mine"]["acceptance_length"]
    assert pair["alignment"]["aligned"] is True
    steps = [r["step"] for r in read_jsonl(run / "distill" / "metrics.jsonl") if r["kind"] == "train"]
    assert sorted(set(steps)) == list(range(1, 13))


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["distill.warmupp=1"], "distill: warmupp: unknown key; the nearest valid one is warmup"),
        (["measur.repeats=1"], "measur: unknown key; the nearest valid one is measure"),
        (["generate.sets.mine.prompts=none.jsonl"], "none.jsonl"),
        (["target=nowhere/at/all"], "no such model"),
        (["init.layers=[0,9]"], "layer"),
    ],
)
def test_bad_input_is_one_line_and_exit_2_before_anything_is_made(
    tmp_path: Path, overrides: list[str], said: str
) -> None:
    file = pipeline(tmp_path)
    done = draftsmith("run", str(file), *overrides)
    assert done.returncode == 2, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run" / "init").exists()
