"""Heads made by others: which method a config names, what is refused before a server starts, and the arms of `measure`."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from eval.measure import Arm
from eval.verdict import judge, serve_with
from pairing.engine import Engine
from pairing.errors import InputError
from pairing.files import read_json
from pairing.speculators import method_of, refused, require_speculator, require_suffix
from recipes.measure_config import MeasureConfig
from recipes.measure_plan import speculator_arms
from tests import heads, tiny

ENGINE = Engine("0.32.0", "cpu", None)


@pytest.mark.parametrize(
    ("config", "method"),
    [
        ({"speculators_config": {"algorithm": "eagle3"}, "architectures": ["Eagle3Speculator"]}, "eagle3"),
        ({"speculators_model_type": "eagle3"}, "eagle3"),
        ({"speculators_model_type": "eagle", "architectures": ["EagleSpeculator"]}, "eagle"),
        ({"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"}, "eagle3"),
        ({"architectures": ["LlamaForCausalLM"], "draft_vocab_size": 32000, "model_type": "llama"}, "eagle3"),
        ({"architectures": ["EagleLlamaForCausalLM"], "model_type": "eagle"}, "eagle"),
        ({"model_type": "medusa"}, "medusa"),
        ({"medusa_num_heads": 3, "base_model_name_or_path": "lmsys/vicuna-7b-v1.3"}, "medusa"),
        ({"model_type": "mlp_speculator"}, "mlp_speculator"),
        ({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}, None),
    ],
)
def test_the_method_that_a_config_names(config: dict[str, Any], method: str | None) -> None:
    assert method_of(config) == method


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tiny.folder(tmp_path / "target", layers=4)


def required(target: Path, folder: Path, method: str = "auto", K: int = 3) -> str:
    return require_speculator("speculators.h", folder, method, K, read_json(target / "config.json"), ENGINE)


def test_heads_that_fit(target: Path, tmp_path: Path) -> None:
    assert required(target, heads.eagle(tmp_path / "e3", target, third=True)) == "eagle3"
    assert required(target, heads.eagle(tmp_path / "e1", target, third=False)) == "eagle"
    assert required(target, heads.medusa(tmp_path / "m", target, 3)) == "medusa"


def test_what_does_not_fit_is_one_line(target: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"speculators\.h\.model: .* holds no config\.json"):
        required(target, tmp_path / "nowhere")
    with pytest.raises(InputError, match=r"give speculators\.h\.method, one of eagle3, eagle, medusa, mlp_speculator$"):
        required(target, target)  # a plain model says nothing
    head = heads.medusa(tmp_path / "m", target, 3)
    with pytest.raises(
        InputError, match=r"3 Medusa heads draft 3 tokens: give speculators\.h\.num_speculative_tokens=3"
    ):
        required(target, head, K=4)
    other = tiny.folder(tmp_path / "other", rows=tiny.ROWS + 16)
    with pytest.raises(InputError, match=r"made for 272 vocabulary rows, the target has 288"):
        required(other, head)
    config = read_json(target / "config.json") | {"hidden_size": 128}
    with pytest.raises(InputError, match=r"made for 64 hidden states, the target has 128"):
        require_speculator("speculators.h", head, "auto", 3, config, ENGINE)


def test_a_method_that_the_installed_vllm_lacks_is_refused_by_name(target: Path, tmp_path: Path) -> None:
    """vLLM 0.32 takes `mlp_speculator` in its config and has no proposer for it: the engine would die after loading."""
    with pytest.raises(InputError, match=r"speculators\.h: vLLM 0\.32\.0 \(cpu\) has no proposer for mlp_speculator"):
        required(target, heads.medusa(tmp_path / "m", target, 3), "mlp_speculator")
    assert [refused(m, ENGINE) for m in ("eagle", "eagle3", "medusa")] == [None] * 3
    runner = tmp_path / "vllm" / "v1" / "worker" / "gpu_model_runner.py"
    runner.parent.mkdir(parents=True)
    runner.write_text('if method == "mlp_speculator":\n')
    assert refused("mlp_speculator", ENGINE, tmp_path / "vllm") is None
    assert "no proposer for eagle3" in (refused("eagle3", ENGINE, tmp_path / "vllm") or "")


def test_suffix_asks_for_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"pip install .* arctic-inference==0\.1\.1` .*, or leave suffix out$"):
        require_suffix()


def test_their_arms(target: Path, tmp_path: Path) -> None:
    head = heads.medusa(tmp_path / "m", target, 3)
    values = {"target": str(target), "workloads": {}, "out": tmp_path / "out", "num_speculative_tokens": 4}
    config = MeasureConfig.model_validate(
        {**values, "speculators": {"m": {"model": head, "num_speculative_tokens": 3}}}
    )
    (arm,) = speculator_arms(config, {"target"}, read_json(target / "config.json"), ENGINE)
    assert arm == Arm("m", "speculator", head, 3, method="medusa")
    assert arm.speculation() == {"method": "medusa", "model": str(head), "num_speculative_tokens": 3}
    assert Arm("suffix", "suffix", None, 4).speculation() == {
        "method": "suffix", "num_speculative_tokens": 4, "suffix_decoding_max_cached_requests": 0,
    }  # fmt: skip
    with pytest.raises(InputError, match=r"speculators\.m: that name is taken"):
        speculator_arms(config, {"m"}, read_json(target / "config.json"), ENGINE)


def test_a_head_that_is_fastest_is_named_and_served_by_its_method() -> None:
    shared: dict[str, Any] = {"workload": "w", "group": None, "temperature": 0.0, "concurrency": 1}
    rows = [
        {**shared, "arm": "target", "kind": "target"},
        {**shared, "arm": "m", "kind": "speculator", "model": "heads/m", "method": "medusa", "num_speculative_tokens": 3,
         "speedup": 1.3, "speedup_interval": [1.2, 1.4], "acceptance_length": 2.0, "draft_acceptance_rate": 0.3,
         "exact_match": 1.0},
    ]  # fmt: skip
    found = judge(rows)
    assert found["sentence"].startswith("Deploy m at K = 3")
    served = serve_with(found, "T", None)
    assert served is not None
    assert '{"method": "medusa", "num_speculative_tokens": 3, "model": "heads/m"}' in served["command"]
