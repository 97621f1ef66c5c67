"""pair.json: what a drafter folder says of itself and of the target that it was made for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pairing.errors import InputError
from pairing.files import read_json, write_json
from pairing.source import ModelSource, digests

SCHEMA = 1


def describe_model(source: ModelSource) -> dict[str, Any]:
    """Name, revision and digests: enough to refuse another model later."""
    return {"name": source.name, "path": str(source.path), "revision": source.revision, "digests": digests(source.path)}


def new_pair(target: ModelSource, made: dict[str, Any]) -> dict[str, Any]:
    """The first pair.json of a drafter. `made` is the step that made it: {"step": "init", ...}."""
    return {
        "schema": SCHEMA,
        "target": describe_model(target),
        "made": [made],
        "alignment": None,
        "quantization": None,
        "training": None,
        "parallel_drafting": None,
        "measurements": [],
        "serve": None,
        "formats": None,
    }


def read_pair(folder: Path) -> dict[str, Any]:
    """Raises InputError where the folder has no pair.json or one of a later schema."""
    path = folder / "pair.json"
    if not path.is_file():
        raise InputError(f"{folder}: no pair.json, so it is no drafter made by draftsmith: run `draftsmith init` first")
    pair = read_json(path)
    if pair.get("schema") != SCHEMA:
        raise InputError(f"{path}: schema {pair.get('schema')!r}, this version reads {SCHEMA}: update draftsmith")
    return dict(pair)


def update_pair(folder: Path, **fields: Any) -> dict[str, Any]:
    """Sets fields of pair.json atomically and returns the whole."""
    pair = read_pair(folder) | fields
    write_json(folder / "pair.json", pair)
    return pair
