"""Concurrency by K: where speculation pays, the K to use at each batch size, served and measured once more. Exit 1: nowhere.

draftsmith sweep target=T drafter=D workloads.mine.answers=runs/data/heldout out=runs/sweep
draftsmith sweep --config sweep.yaml num_speculative_tokens=[1,2,4,6] concurrencies=[1,2,4,8] max_num_seqs=64

Each K is a server of its own, one at a time, in turns with the target alone. What comes out is a batch-size schedule for vLLM
(`num_speculative_tokens_per_batch_size`), K = 0 where speculation loses, and whether the engine honours it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

if __package__ in (None, ""):  # launched by path: sys.path[0] is recipes/, where `import distill` would find a script
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from pydantic import Field
from rich.console import Console
from rich.table import Table

from distill.answers import Answers
from eval import schedule, server, sweep
from eval.measure import AGAIN, Arm, Plan, measure
from eval.results import LogProbs, write_results
from pairing.card import write_card
from pairing.engine import Engine, require_vllm
from pairing.errors import InputError, PartFailedError
from pairing.files import read_json, read_jsonl, write_json
from pairing.pair import update_pair
from pairing.parallel_drafting import trained_findings
from pairing.preflight import require_start
from pairing.source import ModelSource, resolve
from recipes.config import Strict, guarded, parse
from recipes.measure import recorded
from recipes.measure_config import MeasureConfig, WorkloadConfig
from recipes.measure_plan import plan_of, preflight_of
from recipes.run_folder import open_run, provenance

Row = dict[str, Any]
Known = tuple[LogProbs, Mapping[tuple[str, str], Sequence[int]]]  # of recipes.measure.recorded
Run = Callable[[Plan, Path], tuple[list[Row], list[Row]]]  # measures a plan into a folder: its surface, its requests

IDLE = 0.05  # where the schedule says K = 0, a drafter that is loaded and asked for no draft may cost this part of the speed
ONE_SERVER = (
    "Every K was measured on one server (repeats=1): what the machine did differently from one server to the next is in the "
    "figures and not in their intervals. With repeats=2 each has a second one, in reverse order."
)


class SweepConfig(Strict):
    target: str
    """hub id, folder or .gguf file"""
    drafter: str
    """drafter folder"""
    workloads: dict[str, WorkloadConfig]
    """name -> prompts; the schedule is for all of them together"""
    out: Path
    """run folder: sweep.json, results.jsonl, requests.jsonl, logs, confirm/"""
    num_speculative_tokens: list[Annotated[int, Field(ge=1, le=32)]] = Field(default=[1, 2, 4, 6], min_length=1)
    """every K that is tried; 0, the target alone, always is"""
    draft_sample_methods: list[Literal["greedy", "probabilistic"]] = Field(default=["greedy"], min_length=1)
    """how the drafter draws: argmax, from its distribution, or both, compared"""
    parallel_drafting: Literal["both", "only", "off"] = "both"
    """of a drafter that was trained for it: all drafts from one pass, one by one, or both, compared"""
    concurrencies: list[Annotated[int, Field(ge=1)]] = Field(default=[1, 2, 4, 8], min_length=1)
    """requests in flight"""
    max_num_seqs: int | None = Field(default=None, ge=1)
    """largest batch that it will be served with; K = 0 above the largest concurrency; null: that concurrency"""
    temperature: float = Field(default=0.0, ge=0)
    """of the target's sampling, in every arm"""
    repeats: int = Field(default=2, ge=1)
    """times that every prompt is sent to every arm; odd ones run the arms backwards"""
    aa: bool = True
    """serve the target alone a second time, furthest from the first: its "speedup" shows what the machine did meanwhile"""
    minutes: float | None = None
    """begin no further repeat after this long, of the sweep and again of the confirmation; the first is always finished"""
    seed: int = 0
    """of sampling"""
    warmup: int = Field(default=2, ge=0)
    """requests to each server before anything is timed"""
    dtype: str = "auto"
    """weights and activations; auto: float32 on the CPU back end, the model's own elsewhere"""
    enforce_eager: bool = False
    """skip compilation, in every arm"""
    max_model_len: int = 1024
    """context of the engine, in tokens"""
    kv_cache_gib: int = 1
    """CPU back end: KV cache of the server"""
    start_timeout_s: float = 900
    """how long a server may take to answer"""
    record: bool = True
    """write what to serve with into the drafter's pair.json"""


