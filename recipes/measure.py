"""Serves each arm in vLLM and measures acceptance, speed and losslessness on the same prompts, side by side.

draftsmith measure --config measure.yaml
draftsmith measure target=… drafters.drafter=runs/drafter workloads.mine.answers=runs/data/heldout out=runs/measure
draftsmith measure --config measure.yaml --require "speedup>=1.2@c1" --require "exact_match>=1"    # exit 1 where not met

Arms: the target alone, each drafter, vLLM's n-gram and suffix proposers, speculator checkpoints that are given, and
transformers' own assisted generation offline. Prompts come from answers folders (`generate`), whose
recorded distribution also gives the acceptance length that is to be expected, and explains outputs that differ.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal

if __package__ in (None, ""):  # launched by path: sys.path[0] is recipes/, where `import distill` would find a script
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from accelerate import Accelerator
from pydantic import BeforeValidator, Field
from rich.console import Console

from distill.answers import Answers, open_answers, require_target
from distill.batches import Rows, check_rows
from distill.evaluate import score_prompts
from distill.evaluate_parallel import score_rounds
from eval import requirements, server
from eval.measure import AGAIN, Arm, Plan, Request, measure
from eval.report import markdown_results
from eval.results import Offline, write_results
from eval.verdict import answers as judged
from pairing.acceptance import acceptance_length_of, replay, replay_rounds, uniform_starts
from pairing.alignment import check_pair, tokens_by_id
from pairing.bootstrap import interval
from pairing.budgets import device_memory, servers_findings
from pairing.card import write_card
from pairing.engine import Engine, require_vllm
from pairing.errors import InputError
from pairing.files import read_json, read_jsonl, write_jsonl
from pairing.mask_token import mask_id_of
from pairing.pair import update_pair
from pairing.parallel_drafting import trained_findings
from pairing.preflight import Serving, require_start
from pairing.serving_plan import Model
from pairing.source import ModelSource, load_model, load_tokenizer, resolve
from pairing.speculators import require_speculator, require_suffix
from pairing.weights import read_headers
from recipes.config import Strict, guarded, parse
from recipes.run_folder import open_run, provenance


def part_of_one(value: Any) -> Any:
    """A part that is given in percent, as "3%", as a number, 0.03; anything else as it is."""
    found = re.fullmatch(r"\s*([0-9.]+)\s*%\s*", value) if isinstance(value, str) else None
    try:
        return float(found[1]) / 100 if found else value
    except ValueError:
        return value


class WorkloadConfig(Strict):
    answers: Path
    """answers folder of `generate`: its prompts are sent"""
    limit: int = Field(default=16, ge=2)
    """prompts sent; groups keep their shares"""
    max_tokens: int = Field(default=128, ge=1)
    """longest answer; answers end where they end by themselves"""


class SpeculatorConfig(Strict):
    model: Path
    """folder of a checkpoint that drafts from the target's hidden states"""
    method: Literal["auto", "eagle3", "eagle", "medusa", "mlp_speculator"] = "auto"
    """auto: what its config.json says"""
    num_speculative_tokens: int | None = Field(default=None, ge=1, le=32)
    """K of this arm; null: num_speculative_tokens"""


