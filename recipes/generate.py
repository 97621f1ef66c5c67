"""Lets the target answer prompts, or reads answers that are given, and records its distribution at every position.

draftsmith generate target=HuggingFaceTB/SmolLM2-135M-Instruct out=runs/data sets.train.prompts=my.jsonl
python recipes/generate.py target=./my-target out=runs/data sets.train.prompts=orders sets.train.limit=600
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

if __package__ in (None, ""):  # launched by path: sys.path[0] is recipes/, where `import distill` would find a script
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import numpy as np
from pydantic import Field, field_validator
from rich.console import Console
from rich.table import Table

from distill.answers import Answer, open_answers, spans_of, spread
from distill.generate import (
    Given,
    Job,
    choose_backend,
    generate,
    new_job,
    open_target,
    record,
    recorded_heads,
    unanswered,
)
from distill.in_servers import open_servers
from distill.prompts import Prompt, Turns, draw, heldout_split, load_prompts
from distill.requests import Answerer, Sampling, ending_ids, require_fit, require_template, text_config, tokenize
from distill.score import score
from distill.turns import Text, given_texts, longest_chat
from pairing.alignment import tokens_by_id
from pairing.errors import InputError
from pairing.pair import describe_model
from pairing.source import ModelSource, load_tokenizer, resolve
from recipes.config import Strict, guarded, parse
from recipes.run_folder import open_run


class SetConfig(Strict):
    prompts: str
    """orders, humaneval, a .jsonl or .parquet file with `prompt` or `messages` per row, a data set's folder or name; with
    answers=given also a folder of recorded answers"""
    answers: Turns | None = None
    """every: the target answers each user's message in order, its own answers in the history. last: the history stays as
    written, the last user's message is answered. given: the text's own answers stay, the target scores them. Left out:
    every; for orders last (their examples are turns)"""
    split: str | None = None
    """for orders train or test; for a data set its split (train where left out); a file has none"""
    limit: int | None = Field(default=None, ge=1)
    """at most so many prompts, drawn by seed; all where left out"""
    heldout: int | None = Field(default=None, ge=1)
    """hold so many prompts out into a set of its own, NAME-heldout: by a digest of the text, before limit, near-duplicates
    together"""
    max_tokens: int = Field(default=256, ge=1)
    """an answer ends by itself or after so many tokens"""
    system: str | None = None
    """a system message for the chats that have none; for orders it replaces instruction and examples"""


class GenerateConfig(Strict):
    target: str
    """the target: a hub id, a folder or a .gguf file"""
    out: Path
    """the run folder; each set's answers go to out/NAME"""
    sets: dict[str, SetConfig] = Field(min_length=1)
    """one or more sets of prompts, such as train and heldout"""
    temperature: float = Field(default=0.0, ge=0)
    """0 is greedy; use what you serve with"""
    top_logprobs: int = Field(default=32, ge=1)
    """how many of the most likely tokens are recorded per position; the rest is one number"""
    tail_samples: int = Field(default=0, ge=0)
    """ids drawn from the rest per position, with their log-probabilities; for answers=given alone"""
    seed: int = 0
    """decides which prompts are taken and, above temperature 0, what is drawn"""
    backend: Literal["auto", "vllm", "transformers"] = "auto"
    """auto takes vllm where it is installed; given answers are always scored in transformers"""
    servers: list[str] = Field(default=[])
    """vLLM servers of the target, such as [http://10.0.0.1:8000], instead of a back end in this process"""
    served_model: str | None = None
    """the target's name on the servers, where it is not its own"""
    per_server: int = Field(default=64, ge=1)
    """requests in flight at each server"""
    patience: float = Field(default=120, gt=0)
    """seconds with every server down before giving up; what is finished stays"""
    max_model_len: int | None = Field(default=None, ge=2)
    """the longest prompt and answer together, at most the target's own context, which is the default"""
    max_num_seqs: int = Field(default=96, ge=1)
    """how many prompts are answered at a time in this process"""
    skip_failed: int = Field(default=0, ge=0)
    """so many prompts of each set that cannot be answered are left out, named at the end and in meta.json; one more ends the
    run"""

    @field_validator("sets")
    @classmethod
    def _plain_names(cls, sets: dict[str, SetConfig]) -> dict[str, SetConfig]:
        for name, one in sets.items():
            if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", name) or name == "logs":
                raise ValueError(f"a set's name becomes a folder: letters, digits, - and _, and not logs, for {name!r}")
            if one.heldout and f"{name}-heldout" in sets:
                raise ValueError(f"{name}.heldout makes the set {name}-heldout, which is there already: rename one")
        return sets

    @field_validator("servers")
    @classmethod
    def _urls(cls, servers: list[str]) -> list[str]:
        for url in servers:
            if "@" in url:  # not repeated here: it would be written to config.yaml and to logs
                raise ValueError("a server's address holds no user and password: give the key in VLLM_API_KEY")
            if not re.fullmatch(r"https?://([\w.-]+|\[[0-9a-fA-F:.]+\])(:\d{1,5})?/?", url):
                raise ValueError(f"a server is http://host:port, without a path, not {url!r}")
        return list(dict.fromkeys(url.rstrip("/") for url in servers))


