"""The drafter in training: what is trainable, and its hidden states at supervised positions only.

Shapes: B rows, L columns, N supervised positions, H hidden, V vocabulary rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

import torch

from distill.batches import Batch
from distill.mask_blocks import attention, window_of
from distill.options import exact_products, left_alone, short_attention
from pairing.errors import InputError

Trainable = Literal["all", "layers", "lora", "qlora"]


def freeze(model: Any, trainable: Trainable) -> list[tuple[str, torch.nn.Parameter]]:
    """Sets what learns and returns it by name. "layers" leaves the embedding and the head as they are: half of the
    drafter's weights and, through the head, a third of the work of a step. With "lora" and "qlora" it is the adapters that
    `distill.adapters.attach` has put on the model.
    """
    if trainable in ("all", "layers"):
        model.requires_grad_(True)
    if trainable == "layers":
        model.get_input_embeddings().requires_grad_(False)
        model.get_output_embeddings().requires_grad_(False)
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


def supervised_hidden(model: Any, batch: Batch) -> torch.Tensor:
    """The decoder's last hidden states [N, H] at the positions that predict answer tokens.

    The columns that all rows of a batch share (a system prompt, few-shot examples) run once, as one row, and every row
    attends to their keys and values. Causal attention makes that exact, gradients too; on chat prompts it saves
    half of the decoder's work. A decoder that hands on more than keys and values runs whole rows. Rows are padded on the right,
    so the causal mask alone keeps padding out. Mask tokens (`batch.blocks`) bring positions and an attention mask of their own.
    What comes after the last layer's attention runs at these N positions only.
    """
    decoder: Any = model.get_decoder()
    cache, more = None, {}
    shared = batch.shared if batch.shared and _keys_alone(decoder) else 0
    if batch.blocks is not None:
        window = window_of(decoder.config)
        shared = 0 if window else shared  # a sliding window's cache drops the columns that left it
        more = attention(batch.blocks, shared, model.dtype, window)
    if shared:
        first = batch.row_N.new_zeros(1)  # nobody looks here; and one position is what every kind of MLP takes
        with _only_at(decoder, (first, first)):
            cache = decoder(input_ids=batch.input_BL[:1, :shared], use_cache=True).past_key_values
        for layer in cache.layers:
            layer.keys = layer.keys.expand(len(batch.input_BL), -1, -1, -1)
            layer.values = layer.values.expand(len(batch.input_BL), -1, -1, -1)
            layer.update = _kept_as_it_is(layer)
        more["past_key_values"] = cache
    at = (batch.row_N, batch.column_N - shared)
    with _only_at(decoder, at), short_attention(decoder, batch.input_BL):
        out = decoder(input_ids=batch.input_BL[:, shared:], use_cache=cache is not None, **more)
    for layer in cache.layers if cache is not None else ():
        del layer.update  # it refers to its layer: a circle would keep both until the next collection
    return out.last_hidden_state[at]


@contextmanager
def _only_at(decoder: Any, at: tuple[torch.Tensor, torch.Tensor]) -> Iterator[None]:
    """The last layer's MLP runs at these rows and columns [N] and is 0 elsewhere, where nobody looks: exact, gradients too.

    Most of a layer's work is its MLP's, and of a shallow drafter's the last layer is much. A decoder whose layers are otherwise
    built, compiled or run twice (gradient checkpointing) is left alone.
    """
    last = next(reversed(getattr(decoder, "layers", [])), None)
    mlp = getattr(last, "mlp", None)
    if not isinstance(mlp, torch.nn.Module) or left_alone(decoder):
        yield
        return
    forward = mlp.forward

    def some(hidden_BLH: torch.Tensor, *more: Any, **named: Any) -> Any:
        out = None if more or named else forward(hidden_BLH[at][None])
        if not isinstance(out, torch.Tensor):  # it looks at something else too, or experts give their router's choice
            return forward(hidden_BLH, *more, **named)
        return torch.zeros_like(hidden_BLH, dtype=out.dtype).index_put(at, out[0])

    mlp.forward = some
    try:
        yield
    finally:
        mlp.forward = forward


def _keys_alone(decoder: Any) -> bool:
    """Whether every layer hands on keys and values and nothing else, so that a prefix's cache stands in for its columns in all
    rows. Linear attention (Qwen3-Next, Falcon-H1, Jamba) hands on a state that each row then writes over, others an index.
    """
    from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

    layers = DynamicCache(config=decoder.config).layers  # what the decoder makes for itself
    return all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in layers)


def _kept_as_it_is(layer: Any) -> Callable[..., Any]:
    """`layer.update` without the new tokens staying: nobody reads them again, and over all layers they are megabytes a row."""
    update, keys, values = layer.update, layer.keys, layer.values

    def once(*args: Any, **kwargs: Any) -> Any:
        both = update(*args, **kwargs)
        layer.keys, layer.values = keys, values
        return both

    return once


def require_plain_head(model: Any, batch: Batch, role: str = "draft") -> None:
    """Raises InputError where hidden states times the head's matrix are not the model's own logits on `batch`'s beginning,
    or these are not finite.

    The first is so for models that cap, scale or shift their logits, and would train them on a wrong distribution.
    """
    rows = torch.arange(len(batch.input_BL), device=batch.input_BL.device)
    ids_BL = batch.input_BL[:, :64]
    last = ids_BL.shape[1] - 1
    # a 16-bit model rounds otherwise with a prefix that is shared (5 % off after 24 layers), so it runs as in its own forward
    wide = model.dtype == torch.float32
    shared, off = (min(batch.shared, last), 1e-3) if wide else (0, 4 * torch.finfo(model.dtype).eps)
    start = replace(batch, input_BL=ids_BL, shared=shared, row_N=rows, column_N=torch.full_like(rows, last))
    with torch.no_grad(), exact_products():
        ours_BV = supervised_hidden(model, start) @ model.get_output_embeddings().weight.T
        model_BV = model(input_ids=ids_BL, logits_to_keep=1).logits[:, -1]
    bad_B = ~torch.isfinite(model_BV).all(-1)
    if bool(bad_B.any()):
        raise InputError(
            f"the {role} ({model.config.model_type}) gives logits that are not finite on prompt "
            f"{batch.ids[int(bad_B.nonzero()[0])]}: damaged weights, or a type too narrow (target_dtype)"
        )
    if not torch.allclose(ours_BV.float(), model_BV.float(), rtol=off, atol=off * float(model_BV.abs().max())):
        raise InputError(
            f"the {role} ({model.config.model_type}) changes its logits after the head (a cap, a scale or a bias), "
            f"which the chunked head does not do: choose a {role} of another architecture"
        )
