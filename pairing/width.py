"""How much each channel, head and layer of a target matters on given texts, and which of them a narrower drafter keeps.

Importance by activations (Minitron, Muralidharan et al. 2024, arXiv 2407.14679, section 2.2): of a hidden channel the
outputs of the norms, of an FFN channel what enters the down projection, of a head the norm of what it hands to the output
projection; absolute values, averaged over tokens within a text, then the L2 norm over texts. Of a layer its block
influence, 1 − E[cos(input, output)] (Men et al. 2024, arXiv 2403.03853).

Axes of a tensor: H hidden, F FFN, Q query heads x width, K key/value heads x width; fused ones: QKV and FF one after
the other, N as GPT-NeoX has it, query, key and value of one head together. Shapes: L layers, T tokens of a text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from pairing.errors import InputError
from pairing.progress import bar

# The first ending that fits says what a tensor's dimensions are; None is left whole.
AXES: dict[str, tuple[str | None, ...]] = {
    "q_norm.weight": (None,),
    "k_norm.weight": (None,),
    "norm.weight": ("H",),
    "norm.bias": ("H",),
    "embed_tokens.weight": (None, "H"),
    "embed_in.weight": (None, "H"),
    "embed_positions.weight": (None, "H"),
    "lm_head.weight": (None, "H"),
    "embed_out.weight": (None, "H"),
    "qkv_proj.weight": ("QKV", "H"),
    "query_key_value.weight": ("N", "H"),
    "query_key_value.bias": ("N",),
    "q_proj.weight": ("Q", "H"),
    "q_proj.bias": ("Q",),
    "k_proj.weight": ("K", "H"),
    "k_proj.bias": ("K",),
    "v_proj.weight": ("K", "H"),
    "v_proj.bias": ("K",),
    "o_proj.weight": ("H", "Q"),
    "o_proj.bias": ("H",),
    "out_proj.weight": ("H", "Q"),
    "out_proj.bias": ("H",),
    "dense.weight": ("H", "Q"),
    "dense.bias": ("H",),
    "gate_up_proj.weight": ("FF", "H"),
    "gate_proj.weight": ("F", "H"),
    "up_proj.weight": ("F", "H"),
    "fc1.weight": ("F", "H"),
    "fc1.bias": ("F",),
    "dense_h_to_4h.weight": ("F", "H"),
    "dense_h_to_4h.bias": ("F",),
    "down_proj.weight": ("H", "F"),
    "down_proj.bias": ("H",),
    "fc2.weight": ("H", "F"),
    "fc2.bias": ("H",),
    "dense_4h_to_h.weight": ("H", "F"),
    "dense_4h_to_h.bias": ("H",),
}
ATTENTION_OUT = ("o_proj", "out_proj", "attention.dense")
FFN_OUT = ("down_proj", "fc2", "dense_4h_to_h")
# In these a head is hidden_size / heads wide (transformers or vLLM reads no head_dim), so both shrink together.
# Their configs refuse a hidden size that is no multiple of the number of heads, whatever head_dim says.
DIVIDED = frozenset({"LlamaForCausalLM", "Gemma3ForCausalLM"})
COUPLED = ("Qwen2ForCausalLM", "GPTNeoXForCausalLM", "OPTForCausalLM")


@dataclass(frozen=True)
class Shape:
    """The widths of a model."""

    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int

    def sizes(self) -> dict[str, int]:
        q, k = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {"H": self.hidden, "F": self.ffn, "FF": 2 * self.ffn, "Q": q, "K": k, "QKV": q + 2 * k, "N": 3 * q}


@dataclass(frozen=True)
class Importance:
    """What the texts say; larger is more important."""

    hidden_H: torch.Tensor
    ffn_LF: torch.Tensor
    heads_LQ: torch.Tensor  # Q query heads here
    influence_L: torch.Tensor
    tokens: int


@dataclass(frozen=True)
class Kept:
    """Indices that stay, ascending; of FFN channels and heads layer by layer."""

    hidden: list[int]
    ffn: list[list[int]]
    heads: list[list[int]]
    kv_heads: list[list[int]]


def shape_of(config: Mapping[str, Any]) -> Shape:
    heads = int(config["num_attention_heads"])
    hidden = int(config["hidden_size"])
    return Shape(
        hidden,
        int(config.get("intermediate_size") or config["ffn_dim"]),
        heads,
        int(config.get("num_key_value_heads") or heads),
        int(config.get("head_dim") or hidden // heads),
    )


def narrower(
    old: Shape,
    architecture: str,
    hidden: int | None = None,
    ffn: int | None = None,
    heads: int | None = None,
    kv_heads: int | None = None,
) -> Shape:
    """The shape asked for. `kv_heads` groups stay, with equally many of each one's heads.

    Where `kv_heads` is not given all groups stay if `heads` divides over them, else whole groups go.

    Raises InputError where a width is larger than the target's, the heads make no equal groups, or hidden and heads
    do not fit each other in an architecture that ties them (`COUPLED`); one of the two alone sets the other there.
    """
    if architecture in COUPLED:
        if heads is None and hidden is not None:
            heads = hidden // old.head_dim
        hidden = hidden if hidden is not None or heads is None else heads * old.head_dim
        if hidden is not None and hidden != (heads or 0) * old.head_dim:
            raise InputError(
                f"hidden={hidden}: in a {architecture} it is the heads' number times {old.head_dim}: "
                f"give a multiple of {old.head_dim}, and heads=… to match or not at all"
            )
    asked = {"hidden": hidden, "ffn": ffn, "heads": heads, "kv_heads": kv_heads}
    for name, value in asked.items():
        most = getattr(old, name)
        if value is not None and not 1 <= value <= most:
            raise InputError(f"{name}={value}: the target has {most}")
    group = old.heads // old.kv_heads
    heads = heads or (kv_heads * group if kv_heads else old.heads)
    kv = kv_heads or (old.kv_heads if heads % old.kv_heads == 0 else heads // group)
    if not kv or heads % kv or heads // kv > group:
        fits = [n for n in range(1, old.heads + 1) if n % old.kv_heads == 0 or n % group == 0]
        raise InputError(
            f"heads={heads}, kv_heads={kv_heads}: {old.kv_heads} groups of {group} allow heads={fits}, "
            f"or with kv_heads=… any multiple of it up to {group} times it"
        )
    wide = hidden or old.hidden
    if architecture in DIVIDED and wide % heads and (wide, heads) != (old.hidden, old.heads):
        raise InputError(
            f"hidden={wide}, heads={heads}: transformers loads a {architecture} only where hidden is a multiple of heads"
        )
    return Shape(wide, ffn or old.ffn, heads, kv, old.head_dim)


def importance(model: Any, texts: Sequence[Sequence[int]], old: Shape) -> Importance:
    """Runs the target on `texts` (lists of ids), one at a time, and gathers what each part puts out."""
    layers = int(model.config.get_text_config().num_hidden_layers)
    sizes = {"hidden": (old.hidden,), "ffn": (layers, old.ffn), "heads": (layers, old.heads), "cosine": (layers,)}
    total = {key: torch.zeros(size) for key, size in sizes.items()}
    tokens = sum(map(len, texts))
    if not tokens:
        raise InputError("no text to measure importance on")
    with torch.no_grad(), _watch(model, old) as seen, bar("measuring importance", total=len(texts)) as advance:
        for text in texts:
            seen.update({key: torch.zeros(size) for key, size in sizes.items()})
            model(torch.tensor([list(text)], device=model.device), use_cache=False)
            for key in ("hidden", "ffn", "heads"):
                total[key] += seen[key] ** 2
            total["cosine"] += seen["cosine"] * len(text)
            advance(1, "")
    return Importance(
        total["hidden"].sqrt(), total["ffn"].sqrt(), total["heads"].sqrt(), 1 - total["cosine"] / tokens, tokens
    )


@contextmanager
def _watch(model: Any, old: Shape) -> Iterator[dict[str, torch.Tensor]]:
    """Yields what the hooks write during one forward pass over one text: means over its tokens."""
    seen: dict[str, torch.Tensor] = {}
    hooks = []

    def attention(layer: int) -> Any:
        def hook(_module: Any, args: Any) -> None:
            seen["heads"][layer] = args[0].float().reshape(-1, old.heads, old.head_dim).norm(dim=-1).mean(0).cpu()

        return hook

    def ffn(layer: int) -> Any:
        def hook(_module: Any, args: Any) -> None:
            seen["ffn"][layer] = args[0].float().reshape(-1, old.ffn).abs().mean(0).cpu()

        return hook

    def norm(_module: Any, _args: Any, output: Any) -> None:
        seen["hidden"] += output.float().reshape(-1, old.hidden).abs().mean(0).cpu()

    def block(layer: int) -> Any:
        def hook(_module: Any, args: Any, kwargs: Any, output: Any) -> None:
            before = args[0] if args else kwargs["hidden_states"]
            after = output[0] if isinstance(output, tuple) else output
            seen["cosine"][layer] = torch.cosine_similarity(before.float(), after.float(), dim=-1).mean().cpu()

        return hook

    for name, module in model.named_modules():
        number = re.search(r"layers\.(\d+)", name)
        layer = int(number[1]) if number else -1
        if number and name.endswith(number[0]):
            hooks.append(module.register_forward_hook(block(layer), with_kwargs=True))
        elif number and name.endswith(ATTENTION_OUT):
            hooks.append(module.register_forward_pre_hook(attention(layer)))
        elif number and name.endswith(FFN_OUT):
            hooks.append(module.register_forward_pre_hook(ffn(layer)))
        elif name.endswith("norm") and not name.endswith(("q_norm", "k_norm")):
            hooks.append(module.register_forward_hook(norm))
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def influential(influence_L: torch.Tensor, count: int) -> list[int]:
    """The `count` layers of the largest block influence, ascending."""
    return sorted(influence_L.topk(count).indices.tolist())


def choose(found: Importance, old: Shape, new: Shape) -> Kept:
    """The most important channels and heads: hidden ones for the whole model, the others layer by layer."""
    group = old.heads // old.kv_heads
    heads, kv_heads = [], []
    for heads_Q in found.heads_LQ:
        groups = heads_Q.reshape(old.kv_heads, group)
        kv = sorted(groups.sum(1).topk(new.kv_heads).indices.tolist())
        each = [sorted(groups[g].topk(new.heads // new.kv_heads).indices.tolist()) for g in kv]
        heads.append([g * group + i for g, inner in zip(kv, each, strict=True) for i in inner])
        kv_heads.append(kv)
    return Kept(
        sorted(found.hidden_H.topk(new.hidden).indices.tolist()),
        [sorted(row.topk(new.ffn).indices.tolist()) for row in found.ffn_LF],
        heads,
        kv_heads,
    )


def axes_of(name: str) -> tuple[str | None, ...]:
    """Raises KeyError for a tensor that no architecture here has."""
    return AXES[next(ending for ending in AXES if name.endswith(ending))]


def narrow_shape(name: str, shape: tuple[int, ...], new: Shape) -> tuple[int, ...]:
    sizes = new.sizes()
    return tuple(n if axis is None else sizes[axis] for n, axis in zip(shape, axes_of(name), strict=True))


def narrow(tensor: torch.Tensor, name: str, layer: int | None, kept: Kept, old: Shape) -> torch.Tensor:
    """The tensor with only the kept indices along its axes; `layer` is its number in the target."""
    for dim, axis in enumerate(axes_of(name)):
        if axis is not None:
            tensor = tensor.index_select(dim, torch.tensor(_indices(axis, layer, kept, old)))
    return tensor.contiguous()


def _indices(axis: str, layer: int | None, kept: Kept, old: Shape) -> list[int]:
    if axis == "H":
        return kept.hidden
    assert layer is not None
    ffn, width = kept.ffn[layer], old.head_dim
    if axis in ("F", "FF"):
        return ffn if axis == "F" else [*ffn, *(old.ffn + i for i in ffn)]
    if axis == "N":
        return [h * 3 * width + i for h in kept.heads[layer] for i in range(3 * width)]
    q = [h * width + i for h in kept.heads[layer] for i in range(width)]
    k = [h * width + i for h in kept.kv_heads[layer] for i in range(width)]
    q_end, k_end = old.heads * width, (old.heads + old.kv_heads) * width
    return {"Q": q, "K": k, "QKV": [*q, *(q_end + i for i in k), *(k_end + i for i in k)]}[axis]


def narrow_config(config: Mapping[str, Any], architecture: str, new: Shape) -> dict[str, Any]:
    values = {
        "hidden_size": new.hidden,
        "ffn_dim" if "ffn_dim" in config else "intermediate_size": new.ffn,
        "num_attention_heads": new.heads,
    }
    if "num_key_value_heads" in config:
        values["num_key_value_heads"] = new.kv_heads
    if architecture not in COUPLED:
        values["head_dim"] = new.head_dim
    if "word_embed_proj_dim" in config:
        values["word_embed_proj_dim"] = new.hidden
    return {**config, **values}


def shapes_below(old: Shape, architecture: str) -> Iterator[Shape]:
    """The target's shape and narrower ones of its proportions, widest first: multiples of 64 (a block of NF4)."""
    yield old
    for hidden in range((old.hidden - 1) // 64 * 64, 0, -64):
        ffn = max(round(old.ffn * hidden / old.hidden / 64), 1) * 64
        for heads in range(max(old.heads * hidden // old.hidden, 1), 0, -1):
            try:
                yield narrower(old, architecture, hidden, min(ffn, old.ffn), heads)
            except InputError:
                continue
            break
