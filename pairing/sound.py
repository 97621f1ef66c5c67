"""Whether config.json and generation_config.json hold what everybody who reads them takes for granted: types, not values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pairing.errors import InputError
from pairing.files import read_json

COUNTS = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
          "max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_sequence_length")  # fmt: skip
GROUPS = ("text_config", "rope_scaling", "rope_parameters", "quantization_config")
IDS = ("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id")


def require_sound(folder: Path, name: str) -> None:
    """Raises InputError, one line, where a config of the model in `folder` is written by hand and wrong."""
    require_config(read_json(folder / "config.json"), f"{name}: config.json")
    generation = folder / "generation_config.json"
    if generation.is_file():
        _require(read_json(generation), _wrong_ids, f"{name}: generation_config.json")


def require_config(config: Any, where: str) -> None:
    """Raises InputError; `where` is what a user wrote: a file, or the overrides that `config` has in it already."""
    _require(config, _wrong, where)


def _require(config: Any, faults: Any, where: str) -> None:
    fault = next(faults(config), None) if isinstance(config, dict) else "it holds no keys"
    if fault is not None:
        raise InputError(f"{where}: {fault}: mend it there, or fetch the model again")


def _wrong(config: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong in a config.json and in its text part; a key that is left out or null is not."""
    for key in COUNTS:
        if (value := config.get(key)) is not None and (not _whole(value) or value < 1):
            yield f"{key} is {value!r}, not a whole number from 1 on"
    for key in GROUPS:
        if (value := config.get(key)) is not None and not isinstance(value, dict):
            yield f"{key} is {value!r}, not a group of keys"
    if not isinstance(config.get("model_type") or "", str):
        yield f"model_type is {config['model_type']!r}, not a name"
    names = config.get("architectures")
    if names is not None and not (isinstance(names, list) and all(isinstance(n, str) for n in names)):
        yield f"architectures is {names!r}, not a list of names"
    for key in ("rope_scaling", "rope_parameters"):
        factor = (config.get(key) or {}).get("factor")
        if factor is not None and not isinstance(factor, int | float):
            yield f"{key}.factor is {factor!r}, not a number"
    yield from _wrong_ids(config)
    if text := config.get("text_config"):
        yield from (f"text_config.{fault}" for fault in _wrong(text))


def _wrong_ids(config: Mapping[str, Any]) -> Iterator[str]:
    for key in IDS:
        if (value := config.get(key)) is not None and not all(
            map(_whole, value if isinstance(value, list) else [value])
        ):
            yield f"{key} is {value!r}, not an id or a list of ids"


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