class MeasureConfig(Strict):
    target: str
    """hub id, folder or .gguf file"""
    drafters: dict[str, str] = Field(default_factory=dict)
    """arm name -> drafter folder"""
    speculators: dict[str, SpeculatorConfig] = Field(default_factory=dict)
    """arm name -> head that others trained for this target: EAGLE, EAGLE-3, Medusa"""
    workloads: dict[str, WorkloadConfig]
    """name -> prompts"""
    out: Path
    """run folder: results.jsonl, requests.jsonl, logs"""
    num_speculative_tokens: int = Field(default=4, ge=1, le=32)
    """K, of every arm that drafts"""
    draft_sample_method: Literal["greedy", "probabilistic"] = "greedy"
    """how drafters draw: argmax, or from their distribution"""
    parallel_drafting: Literal["both", "only", "off"] = "both"
    """of drafters that were trained for it: measured both ways, the arm NAME-parallel taking all drafts from one pass"""
    parallel_num_speculative_tokens: int | None = Field(default=None, ge=1, le=32)
    """K of the parallel arms, whose drafts cost less and so may be more; null: num_speculative_tokens"""
    ngram: bool = True
    """measure vLLM's n-gram proposer too"""
    suffix: bool = False
    """measure vLLM's suffix proposer too; needs the package arctic-inference"""
    assisted: bool = False
    """measure assisted generation and prompt lookup in transformers too, offline, beside its own target"""
    arms: list[str] | None = None
    """of the arms that this config makes those to measure, beside the target alone; null: all"""
    temperatures: list[Annotated[float, Field(ge=0)]] = Field(default=[0.0], min_length=1)
    """of the target's sampling, in every arm"""
    concurrencies: list[Annotated[int, Field(ge=1)]] = Field(default=[1], min_length=1)
    """requests in flight"""
    rates: list[Annotated[float, Field(gt=0)]] = Field(default=[])
    """requests/s that arrive by a Poisson process, whoever is still being answered; one server at a time"""
    repeats: int = Field(default=2, ge=1)
    """times that every prompt is sent to every arm; with `precision` at most so many"""
    minutes: float | None = None
    """begin no further repeat after this long; the first is always finished"""
    precision: Annotated[float, Field(gt=0, lt=1), BeforeValidator(part_of_one)] | None = None
    """begin no further repeat once every speedup's 95 % interval is this narrow: 3% or 0.03 is ± 3 %; also --precision"""
    aa: bool = False
    """serve the target alone a second time: its "speedup" shows the machine's noise"""
    require: list[str] = Field(default_factory=list)
    """what must be met for exit code 0, as "speedup>=1.2@c1" (docs/measure.md); also --require, repeatable"""
    seed: int = 0
    """of sampling"""
    warmup: int = Field(default=2, ge=0)
    """requests to each server before anything is timed"""
    resident: bool | None = None
    """all servers up at once, arms interleaved by prompt; false: one server at a time, interleaved by repeat; null: all at once
    where their memory is free"""
    group_by: str | None = "seen"
    """prompt tag whose values are reported apart"""
    dtype: str = "auto"
    """weights and activations; auto: float32 on the CPU back end, the model's own elsewhere"""
    enforce_eager: bool = False
    """skip compilation, in every arm"""
    max_model_len: int = 1024
    """context of the engine, in tokens"""
    kv_cache_gib: int = 1
    """CPU back end: KV cache of each server"""
    start_timeout_s: float = 900
    """how long a server may take to answer"""
    request_timeout_s: float = Field(default=600, gt=0)
    """how long one whole answer may take; an arm that takes longer is void"""
    record: bool = True
    """write measurements and what to serve with into each drafter's pair.json"""


