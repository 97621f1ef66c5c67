"""One model of a pair as the comparisons see it: config, tokenizer, generation config, the weights' headers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pairing.files import digest_file, read_json
from pairing.quick_import import shared_tokenizers
from pairing.serving import text_config
from pairing.source import TOKENIZER_FILES, ModelSource, load_tokenizer, require_causal
from pairing.weights import TensorInfo, read_headers


@dataclass(frozen=True)
class Side:
    """One model of the pair, with what the comparisons need."""

    name: str
    path_like: bool  # the name is a folder, not a hub id
    config: dict[str, Any]
    tokenizer: Any
    generation: dict[str, Any]
    tensors: dict[str, TensorInfo]

    @property
    def text(self) -> dict[str, Any]:
        return text_config(self.config)


def read_side(source: ModelSource, like: Side | None = None, like_source: ModelSource | None = None) -> Side:
    """Raises InputError where a part does not load (a corrupt tokenizer, torn weights) or the model writes no text.

    Where the tokenizer's files are those of `like`, read from `like_source`, its tokenizer is taken: a large one takes
    more than a second to load, and most drafters carry their target's.
    """
    generation = source.path / "generation_config.json"
    config = read_json(source.path / "config.json")
    require_causal(config, source.name)
    if like and like_source and _same_tokenizer(source.path, like_source.path, config, like.config):
        tokenizer = like.tokenizer
    else:
        with shared_tokenizers():
            tokenizer = load_tokenizer(source.path)
    return Side(
        source.name,
        Path(source.name).exists(),
        config,
        tokenizer,
        read_json(generation) if generation.is_file() else {},
        read_headers(source.path),
    )


def _same_tokenizer(a: Path, b: Path, a_config: dict[str, Any], b_config: dict[str, Any]) -> bool:
    """Byte by byte; config.json has a say in the tokenizer's class where its own files name none."""
    keys = ("model_type", "tokenizer_class")
    return all(a_config.get(k) == b_config.get(k) for k in keys) and _tokenizer_files(a) == _tokenizer_files(b)


def _tokenizer_files(folder: Path) -> dict[str, str]:
    files = [folder / name for name in (*TOKENIZER_FILES, "chat_template.json")] + list(folder.rglob("*.jinja"))
    return {str(f.relative_to(folder)): digest_file(f) for f in files if f.is_file()}