SHARED = ("target", "workloads", "out", "parallel_drafting", "concurrencies", "repeats", "minutes", "seed", "warmup", "dtype",
          "enforce_eager", "max_model_len", "kv_cache_gib", "start_timeout_s")  # fmt: skip


def sweep_plan(config: SweepConfig, engine: Engine) -> tuple[Plan, ModelSource, dict[str, Answers]]:
    """`measure`'s plan with an arm for each K and way of drafting. Raises InputError before a server starts."""
    largest = max(config.concurrencies)
    most = config.max_num_seqs or largest
    if most < largest:
        raise InputError(
            f"max_num_seqs is {most}: of {largest} requests in flight the rest would queue; "
            f"give max_num_seqs={largest} or smaller concurrencies"
        )
    plan, target, answers = plan_of(
        MeasureConfig(
            **{key: getattr(config, key) for key in SHARED},
            drafters={"drafter": config.drafter},
            num_speculative_tokens=max(config.num_speculative_tokens),
            temperatures=[config.temperature],
            ngram=False,
            resident=False,
            group_by=None,
        ),
        engine,
    )
    settings = replace(plan.settings, max_num_seqs=most)
    arms = [arm for arm in plan.arms if arm.kind == "target"]
    for one in plan.arms[len(arms) :]:
        for method in dict.fromkeys(config.draft_sample_methods):
            mode = one.name if method == "greedy" else f"{one.name}-{method}"
            arms += [
                replace(one, name=sweep.arm_name(mode, k), num_speculative_tokens=k, draft_sample_method=method)
                for k in sorted(set(config.num_speculative_tokens))
            ]
    arms += [Arm(AGAIN, "target")] if config.aa else []
    plan = replace(plan, arms=arms, settings=settings, concurrencies=tuple(sorted(set(config.concurrencies))))
    for arm in arms:
        if arm.model is not None:
            require_start(target, resolve(str(arm.model)), preflight_of(settings, arm, engine.backend))
    return plan, target, answers


def beyond_training(plan: Plan, engine: Engine) -> list[str]:
    """A line for each way of drafting whose largest K is more than the drafter was trained for."""
    said = {}
    for arm in plan.arms:  # of a way the K rise
        if arm.model is not None:
            for f in trained_findings(arm.model, preflight_of(plan.settings, arm, engine.backend)):
                said[arm.parallel_drafting, arm.draft_sample_method] = f"{arm.name}: {f.what}: {f.fix}"
    return list(said.values())


def schedule_arm(plan: Plan, found: Mapping[str, Any]) -> Arm:
    """The arm that serves the schedule: an ordinary one where its K is the same at every batch size.

    Raises PartFailedError where the installed vLLM reads the schedule otherwise than it is meant.
    """
    entries: schedule.Schedule = found["schedule"]
    k = max(entry[2] for entry in entries)
    one = next(arm for arm in plan.arms if arm.name == sweep.arm_name(found["mode"], k))
    if len(entries) == 1:
        return one
    most = plan.settings.max_num_seqs
    try:
        looked_up = schedule.engine_lookup(entries, most)
    except ValueError as e:
        raise PartFailedError(f"vLLM refuses the schedule {entries}: {e}") from e
    if looked_up not in (None, [schedule.k_at(entries, size) for size in range(1, most + 1)]):
        raise PartFailedError(f"vLLM reads the schedule {entries} as {looked_up}")
    return replace(one, name="schedule", schedule=tuple((low, high, k) for low, high, k in entries))


def confirm(plan: Plan, chosen: Arm, fixed: Arm, out: Path, run: Run) -> tuple[list[Row], list[Row]]:
    """Serves the choice once more, in turns with the target and the best single K; the rows of both.

    The best of many cells looks better than it is; these figures were not chosen.
    """
    asked = [list(entry) for entry in chosen.schedule]
    held = out / "schedule.json"
    if held.is_file() and read_json(held) != asked:  # cells were measured again since, and say something else now
        for stale in ("blocks.jsonl", "requests.jsonl"):
            (out / stale).unlink(missing_ok=True)
    write_json(held, asked)
    arms = dict.fromkeys([plan.arms[0], fixed, chosen])
    cells, requests = run(replace(plan, arms=list(arms)), out)
    best, single = (sweep.confirmed(cells, requests, arm, fixed.name) for arm in (chosen, fixed))
    return best, single


