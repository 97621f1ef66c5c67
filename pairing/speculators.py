"""Speculator heads that others trained (EAGLE, EAGLE-3, Medusa): which method a folder is for, and whether it fits a target.

A head drafts from the target's own hidden states and has no vocabulary of its own, so sizes are all there is to compare.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

from pairing.engine import Engine
from pairing.errors import InputError
from pairing.files import read_json
from pairing.serving import text_config

Method = Literal["eagle3", "eagle", "medusa", "mlp_speculator"]
METHODS: tuple[str, ...] = get_args(Method)


def method_of(config: Mapping[str, Any]) -> str | None:
    """The method that a head's config.json is for; None where nothing in it says (many EAGLE ones look like a plain model).

    The library speculators writes `speculators_config.algorithm` and `speculators_model_type`; others a model type or class.
    """
    said = [
        (config.get("speculators_config") or {}).get("algorithm"),
        config.get("speculators_model_type"),
        config.get("model_type"),
    ]
    if known := next((str(s) for s in said if s in METHODS and s != "eagle"), None):
        return known
    classes = " ".join(config.get("architectures") or [])
    if "Eagle3" in classes or config.get("draft_vocab_size"):
        return "eagle3"
    if "Eagle" in classes or "eagle" in said:
        return "eagle"
    if "Medusa" in classes or "medusa_num_heads" in config:
        return "medusa"
    return "mlp_speculator" if "MLPSpeculator" in classes else None


def require_speculator(
    name: str, folder: Path, method: str, K: int, target: Mapping[str, Any], installed: Engine
) -> str:
    """The method of the head in `folder`, where vLLM can draft K tokens with it beside the target of this config.json.

    Raises InputError, beginning with `name`, with what does not fit.
    """
    if not (folder / "config.json").is_file():
        raise InputError(f"{name}.model: {folder} holds no config.json: give the folder of a speculator checkpoint")
    config = read_json(folder / "config.json")
    found = method_of(config) if method == "auto" else method
    if found is None:
        raise InputError(
            f"{name}: the config.json in {folder} does not say which method the checkpoint is for: give {name}.method, one of "
            f"{', '.join(METHODS)}"
        )
    if reason := refused(found, installed):
        raise InputError(f"{name}: {reason}: leave it out")
    own, text = text_config(config), text_config(target)
    layer = config.get("transformer_layer_config") or own  # where the library speculators keeps the layer's sizes
    width = config.get("target_hidden_size") or layer.get("hidden_size")
    for what, mine, theirs in (
        ("hidden states", width, text.get("hidden_size")),
        ("vocabulary rows", layer.get("vocab_size"), text.get("vocab_size")),
    ):
        if mine is not None and mine != theirs:
            raise InputError(
                f"{name}: {folder} was made for {mine} {what}, the target has {theirs}: it is another model's"
            )
    heads = config.get("num_heads") or config.get("medusa_num_heads")
    if found == "medusa" and heads and heads != K:
        raise InputError(
            f"{name}: its {heads} Medusa heads draft {heads} tokens: give {name}.num_speculative_tokens={heads}"
        )
    return found


def refused(method: str, installed: Engine, package: Path | None = None) -> str | None:
    """Why the installed vLLM does not draft by this method, read in its source; None where nothing speaks against it."""
    if package is None:
        spec = importlib.util.find_spec("vllm")
        if spec is None or not spec.submodule_search_locations:
            return None
        package = Path(spec.submodule_search_locations[0])
    runner = package / "v1/worker/gpu_model_runner.py"  # the CPU back end's is a subclass of it
    text = runner.read_text(encoding="utf-8") if runner.is_file() else ""
    signs = {"eagle": "use_eagle()", "eagle3": "use_eagle()"}
    if text and signs.get(method, f'method == "{method}"') not in text:
        return f"vLLM {installed.version} ({installed.backend}) has no proposer for {method} (read in {runner})"
    return None


def require_suffix() -> None:
    """Raises InputError where the package that vLLM's suffix proposer is made of is not there."""
    if importlib.util.find_spec("arctic_inference") is None:
        # by itself pip would fetch a torch 2.7.0 of some gigabytes to build it with
        raise InputError(
            "suffix: vLLM's suffix proposer needs the package arctic-inference, which is not installed: run, in the activated "
            "environment, `pip install wheel nanobind==2.9.2 grpcio-tools && pip install --no-build-isolation --no-deps "
            "arctic-inference==0.1.1` (it is compiled: C++ compiler and cmake), or leave suffix out"
        )
