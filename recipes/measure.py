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
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # launched by path: sys.path[0] is recipes/, where `import distill` would find a script
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from accelerate import Accelerator
from rich.console import Console

from distill.answers import Answers
from distill.batches import Rows, check_rows
from distill.evaluate import score_prompts, told_by
from distill.evaluate_parallel import score_rounds
from eval import requirements, server
from eval.measure import Arm, Plan, measure
from eval.report_text import markdown_results
from eval.results import Offline, write_results
from eval.verdict import answers as judged
from pairing.acceptance import acceptance_length_of, replay, replay_rounds, uniform_starts
from pairing.alignment import tokens_by_id
from pairing.bootstrap import interval
from pairing.card import write_card
from pairing.engine import require_vllm
from pairing.errors import InputError
from pairing.files import read_jsonl, write_jsonl
from pairing.mask_token import mask_id_of
from pairing.pair import update_pair
from pairing.parallel_drafting import trained_findings
from pairing.source import load_model, load_tokenizer, resolve
from recipes.config import guarded, parse
from recipes.measure_config import MeasureConfig
from recipes.measure_plan import plan_of, preflight_of
from recipes.run_folder import open_run, provenance


def expected(plan: Plan, answers: dict[str, Answers], real: int) -> dict[tuple[str, str, str | None], Offline]:
    """(arm, workload, group) -> τ by replay: the drafter teacher-forced on the target's recorded answers, as far as they are
    asked for."""
    accelerator, out = Accelerator(), dict[tuple[str, str, str | None], Offline]()
    for arm in plan.arms:
        if arm.model is None or arm.kind != "draft_model":
            continue
        if arm.synthetic:  # told by nothing but what was asked for
            tau = 1 + sum(arm.synthetic)
            out |= {(arm.name, name, None): Offline(0.0, tau, (tau, tau), None) for name in plan.workloads}
            continue
        model = load_model(arm.model).to(accelerator.device)
        for name, requests in plan.workloads.items():
            rows = check_rows(
                answers[name],
                name,
                rows=model.config.vocab_size,
                real=real,
                context=model.config.max_position_embeddings,
            )
            if told_by(rows, arm.draft_sample_method) is None:
                continue
            accepted = last_rounds(accelerator, model, rows, arm)
            for group in {None, *(r.group for r in requests)}:
                asked = [r for r in requests if group in (None, r.group) and r.id in accepted]
                w = [accepted[r.id][: r.max_tokens] for r in asked]
                if one := offline(w, arm, rows.temperature):
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
    how: dict[str, Any] = {"batch_size": 8, "draft_sample_method": arm.draft_sample_method}
    if not arm.parallel_drafting or mask is None:
        return {s.id: s.w[-1] for s in score_prompts(accelerator, model, rows, **how)}
    return {s.id: s.w[-1] for s in score_rounds(accelerator, model, rows, mask, arm.num_speculative_tokens, **how)}


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
    for model in dict.fromkeys(a.model for a in plan.arms if not a.synthetic):
        if model is None or not (model / "pair.json").is_file():
            continue
        arms = {a.name: a for a in plan.arms if a.model == model and not a.synthetic}
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
