"""`plan` in the real engine: a tiny target, two candidate shapes and a drafter, steps and rounds at two batch sizes."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from pairing.init import init_drafter
from pairing.mask_token import free_mask, write_mask
from pairing.source import resolve
from recipes import plan as recipe
from tests import tiny
from tests.stored_answers import answered, store

LAYERS = 24


def test_measured_steps_and_a_drafter_foretold(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Models this small are slower on two cores. Two layers of 24 take less than half a step, and a round with them more
    than a verify step; a drafter of all 24 layers is always right, and no faster than its target. It names a mask, which it never
    learnt to read: from one pass its first draft is as good, in rounds that were measured whole."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", str(min(os.sched_getaffinity(0))))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    target = tiny.folder(tmp_path / "target", layers=LAYERS, positions=2048)
    answers = store(tmp_path / "answers", answered(target, 6, seed=1), target)
    drafter = tmp_path / "drafter"
    init_drafter(resolve(str(target)), drafter, list(range(LAYERS)))
    write_mask(drafter, free_mask(drafter))
    words = [str(target), f"answers={answers}", "layers=[2]", f"drafter={drafter}", "num_speculative_tokens=[1,4]"]
    assert recipe.main([*words, "batch_sizes=[1,2]", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["engine"].startswith("vLLM ")
    assert found["expected_acceptance"] == 1
    assert [b["batch_size"] for b in found["batches"]] == [1, 2]
    for batch in found["batches"]:
        shallow, whole = (s["c"][0] for s in batch["shapes"])
        assert shallow < 0.7 < whole < 1.5
        assert batch["verify"]["1"] > 0.8
        assert batch["pair_round"]["4"] > batch["pair_round"]["1"] > batch["verify"]["1"]
        assert batch["parallel_round"]["1"] == batch["pair_round"]["1"], "one draft is the same round both ways"
        assert batch["pair_round"]["4"] > batch["parallel_round"]["4"] > batch["verify"]["4"], (
            "one draft step, not four"
        )
        in_one_pass = batch["foretold_parallel"]
        assert {K: told["round"] for K, told in in_one_pass.items()} == batch["parallel_round"]
        for figure in ("tau", "round", "decode", "request"):
            assert in_one_pass["1"][figure] == pytest.approx(batch["foretold"]["1"][figure])
        assert 1.5 < in_one_pass["4"]["tau"] < batch["foretold"]["4"]["tau"]
        assert in_one_pass["4"]["decode"] == pytest.approx(in_one_pass["4"]["tau"] / batch["parallel_round"]["4"])
        told = batch["foretold"]["4"]
        assert told["round"] == pytest.approx(batch["pair_round"]["4"])
        assert 0 < told["request"] < 1.1
        assert told["request_interval"][0] <= told["request"] <= told["request_interval"][1]
    assert not list(tmp_path.glob("*.log"))
