"""The NF4 format: linear layers in 4-bit codes of a normal distribution, by bitsandbytes, double quantization.

Dettmers et al. 2023 (arXiv 2305.14314), section 3. bitsandbytes writes and reads it; products run in `compute_dtype`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch

from pairing.four_bit import NF4_BLOCK
from pairing.init import DTYPES
from pairing.source import load_model
from pairing.weights import HEADS

SCALES = 256  # scales that share one of the second level (double quantization)
PACKED = "quant_state.bitsandbytes__nf4"
STATE = ("absmax", "quant_map", "nested_absmax", "nested_quant_map", PACKED)


def names_of(weight: str) -> list[str]:
    """The tensors that the weight called `weight` is stored as."""
    return [weight, *(f"{weight}.{part}" for part in STATE)]


def stored_bytes(shape: tuple[int, ...]) -> int:
    """About what one weight takes: half a byte a value, a byte a block, code books and state."""
    values = math.prod(shape)
    scales = values // NF4_BLOCK
    return values // 2 + scales + 4 * (scales // SCALES + 1) + 1300


def write(folder: Path, goal: Path, linear: Collection[str], stored: torch.dtype, compute_dtype: str) -> Any:
    """Writes config and weights of the copy to `goal`; returns the copy as it is in memory. `linear` is what
    bitsandbytes quantizes by itself: every linear layer but the head."""
    memory = load(folder, stored, compute_dtype).eval()
    memory.save_pretrained(goal)  # before any forward: on some CPUs that repacks the weights in place
    return memory


def load(folder: Path, stored: torch.dtype, compute_dtype: str) -> Any:
    """The 16- or 32-bit model in `folder`, its linear layers rounded to NF4 as they are read; the head is left."""
    from transformers import BitsAndBytesConfig

    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it warns of optional kernels that it does without
    nf4 = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=DTYPES[compute_dtype],
        llm_int8_skip_modules=[name.removesuffix(".weight") for name in HEADS],
    )
    return load_model(folder, dtype=stored, quantization_config=nf4)
