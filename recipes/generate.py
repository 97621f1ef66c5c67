"""Lets the target answer prompts, and records its distribution at every position.

draftsmith generate target=HuggingFaceTB/SmolLM2-135M-Instruct out=runs/data sets.train.prompts=my.jsonl
python recipes/generate.py target=./my-target out=runs/data sets.train.prompts=orders sets.train.limit=600
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any, Literal

if __package__ in (None, ""):  # launched by path: sys.path[0] is recipes/, where `import distill` would find a script
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from pydantic import Field, field_validator
from rich.console import Console
from rich.table import Table

from distill.generate import Job, choose_backend, generate, new_job, open_target, unanswered
from distill.prompts import load_prompts
from distill.requests import Sampling, require_fit, text_config, tokenize
from pairing.errors import InputError
from pairing.pair import describe_model
from pairing.source import ModelSource, load_tokenizer, resolve
from recipes.config import Strict, guarded, parse
from recipes.run_folder import open_run


class SetConfig(Strict):
    prompts: str
    """orders, humaneval, a .jsonl file with `prompt` or `messages` per line, or a data set's folder or name"""
    split: str | None = None
    """for orders train or test; for a data set its split (train where left out); a file has none"""
    limit: int | None = Field(default=None, ge=1)
    """at most so many prompts, drawn by seed; all where left out"""
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
    seed: int = 0
    """decides which prompts are taken and, above temperature 0, what is drawn"""
    backend: Literal["auto", "vllm", "transformers"] = "auto"
    """auto takes vllm where it is installed"""
    max_model_len: int | None = Field(default=None, ge=2)
    """the longest prompt and answer together, at most the target's own context, which is the default"""
    max_num_seqs: int = Field(default=96, ge=1)
    """how many prompts are answered at a time"""

    @field_validator("sets")
    @classmethod
    def _plain_names(cls, sets: dict[str, SetConfig]) -> dict[str, SetConfig]:
        for name in sets:
            if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", name) or name == "logs":
                raise ValueError(f"a set's name becomes a folder: letters, digits, - and _, and not logs, for {name!r}")
        return sets


def context_of(config: GenerateConfig, target: ModelSource) -> int | None:
    """How many tokens a prompt and its answer may have; None where the target names no limit."""
    own: int | None = getattr(text_config(target.path), "max_position_embeddings", None)
    if config.max_model_len is not None and own is not None and config.max_model_len > own:
        raise InputError(f"max_model_len={config.max_model_len} is more than the target's own context of {own} tokens")
    return config.max_model_len or own


def plan(config: GenerateConfig, target: ModelSource, notes: Console) -> list[Job]:
    """Reads and checks everything that can be wrong, before anything is written or loaded."""
    backend, context = choose_backend(config.backend), context_of(config, target)
    tokenizer, described = load_tokenizer(target.path), describe_model(target)
    rows = text_config(target.path).vocab_size
    jobs = []
    for name, one in config.sets.items():
        prompts = load_prompts(
            one.prompts, one.split, one.limit, config.seed, one.system, lambda line: notes.print(line, markup=False)
        )
        requests = tokenize(prompts, tokenizer, config.target)
        require_fit(requests, one.max_tokens, context, f"set {name}")
        sampling = Sampling(one.max_tokens, config.temperature, config.top_logprobs, config.seed)
        source = one.prompts + (f" ({one.split})" if one.split else "")
        jobs.append(
            new_job(
                name,
                config.out / name,
                requests,
                sampling,
                target=described,
                rows=rows,
                backend=backend,
                prompts_source=source,
            )
        )
    return jobs


def sizes(job: Job) -> dict[str, Any]:
    """What the job will take: exact for prompts, at most for answers and bytes."""
    prompt_tokens = [len(r.prompt_ids) for r in job.requests]
    answer_tokens = len(job.requests) * job.sampling.max_tokens
    texts = sum(len(json.dumps(r.prompt.messages, ensure_ascii=False).encode()) for r in job.requests)
    return {
        "prompts": len(job.requests),
        "prompt_tokens": sum(prompt_tokens),
        "longest_prompt": max(prompt_tokens),
        "answer_tokens_at_most": answer_tokens,
        "bytes_at_most": answer_tokens * (6 * job.sampling.top_logprobs + 8) + 4 * sum(prompt_tokens) + texts,
    }


def run(config: GenerateConfig, notes: Console) -> dict[str, dict[str, Any]]:
    """Answers every set, going on where an earlier run of this config stopped; returns each set's statistics."""
    target = resolve(config.target)
    if target.note:
        notes.print(target.note, markup=False)
    jobs = plan(config, target, notes)
    open_run(config.out, config)
    todo = [unanswered(job) for job in jobs]
    if not any(todo):  # no engine is started for nothing
        return {job.name: generate(job, [], lambda *_: iter(())) for job in jobs}
    backend, log = choose_backend(config.backend), config.out / "logs" / "vllm.log"
    context = max(len(r.prompt_ids) + job.sampling.max_tokens for job in jobs for r in job.requests)
    if backend == "vllm":
        notes.print(f"starting vLLM, half a minute or more; its log: {log}", markup=False)
    with open_target(
        backend,
        target,
        context=config.max_model_len or context,
        top_logprobs=config.top_logprobs,
        max_num_seqs=config.max_num_seqs,
        log=log,
    ) as answerer:
        return {job.name: generate(job, rest, answerer) for job, rest in zip(jobs, todo, strict=True)}


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
        table = Table("set", "prompts", "prompt tokens", "longest", "answer tokens, at most", "disk, at most")
        for name, s in planned.items():
            table.add_row(
                name,
                f"{s['prompts']}",
                f"{s['prompt_tokens']}",
                f"{s['longest_prompt']}",
                f"{s['answer_tokens_at_most']}",
                f"{s['bytes_at_most'] / 1e6:.1f} MB",
            )
        Console().print(table)
        print(f"{config.target} answers in {backend}; nothing was written")
        return 0
    stats = run(config, notes)
    if args.json:
        print(json.dumps({"out": str(config.out), "sets": stats}, indent=2))
        return 0
    table = Table("set", "prompts", "prompt tokens", "answer tokens", "mean", "ended", "tail mass", "disk", "tok/s")
    for name, s in stats.items():
        rate = s["last_run"]["tokens_per_s"]
        table.add_row(
            name,
            f"{s['prompts']}",
            f"{s['prompt_tokens']['total']}",
            f"{s['answer_tokens']['total']}",
            f"{s['answer_tokens']['mean']:.1f}",
            f"{s['stop'] / s['prompts']:.0%}",
            f"{s['tail_mass_mean']:.4f}",
            f"{s['bytes'] / 1e6:.1f} MB",
            f"{rate}" if rate else "",
        )
    Console().print(table)
    return 0


if __name__ == "__main__":
    raise SystemExit(guarded(main))
