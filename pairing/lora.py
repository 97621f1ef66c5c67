"""A LoRA adapter as PEFT writes it, read from its files and merged into its base's files, one weight file at a time.

The delta is computed in float32 and added to the base's own 16- or 32-bit weights, which keep their type (fault D17).
Memory holds one weight file of the base. What is merged is what the adapter's own forward pass computes: where input
embedding and head are tied and the adapter changes one of them alone, the result is untied and its config says so.

Shapes: O outputs, I inputs of a layer, r rank, V vocabulary rows, H hidden.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import safe_open

from pairing.errors import InputError
from pairing.files import read_json, write_json
from pairing.progress import bar
from pairing.weights import EMBEDDINGS, HEADS, TensorInfo, read_header, read_headers, weight_files

if TYPE_CHECKING:
    import torch

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
LOW_RANK = re.compile(r"(.+)\.lora_(A\.weight|B\.weight|embedding_A|embedding_B)")
FLOATS = ("F32", "F16", "BF16")
WAY_OUT = "merge it with PEFT (`merge_and_unload`, `save_pretrained`) and give that folder"
# Variants of LoRA whose delta is not scaling · B A, or that change the base's modules.
VARIANTS = ("use_dora", "use_bdlora", "use_qalora", "lora_bias", "alora_invocation_tokens", "arrow_config",
            "kasa_config", "monteclora_config", "layer_replication", "target_parameters",
            "trainable_token_indices", "megatron_config")  # fmt: skip
# Models whose layers are stored [I, O] (Conv1D). PEFT's fan_in_fan_out says so only where no other layer is adapted.
CONV1D = ("gpt2", "openai-gpt")
# Other ways to begin (PiSSA, OLoRA, CorDA, LoftQ, LoRA-GA) change the base's weights too: B A belongs to another base.
BEGINNINGS = (None, True, False, "gaussian", "eva", "orthogonal")


@dataclass(frozen=True)
class Adapter:
    """What an adapter folder changes, by the names of the base's tensors."""

    base: str  # the base's name or path, as written in the adapter
    revision: str | None  # of the base, where it is a hub id
    pairs: dict[str, tuple[str, str]]  # tensor -> keys of A and B
    whole: dict[str, str]  # tensor -> key of what replaces it (modules_to_save, resized embeddings, biases)
    scaling: Callable[[str, int], float]  # of (tensor, rank)
    transposed: bool  # the base's layers are stored [I, O], as far as the adapter says


def is_adapter(folder: Path) -> bool:
    return (folder / CONFIG).is_file()


def read_adapter(folder: Path, name: str) -> Adapter:
    """Reads config and header of the adapter in `folder`. `name` is the user's name of it.

    Raises InputError in one line: no LoRA, a variant or a way to begin that a plain merge would get wrong, pickled
    weights, weights that are missing or unknown, a whole model beside the adapter.
    """
    config = read_json(folder / CONFIG)
    kind, task = config.get("peft_type"), config.get("task_type")
    if kind != "LORA":
        raise InputError(f"{name}: an adapter of type {kind}; only LoRA is merged here: {WAY_OUT}")
    if task not in (None, "CAUSAL_LM"):
        raise InputError(f"{name}: a LoRA adapter for {task}, no causal LM: give a model that continues text")
    used = [key for key in VARIANTS if config.get(key)]
    if config.get("init_lora_weights", True) not in BEGINNINGS:
        used.append(f"init_lora_weights={config['init_lora_weights']}")
    if used:
        raise InputError(f"{name}: a LoRA adapter with {used[0]}, which a plain merge would get wrong: {WAY_OUT}")
    if not config.get("base_model_name_or_path"):
        raise InputError(f"{name}: {CONFIG} names no base: set base_model_name_or_path to its folder or hub id")
    if not (folder / WEIGHTS).is_file():
        pickled = any(folder.glob("adapter_model*.bin"))
        raise InputError(
            f"{name}: only a pickled adapter (adapter_model.bin), which is never read: save it with PEFT's "
            "`save_pretrained(safe_serialization=True)`" if pickled else f"{name}: {CONFIG} without {WEIGHTS}"
        )  # fmt: skip
    models = [f.name for f in folder.glob("*.safetensors") if not f.name.startswith("adapter_")]
    if models:
        raise InputError(
            f"{name}: holds a whole model ({models[0]}) and an adapter ({CONFIG}), and engines differ in which of "
            "them they take: move one of the two to another folder"
        )
    pairs, whole = _changes(name, sorted(read_header(folder / WEIGHTS)))
    alphas, root = config.get("alpha_pattern") or {}, config.get("use_rslora")

    def scaling(tensor: str, rank: int) -> float:
        module = tensor.removesuffix(".weight")
        # PEFT's rule: the first pattern that matches the end of the module's path, as a regular expression
        own = (value for key, value in alphas.items() if re.match(rf"(.*\.)?({key})$", module))
        return float(next(own, config.get("lora_alpha", 8))) / (math.sqrt(rank) if root else rank)

    base, revision = str(config["base_model_name_or_path"]), config.get("revision")
    return Adapter(base, revision, pairs, whole, scaling, bool(config.get("fan_in_fan_out")))