def context_of(config: GenerateConfig, target: ModelSource) -> int | None:
    """How many tokens a prompt and its answer may have; None where the target names no limit."""
    own: int | None = getattr(text_config(target.path), "max_position_embeddings", None)
    if config.max_model_len is not None and own is not None and config.max_model_len > own:
        raise InputError(f"max_model_len={config.max_model_len} is more than the target's own context of {own} tokens")
    return config.max_model_len or own


def plan(config: GenerateConfig, target: ModelSource, notes: Console) -> list[Job]:
    """Reads and checks everything that can be wrong, before anything is written or loaded."""

    def note(line: str) -> None:
        notes.print(line, markup=False)

    backend = "servers" if config.servers else choose_backend(config.backend)
    context, tokenizer, described = context_of(config, target), load_tokenizer(target.path), describe_model(target)
    rows = text_config(target.path).vocab_size
    jobs = []
    for name, one in config.sets.items():
        turns: Turns = one.answers or ("last" if one.prompts == "orders" else "every")
        if config.tail_samples and turns != "given":
            raise InputError(
                f"tail_samples={config.tail_samples}: set {name} is answered in {backend}, and vLLM gives the largest "
                "probabilities alone: leave it out here, then score what was generated in a second run "
                f"(sets.{name}.prompts={config.out / name} sets.{name}.answers=given tail_samples={config.tail_samples}, "
                "and another out)"
            )
        sampling = Sampling(one.max_tokens, config.temperature, config.top_logprobs, config.seed)
        source = one.prompts + (f" ({one.split})" if one.split else "")
        about: dict[str, Any] = {"turns": turns, "tail_samples": config.tail_samples}
        recorded = turns == "given" and (Path(one.prompts).expanduser() / "meta.json").is_file()
        parts: dict[str, Sequence[Any]]
        if recorded:
            given, about = _recorded(name, one, config, described)
            parts = {name: given}
        else:
            parts = {n: p if turns != "given" else _given(n, p, tokenizer, target, note) for n, p in
                     _prompts(name, one, turns, config, note).items()}  # fmt: skip
        for part, items in parts.items():
            if turns == "given":
                _require_given(part, items, context)
                requests = items
            else:
                requests = tokenize(items, tokenizer, config.target, every_turn=turns == "every")
                require_fit(requests, one.max_tokens, context, f"set {part}")
            jobs.append(
                new_job(
                    part,
                    config.out / part,
                    requests,
                    sampling,
                    target=described,
                    rows=rows,
                    backend="transformers" if turns == "given" else backend,
                    prompts_source=source,
                    skip_failed=config.skip_failed,
                    **about,
                )
            )
    return jobs


