"""What a drafter would give on this machine, before one is trained: go or no-go, and which size. Exit 1: no-go.

draftsmith plan HuggingFaceTB/SmolLM2-135M-Instruct answers=runs/data/heldout
draftsmith plan ./my-target answers=runs/data/heldout layers=[2,4] batch_sizes=[1,8] out=plan.json
draftsmith plan ./my-target answers=runs/data/heldout drafter=runs/drafter     # a trained one: its speedup foretold
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

if __package__ in (None, ""):  # launched by path: sys.path[0] is recipes/, where `import distill` would find a script
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import numpy as np
from accelerate import Accelerator
from pydantic import Field
from rich.console import Console
from rich.table import Table

from distill.answers import Answers, open_answers, require_target
from distill.batches import check_rows
from distill.evaluate import score_prompts
from distill.evaluate_parallel import score_rounds
from distill.spread import spread
from eval import plan
from pairing.alignment import check_pair, tokens_by_id
from pairing.budgets import device_memory, memory_findings, memory_numbers
from pairing.decode_time import BLOCK, BLOCKS, CONTEXT, engine_name, open_timer
from pairing.engine import Engine, engine
from pairing.engine_support import one_pass_fault, probe
from pairing.errors import InputError
from pairing.files import read_json, write_json
from pairing.init import plan_init, spaced
from pairing.mask_token import mask_id_of
from pairing.parallel_drafting import trained_findings
from pairing.serving import context
from pairing.serving_plan import Model, Serving
from pairing.source import ModelSource, load_model, load_tokenizer, resolve
from pairing.weights import parameters, read_headers
from recipes.config import Strict, guarded, parse
from recipes.measure_plan import forced_v2
from recipes.run_folder import provenance

NOT_SYNTHETIC = (
    "rejection_sample_method=synthetic is not used: vLLM's CPU back end has none, and steps are timed one by one"
)


class PlanConfig(Strict):
    target: str
    """the target: a hub id, a folder or a .gguf file"""
    answers: Path
    """a folder of `draftsmith generate` on your prompts, best one that no drafter is trained on"""
    drafter: str | None = None
    """a trained drafter: its own acceptance by replay, its own step, its speedup foretold for each K"""
    layers: list[Annotated[int, Field(ge=2)]] = Field(default=[2, 3, 5])
    """candidate drafters: so many evenly spaced layers of the target, as `init count=…` makes them"""
    num_speculative_tokens: list[Annotated[int, Field(ge=1, le=32)]] = Field(
        default=[1, 2, 3, 4, 5, 6, 7, 8], min_length=1
    )
    """K to choose from; the verify step is measured at the smallest, the middle and the largest"""
    batch_sizes: list[Annotated[int, Field(ge=1)]] = Field(default=[1, 4], min_length=1)
    """requests that decode at a time"""
    prompts: int = Field(default=64, ge=2)
    """how many of the answers are read"""
    temperature: float | None = Field(default=None, ge=0)
    """you serve with; null: the one at which the answers were drawn, and with drafter= no other"""
    assumed_acceptance: float = Field(default=0.8, gt=0, le=1)
    """α that a trained drafter is taken to reach where none is given; never more than the ceiling"""
    worth: float = Field(default=0.05, ge=0)
    """so much more α a larger drafter is taken to be good for: it is recommended while it needs no more to be as fast"""
    min_speedup: float = Field(default=1.1, ge=1)
    """the least speedup that makes it a go"""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """of weights and activations; auto: float32 on the CPU back end, the model's own elsewhere"""
    max_model_len: int = Field(default=1024, ge=2)
    """the longest request that memory is counted for"""
    kv_cache_gib: int = Field(default=1, ge=1)
    """CPU back end: KV cache of the server"""
    out: Path | None = None
    """writes the whole plan there as JSON"""