def plan_of(config: MeasureConfig, engine: Engine) -> tuple[Plan, ModelSource, dict[str, Answers]]:
    """Everything checked that can be before a server starts. Raises InputError."""
    if config.rates and config.resident:
        raise InputError(
            "rates: requests that arrive by the clock would meet servers that share this machine with each other: give "
            "resident=false"
        )
    target = resolve(config.target)
    arms = [Arm("target", "target"), *([Arm(AGAIN, "target")] if config.aa else [])]
    for name, folder in config.drafters.items():
        if name in ("target", "ngram", "suffix", AGAIN):
            raise InputError(f"drafters.{name}: that name is taken: choose another")
        source = resolve(folder)
        drafter, report = source.path, check_pair(target, source)
        if not report["aligned"]:
            worst = next(f for f in report["findings"] if f["level"] in ("blocks", "repairable"))
            raise InputError(f"drafters.{name}: {drafter} does not fit the target: {worst['what']} ({worst['fix']})")
        arms += drafter_arms(config, name, drafter)
    arms += speculator_arms(config, {a.name for a in arms}, read_json(target.path / "config.json"), engine)
    if config.ngram:
        arms.append(Arm("ngram", "ngram", None, config.num_speculative_tokens))
    if config.suffix:
        require_suffix()
        arms.append(Arm("suffix", "suffix", None, config.num_speculative_tokens))
    arms = wanted(config, arms)
    answers = {name: open_answers(w.answers) for name, w in config.workloads.items()}
    workloads = {}
    for name, workload in config.workloads.items():
        require_target(answers[name], target)
        workloads[name] = chosen(answers[name], workload, config.group_by)
        longest = max(len(r.prompt_ids) for r in workloads[name]) + workload.max_tokens
        if longest > config.max_model_len:
            raise InputError(
                f"workloads.{name}: prompt and answer take up to {longest} tokens, max_model_len is {config.max_model_len}: "
                f"give max_model_len={longest} or a smaller workloads.{name}.max_tokens"
            )
    resident = not config.rates and side_by_side(config, target.path, arms, engine)
    settings = server.Settings(
        dtype="float32" if config.dtype == "auto" and engine.backend == "cpu" else config.dtype,
        max_model_len=config.max_model_len,
        # with arrivals by the clock nothing else says how many are in flight
        max_num_seqs=max(64 if config.rates else 8, *config.concurrencies),
        enforce_eager=config.enforce_eager,
        kv_cache_gib=config.kv_cache_gib,
        # servers that live side by side share the GPU
        gpu_memory_utilization=0.9 / len(arms) if resident else 0.9,
    )
    for arm in arms:
        if arm.kind == "draft_model":
            require_start(target, resolve(str(arm.model)), preflight_of(settings, arm, engine.backend))
    plan = Plan(
        target.path, arms, workloads, settings, config.repeats, config.minutes, tuple(config.concurrencies),
        tuple(config.temperatures), config.seed, config.warmup, resident, start_timeout_s=config.start_timeout_s,
        precision=config.precision, rates=tuple(config.rates), request_timeout_s=config.request_timeout_s,
    )  # fmt: skip
    return plan, target, answers


def wanted(config: MeasureConfig, arms: list[Arm]) -> list[Arm]:
    """The target and those of `arms` that the config names. Raises InputError for a name that none has."""
    if config.arms is None:
        return arms
    names = [arm.name for arm in arms if arm.kind != "target"]
    if unknown := sorted(set(config.arms) - set(names)):
        raise InputError(f"arms: no arm is called {', '.join(unknown)}: there are {', '.join(names) or 'none'}")
    return [arm for arm in arms if arm.kind == "target" or arm.name in config.arms]


def side_by_side(config: MeasureConfig, target: Path, arms: list[Arm], engine: Engine) -> bool:
    """Whether all servers are up at once. Raises InputError where that is asked for and the system would end one of them."""
    if config.resident is False or engine.backend != "cpu":  # a GPU's memory is shared out by a flag
        return config.resident is not False
    folders = [[m for m in (target, arm.model) if m is not None] for arm in arms]
    read = {m: Model(read_json(m / "config.json"), read_headers(m)) for pair in folders for m in pair}
    serving = Serving(dtype="float32" if config.dtype == "auto" else config.dtype, kv_cache_gib=config.kv_cache_gib)
    over = servers_findings([[read[m] for m in pair] for pair in folders], device_memory("cpu"), serving)
    if over and config.resident:
        fix = "give resident=false (one server at a time), name fewer arms (arms=[…]), or free memory"
        raise InputError(f"resident=true: {over[0].what}: {fix}")
    return not over


def drafter_arms(config: MeasureConfig, name: str, drafter: Path) -> list[Arm]:
    """One by one, in parallel, or both where the drafter's config names a mask token."""
    one = Arm(name, "draft_model", drafter, config.num_speculative_tokens, config.draft_sample_method)
    if config.parallel_drafting == "off" or mask_id_of(read_json(drafter / "config.json")) is None:
        return [one]
    K = config.parallel_num_speculative_tokens or config.num_speculative_tokens
    parallel = replace(one, name=f"{name}-parallel", num_speculative_tokens=K, parallel_drafting=True)
    return [parallel] if config.parallel_drafting == "only" else [one, parallel]