def _prompts(
    name: str, one: SetConfig, turns: Turns, config: GenerateConfig, note: Callable[[str], None]
) -> dict[str, list[Prompt]]:
    """The set's prompts, and those of NAME-heldout where some are held out."""
    if one.heldout is None:
        return {name: load_prompts(one.prompts, one.split, one.limit, config.seed, one.system, note, turns)}
    if one.prompts == "orders":
        raise InputError(f"sets.{name}.heldout: orders have a split of their own for that: give a set with split=test")
    prompts = load_prompts(one.prompts, one.split, None, config.seed, one.system, note, turns)
    rest, held = heldout_split(prompts, one.heldout)
    return {name: draw(rest, one.limit, config.seed), f"{name}-heldout": held}


def _given(
    name: str, prompts: Sequence[Prompt], tokenizer: Any, target: ModelSource, note: Callable[[str], None]
) -> list[Given]:
    """Each chat as the texts that hold its answers."""
    require_template(tokenizer, target.name)
    endings = ending_ids(target.path)
    given = [Given(one, given_texts(one, tokenizer, endings)) for one in prompts]
    split = sum(len(one.texts) > 1 for one in given)
    if split:
        note(f"set {name}: the target's template rewrites the history of {split} chats, which become several rows each")
    return given


def _recorded(
    name: str, one: SetConfig, config: GenerateConfig, target: dict[str, Any]
) -> tuple[list[Given], dict[str, Any]]:
    """Recorded answers as they stand, token by token, and what is known of how they were made."""
    if one.split or one.heldout or one.system:
        raise InputError(f"sets.{name}: recorded answers are taken as they are: leave out split, heldout and system")
    answers = open_answers(Path(one.prompts).expanduser())
    if answers.meta["target"]["digests"]["tokenizer"] != target["digests"]["tokenizer"]:
        raise InputError(
            f"sets.{name}: {one.prompts} is in the tokens of {answers.meta['target']['name']}, and {config.target} has another "
            "tokenizer: generate answers with this target"
        )
    rows = [
        row for row in answers.data.select_columns(["id", "messages", "tags", "input_ids", "spans"]) if row["spans"]
    ]
    given = []
    for row in rows:
        prompt = Prompt(row["id"], json.loads(row["messages"]), json.loads(row["tags"]))
        given.append(Given(prompt, [Text(prompt, row["input_ids"], spans_of(row["spans"]))]))
    if one.limit and one.limit < len(given):
        kept = {p.id for p in draw([g.prompt for g in given], one.limit, config.seed)}
        given = [g for g in given if g.prompt.id in kept]
    made = {"turns": answers.meta["turns"], "sampled": answers.meta["sampling"]}
    return given, made | {"tail_samples": config.tail_samples}


def _require_given(name: str, given: Sequence[Given], context: int | None) -> None:
    texts = [text for one in given for text in one.texts]
    long = [text for text in texts if context is not None and len(text.input_ids) > context]
    if long:
        raise InputError(
            f"set {name}: {len(long)} of {len(texts)} texts are longer than the context of {context} tokens: the first is "
            f"{long[0].prompt.id} with {len(long[0].input_ids)} tokens: shorten these or leave them out"
        )
    share = sum(text.supervised for text in texts) / sum(len(text.input_ids) for text in texts)
    if not 0 < share < 1:
        raise InputError(
            f"set {name}: {share:.0%} of its tokens are answers, so the template does not tell answers from prompts: let the "
            "target answer (answers=every)"
        )