def candidates(config: PlanConfig, target: ModelSource, dtype: str | None) -> list[plan.Drafter]:
    headers, found = read_headers(target.path), []
    for count in sorted(set(config.layers)):
        made = plan_init(target, spaced(count, int(read_json(target.path / "config.json")["num_hidden_layers"])), dtype)
        tensors = {new: headers[old] for new, old in made["tensors"].items()}
        found.append(plan.Drafter(f"{count} layers", Model(made["config"], tensors), made["parameters"]))
    return found


def given(config: PlanConfig, target: ModelSource, dtype: str | None) -> plan.Drafter | None:
    if config.drafter is None:
        return None
    source = resolve(config.drafter)
    report = check_pair(target, source)
    if not report["aligned"]:
        raise InputError(
            f"drafter: {source.name} does not fit the target: {report['verdict']} (see `draftsmith check`)"
        )
    headers = read_headers(source.path)
    return plan.Drafter(source.name, Model(in_type(source, dtype), headers), parameters(headers))


def in_type(source: ModelSource, dtype: str | None) -> dict[str, Any]:
    read = read_json(source.path / "config.json")
    return {k: v for k, v in read.items() if k != "torch_dtype"} | {"dtype": dtype} if dtype else read


def require_drawn_as_served(config: PlanConfig, answers: Answers) -> None:
    """Raises InputError where a drafter's τ, which is replayed on the answers, would be that of another temperature."""
    drawn_at = answers.temperature or 0.0
    if config.drafter and config.temperature not in (None, drawn_at):
        raise InputError(
            f"temperature={config.temperature:g}: these answers were drawn at {drawn_at:g}, and what a drafter would give is "
            f"replayed on them: give answers generated at {config.temperature:g}, or leave temperature or drafter out"
        )


def beyond_training(drafter: ModelSource, most: int) -> list[str]:
    """What is to be said of the largest K where all drafts come from one pass."""
    if mask_id_of(read_json(drafter.path / "config.json")) is None:
        return []
    serving = Serving(num_speculative_tokens=most, speculative_config={"parallel_drafting": True})
    return [f"in one pass: {f.what}: {f.fix}" for f in trained_findings(drafter.path, serving)]


def without_one_pass(installed: Engine) -> str | None:
    """Why rounds whose drafts come from one pass can't be timed in this engine; None where they can."""
    fault = one_pass_fault(installed, probe(installed.backend), forced_v2())
    return ": ".join(filter(None, fault)) if fault else None


def score(config: PlanConfig, drafter: ModelSource, answers: Answers, real: int, one_pass: bool) -> plan.Scored:
    """The trained drafter, teacher-forced on the target's own answers; with `one_pass` also drafting so, if it has a mask."""
    model = load_model(drafter.path)
    accelerator = Accelerator()
    rows = check_rows(
        answers,
        str(config.answers),
        rows=model.config.vocab_size,
        real=real,
        context=context(model.config.to_dict()) or 10**9,
    )
    scores = score_prompts(accelerator, model.to(accelerator.device), rows, batch_size=8, most=config.prompts)
    starts = {row["id"]: row["spans"][-2] for row in answers.data.select_columns(["id", "spans"]) if row["spans"]}
    w = [s.accepted[-1] for s in scores]  # of a conversation its last answer, as `measure` asks for it
    mask, parallel = mask_id_of(model.config.to_dict()), None
    if mask is not None and one_pass:
        most = max(config.num_speculative_tokens)
        found = score_rounds(accelerator, model, rows, mask, most, batch_size=8, most=config.prompts)
        parallel = [s.accepted[-1] for s in found]
    return plan.Scored(w, np.array([starts[s.id] for s in scores], float), parallel)


def memory(config: PlanConfig, target: Model, drafter: plan.Drafter, K: int, batch: int) -> dict[str, Any] | None:
    """Bytes of both models, and whether they fit here; None where no vLLM is installed, whose defaults they are of."""
    installed = engine()
    if installed is None:
        return None
    serving = Serving(
        num_speculative_tokens=K,
        max_model_len=config.max_model_len,
        max_num_seqs=max(8, batch),
        dtype=config.dtype if config.dtype != "auto" else "float32" if installed.backend == "cpu" else "auto",
        kv_cache_gib=config.kv_cache_gib if installed.backend == "cpu" else None,
    )
    here = device_memory(installed.backend)
    found = memory_findings(target, drafter.model, installed, here, serving)
    numbers = memory_numbers(target, drafter.model, installed, here, serving)
    return numbers | {"fits": not any(f.level == "blocks" for f in found), "says": "; ".join(f.what for f in found)}


