"""What a 4-bit model asks of an engine: how it is stored, and which widths and types vLLM's kernels take (fault D19).

Read in vLLM 0.32 (kernels/linear/mixed_precision/cpu.py and marlin.py, and the compressed-tensors scheme above them); a test
holds these rules against the installed version's own answers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pairing.engine import Engine, bitsandbytes_advice
from pairing.finding import Finding
from pairing.weights import TensorInfo

NF4_BLOCK = 64  # values that share one scale
GROUPS = (32, 64, 128)  # values that share one scale in W4A16: what Marlin takes, and the CPU back end too
CPU_TILE = 32  # the CPU back end's kernel takes inputs and outputs by that many
WAY_OUT = "or serve the drafter as it is, in 16 bit (`--dtype bfloat16`)"
PACKED = ".weight_packed"  # how compressed-tensors calls a layer's codes, eight to an int32


@dataclass(frozen=True)
class Stored:
    """How the linear layers of a model are stored."""

    format: str  # "nf4" or "w4a16"; what else quantizes is none of ours, and is left to the engine
    group_size: int = NF4_BLOCK  # values that share one scale


def stored(config: Mapping[str, Any]) -> Stored | None:
    """Of a config.json; None where it is neither NF4 nor W4A16."""
    quantization = config.get("quantization_config") or {}
    method = quantization.get("quant_method")
    if method == "bitsandbytes" and quantization.get("load_in_4bit", True):
        return Stored("nf4")
    if method == "compressed-tensors":
        for group in quantization.get("config_groups", {}).values():
            weights = group.get("weights") or {}
            if weights.get("num_bits") == 4 and weights.get("type") == "int" and not group.get("input_activations"):
                return Stored("w4a16", int(weights.get("group_size") or -1))
    return None


def width_fault(how: Stored, shape: tuple[int, ...], backend: str | None) -> str | None:
    """Why no kernel of vLLM's `backend` ("cpu", "cuda"; None: either) takes a layer of `shape` (outputs, inputs).

    vLLM fuses layers that share their input, whose outputs then add up; we ask of each alone, which is never milder.
    """
    outputs, inputs = shape
    if how.format == "nf4":
        if inputs % NF4_BLOCK:
            return f"is {inputs} wide, no multiple of {NF4_BLOCK}: its 4-bit blocks would cross rows"
        return None
    if how.group_size not in GROUPS:
        return f"has groups of {how.group_size} values: vLLM's kernels take {', '.join(map(str, GROUPS))}"
    if inputs % how.group_size:
        return f"is {inputs} wide, no multiple of its group size {how.group_size}"
    if backend == "cpu" and outputs % CPU_TILE:
        return f"has {outputs} outputs, no multiple of {CPU_TILE}, which vLLM's CPU kernel asks for"
    return None


def type_fault(how: Stored, dtype: str, backend: str | None) -> str | None:
    """Why a model stored so does not run in an engine of this --dtype."""
    if how.format == "w4a16" and dtype in ("float32", "float") and backend == "cuda":
        return "W4A16 kernels on CUDA take 16-bit activations only"
    return None


def four_bit_findings(
    role: str, config: Mapping[str, Any], tensors: Mapping[str, TensorInfo], installed: Engine, w4a16: bool, dtype: str
) -> list[Finding]:
    """What keeps a 4-bit target or drafter from starting in `installed` with this --dtype. `w4a16`: whether that vLLM has
    kernels for it."""
    how = stored(config)
    if how is None:
        return []
    other, build = "serve the 16-bit copy", f"vLLM {installed.version} ({installed.backend})"
    if how.format == "nf4":
        advice = bitsandbytes_advice(installed.version, installed.bitsandbytes_plugin)
        return [_stop(f"the {role} is stored in NF4, which {build} does not read", advice)] if advice else []
    if not w4a16:
        return [_stop(f"the {role} is stored in W4A16, for which {build} has no kernel", other)]
    findings = []
    if fault := type_fault(how, dtype, installed.backend):
        findings.append(
            _stop(f"the {role} is stored in W4A16 and --dtype is {dtype}: {fault}", "give `--dtype bfloat16`")
        )
    for name, info in tensors.items():
        shape = (info.shape[0], info.shape[-1] * 8)
        if name.endswith(PACKED) and (fault := width_fault(how, shape, installed.backend)):
            findings.append(_stop(f"the {role}'s {name.removesuffix(PACKED)} {fault}", other))
            break
    return findings


def four_bit_shards(role: str, config: Mapping[str, Any], devices: int) -> list[Finding]:
    """What of a 4-bit model does not divide over `devices`. `config` is the language model's with its quantization."""
    how = stored(config)
    if how is None:
        return []
    text = config.get("text_config", config)
    hidden, ffn = int(text.get("hidden_size") or 0), int(text.get("intermediate_size") or text.get("ffn_dim") or 0)
    if how.format == "nf4":
        odd = [str(width) for width in (hidden, ffn) if (width // devices) % NF4_BLOCK]
        also = f"; and {' and '.join(odd)} over {devices} are no multiples of its blocks of {NF4_BLOCK}" if odd else ""
        what = f"the {role} is stored in 4 bit (bitsandbytes), which vLLM does not split over devices{also}"
        return [Finding("blocks", what, "shards", "serve the 16-bit copy, or on one device", stops=("vllm",))]
    heads = int(text.get("num_attention_heads") or 1)
    attention = heads * int(text.get("head_dim") or hidden // heads)
    # what is split by its inputs: the attention's output projection and the FFN's
    odd = [str(width) for width in (attention, ffn) if (width // devices) % how.group_size]
    if not odd:
        return []
    what = f"the {role} is stored in groups of {how.group_size}, and {' and '.join(odd)} over {devices} are no multiples of it"
    fix = "serve on fewer devices, or quantize it again with a smaller group_size"
    return [Finding("blocks", what, "shards", fix, stops=("vllm",))]


def _stop(what: str, fix: str) -> Finding:
    return Finding("blocks", what, "engine", fix, stops=("vllm",))