def speculator_arms(config: MeasureConfig, taken: set[str], target: dict[str, Any], engine: Engine) -> list[Arm]:
    """Heads have no vocabulary to compare; their sizes must be the target's."""
    arms = []
    for name, one in config.speculators.items():
        if name in taken | {"ngram", "suffix"}:
            raise InputError(f"speculators.{name}: that name is taken: choose another")
        K = one.num_speculative_tokens or config.num_speculative_tokens
        method = require_speculator(f"speculators.{name}", one.model, one.method, K, target, engine)
        arms.append(Arm(name, "speculator", one.model, K, method=method))
    return arms


def preflight_of(settings: server.Settings, arm: Arm, backend: str) -> Serving:
    """What an arm asks of the engine, for pairing.preflight to look at before anything starts."""
    forced = os.environ.get("VLLM_USE_V2_MODEL_RUNNER")
    return Serving(
        num_speculative_tokens=arm.num_speculative_tokens,
        max_model_len=settings.max_model_len,
        max_num_seqs=settings.max_num_seqs,
        dtype=settings.dtype,
        gpu_memory_utilization=settings.gpu_memory_utilization,
        kv_cache_gib=settings.kv_cache_gib if backend == "cpu" else None,
        speculative_config={k: v for k, v in (arm.speculation() or {}).items() if k not in ("method", "model")},
        force_v2=None if forced is None else forced == "1",
    )


def chosen(answers: Answers, workload: WorkloadConfig, group_by: str | None) -> list[Request]:
    """The first `limit` prompts by id, which is a digest and so a fair draw; each group keeps its share. A conversation
    counts once, and is asked for its last answer."""
    groups: dict[str | None, list[Request]] = defaultdict(list)
    for row in answers.data.select_columns(["id", "input_ids", "spans", "tags"]):
        if not row["spans"]:
            continue
        tags = json.loads(row["tags"])
        group = f"{group_by}={json.dumps(tags[group_by])}" if group_by in tags else None
        prompt_ids = row["input_ids"][: row["spans"][-2]]
        groups[group].append(Request(row["id"], prompt_ids, workload.max_tokens, group, tags))
    share = min(1.0, workload.limit / sum(map(len, groups.values())))
    return [r for requests in groups.values() for r in requests[: max(1, round(share * len(requests)))]]


def expected(plan: Plan, answers: dict[str, Answers], real: int) -> dict[tuple[str, str, str | None], Offline]:
    """(arm, workload, group) -> τ by replay: the drafter teacher-forced on the target's recorded answers, as far as they are
    asked for."""
    accelerator, out = Accelerator(), {}
    for arm in plan.arms:
        if arm.model is None or arm.kind != "draft_model":
            continue
        model = load_model(arm.model).to(accelerator.device)
        for name, requests in plan.workloads.items():
            temperature = float(answers[name].meta.get("sampling", {}).get("temperature", 0.0))
            if temperature and arm.draft_sample_method != "greedy":
                continue  # w is top-1 agreement here, which is the chance of acceptance for argmax drafts alone
            rows = check_rows(
                answers[name],
                name,
                rows=model.config.vocab_size,
                real=real,
                context=model.config.max_position_embeddings,
            )
            accepted = last_rounds(accelerator, model, rows, arm)
            for group in {None, *(r.group for r in requests)}:
                asked = [r for r in requests if group in (None, r.group) and r.id in accepted]
                w = [accepted[r.id][: r.max_tokens] for r in asked]
                if one := offline(w, arm, temperature):
                    out[arm.name, name, group] = one
    return out