def run(config: PlanConfig, dry: bool = False) -> dict[str, Any]:
    """The plan; dry: without what has to be measured. Raises InputError, PartFailedError where no step can be measured."""
    target, answers, installed = resolve(config.target), open_answers(config.answers), engine()
    require_target(answers, target)
    require_drawn_as_served(config, answers)
    dtype = (
        config.dtype if config.dtype != "auto" else "float32" if not installed or installed.backend == "cpu" else None
    )
    trained = given(config, target, dtype)
    drafters = candidates(config, target, dtype) + ([trained] if trained else [])
    if not drafters:
        raise InputError("layers: name a number of layers, or give drafter=…")
    ks = sorted(set(config.num_speculative_tokens))
    real = max(tokens_by_id(load_tokenizer(target.path))) + 1
    known = spread(answers, config.prompts, real=real, temperature=config.temperature, ks=ks)
    own = Model(in_type(target, dtype), read_headers(target.path))
    most = max(config.batch_sizes)
    result: dict[str, Any] = {
        "target": config.target, "drafter": config.drafter, "engine": engine_name(), "notes": [NOT_SYNTHETIC],
        "num_speculative_tokens": ks, "spread": known,
        "candidates": [
            {"name": d.name, "parameters": d.parameters, "memory": memory(config, own, d, ks[-1], most)} for d in drafters
        ],
    }  # fmt: skip
    missing = without_one_pass(installed) if installed else None
    if missing is not None:
        result["notes"].append(f"drafts from one pass are left out: {missing}")
    elif config.drafter:
        result["notes"] += beyond_training(resolve(config.drafter), ks[-1])
    if dry:
        return result
    one_pass = installed is not None and missing is None
    scored = score(config, resolve(config.drafter), answers, real, one_pass) if config.drafter else None
    alpha = min(config.assumed_acceptance, known["alpha_ceiling"])
    ceiling = {K: known["tau_ceiling"][str(K)] for K in ks}
    batches = []
    with tempfile.TemporaryDirectory() as temp:
        log = (config.out or Path(temp) / "plan").with_suffix(".log")
        with open_timer(os.environ, log, batch=most) as timer:
            for size in sorted(set(config.batch_sizes)):
                steps = plan.measure(
                    timer, own.config, drafters, ks, size, rounds=installed is not None, one_pass=one_pass
                )
                ways = {"foretold": False, "foretold_parallel": True}
                told = {
                    way: plan.foretell(steps, ks, scored, parallel=on) if scored else None for way, on in ways.items()
                }
                batches.append(plan.figures(steps, drafters, ks, alpha, ceiling) | told)
    result |= {"batches": batches, "recommended": None, "expected_acceptance": scored.alpha if scored else None}
    if made := [d for d in drafters if d is not trained]:
        costs = [{int(K): cost for K, cost in s["round"].items()} for s in batches[0]["shapes"]]
        result["recommended"] = made[plan.recommend(costs[: len(made)], alpha, config.worth)].name
    chosen = trained or next(d for d in drafters if d.name == result["recommended"])
    result["memory"] = memory(config, own, chosen, ks[-1], most)
    result["go"], result["verdict"] = plan.verdict(result, config.min_speedup)
    return result | {"provenance": provenance()}


