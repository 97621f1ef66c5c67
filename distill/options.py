"""Options of a training step that trade time for memory or accuracy for speed; measured in docs/scale.md."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

SHORT = 256  # columns
CACHE_LINE = 64  # bytes
FORMS = 16  # in which a compiled layer may meet its input: a prefix, its cache or neither; one row or more; learning or not; …


def checkpoint_layers(model: Any) -> None:
    """Gradient checkpointing: layers keep their input alone and run once more in the backward pass.

    transformers drops the KV cache while it is on, so batches must not share their prefix (`parallel.equal_graphs`). Not
    reentrant, so that a frozen embedding needs no gradient of its own. Only in training mode; evaluation is as before.
    """
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def compile_layers(model: Any, backend: str = "inductor") -> None:
    """torch.compile, a layer at a time; lengths stay variable.

    The whole decoder would be compiled anew for the shared prefix's cache, and again for each form of batch. A layer that
    reads or makes a cache is compiled for its own number there, and torch counts all layers as one code: after 8 compilations,
    which is 4 layers, it would go on uncompiled without a word. So its limits are raised to what these layers need.
    """
    layers, limits = model.get_decoder().layers, torch._dynamo.config
    limits.recompile_limit = max(limits.recompile_limit, FORMS * len(layers))
    limits.accumulated_recompile_limit = max(limits.accumulated_recompile_limit, FORMS * len(layers))
    for layer in layers:
        layer.compile(dynamic=True, backend=backend)


def decoder_autocast(device: torch.device, bf16: bool) -> torch.autocast:
    """bf16 for the decoder's matrix products; weights, head and loss stay float32.

    Ours and not `accelerator.autocast()`, which does nothing under DeepSpeed, whose bf16 would turn the weights to 16 bits.
    """
    return torch.autocast(device.type, torch.bfloat16, enabled=bf16)


def left_alone(decoder: Any) -> bool:
    """Whether its layers are compiled, or run once more for the gradient: then how they run may not differ by call."""
    compiled = any(getattr(layer, "_compiled_call_impl", None) is not None for layer in getattr(decoder, "layers", ()))
    return compiled or bool(getattr(decoder, "gradient_checkpointing", False))


@contextmanager
def short_attention(decoder: Any, input_BL: torch.Tensor) -> Iterator[None]:
    """Attention over short rows as whole products on a CPU whose float32 products are oneDNN's (`matmul_precision`).

    torch's CPU kernel goes tile by tile, and a tile's product costs oneDNN more to begin than to do: 9.5 ms for 8 rows of 63
    columns, forward and backward, where whole products take 1.9 (docs/notebook.md). Those keep columns² numbers a head.
    """
    by_tiles = input_BL.device.type != "cpu" or torch.get_float32_matmul_precision() == "highest"
    if by_tiles or input_BL.shape[1] > SHORT or left_alone(decoder):
        yield
        return
    with sdpa_kernel(SDPBackend.MATH):
        yield


@contextmanager
def exact_products() -> Iterator[None]:
    """Float32 products as they are, whatever `matmul_precision` the run has: for checks that compare two ways to one result."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def own_weights(model: Any) -> Any:
    """The model, with weights that lie in their mapped file moved to memory of its own, in step with a CPU's cache lines.

    safetensors maps a weight where its file has it, which is seldom a multiple of 64 bytes: products then take a tenth longer
    (docs/notebook.md), and a file that is written over would change the run.
    """
    for weight in model.parameters():
        if weight.device.type == "cpu" and weight.is_floating_point() and weight.data_ptr() % CACHE_LINE:
            weight.data = weight.data.clone()
    return model


def give_back_memory() -> None:
    """Makes glibc return every freed buffer of 4 MiB or more at once, and of smaller ones keep 32 MiB; elsewhere does nothing.

    Left alone it raises the first bound to 32 MiB as it sees buffers freed, keeps what is smaller in its heap, and finds the
    holes there too small for the next chunk: a third of a step's peak. With that bound set it would give the heap's end back
    whenever 128 KiB are free there, and have it mapped again for the next piece of logits: a fifth of a step (mallopt(3),
    M_MMAP_THRESHOLD, M_TRIM_THRESHOLD; docs/notebook.md).
    """
    if sys.platform == "linux" and (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        mallopt(-3, 4 * 2**20)
        mallopt(-1, 32 * 2**20)
