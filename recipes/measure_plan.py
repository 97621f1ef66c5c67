"""From measure's config to the plan that is measured: its arms, prompts and engine settings, checked before a server starts."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

from distill.answers import Answers, open_answers, require_target
from eval import server
from eval.measure import AGAIN, Arm, Plan, Request
from pairing.alignment import check_pair
from pairing.budgets import device_memory, servers_findings
from pairing.engine import Engine
from pairing.errors import InputError
from pairing.files import read_json
from pairing.mask_token import mask_id_of
from pairing.parallel_drafting import trained_one_by_one
from pairing.preflight import Serving, require_start
from pairing.serving_plan import Model
from pairing.source import ModelSource, resolve
from pairing.speculators import require_speculator, require_suffix
from pairing.weights import read_headers
from recipes.measure_config import MeasureConfig, WorkloadConfig


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
        arms += [*drafter_arms(config, name, drafter), *synthetic_arms(config, name, drafter)]
    arms += speculator_arms(config, {a.name for a in arms}, read_json(target.path / "config.json"), engine)
    arms = wanted(config, arms + lookup_arms(config))
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
    """One by one, in parallel, or both where the drafter's config names a mask token. Both is for drafters that were trained
    for it: of one that was distilled and not for that it is one by one, and "only" is taken at its word."""
    one = Arm(name, "draft_model", drafter, config.num_speculative_tokens, config.draft_sample_method)
    if config.parallel_drafting == "off" or mask_id_of(read_json(drafter / "config.json")) is None:
        return [one]
    if config.parallel_drafting == "both" and trained_one_by_one(drafter):
        return [one]
    K = config.parallel_num_speculative_tokens or config.num_speculative_tokens
    parallel = replace(one, name=f"{name}-parallel", num_speculative_tokens=K, parallel_drafting=True)
    return [parallel] if config.parallel_drafting == "only" else [one, parallel]


def lookup_arms(config: MeasureConfig) -> list[Arm]:
    """The proposers that look drafts up in the text. Raises InputError where the package of one is missing."""
    if config.suffix:
        require_suffix()
    K = config.lookup_num_speculative_tokens or config.num_speculative_tokens
    asked = {"ngram": config.ngram, "suffix": config.suffix}
    return [Arm(name, name, None, K) for name, on in asked.items() if on]


def synthetic_arms(config: MeasureConfig, name: str, drafter: Path) -> list[Arm]:
    """The drafter with the acceptance that is asked for in place of its own. Raises InputError where it cannot be had."""
    rates = tuple(config.synthetic_acceptance_rates or ())
    if not rates:
        return []
    if list(rates) != sorted(rates, reverse=True):
        raise InputError(
            "synthetic_acceptance_rates: a draft counts with all before it, so they may not rise: [0.8, 0.6, 0.5]"
        )
    return [Arm(f"{name}-synthetic", "draft_model", drafter, len(rates), config.draft_sample_method, synthetic=rates)]


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


def forced_v2() -> bool | None:
    """Which of vLLM's runners the environment forces; None: vLLM chooses."""
    forced = os.environ.get("VLLM_USE_V2_MODEL_RUNNER")
    return None if forced is None else forced == "1"


def preflight_of(settings: server.Settings, arm: Arm, backend: str) -> Serving:
    """What an arm asks of the engine, for pairing.preflight to look at before anything starts."""
    return Serving(
        num_speculative_tokens=arm.num_speculative_tokens,
        max_model_len=settings.max_model_len,
        max_num_seqs=settings.max_num_seqs,
        dtype=settings.dtype,
        gpu_memory_utilization=settings.gpu_memory_utilization,
        kv_cache_gib=settings.kv_cache_gib if backend == "cpu" else None,
        speculative_config={k: v for k, v in (arm.speculation() or {}).items() if k not in ("method", "model")},
        force_v2=forced_v2(),
        one_by_one="give parallel_drafting=off",  # a key and a value of measure, sweep and serve alike
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