def swept(config: SweepConfig, plan: Plan, run: Run) -> Row:
    """Measures, decides, confirms and records; what sweep.json holds (docs/sweep.md)."""
    cells, requests = run(plan, config.out)
    most = plan.settings.max_num_seqs
    found = sweep.decide(cells, requests, most)
    report: Row = {
        "answer": "none" if found else "not measurable",
        "mode": None, "best": [], "fixed": None, "schedule": [[1, most, 0]], "pays_up_to": None, "stops_at": None,
        **(found or {}),
        "confirmed": [],
        "tried": None,
        "notes": [ONE_SERVER] if config.repeats == 1 else [],
        "serve": None,
        "surface": cells,
        "again": [],
    }  # fmt: skip
    results = read_jsonl(config.out / "results.jsonl")
    if config.aa:
        report["again"] = sweep.again(plan.arms, results, requests)
        report["notes"] += sweep.drift(report["again"])
    if found is None or found["pays_up_to"] is None:
        report["notes"] += sweep.notes(cells, found, results, most)
        return report
    chosen = schedule_arm(plan, found)
    fixed = next(arm for arm in plan.arms if arm.name == sweep.arm_name(found["mode"], found["fixed"]))
    best, single = confirm(plan, chosen, fixed, config.out / "confirm", run)
    arm, lost = chosen, sweep.losses(best, IDLE)
    if missed := [c for c in best if c["ignored"]]:
        drafted = ", ".join(f"{c['drafted_per_round']:.2f} with {c['concurrency']} in flight (asked: {c['asked']})"
                            for c in missed)  # fmt: skip
        report["notes"].append(
            f"This engine ignores the schedule: it drafted {drafted} a round, as with a fixed K = "
            f"{chosen.num_speculative_tokens}. The best fixed K is {fixed.num_speculative_tokens}."
        )
        arm, lost = fixed, sweep.losses(single, IDLE)
    elif lost and chosen != fixed and not sweep.losses(single, IDLE):
        report["notes"] += [
            *lost,
            f"K = {fixed.num_speculative_tokens} at every batch size is slower nowhere: serve that.",
        ]
        arm, lost = fixed, []
    if arm != chosen:
        report |= {"tried": report["schedule"], "schedule": [[1, most, fixed.num_speculative_tokens]]}
    report["notes"] += [*lost, *sweep.notes(cells, report, results, most)]
    shown = best if arm == chosen else [*best, *single]
    report |= {"confirmed": shown, "answer": "not confirmed" if lost else "schedule" if arm.schedule else "fixed"}
    if not lost:
        keys = ("num_speculative_tokens", "draft_sample_method", "parallel_drafting")
        report["serve"] = {key: value for key, value in asdict(arm).items() if key in keys} | {
            "num_speculative_tokens_per_batch_size": [list(entry) for entry in arm.schedule] or None,
            "command": line(plan, arm),
        }
        if config.record and arm.model and (arm.model / "pair.json").is_file():
            keep = ("best", "pays_up_to", "stops_at", "schedule", "confirmed")
            update_pair(arm.model, serve=report["serve"], sweep={key: report[key] for key in keep})
            write_card(arm.model)
    return report


def measured(plan: Plan, out: Path, versions: Mapping[str, Any], known: Known) -> tuple[list[Row], list[Row]]:
    """Runs what `out` lacks of the plan; the surface and the requests. `known` explains outputs that differ."""
    measure(plan, out)
    requests = read_jsonl(out / "requests.jsonl")
    return sweep.surface(plan.arms, write_results(plan, out, versions, {}, *known), requests), requests


def line(plan: Plan, arm: Arm) -> str:
    return server.serve_line(server.serve_words(plan.target, arm.speculation(), plan.settings, 8000))