def offline(w: list[Any], arm: Arm, temperature: float) -> Offline | None:
    """What is to be expected by each prompt's chances of acceptance, as `last_rounds` gives them; None where they hold no
    round: answers of one token, which comes of the prompt."""
    found = (replay_rounds if arm.parallel_drafting else replay)(w, arm.num_speculative_tokens)
    tau = found.acceptance_length
    if not found.rounds_P.sum():
        return None
    low, high = found.acceptance_length_low, found.acceptance_length_high
    if (
        temperature
    ):  # the served answers are another draw than the recorded ones: both have the noise of as many prompts
        below, above = interval(lambda w_RP: acceptance_length_of(found, w_RP), len(w))
        low, high = min(low, tau - 2**0.5 * (tau - below)), max(high, tau + 2**0.5 * (above - tau))
    forced = None if arm.parallel_drafting else uniform_starts(w, arm.num_speculative_tokens)
    return Offline(temperature, tau, (low, high), None if forced is None or forced != forced else forced)


def last_rounds(accelerator: Accelerator, model: Any, rows: Rows, arm: Arm) -> dict[str, Any]:
    """What is accepted of each prompt's last answer, which is the one that is asked for, as `replay` or `replay_rounds`
    takes it."""
    mask = mask_id_of(model.config.to_dict())
    if not arm.parallel_drafting or mask is None:
        return {s.id: s.accepted[-1] for s in score_prompts(accelerator, model, rows, batch_size=8)}
    scores = score_rounds(accelerator, model, rows, mask, arm.num_speculative_tokens, batch_size=8)
    return {s.id: s.accepted[-1] for s in scores}


def recorded(
    answers: dict[str, Answers],
) -> tuple[dict[tuple[str, str, int], dict[int, float]], dict[tuple[str, str], list[int]]]:
    """What the target's own distribution was along its recorded answers, each row's last one, and those answers."""
    log_probs: dict[tuple[str, str, int], dict[int, float]] = {}
    references: dict[tuple[str, str], list[int]] = {}
    for name, held in answers.items():
        k = held.meta["top_logprobs"]
        for row in held.data:
            if not row["spans"]:
                continue
            start, end = row["spans"][-2:]
            references[name, row["id"]] = row["input_ids"][start:end]
            before = len(row["tail_mass"]) - (end - start)  # positions of the answers before it
            for at in range(end - start):
                span = slice((before + at) * k, (before + at + 1) * k)
                log_probs[name, row["id"], at] = dict(
                    zip(row["head_ids"][span], row["head_logprobs"][span], strict=True)
                )
    return log_probs, references


def record(plan: Plan, rows: list[dict[str, Any]], where: Mapping[str, Any]) -> None:
    """Into each measured drafter's pair.json and card: what was measured, where (`provenance`), what to serve it with."""
    for model in dict.fromkeys(a.model for a in plan.arms):
        if model is None or not (model / "pair.json").is_file():
            continue
        arms = {a.name: a for a in plan.arms if a.model == model}
        mine = [{**r, "answer": answer, "reason": why} for r, answer, why in judged(rows) if r["arm"] in arms]
        # both ways of drafting may be among them
        arm = arms[max(mine, key=lambda r: (r["answer"] == "faster", r["speedup"] or 0.0))["arm"]]
        keep = ("arm", "workload", "temperature", "concurrency", "rate", "num_speculative_tokens", "parallel_drafting",
                "draft_acceptance_rate", "acceptance_length", "speedup", "speedup_interval", "exact_match", "void",
                "answer", "reason", "versions")  # fmt: skip
        update_pair(
            model,
            measurements=[{k: r.get(k) for k in keep} for r in mine],
            measured={"date": datetime.now(UTC).strftime("%Y-%m-%d"), "machine": machine(where)},
            serve={
                "num_speculative_tokens": arm.num_speculative_tokens,
                "draft_sample_method": arm.draft_sample_method,
                "parallel_drafting": arm.parallel_drafting,
                "num_speculative_tokens_per_batch_size": None,
                "command": server.serve_line(server.serve_words(plan.target, arm.speculation(), plan.settings, 8000)),
            },
        )
        write_card(model)


