"""The target's answers on disk: one row per conversation, Arrow shards in a folder, whole or absent.

Layout: meta.json (what made it, and whether it is complete) and shards/part-00000.arrow … (Arrow stream format, memory-
mapped by `datasets`). A supervised token costs 6 (K + M) + 8 bytes, any other token 4: 200 at K = 32 and M = 0, and 200 at
K = 24 and M = 8. Shapes: n supervised tokens of a row, K recorded ids of the head, M drawn ids of the tail.
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
from pairing.errors import InputError, PartFailedError
from pairing.files import read_json, write_bytes, write_json
from pairing.pair import describe_model
from pairing.source import ModelSource

SCHEMA = 2
COLUMNS = pa.schema(
    [
        ("id", pa.string()),
        # JSON: what the last answer answers, with every assistant turn before it; the last answer is there as tokens only
        ("messages", pa.string()),
        ("tags", pa.string()),  # JSON
        ("input_ids", pa.list_(pa.int32())),  # prompts and answers in order, to the last supervised token
        # [start, end, start, end, …] of the answers in input_ids, ascending, none empty. An answer's ending token is in it,
        # where the answer ended by itself. Every token in a span is supervised, no other is
        ("spans", pa.list_(pa.int32())),
        ("finish_reason", pa.string()),  # of the last answer: "stop" or "length"
        # from here on by supervised position, spans in order: the distribution from which that token came, that is the
        # logits at the token before it
        ("head_ids", pa.list_(pa.int32())),  # [n * K], the K most likely at each position, most likely first
        ("head_logprobs", pa.list_(pa.float16())),  # [n * K], at temperature 1, never renormalised
        ("tail_mass", pa.list_(pa.float32())),  # [n], probability of all other tokens together
        ("tail_ids", pa.list_(pa.int32())),  # [n * M], drawn from the tokens outside the head, with replacement
        ("tail_logprobs", pa.list_(pa.float16())),  # [n * M], log p itself, not given that it is outside the head
    ]
)
NO_PROBABILITY = -1e4  # stands for -inf: exp gives 0, and 0 · log p stays a number


@dataclass(frozen=True)
class Answer:
    """A conversation with the target's answers; the columns above say more."""

    prompt: Prompt
    input_ids: list[int]
    spans: list[tuple[int, int]]
    finish_reason: str
    head_ids_NK: NDArray[np.int32]
    head_logprobs_NK: NDArray[np.float32]
    tail_ids_NM: NDArray[np.int32] | None = None  # None: M = 0
    tail_logprobs_NM: NDArray[np.float32] | None = None

    @property
    def supervised(self) -> int:
        return sum(end - start for start, end in self.spans)


@dataclass(frozen=True)
class Answers:
    meta: dict[str, Any]
    data: datasets.Dataset  # ordered by id, so the order does not depend on which prompt was answered first

    @property
    def temperature(self) -> float | None:
        """At which the answers were drawn; None where that is not known, as of given texts."""
        found = (self.meta.get("sampling") or {}).get("temperature")
        return None if found is None else float(found)


def spans_of(flat: Sequence[int] | NDArray[Any]) -> list[tuple[int, int]]:
    """(start, end) of each answer, from the column `spans`."""
    return [(int(start), int(end)) for start, end in zip(flat[::2], flat[1::2], strict=True)]


def supervised_index(flat: Sequence[int] | NDArray[Any]) -> NDArray[np.int64]:
    """[n] the supervised tokens' places in input_ids, from the column `spans`. Their logits stand one place earlier."""
    return np.concatenate([np.zeros(0, np.int64), *(np.arange(start, end) for start, end in spans_of(flat))])


def good_spans(flat: Sequence[int] | NDArray[Any], tokens: int) -> bool:
    """Whether these are spans of a row of `tokens` tokens: in order, none empty, something before the first, and nothing
    after the last. No span at all is good: such a row teaches nothing."""
    edges = np.asarray([1, *flat, tokens] if len(flat) else [], np.int64)
    gaps = np.diff(edges)
    return len(flat) % 2 == 0 and bool(
        (gaps[::2] >= 0).all() and (gaps[1::2] > 0).all() and (edges[-2:-1] == tokens).all()
    )


def write_shard(folder: Path, answers: Sequence[Answer]) -> Path:
    """Adds one shard atomically and returns its path."""
    for a in answers:
        assert good_spans([edge for span in a.spans for edge in span], len(a.input_ids)), a.prompt.id
        assert a.head_ids_NK.shape == a.head_logprobs_NK.shape, a.prompt.id
        assert len(a.head_ids_NK) == a.supervised, a.prompt.id
        if a.tail_ids_NM is not None:
            assert a.tail_logprobs_NM is not None, a.prompt.id
            assert a.tail_ids_NM.shape == a.tail_logprobs_NM.shape, a.prompt.id
            assert len(a.tail_ids_NM) == a.supervised, a.prompt.id
    heads = [a.head_logprobs_NK.astype(np.float64) for a in answers]
    # from the full-precision head, before it is rounded to 16 bits; clipped, as a sum of rounded parts may pass 1
    tails = [np.clip(1 - np.exp(h).sum(axis=1), 0, 1) for h in heads]
    columns = {
        "id": [a.prompt.id for a in answers],
        "messages": [json.dumps(a.prompt.messages, ensure_ascii=False) for a in answers],
        "tags": [json.dumps(a.prompt.tags, ensure_ascii=False) for a in answers],
        "input_ids": [np.asarray(a.input_ids, np.int32) for a in answers],
        "spans": [np.asarray(a.spans, np.int32).ravel() for a in answers],
        "finish_reason": [a.finish_reason for a in answers],
        "head_ids": [a.head_ids_NK.ravel() for a in answers],
        "head_logprobs": [_half(h) for h in heads],
        "tail_mass": [t.astype(np.float32) for t in tails],
        "tail_ids": [[] if a.tail_ids_NM is None else a.tail_ids_NM.ravel() for a in answers],
        "tail_logprobs": [[] if a.tail_logprobs_NM is None else _half(a.tail_logprobs_NM) for a in answers],
    }
    batch = pa.record_batch([pa.array(columns[f.name], f.type) for f in COLUMNS], schema=COLUMNS)
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, COLUMNS) as writer:
        writer.write_batch(batch)
    parts = shard_paths(folder)
    number = _number(parts[-1]) + 1 if parts else 0
    path = folder / "shards" / f"part-{number:05d}.arrow"
    try:
        write_bytes(path, sink.getvalue())
    except OSError as e:
        raise PartFailedError(
            f"{path}: the answers could not be written ({e.strerror or e}); those before are kept: make room, and start the same "
            "command again"
        ) from e
    return path