def show(result: Mapping[str, Any]) -> None:
    console = Console(highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = 200  # a file or a pipe has no edge that the table must be cut at
    known = result["spread"]
    (p, low, high), (least, most) = known["max_p_at_1"], known["max_p"]
    console.print(
        f"{known['prompts']} prompts, {known['tokens']} tokens: E[max p] {p:.3f} ({low:.3f} to {high:.3f}) at temperature 1; at "
        f"{known['temperature']:g}, as served, {least:.3f} to {most:.3f}: α of argmax drafting can be no more",
        markup=False,
    )
    for batch in result.get("batches", []):
        verify = ", ".join(f"{x:.2f} at K = {K}" for K, x in batch["verify"].items())
        rest = ", ".join(f"{x:.2f} at K = {K}" for K, x in batch["rest"].items())
        console.print(
            f"\nbatch {batch['batch_size']}: target step {batch['target_ms'][0]:.1f} ms; verify step {verify}; rest of a round "
            f"{rest or 'not measured'}; a perfect free drafter {batch['perfect_free']['S']:.2f}x at K = "
            f"{batch['perfect_free']['K']}",
            markup=False,
        )
        table = Table()
        goals, alphas = (f"α for {g}x" for g in plan.GOALS), (f"S at α {a}" for a in plan.ALPHAS)
        for name in ("drafter", "parameters", "ms", "c", "break-even α", *goals, *alphas):
            table.add_column(name, justify="right", no_wrap=True)
        for s in batch["shapes"]:
            table.add_row(
                s["name"], f"{s['parameters'] / 1e6:.1f}M", f"{s['ms'][0]:.1f}", f"{s['c'][0]:.3f}",
                _alpha(s["break_even"]), *(_alpha(s["needed"][str(g)]) for g in plan.GOALS),
                *(f"{s['at'][str(a)]['S']:.2f} (K {s['at'][str(a)]['K']})" for a in plan.ALPHAS),
            )  # fmt: skip
        console.print(table)
        if way := batch["shapes"][-1].get("parallel"):
            rounds = ", ".join(f"{x:.2f} at K = {K}" for K, x in batch["parallel_round"].items())
            console.print(
                f"{batch['shapes'][-1]['name']}, all drafts in one pass: a round {rounds}; break-even α "
                f"{_alpha(way['break_even'])}; {_speeds(way)}",
                markup=False,
            )
        for name, says in (("foretold", "one by one"), ("foretold_parallel", "in one pass")):
            for K, told in (batch[name] or {}).items():
                low, high = told["request_interval"]
                decode = f", decoding {told['decode']:.2f}x" if told["decode"] else ""
                console.print(
                    f"{says}, K = {K}: {plan.length(told['tau'])}{decode}, whole requests {told['request']:.2f}x "
                    f"({low:.2f} to {high:.2f} over prompts)",
                    markup=False,
                )
    for note in result["notes"]:
        if note != NOT_SYNTHETIC:
            console.print(f"! {note}", style="yellow", markup=False)


def _speeds(figures: Mapping[str, Any]) -> str:
    return ", ".join(
        f"S at α {a} {figures['at'][str(a)]['S']:.2f} (K {figures['at'][str(a)]['K']})" for a in plan.ALPHAS
    )


def _alpha(found: Mapping[str, float] | None) -> str:
    return f"{found['alpha']:.2f} (K {found['K']})" if found else "none"


def main(argv: list[str]) -> int:
    config, args = parse(PlanConfig, argv, ("target",), "What a drafter would give here, before one is trained.")
    result = run(config, dry=args.dry_run)
    if config.out is not None and not args.dry_run:
        write_json(config.out, result)
    if args.json:
        print(json.dumps(result, indent=2, ensure_ascii=False))
    else:
        show(result)
        for c in result["candidates"]:
            says = f": {c['memory']['says']}" if c["memory"] else ""
            print(f"{c['name']}: {c['parameters']:,} parameters{says}")
    if args.dry_run:
        if not args.json:
            print(
                f"would measure in {result['engine']}, batches {sorted(set(config.batch_sizes))}, from {CONTEXT} tokens on, "
                f"{BLOCKS} blocks of {BLOCK} steps in turns: target, drafters, verify steps, rounds of a pair"
            )
        return 0
    if not args.json:
        if result["recommended"]:
            print(f"\nto train first: {result['recommended']}")
        print(result["verdict"])
    return 0 if result["go"] else 1


if __name__ == "__main__":
    raise SystemExit(guarded(main))