def _changes(name: str, keys: list[str]) -> tuple[dict[str, tuple[str, str]], dict[str, str]]:
    """(tensor -> keys of A and B, tensor -> key of its replacement). Every key has a meaning, or InputError."""
    halves: dict[str, list[str]] = {}
    whole = {}
    for key in keys:
        path = key.removeprefix(PREFIX)
        if match := LOW_RANK.fullmatch(path):
            halves.setdefault(f"{match[1]}.weight", []).append(key)
        elif path.endswith((".weight", ".bias")) and ".lora_" not in path:
            whole[path.replace(".base_layer.", ".")] = key
        else:
            raise InputError(f"{name}: {WEIGHTS} holds {key}, which is not known here: {WAY_OUT}")
    odd = next((tensor for tensor, found in halves.items() if len(found) != 2), None)
    if odd or not (halves or whole):
        what = f"holds one half of the pair for {odd}" if odd else "holds no tensors"
        raise InputError(f"{name}: {WEIGHTS} {what}: save the adapter again")
    return {tensor: (found[0], found[1]) for tensor, found in halves.items()}, whole


def merge_adapter(folder: Path, name: str, base: Path, goal: Path) -> dict[str, Any]:
    """Writes config.json and the merged weights to `goal`; returns {"changed" (tensors), "rows", "tied", "dtype"}.

    `base` is the base's folder. Raises InputError as `read_adapter` does, and where the base is quantized, lacks a
    tensor that the adapter changes, or has other shapes.
    """
    from safetensors.torch import load_file, save_file

    adapter, config = read_adapter(folder, name), read_json(base / "config.json")
    if config.get("model_type") in CONV1D:
        adapter = replace(adapter, transposed=True)
    tensors = read_headers(base)
    if "quantization_config" in config:
        raise InputError(
            f"{name}: its base {adapter.base} is quantized, and a merge into rounded weights loses quality: set "
            f"base_model_name_or_path in {CONFIG} to the 16-bit model that it was made from"
        )
    first = next((n for n in tensors if n.endswith(EMBEDDINGS)), None)
    if first is None:
        raise InputError(f"{name}: its base {adapter.base} holds no embedding")
    last = next((n for n in tensors if n.endswith(HEADS)), None)
    # where the head is tied it need not be in the base's files; the adapter may have one of its own all the same
    tied = bool(config.get("tie_word_embeddings", last is None))
    last = last or ("embed_out.weight" if first.endswith("embed_in.weight") else "lm_head.weight")
    changed = {*adapter.pairs, *adapter.whole}
    for tensor in sorted(changed - ({last} if tied else set())):
        if tensor not in tensors:
            raise InputError(
                f"{name}: it changes {tensor}, which is not in its base {adapter.base}: another base, or one that "
                f"stores its weights under other names: {WAY_OUT}"
            )
        if tensors[tensor].dtype not in FLOATS:
            raise InputError(f"{name}: {tensor} of its base {adapter.base} is {tensors[tensor].dtype}, no 16 or 32 bit")
    ours = load_file(folder / WEIGHTS)
    ends = {}
    if changed & {first, last}:
        ends[first] = _changed(name, adapter, ours, first, _read(tensors, first))
        # a tied head follows an embedding that got new rows; any other head stays as the adapter left it
        grown = len(ends[first]) != tensors[first].shape[0] and last not in changed
        before = ends[first] if tied and grown else _read(tensors, first if tied else last)
        ends[last] = _changed(name, adapter, ours, last, before)
        if len(ends[first]) != len(ends[last]):
            raise InputError(
                f"{name}: its embedding has {len(ends[first])} rows and its head {len(ends[last])}: save the adapter "
                "with both (`save_embedding_layers=True`)"
            )
        tied = tied and ends[first].equal(ends[last])
        config["tie_word_embeddings"] = tied
        text = config if "vocab_size" in config else config.get("text_config", config)
        text["vocab_size"] = len(ends[first])
    files = weight_files(base)
    places: dict[str, str] = {}
    with bar("merging the adapter", total=len(files)) as advance:
        for file in files:
            with safe_open(file, framework="pt") as f:
                weights = {key: f.get_tensor(key) for key in f.offset_keys()}
            for key in {*weights} & {*changed, *ends}:
                weights[key] = ends[key] if key in ends else _changed(name, adapter, ours, key, weights[key])
            if ends and tied:
                weights.pop(last, None)
            elif ends and first in weights and last not in tensors:
                weights[last] = ends[last]
            save_file({k: t.contiguous() for k, t in weights.items()}, goal / file.name, metadata={"format": "pt"})
            places |= dict.fromkeys(weights, file.name)
            advance(1, "")
    if len(files) > 1:
        size = sum(tensor.bytes for file in files for tensor in read_header(goal / file.name).values())
        write_json(goal / "model.safetensors.index.json", {"metadata": {"total_size": size}, "weight_map": places})
    write_json(goal / "config.json", config)
    rows = len(ends[first]) if ends else tensors[first].shape[0]
    return {"changed": len(changed), "rows": rows, "tied": tied, "dtype": tensors[first].dtype}