def describe(report: Mapping[str, Any], console: Console) -> None:
    """The surface, a table for each way of drafting, then what follows from it."""
    best = {(report["mode"], b["concurrency"]): b["num_speculative_tokens"] for b in report["best"]}
    cells = report["surface"]
    for mode in dict.fromkeys(c["mode"] for c in cells if c["mode"]):
        mine = [c for c in cells if c["mode"] in (mode, None)]
        ks = sorted({c["num_speculative_tokens"] for c in mine})
        table = Table(
            title=f"speed over the target alone, {mode} (95 %)", title_justify="left", box=None, pad_edge=False
        )
        for head in ("in flight", "target tok/s", *(f"K = {k}" for k in ks[1:])):
            table.add_column(head, justify="right", no_wrap=True)
        for size in sorted({c["concurrency"] for c in mine}):
            row = {c["num_speculative_tokens"]: c for c in mine if c["concurrency"] == size}
            speed = row[0]["output_tokens_per_s"]
            table.add_row(
                str(size),
                f"{speed:.1f}" if speed else "void",
                *(_speed(row[k]) + ("*" if best.get((mode, size)) == k else " ") for k in ks[1:]),
            )
        console.print(table)
    up_to, stops = report["pays_up_to"], report["stops_at"]
    pays = f"pays up to {up_to} in flight" + (f", no longer at {stops}" if stops else "") if up_to else "pays nowhere"
    console.print(f"speculation {pays}")
    for c in report["confirmed"]:
        over = f", {c['over_fixed']:.2f}x the fixed K = {report['fixed']}" if c["over_fixed"] else ""
        drafted = (
            f", {c['drafted_per_round']:.2f} drafted a round (asked: {c['asked']})"
            if c["drafted_per_round"] is not None
            else ""
        )
        console.print(f"measured once more, {c['arm']} with {c['concurrency']} in flight: {_speed(c)}{over}{drafted}")
    for note in report["notes"]:
        console.print(f"! {note}", style="yellow", markup=False)
    console.print(f"schedule: {json.dumps(report['schedule'])}", markup=False)
    if report["serve"]:
        console.print(f"\n{report['serve']['command']}", markup=False, soft_wrap=True)


def _speed(cell: Mapping[str, Any]) -> str:
    if not cell["interval"]:
        return "void" if cell["void"] else "–"
    low, high = cell["interval"]
    return f"{cell['speedup']:.2f} ({low:.2f}–{high:.2f})"


def main(argv: list[str]) -> int:
    config, args = parse(SweepConfig, argv, about=__doc__ or "")
    engine = require_vllm("sweep")
    plan, target, answers = sweep_plan(config, engine)
    untrained = beyond_training(plan, engine)
    for said in [*([target.note] if target.note else []), *untrained]:
        Console(stderr=True, highlight=False, soft_wrap=True).print(said, markup=False)
    if args.dry_run:
        asked = [r for workload in plan.workloads.values() for r in workload]
        cells = len(plan.arms) * len(plan.concurrencies)
        print(f"cells: {cells} ({len(plan.arms)} arms x {len(plan.concurrencies)} concurrencies)")
        print(
            f"servers started: {len(plan.arms) * plan.repeats}, one at a time, and up to {3 * plan.repeats} to confirm"
        )
        sent = cells * plan.repeats
        print(f"requests: {len(asked) * sent}, at most {sum(r.max_tokens for r in asked) * sent} tokens")
        for arm in plan.arms:
            print(line(plan, arm))
        return 0
    open_run(config.out, config)
    where = provenance()["versions"]
    report = swept(config, plan, partial(measured, versions=where, known=recorded(answers)))
    report["notes"] += untrained
    report |= {"target": config.target, "drafter": config.drafter, "temperature": config.temperature, "versions": where}
    write_json(config.out / "sweep.json", report)
    if args.json:
        print(json.dumps(report, indent=2))
    else:
        width = None if sys.stdout.isatty() else 160  # in a log no table is cut short
        describe(report, Console(highlight=False, width=width))
    if report["answer"] == "not measurable":
        raise PartFailedError("the target alone was measured at no concurrency: see the notes above")
    return 0 if report["serve"] else 1


if __name__ == "__main__":
    raise SystemExit(guarded(main))