def _half(logprobs: NDArray[Any]) -> NDArray[np.float16]:
    return np.maximum(logprobs, NO_PROBABILITY).astype(np.float16).ravel()


def shard_paths(folder: Path) -> list[Path]:
    """Whole shards, in the order they were written. A shard that is being written has another name."""
    return sorted((folder / "shards").glob("part-*.arrow"), key=_number)


def _number(path: Path) -> int:
    return int(path.stem.removeprefix("part-"))  # as text part-100000 would come before part-99999


def begin(folder: Path, meta: dict[str, Any]) -> set[str]:
    """Opens `folder` for the answers that `meta` describes and returns the ids of those already there.

    Raises InputError where it holds answers of another target, prompts or sampling.
    """
    if (folder / "meta.json").is_file():
        held = _meta(folder)
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


def first_heads(folder: Path, count: int) -> list[tuple[str, list[int], dict[int, float]]]:
    """Of the first shard's rows at most `count`, those whose answer began least certainly, since another model differs there
    the most: id, the tokens before that answer, and the recorded head (id -> probability) after them."""
    k, found = _meta(folder)["top_logprobs"], []
    for path in shard_paths(folder)[:1]:
        for row in _read(path).select(["id", "input_ids", "spans", "head_ids", "head_logprobs"]).to_pylist():
            if row["spans"]:
                p = np.exp(np.float64(row["head_logprobs"][:k])).tolist()
                found.append(
                    (row["id"], row["input_ids"][: row["spans"][0]], dict(zip(row["head_ids"], p, strict=False)))
                )
    return sorted(found, key=lambda one: (max(one[2].values()), one[0]))[:count]


def complete(folder: Path, run: dict[str, Any]) -> dict[str, Any]:
    """Marks the answers as whole and returns the statistics, `run` (what only the run knows) among them.

    Raises PartFailedError where a row is there twice.
    """
    meta = read_json(folder / "meta.json")
    ids = [id_ for path in shard_paths(folder) for id_ in _read(path)["id"].to_pylist()]
    if len(set(ids)) != len(ids):
        raise PartFailedError(
            f"{folder}: {len(ids) - len(set(ids))} rows are there twice, so two runs wrote at once: delete that folder and "
            "start the command once"
        )
    stats = statistics(folder) | run
    write_json(folder / "meta.json", {**meta, "complete": True, "stats": stats})
    return stats


def open_answers(folder: Path) -> Answers:
    """All answers in `folder`, memory-mapped. Raises InputError where there are none, or not all yet."""
    if not (folder / "meta.json").is_file():
        raise InputError(f"{folder}: no answers there (no meta.json): make them with `draftsmith generate`")
    meta = _meta(folder)
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
    """Counts over all whole shards: conversations, their prompt tokens (all that are not supervised) and answer tokens, how
    their last answers ended, the mean tail mass."""
    tables = [_read(path) for path in shard_paths(folder)]
    tokens = np.array([len(ids) for t in tables for ids in t["input_ids"]])
    spans = [spans_of(flat.as_py()) for t in tables for flat in t["spans"]]
    answer = np.array([sum(end - start for start, end in row) for row in spans])
    prompt = tokens - answer
    stops = sum(reason == "stop" for t in tables for reason in t["finish_reason"].to_pylist())
    tail = np.concatenate([t["tail_mass"].combine_chunks().flatten().to_numpy() for t in tables])
    return {
        "prompts": len(prompt),
        "answers": sum(map(len, spans)),
        "prompt_tokens": spread(prompt),
        "answer_tokens": spread(answer),
        "stop": stops,
        "length": len(prompt) - stops,
        "tail_mass_mean": float(tail.mean()) if len(tail) else None,
        "bytes": sum(path.stat().st_size for path in shard_paths(folder)),
    }


def _meta(folder: Path) -> dict[str, Any]:
    meta: dict[str, Any] = read_json(folder / "meta.json")
    if meta.get("schema") != SCHEMA:
        raise InputError(
            f"{folder}: answers of schema {meta.get('schema')!r}, this version reads {SCHEMA}: delete the folder and make "
            "them again with the same `draftsmith generate`"
        )
    return meta


def spread(counts: NDArray[np.int_]) -> dict[str, float]:
    """Total, mean, median, 90th percentile (both as lengths that occur) and largest."""
    p50, p90 = np.quantile(counts, [0.5, 0.9], method="higher")
    whole = {"total": int(counts.sum()), "mean": round(float(counts.mean()), 2)}
    return whole | {"p50": int(p50), "p90": int(p90), "max": int(counts.max())}


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
