"""`init draft_step=…` on the real engine: what is measured is kept, written down, and within the limit."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from distill.quantize import quantize_drafter
from pairing import decode_time
from pairing.alignment import check_pair
from pairing.decode_time import open_timer
from pairing.errors import InputError, PartFailedError
from pairing.files import read_json
from pairing.init import init_drafter
from pairing.pair import read_pair
from pairing.source import resolve
from recipes import init as recipe
from tests import tiny

LAYERS = 24


@pytest.fixture
def one_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models this small are slower on two."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", str(min(os.sched_getaffinity(0))))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def test_a_drafter_to_a_share_of_the_targets_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], one_core: None
) -> None:
    target = tiny.folder(tmp_path / "target", layers=LAYERS)
    out = tmp_path / "drafter"
    assert recipe.main([f"target={target}", f"out={out}", "draft_step=0.7", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    step = result["draft_step"]
    assert 2 <= len(result["layers"]) < LAYERS
    assert step["measured"] == step["share"][0] <= 0.7
    assert step["share"][1] <= step["share"][0] <= step["share"][2]
    assert 0 < step["ms"][0] < step["target_ms"][0]
    assert step["engine"].startswith("vLLM ")
    assert step["tried"][0]["layers"] == 2
    assert any(t["layers"] == len(result["layers"]) and t["measured"] == step["measured"] for t in step["tried"])
    assert read_pair(out)["made"][0]["draft_step"] == step
    assert read_json(out / "config.json")["num_hidden_layers"] == len(result["layers"])
    assert check_pair(resolve(str(target)), resolve(str(out)))["aligned"]
    assert not list(tmp_path.glob("*.log")), "the engine's output stays only where it failed"
    assert f"of the target's {step['target_ms'][0]:.1f} ms" in recipe.draft_step_line(step)


@pytest.mark.parametrize("vllm", [True, False])
def test_a_verify_step(vllm: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_core: None) -> None:
    """65 tokens at once take a model of this size several times as long as one, scheduler and all."""
    if not vllm:
        monkeypatch.setattr(decode_time, "engine", lambda: None)
    shape = {"hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8, "head_dim": 64}
    config = tiny.model(layers=8, positions=1024).config.to_dict() | shape
    with open_timer(os.environ, tmp_path / "log") as timer:
        (plain, verify) = timer([config], verify=[64])
    assert plain.share == (1, 1, 1)
    assert verify.share[0] > 1.5


def test_an_nf4_copy_is_timed_from_its_folder_beside_what_it_was_made_of(tmp_path: Path, one_core: None) -> None:
    target = tiny.folder(tmp_path / "target", layers=12)
    init_drafter(resolve(str(target)), tmp_path / "drafter", [0, 11])
    quantize_drafter(tmp_path / "drafter", tmp_path / "nf4")
    with open_timer(os.environ, tmp_path / "log", "float32") as timer:
        whole, drafter, nf4 = timer([target, tmp_path / "drafter", tmp_path / "nf4"])
    assert whole.share == (1, 1, 1)
    assert 0 < drafter.ms[0] < whole.ms[0]
    assert nf4.ms[0] > drafter.ms[0]  # products on the CPU unpack NF4 first


def test_without_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_core: None) -> None:
    """In transformers, and labelled so; a config that does not run is one line and a log."""
    monkeypatch.setattr(decode_time, "engine", lambda: None)
    assert "no vLLM installed" in decode_time.engine_name()
    config = tiny.model(layers=2).config.to_dict()
    log = tmp_path / "log"
    with pytest.raises(InputError), open_timer(os.environ, log):
        raise InputError("nothing is fast enough")
    assert not log.exists()
    with open_timer(os.environ, log) as timer:
        deep, flat = timer([config | {"num_hidden_layers": 12}, config])
        again = timer([config, config])
    assert deep.share == again[0].share == (1, 1, 1)
    assert 0 < flat.share[0] < 0.6
    assert flat.ms[0] < deep.ms[0]
    assert not log.exists()
    with (
        pytest.raises(PartFailedError, match=r"no decode step could be measured in transformers .*nobody_knows.*log: "),
        open_timer(os.environ, log) as timer,
    ):
        timer([config | {"model_type": "nobody_knows"}])
    assert log.exists()