def machine(where: Mapping[str, Any]) -> str:
    """The devices of a provenance in a few words."""
    return ", ".join(where["gpus"]) or f"{where['cpu'] or 'a CPU'} ({where['cores']} cores)"


def with_requirements(argv: list[str]) -> list[str]:
    """Each `--require TEXT` or `--require=TEXT` taken out, and all of them as an override of the key; `--precision` too."""
    words, texts = iter(argv), []
    rest = []
    for word in words:
        if word == "--require" or word.startswith("--require="):
            text = word.partition("=")[2] if "=" in word else next(words, None)
            if not text:
                raise InputError(f"--require needs what is required: {requirements.FORM}")
            texts.append(text)
        elif word == "--precision" or word.startswith("--precision="):
            text = word.partition("=")[2] if "=" in word else next(words, None)
            if not text:
                raise InputError("--precision needs a width: 3% asks for speedups to ± 3 %")
            rest.append(f"precision={text}")
        else:
            rest.append(word)
    return [*rest, f"require={json.dumps(texts)}"] if texts else rest


def in_transformers(config: MeasureConfig, plan: Plan, versions: dict[str, Any]) -> str:
    """Measures the offline arms, appends their rows to results.jsonl and returns them as a table."""
    from eval.assisted import assisted_results, markdown, measure_assisted, ways

    tried = ways(
        {name: resolve(folder).path for name, folder in config.drafters.items()}, config.num_speculative_tokens
    )
    device = Accelerator().device
    void = measure_assisted(plan.target, tried, plan.workloads, config.out, plan.repeats, plan.settings.dtype, device)
    rows = assisted_results(config.out, tried, plan.workloads, void, versions)
    write_jsonl(config.out / "results.jsonl", [*read_jsonl(config.out / "results.jsonl"), *rows])
    return markdown(rows)


def main(argv: list[str]) -> int:
    config, args = parse(MeasureConfig, with_requirements(argv), about=__doc__ or "")
    engine = require_vllm("measure")
    plan, target, answers = plan_of(config, engine)
    required = requirements.read(config.require, plan)
    notes = Console(stderr=True, highlight=False, soft_wrap=True)
    if target.note:
        notes.print(target.note, markup=False)
    if config.resident is None and not plan.resident:
        why = "requests at a rate are for it alone" if config.rates else "memory does not hold them all side by side"
        notes.print(f"one server at a time: {why}", markup=False)
    for arm in plan.arms:
        for f in (
            trained_findings(arm.model, preflight_of(plan.settings, arm, engine.backend))
            if arm.model and arm.kind == "draft_model"
            else ()
        ):
            notes.print(f"{arm.name}: {f.what}: {f.fix}", markup=False)
    if args.dry_run:
        cells = len(plan.arms) * plan.repeats * len(plan.temperatures) * len(plan.loads)
        requests = [r for workload in plan.workloads.values() for r in workload]
        print(f"arms: {', '.join(a.name for a in plan.arms)}")
        print(f"requests: {len(requests) * cells}, at most {sum(r.max_tokens for r in requests) * cells} tokens")
        for arm in plan.arms:
            print(server.serve_line(server.serve_words(plan.target, arm.speculation(), plan.settings, 8000)))
        return 0
    open_run(config.out, config, free=("require", "start_timeout_s", "request_timeout_s"))
    measure(plan, config.out)
    real = max(tokens_by_id(load_tokenizer(target.path))) + 1  # the padding rows from here on are never drafted
    log_probs, references = recorded(answers)
    where = provenance()
    rows = write_results(plan, config.out, where["versions"], expected(plan, answers, real), log_probs, references)
    if config.record:
        record(plan, rows, where)
    offline = in_transformers(config, plan, where["versions"]) if config.assisted else ""
    if offline:
        rows = read_jsonl(config.out / "results.jsonl")
    print(json.dumps(rows, indent=2) if args.json else f"{markdown_results(rows)}\n{offline}".rstrip())
    met, missed = requirements.judge(required, rows)
    for line in [*met, *missed]:
        notes.print(line, markup=False)
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(guarded(main))
