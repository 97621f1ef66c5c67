"""The 4-bit quantizer in the forward pass: a drafter learns with the very weights that its 4-bit copy will have.

Straight-through (Bengio et al. 2013, arXiv 1308.3432): within `quantized` a linear layer holds Q(W) in place of W, forward and
backward, and the gradient at Q(W) is then taken as W's. The optimizer moves the full-precision W, which is what is saved; its
copy by `draftsmith quantize` in the same format is what was trained. W is swapped once per optimizer step, not once per
batch, and no layer is replaced: checkpoints, names and the chunked head are as ever.

Shapes: O outputs, I inputs of a layer, G groups of a row.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch

from distill.parallel import Kind
from distill.w4a16 import codes_of, scales_of, values_of
from pairing.errors import InputError
from pairing.weights import HEADS

Format = Literal["nf4", "w4a16"]


@dataclass(frozen=True)
class Quantizer:
    """Q: a weight to the values of its 4-bit copy. As `quantize` does, it begins from W in the type that it is stored in."""

    format: Format
    group_size: int = 64  # of w4a16
    dtype: torch.dtype = torch.float32

    def __call__(self, weight_OI: torch.Tensor) -> torch.Tensor:
        """[O, I] to [O, I], in the type that `weight_OI` has."""
        stored_OI = weight_OI.detach().to(self.dtype)
        copy_OI = nf4(stored_OI) if self.format == "nf4" else w4a16(stored_OI, self.group_size)
        return copy_OI.to(weight_OI.dtype)


@contextmanager
def quantized(model: torch.nn.Module, quantizer: Quantizer | None) -> Iterator[None]:
    """Inside, what `quantize` would quantize holds its 4-bit values. None changes nothing.

    Gradients that arise inside are left where they belong, in W's `grad`: all of a backward pass must lie inside, and the
    optimizer's step outside.
    """
    held = {} if quantizer is None else {p: p.data for p in linear_weights(model).values()}
    try:
        for p, weight in held.items():
            assert quantizer is not None
            p.data = quantizer(weight)
        yield
    finally:
        for p, weight in held.items():
            p.data = weight


def linear_weights(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """The weights that are quantized, by name: of every linear layer but the head."""
    linear = {f"{n}.weight": m.weight for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    return {name: weight for name, weight in linear.items() if not name.endswith(HEADS)}


def require_whole(kind: Kind) -> None:
    """Raises InputError where weights lie in shards: a group of values may cross two of them."""
    if kind != "replicated":
        raise InputError(
            f"quantizer= needs whole weights on every process and {kind} shards them: train without it, then run a short part "
            "with it on the result, on one process or launched with two_gpus.yaml"
        )


def nf4(weight_OI: torch.Tensor) -> torch.Tensor:
    """W through NF4 with double quantization and back, by bitsandbytes itself: what it writes is what is trained."""
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    return dequantize_4bit(*quantize_4bit(weight_OI, quant_type="nf4", compress_statistics=True))


def w4a16(weight_OI: torch.Tensor, group_size: int) -> torch.Tensor:
    """W through symmetric int4 in groups and back, each value to its nearest code, as `quantize` does without calibration."""
    scales_OG = scales_of(weight_OI, group_size)
    return values_of(codes_of(weight_OI, scales_OG), scales_OG, weight_OI.dtype)