def _read(tensors: dict[str, TensorInfo], tensor: str) -> torch.Tensor:
    with safe_open(tensors[tensor].file, framework="pt") as f:
        return f.get_tensor(tensor)


def _changed(
    name: str, adapter: Adapter, ours: dict[str, torch.Tensor], tensor: str, before: torch.Tensor
) -> torch.Tensor:
    """The tensor as the adapter has it, in the base's type."""
    after = ours[adapter.whole[tensor]].float() if tensor in adapter.whole else before.float()
    vocabulary = tensor.endswith((*EMBEDDINGS, *HEADS))
    fits = after.shape == before.shape or (vocabulary and after.shape[1:] == before.shape[1:])
    misfit = None if fits else after.shape
    if tensor in adapter.pairs:
        a, b = (ours[key].float() for key in adapter.pairs[tensor])
        if adapter.pairs[tensor][0].endswith("lora_embedding_A"):  # A [r, V], B [H, r], weight [V, H]
            # laid out as a head's pair is, so that a tied pair gives the same bits on both sides
            a, b = b.T.contiguous(), a.T.contiguous()
        delta = b @ a * adapter.scaling(tensor, len(a))  # A [r, I], B [O, r], weight [O, I]
        delta = delta.T if adapter.transposed and not vocabulary else delta
        misfit = misfit or (None if delta.shape == after.shape else delta.shape)
        after = after if misfit else after + delta
    if misfit:
        raise InputError(
            f"{name}: its {tensor} is {list(misfit)}, its base's is {list(before.shape)}: the base {adapter.base} is "
            "not the one that it was trained on"
        )
    return after.to(before.dtype)