def sizes(job: Job) -> dict[str, Any]:
    """What the job will take: exact for prompts and given answers, at most for answers and bytes. Of later turns the prompts
    are counted without the answers before them."""
    texts = [text for one in job.requests if isinstance(one, Given) for text in one.texts]
    prompt_tokens = [len(text.input_ids) - text.supervised for text in texts]
    answers = sum(text.supervised for text in texts)
    for one in job.requests:
        if not isinstance(one, Given):
            prompt_tokens.append(len(one.prompt_ids))
            answers += (1 + len(one.later)) * job.sampling.max_tokens
    words = sum(len(json.dumps(r.prompt.messages, ensure_ascii=False).encode()) for r in job.requests)
    per_token = 6 * (job.sampling.top_logprobs + job.meta["tail_samples"]) + 8
    return {
        "prompts": len(job.requests),
        "prompt_tokens": sum(prompt_tokens),
        "prompt_lengths": spread(np.array(prompt_tokens)),
        "longest_prompt": max(prompt_tokens),
        "answer_tokens_at_most": answers,
        "bytes_at_most": answers * per_token + 4 * sum(prompt_tokens) + words,
    }


def run(config: GenerateConfig, notes: Console) -> dict[str, dict[str, Any]]:
    """Answers every set, going on where an earlier run of this config stopped; returns each set's statistics."""
    target = resolve(config.target)
    if target.note:
        notes.print(target.note, markup=False)
    jobs = plan(config, target, notes)
    # a run goes on with other servers, or fewer at a time, or without what stopped it
    free = ("servers", "served_model", "per_server", "patience", "max_num_seqs", "skip_failed")
    open_run(config.out, config, free=free)
    todo = {job.name: unanswered(job) for job in jobs}
    asked = [job for job in jobs if not job.given]
    stats: dict[str, dict[str, Any]] = {}
    if any(todo[job.name] for job in asked):  # no engine is started for nothing
        tokenizer = load_tokenizer(target.path)
        with _answering(config, target, tokenizer, asked, notes) as (answerer, context, servers):
            for job in asked:
                stats[job.name] = generate(
                    job,
                    todo[job.name],
                    answerer,
                    tokenizer,
                    context,
                    lambda line: notes.print(line, markup=False),
                    _since(servers(), servers) if config.servers else None,
                )
            for url, counts in servers().items():
                said = ", ".join(f"{v} {k}" for k, v in counts.items() if v is not None and k != "failed")
                notes.print(f"{url}: {said}", markup=False)
    for job in jobs:
        if job.name not in stats:
            stats[job.name] = record(job, len(todo[job.name]), _scores(config, target, todo[job.name]))
        for one in stats[job.name].get("left_out", []):
            notes.print(f"set {job.name} is without prompt {one['id']}: {one['reason']}", markup=False)
    return {job.name: stats[job.name] for job in jobs}


def _since(before: dict[str, Any], servers: Callable[[], dict[str, Any]]) -> Callable[[], dict[str, Any]]:
    """What each server did after `before`: a set's share of the run's counts."""

    def counts() -> dict[str, Any]:
        return {
            url: {k: v - before[url][k] if isinstance(v, int) else v for k, v in now.items()}
            for url, now in servers().items()
        }

    return counts


def _scores(config: GenerateConfig, target: ModelSource, given: Sequence[Given]) -> Iterator[list[Answer]]:
    if not given:
        return iter(())
    return score(
        target,
        given,
        top_logprobs=config.top_logprobs,
        tail_samples=config.tail_samples,
        real=max(tokens_by_id(load_tokenizer(target.path))) + 1,
        seed=config.seed,
    )


