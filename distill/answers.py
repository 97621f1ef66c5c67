"""The target's answers on disk: one row per prompt, Arrow shards in a folder, whole or absent.

Layout: meta.json (what made it, and whether it is complete) and shards/part-00000.arrow … (Arrow stream format, memory-
mapped by `datasets`). At K recorded tokens a position costs 6 K + 8 bytes: 200 at K = 32. Shapes: n answer tokens.
"""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from distill.prompts import Prompt
from pairing.errors import InputError
from pairing.files import read_json, write_bytes, write_json
from pairing.pair import describe_model
from pairing.source import ModelSource

SCHEMA = 1
COLUMNS = pa.schema(
    [
        ("id", pa.string()),
        ("messages", pa.string()),  # JSON
        ("tags", pa.string()),  # JSON
        ("prompt_ids", pa.list_(pa.int32())),
        ("answer_ids", pa.list_(pa.int32())),  # with the ending token, where the answer ended by itself
        ("finish_reason", pa.string()),  # "stop" or "length"
        ("head_ids", pa.list_(pa.int32())),  # [n * K], the K most likely at each position, most likely first
        ("head_logprobs", pa.list_(pa.float16())),  # [n * K], at temperature 1, never renormalised
        ("tail_mass", pa.list_(pa.float32())),  # [n], probability of all other tokens together
    ]
)
NO_PROBABILITY = -1e4  # stands for -inf: exp gives 0, and 0 · log p stays a number


@dataclass(frozen=True)
class Answer:
    """What the target said to one prompt. Position j is the distribution from which answer_ids[j] came."""

    prompt: Prompt
    prompt_ids: list[int]
    answer_ids: list[int]  # n
    finish_reason: str
    head_ids_NK: NDArray[np.int32]
    head_logprobs_NK: NDArray[np.float32]


@dataclass(frozen=True)
class Answers:
    meta: dict[str, Any]
    data: datasets.Dataset  # ordered by id, so the order does not depend on which prompt was answered first


def write_shard(folder: Path, answers: Sequence[Answer]) -> Path:
    """Adds one shard atomically and returns its path."""
    for a in answers:
        assert a.head_ids_NK.shape == a.head_logprobs_NK.shape, a.prompt.id
        assert len(a.head_ids_NK) == len(a.answer_ids), a.prompt.id
    heads = [a.head_logprobs_NK.astype(np.float64) for a in answers]
    # from the full-precision head, before it is rounded to 16 bits; clipped, as a sum of rounded parts may pass 1
    tails = [np.clip(1 - np.exp(h).sum(axis=1), 0, 1) for h in heads]
    columns = {
        "id": [a.prompt.id for a in answers],
        "messages": [json.dumps(a.prompt.messages, ensure_ascii=False) for a in answers],
        "tags": [json.dumps(a.prompt.tags, ensure_ascii=False) for a in answers],
        "prompt_ids": [np.asarray(a.prompt_ids, np.int32) for a in answers],
        "answer_ids": [np.asarray(a.answer_ids, np.int32) for a in answers],
        "finish_reason": [a.finish_reason for a in answers],
        "head_ids": [a.head_ids_NK.ravel() for a in answers],
        "head_logprobs": [np.maximum(h, NO_PROBABILITY).astype(np.float16).ravel() for h in heads],
        "tail_mass": [t.astype(np.float32) for t in tails],
    }
    batch = pa.record_batch([pa.array(columns[f.name], f.type) for f in COLUMNS], schema=COLUMNS)
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, COLUMNS) as writer:
        writer.write_batch(batch)
    parts = shard_paths(folder)
    number = int(parts[-1].stem.removeprefix("part-")) + 1 if parts else 0
    path = folder / "shards" / f"part-{number:05d}.arrow"
    write_bytes(path, sink.getvalue())
    return path


def shard_paths(folder: Path) -> list[Path]:
    """Whole shards, in the order they were written. A shard that is being written has another name."""
    return sorted((folder / "shards").glob("part-*.arrow"))


