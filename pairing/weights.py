"""The tensors of a model folder by name, dtype and shape, from the safetensors headers alone; and copies of its files with
some tensors changed, which read one file at a time."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import safe_open

from pairing.errors import InputError
from pairing.files import read_json, write_json

if TYPE_CHECKING:
    import torch

EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight")
HEADS = ("lm_head.weight", "embed_out.weight")
VOCABULARY = (*EMBEDDINGS, *HEADS, "lm_head.bias")  # endings of the tensors that have a row per id
PACKED = ("U8", "I8", "I32")  # types of 4- and 8-bit weights; the values of their rows cannot be had one by one


@dataclass(frozen=True)
class TensorInfo:
    dtype: str  # as safetensors writes it: F32, BF16, U8, ...
    shape: tuple[int, ...]
    file: Path
    bytes: int


def weight_files(folder: Path) -> list[Path]:
    """The files that transformers and vLLM read: the index's where there is one, else model.safetensors, else all.

    Some folders hold the same weights twice (Mistral's consolidated.safetensors); a plain glob would count both.
    """
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        held = read_json(index)
        places = held.get("weight_map") if isinstance(held, dict) else None
        # copies are written under the same names, so a name must not lead out of the folder
        if not isinstance(places, dict) or any(not isinstance(n, str) or Path(n).name != n for n in places.values()):
            raise InputError(
                f"{folder}: {index.name} has no map of tensors to files of that folder: fetch the folder again"
            )
        names = sorted(set(places.values()))
        missing = [n for n in names if not (folder / n).is_file()]
        if missing:
            raise InputError(f"{folder}: {index.name} names {missing[0]}, which is not there: fetch the folder again")
        return [folder / n for n in names]
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    return sorted(folder.glob("*.safetensors"))


def read_header(file: Path) -> dict[str, TensorInfo]:
    """Raises InputError where the file is no safetensors file or was cut short (a stopped download)."""
    broken = InputError(f"{file}: no whole safetensors file: fetch or save it again")
    size = file.stat().st_size
    with open(file, "rb") as f:
        start = f.read(8)
        if len(start) < 8:
            raise broken
        (length,) = struct.unpack("<Q", start)
        if 8 + length > size:
            raise broken
        try:
            header = json.loads(f.read(length))
        except ValueError:
            raise broken from None
    tensors = {}
    try:
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            begin, end = entry["data_offsets"]
            if 8 + length + end > size or not all(isinstance(n, int) for n in entry["shape"]):
                raise ValueError("cut short, or no shape")
            tensors[name] = TensorInfo(entry["dtype"], tuple(entry["shape"]), file, end - begin)
    except (AttributeError, KeyError, TypeError, ValueError) as e:
        raise broken from e
    return tensors


def read_headers(folder: Path) -> dict[str, TensorInfo]:
    """Every tensor of the model in `folder`, in the order of its files."""
    tensors: dict[str, TensorInfo] = {}
    for file in weight_files(folder):
        tensors |= read_header(file)
    if not tensors:
        raise InputError(f"{folder}: its safetensors files hold no tensors")
    return tensors


def find(tensors: dict[str, TensorInfo], endings: tuple[str, ...]) -> TensorInfo | None:
    """The input embedding (`EMBEDDINGS`) or the output head (`HEADS`), whatever wrapper its name stands in."""
    return next((t for name, t in tensors.items() if name.endswith(endings)), None)


def parameters(tensors: dict[str, TensorInfo]) -> int:
    """Stored values, each tensor once. Of packed 4-bit weights these are bytes, not parameters."""
    return sum(math.prod(t.shape) for t in tensors.values())


def vocabulary_tensors(tensors: dict[str, TensorInfo], name: str) -> dict[str, TensorInfo]:
    """Those with a row per id. Raises InputError where they are quantized; `name` is the model's."""
    found = {key: info for key, info in tensors.items() if key.endswith(VOCABULARY)}
    for key, info in found.items():
        if info.dtype in PACKED:
            raise InputError(
                f"{name}: {key} is quantized ({info.dtype}): take the 16-bit model and quantize the result"
            )
    return found


def rewrite(
    source: Path, goal: Path, names: Collection[str], change: Callable[[str, torch.Tensor], torch.Tensor]
) -> None:
    """Writes the weight files of `source` to `goal` under the same names, the tensors `names` as `change` makes them."""
    from safetensors.torch import save_file

    for file in weight_files(source):
        with safe_open(file, framework="pt") as f:
            weights = {key: f.get_tensor(key) for key in f.offset_keys()}
        weights |= {key: change(key, weights[key]) for key in names if key in weights}
        save_file(weights, goal / file.name, metadata={"format": "pt"})
    index = source / "model.safetensors.index.json"
    if index.is_file():
        value = read_json(index)
        write_json(goal / index.name, value)  # the headers are found by it
        value.setdefault("metadata", {})["total_size"] = sum(t.bytes for t in read_headers(goal).values())
        write_json(goal / index.name, value)
