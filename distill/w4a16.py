"""The W4A16 format: linear layers as symmetric 4-bit integers with a scale per group, activations as they are.

Stored as compressed-tensors' `pack-quantized`, which vLLM's kernels and transformers read. Each value goes to its nearest
code, or, with texts of the pair's own domain, where GPTQ puts it.

Shapes: O outputs, I inputs of a layer, G groups of a row, S = I / G values a group.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from distill.drift import Text
from distill.gptq import calibrate, gptq_codes
from pairing.files import read_json, write_json
from pairing.source import load_model
from pairing.weights import HEADS, weight_files

BITS, LEAST, MOST = 4, -8, 7


def names_of(weight: str) -> list[str]:
    """The tensors that the weight called `weight` is stored as."""
    return [f"{weight}_{part}" for part in ("packed", "scale", "shape")]


def stored_bytes(shape: tuple[int, ...], group_size: int, scale_bytes: int) -> int:
    """What one weight takes: half a byte a value, a scale a group, the shape."""
    return math.prod(shape) // 2 + math.prod(shape) // group_size * scale_bytes + 16


def scales_of(weight_OI: torch.Tensor, group_size: int) -> torch.Tensor:
    """[O, G] bfloat16: a group's value of largest magnitude / −8, so that it keeps its value and the range of codes, −8
    to 7, is used on its longer side. Negative where that value is positive.

    In bfloat16 since engines multiply in it, and codes must belong to the scales that are used.
    """
    groups_OGS = weight_OI.unflatten(1, (-1, group_size))
    largest_OG = groups_OGS.gather(2, groups_OGS.abs().argmax(2, keepdim=True)).squeeze(2)
    scales_OG = (largest_OG.float() / LEAST).to(torch.bfloat16)
    return torch.where(scales_OG == 0, torch.ones_like(scales_OG), scales_OG)


def codes_of(weight_OI: torch.Tensor, scales_OG: torch.Tensor) -> torch.Tensor:
    """[O, I] int8, −8 to 7: the nearest code of each value, with whatever scales."""
    groups_OGS = weight_OI.float().unflatten(1, (scales_OG.shape[1], -1))
    return (groups_OGS / scales_OG.float()[..., None]).round_().clamp_(LEAST, MOST).flatten(1).to(torch.int8)


def values_of(codes_OI: torch.Tensor, scales_OG: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[O, I]: what the codes stand for, multiplied in `dtype` as transformers does when it reads them."""
    groups_OGS = codes_OI.to(dtype).unflatten(1, (scales_OG.shape[1], -1))
    return (groups_OGS * scales_OG.to(dtype)[..., None]).flatten(1)


def write(
    folder: Path,
    goal: Path,
    linear: Collection[str],
    stored: torch.dtype,
    group_size: int,
    texts: Sequence[Text] = (),
) -> Any:
    """Writes config and weights of the copy to `goal`; returns a model that holds the copy's values. `linear` names the
    weights to quantize; `texts` are what to calibrate on, none: round to nearest."""
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
    from huggingface_hub import save_torch_state_dict

    memory = load_model(folder, dtype=stored).eval()
    packed: dict[str, torch.Tensor] = {}

    def quantize(name: str, module: torch.nn.Module, hessian_II: torch.Tensor | None) -> None:
        weight_OI = module.weight.data
        scales_OG = scales_of(weight_OI, group_size)
        if hessian_II is None:
            codes_OI = codes_of(weight_OI, scales_OG)
        else:
            codes_OI = gptq_codes(weight_OI, hessian_II, scales_OG, LEAST, MOST)
        module.weight.data = values_of(codes_OI, scales_OG, stored)
        of = (pack_to_int32(codes_OI, BITS), scales_OG.to(stored), torch.tensor(weight_OI.shape))
        packed.update(zip(names_of(name), of, strict=True))

    modules = {name: memory.get_submodule(name.removesuffix(".weight")) for name in linear}
    if texts:
        calibrate(memory, modules, texts, quantize)
    else:
        for name, module in modules.items():
            quantize(name, module, None)
    kept = {n: t for file in weight_files(folder) for n, t in load_file(file).items() if n not in modules}
    save_torch_state_dict(kept | packed, goal)
    write_json(goal / "config.json", read_json(folder / "config.json") | {"quantization_config": describe(group_size)})
    return memory


def describe(group_size: int) -> dict[str, Any]:
    """The quantization_config. Layers are named by class and heads by pattern, which both hold under the prefix that vLLM
    puts before a drafter's names; names of blocks would not."""
    weights = {"num_bits": BITS, "type": "int", "symmetric": True, "strategy": "group", "group_size": group_size,
               "dynamic": False, "actorder": None, "observer": "minmax"}  # fmt: skip
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": [f"re:.*{name.removesuffix('.weight')}" for name in HEADS],
    }