def begin(folder: Path, meta: dict[str, Any]) -> set[str]:
    """Opens `folder` for the answers that `meta` describes and returns the ids of those already there.

    Raises InputError where it holds answers of another target, prompts or sampling.
    """
    if (folder / "meta.json").is_file():
        held = read_json(folder / "meta.json")
        keys = [k for k, v in meta.items() if k != "versions" and held.get(k) != v]
        if keys:
            raise InputError(
                f"{folder} holds other answers (they differ in {', '.join(keys)}): name another folder, or delete that "
                "one to start over"
            )
        for torn in (folder / "shards").glob(".part-*"):  # left by a kill
            torn.unlink()
        return {id_ for path in shard_paths(folder) for id_ in _read(path)["id"].to_pylist()}
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"{folder} exists and holds no answers of draftsmith: name another folder")
    write_json(folder / "meta.json", {"schema": SCHEMA, "complete": False, **meta, "stats": None})
    return set()


def complete(folder: Path, run: dict[str, Any]) -> dict[str, Any]:
    """Marks the answers as whole and returns the statistics, `run` (what only the run knows) among them."""
    meta = read_json(folder / "meta.json")
    stats = statistics(folder) | run
    write_json(folder / "meta.json", {**meta, "complete": True, "stats": stats})
    return stats


def open_answers(folder: Path) -> Answers:
    """All answers in `folder`, memory-mapped. Raises InputError where there are none, or not all yet."""
    if not (folder / "meta.json").is_file():
        raise InputError(f"{folder}: no answers there (no meta.json): make them with `draftsmith generate`")
    meta = read_json(folder / "meta.json")
    if meta.get("schema") != SCHEMA:
        raise InputError(
            f"{folder}: schema {meta.get('schema')!r}, this version reads {SCHEMA}: generate the answers again"
        )
    if not meta["complete"]:
        raise InputError(
            f"{folder}: the answers are not complete: run the same `draftsmith generate` again to finish them"
        )
    data = datasets.concatenate_datasets([_open(path) for path in shard_paths(folder)])
    ids = data["id"][:]
    if len(ids) != meta["stats"]["prompts"]:
        raise InputError(
            f"{folder}: {len(ids)} answers where meta.json counts {meta['stats']['prompts']}: a shard is missing; "
            "delete the folder and generate the answers again"
        )
    return Answers(meta, data.select(sorted(range(len(ids)), key=ids.__getitem__)))


def require_target(answers: Answers, target: ModelSource) -> None:
    """Raises InputError where the answers were written by another model than `target`."""
    was, now = answers.meta["target"], describe_model(target)
    differ = [part for part, digest in was["digests"].items() if now["digests"][part] != digest]
    if differ:
        raise InputError(
            f"the answers were written by another target: {was['name']} differs from {target.name} in its "
            f"{', '.join(differ)}: generate them again with {target.name}"
        )


def statistics(folder: Path) -> dict[str, Any]:
    """Counts over all whole shards: prompts, prompt and answer tokens, how answers ended, the mean tail mass."""
    tables = [_read(path) for path in shard_paths(folder)]
    prompt = np.array([len(ids) for t in tables for ids in t["prompt_ids"]])
    answer = np.array([len(ids) for t in tables for ids in t["answer_ids"]])
    stops = sum(reason == "stop" for t in tables for reason in t["finish_reason"].to_pylist())
    tail = np.concatenate([t["tail_mass"].combine_chunks().flatten().to_numpy() for t in tables])
    return {
        "prompts": len(prompt),
        "prompt_tokens": _spread(prompt),
        "answer_tokens": _spread(answer),
        "stop": stops,
        "length": len(prompt) - stops,
        "tail_mass_mean": float(tail.mean()) if len(tail) else None,
        "bytes": sum(path.stat().st_size for path in shard_paths(folder)),
    }


def _spread(counts: NDArray[np.int_]) -> dict[str, float]:
    return {"total": int(counts.sum()), "mean": round(float(counts.mean()), 2), "max": int(counts.max())}


def _read(path: Path) -> pa.Table:
    try:
        with pa.memory_map(str(path)) as source, pa.ipc.open_stream(source) as reader:
            return reader.read_all()
    except pa.ArrowInvalid as e:
        raise _damaged(path, e) from e


def _open(path: Path) -> datasets.Dataset:
    try:
        return datasets.Dataset.from_file(str(path))
    except pa.ArrowInvalid as e:
        raise _damaged(path, e) from e


def _damaged(path: Path, e: Exception) -> InputError:
    return InputError(f"{path}: damaged ({str(e).splitlines()[0]}): delete its folder and generate the answers again")