@contextmanager
def _answering(
    config: GenerateConfig, target: ModelSource, tokenizer: Any, jobs: Sequence[Job], notes: Console
) -> Iterator[tuple[Answerer, int | None, Callable[[], dict[str, Any]]]]:
    """What answers: servers or a back end in this process; the context it has, and what tells the counts per server."""
    own, requests = context_of(config, target), [(r, job.sampling.max_tokens) for job in jobs for r in job.requests]
    if config.servers:
        with open_servers(
            config.servers,
            target,
            tokenizer,
            served_model=config.served_model,
            top_logprobs=config.top_logprobs,
            probes=[r for r, _ in requests[:3] if not isinstance(r, Given)],
            recorded=recorded_heads(jobs),
            per_server=config.per_server,
            patience=config.patience,
            api_key=os.environ.get("VLLM_API_KEY"),
            note=lambda line: notes.print(line, markup=False),
        ) as (answerer, theirs, counts):
            context = min((c for c in (own, theirs) if c is not None), default=None)
            for job in jobs:
                require_fit(
                    [r for r in job.requests if not isinstance(r, Given)],
                    job.sampling.max_tokens,
                    context,
                    f"set {job.name} on these servers",
                )
            yield answerer, context, counts
        return
    backend, log = choose_backend(config.backend), config.out / "logs" / "vllm.log"
    longest = max(longest_chat(r, n, tokenizer) for r, n in requests if not isinstance(r, Given))
    context = config.max_model_len or min(longest, own or longest)
    if backend == "vllm":
        notes.print(f"starting vLLM, half a minute or more; its log: {log}", markup=False)
    with open_target(
        backend,
        target,
        context=context,
        top_logprobs=config.top_logprobs,
        max_num_seqs=config.max_num_seqs,
        log=log,
    ) as answerer:
        yield answerer, context, lambda: {}


def main(argv: list[str]) -> int:
    config, args = parse(GenerateConfig, argv, about=(__doc__ or "").splitlines()[0])
    notes = Console(stderr=True, highlight=False, soft_wrap=True)
    if args.dry_run:
        jobs = plan(config, resolve(config.target), notes)
        planned = {job.name: sizes(job) for job in jobs}
        backend = jobs[0].meta["backend"]
        if args.json:
            print(json.dumps({"out": str(config.out), "backend": backend, "sets": planned}, indent=2))
            return 0
        show({job.name: _planned(job, planned[job.name]) for job in jobs})
        print(f"{config.target} answers in {backend}; nothing was written")
        return 0
    stats = run(config, notes)
    if args.json:
        print(json.dumps({"out": str(config.out), "sets": stats}, indent=2))
        return 0
    show({name: _made(s) for name, s in stats.items()})
    return 0


def _planned(job: Job, s: Mapping[str, Any]) -> dict[str, str]:
    lengths = "/".join(str(s["prompt_lengths"][key]) for key in ("p50", "p90", "max"))
    return {
        "answers": str(job.meta["turns"]),
        "prompts": str(s["prompts"]),
        "prompt tokens": str(s["prompt_tokens"]),
        "  p50/p90/max": lengths,
        "answer tokens, at most": str(s["answer_tokens_at_most"]),
        "disk, at most": f"{s['bytes_at_most'] / 1e6:.1f} MB",
    }


def _made(s: Mapping[str, Any]) -> dict[str, str]:
    rate, asked, said = s["last_run"]["tokens_per_s"], s["prompt_tokens"], s["answer_tokens"]
    return {
        "rows": str(s["prompts"]),
        "answers": str(s["answers"]),
        "prompt tokens": str(asked["total"]),
        "  p50/p90/max": f"{asked['p50']}/{asked['p90']}/{asked['max']}",
        "answer tokens": str(said["total"]),
        "  p50/p90/max, each answer": f"{said['p50']}/{said['p90']}/{said['max']}",
        "supervised": f"{said['total'] / (said['total'] + asked['total']):.0%}",
        "ended by itself": f"{s['stop'] / s['prompts']:.0%}",
        "tail mass": f"{s['tail_mass_mean']:.4f}",
        "disk": f"{s['bytes'] / 1e6:.1f} MB",
        "tokens/s": f"{rate}" if rate else "",
    }


def show(sets: Mapping[str, Mapping[str, str]]) -> None:
    """A column a set: few sets with many figures each stay readable in 80 columns."""
    table = Table("set", *sets)
    for label in next(iter(sets.values())):
        table.add_row(label, *(figures[label] for figures in sets.values()))
    Console().print(table)


if __name__ == "__main__":
    raise SystemExit(guarded(main))
