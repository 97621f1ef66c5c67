"""Trains a drafter on its target's stored answers, and says what that changed on held-out prompts.

draftsmith distill draft=runs/init data=runs/answers out=runs/distill heldout.orders=runs/held minutes=7
accelerate launch recipes/distill.py target=./my-target draft=runs/init data=runs/answers signal=online on_policy=0.2
accelerate launch --config_file recipes/configs/accelerate/one_process.yaml recipes/distill.py --config my.yaml lr=1e-3
torchrun --nproc_per_node 2 recipes/distill.py draft=… data=… out=… epochs=3 losses.lk_hybrid=1
draftsmith distill draft=… data=… out=… heldout.own=… parallel_drafting=8 num_speculative_tokens=6

The same command goes on where it was stopped. The trained drafter is OUT/drafter.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # launched by path: sys.path[0] is recipes/, where `import distill` would find a script
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch
from accelerate import Accelerator
from rich.console import Console
from transformers.utils.logging import disable_progress_bar

from distill.adapters import attach, load_in_4bit, merged
from distill.batches import Rows, supervised_ids
from distill.checkpoint import Which, load_weights
from distill.evaluate import compare, drafting, score_prompts, told_by, verdict, verdict_of_copy
from distill.evaluate_parallel import compare_rounds, score_rounds
from distill.fake_quantize import Quantizer, quantized, require_whole
from distill.guards import tracker
from distill.inputs import choose_mask, open_inputs, require_reference
from distill.mask_blocks import Parallel, window_of
from distill.merge import merge_record
from distill.objective import auto
from distill.options import give_back_memory, own_weights
from distill.parallel import kind_of
from distill.plan import plan_run
from distill.quantize import Choice, plan_quantize
from distill.save import settle_mask, stored_dtype, write_drafter
from distill.settings import Settings, require_possible
from distill.signals import Target, online, require_recorded
from distill.student import freeze
from distill.train import Send, fit
from pairing.errors import InputError
from pairing.files import digest_json, read_json, write_json, write_jsonl
from pairing.pair import describe_model, read_pair
from pairing.source import load_config, load_model, resolve
from recipes.config import guarded, parse
from recipes.distill_config import DistillConfig
from recipes.run_folder import open_run, require_shared

_WHICH: dict[str, Which] = {"last": "newest", "best": "best"}


def main(argv: list[str]) -> int:
    config, args = parse(DistillConfig, argv, about=(__doc__ or "").splitlines()[0])
    notes = Console(stderr=True, highlight=False, soft_wrap=True, quiet=os.environ.get("RANK", "0") != "0")
    disable_progress_bar()  # transformers draws one per load, also where there is no terminal
    accelerator = _accelerator(config)
    result = run(config, accelerator, notes, dry_run=args.dry_run)
    accelerator.wait_for_everyone()
    accelerator.end_training()  # trackers, then the process group
    if accelerator.is_main_process:
        print(json.dumps(result, indent=2) if args.json else _plain(result))
    return 0


def run(config: DistillConfig, accelerator: Accelerator, notes: Console, dry_run: bool = False) -> dict[str, Any]:
    """Trains, evaluates before against after, writes the drafter; or returns the plan. All ranks call it."""
    draft = resolve(str(config.draft)).path
    rows, heldout = open_inputs(
        draft, config.data, config.heldout, config.target, lambda line: notes.print(line, markup=False)
    )
    if config.target_device is not None:
        _require_device(config.target_device)
    if config.reference is not None:
        require_reference(config.reference, draft)
    if config.serve_temperature is not None and config.serve_temperature != rows.temperature:
        notes.print(
            f"the answers were drawn at temperature {rows.temperature:g}, and the pair is to be served at "
            f"{config.serve_temperature:g}: it learns and is scored on others than it will meet; generate them at that one",
            markup=False,
        )
    if config.signal == "cached":
        require_recorded(rows, config.top_logprobs)
    parallel, said = _parallel(config, draft, [rows, *heldout.values()])
    drafts = {name: drafting(held, config.draft_sample_method) for name, held in heldout.items()}
    for name, one in drafts.items():
        if one["note"] is not None:
            notes.print(f"heldout.{name}: {one['note']}", markup=False)
    if config.take == "best" and not any(told_by(held, config.draft_sample_method) for held in heldout.values()):
        raise InputError(
            f"take=best goes by τ on the held-out sets: {next(iter(drafts.values()))['note']}: or give take=last"
        )
    settings, why = _settings(config, rows.temperature, parallel)
    if settings.quantizer is not None:
        # whether the format holds it at all; where it will be served is not known here
        plan_quantize(draft, Choice(settings.quantizer.format, group_size=config.quantizer_group_size, serve_on="cuda"))
        require_whole(kind_of(accelerator))
    learnt, untrained = _made_rows(config, draft, rows)
    notes.print(f"losses: {why}", markup=False)
    if untrained is not None:
        notes.print(untrained, markup=False)
    if said is not None:
        notes.print(_masks_line(config, said), markup=False)
    if dry_run:
        sizes = plan_run(_student(config), config.draft, _beside(config, accelerator), settings, rows, heldout,
                         accelerator.num_processes, accelerator.device)  # fmt: skip
        return {"plan": sizes, "objective": why}
    with accelerator.main_process_first():
        if accelerator.is_main_process:
            open_run(config.out, config)
    require_shared(config.out)
    if (config.out / "drafter" / "pair.json").is_file():
        notes.print(f"{config.out} is finished already", markup=False)
        return _result(config, read_json(config.out / "evaluation.json"))
    send, close = _tracker(config, accelerator, notes)
    mask_id = None if parallel is None else parallel.mask_id
    model, target = settle_mask(own_weights(_student(config)), draft, mask_id), _target(config, accelerator)
    reference = load_model(config.reference).to(accelerator.device).eval() if config.reference is not None else None
    summary = fit(accelerator, model, rows, heldout, settings, config.out, target, reference, _digests(config), send)
    close()
    del model, target, reference
    scoring: dict[str, Any] = config.model_dump(include={"batch_size", "chunk", "block", "draft_sample_method"})
    model, taken = _trained(config, accelerator, rows, heldout, scoring)
    before = load_model(config.draft).to(accelerator.device)
    for one in (before, model):
        settle_mask(one, draft, mask_id)
    summary |= {"losses": dict(settings.losses), "objective": why, "signal": config.signal}
    summary |= {"temperature": config.temperature, "draft_sample_method": config.draft_sample_method}
    summary |= taken | _trained_for(settings)
    sets, lines = {}, []
    for name, held in heldout.items():
        scores = [
            score_prompts(accelerator, m, held, **scoring, where=f"heldout.{name}, {when} training")
            for when, m in (("before", before), ("after", model))
        ]
        sets[name] = compare(*scores) | {"drafting": drafts[name]}
        if parallel is not None:
            K = max(config.num_speculative_tokens, parallel.num_speculative_tokens)
            how_scored = scoring | {"where": f"heldout.{name}"}
            old, new = (score_rounds(accelerator, m, held, parallel.mask_id, K, **how_scored) for m in (before, model))
            sets[name]["parallel"] = compare_rounds(old, new, config.num_speculative_tokens)
        if settings.quantizer is not None:
            with quantized(model, settings.quantizer):
                in_4_bits = score_prompts(accelerator, model, held, **scoring, where=f"heldout.{name}, 4-bit copy")
            copy = compare(scores[1], in_4_bits)
            sets[name]["quantized"] = {"after": copy["after"], "change": copy["change"]}
        for b, a in zip(*scores, strict=True):
            lines.append({"set": name, "id": a.id, "tags": a.tags, "w_before": b.w, "w_after": a.w})
    evaluation = {"sets": sets, "verdict": verdict(sets) + verdict_of_copy(sets), "training": summary}
    if accelerator.is_main_process:
        write_jsonl(config.out / "evaluation_prompts.jsonl", lines)
        write_json(config.out / "evaluation.json", evaluation)
        how = config.model_dump(mode="json", include={"lr", "seed", "trainable"})
        write_drafter(config.out / "drafter", config.draft, model, evaluation, how, config.data, said, learnt)
    return _result(config, evaluation)


def _student(config: DistillConfig) -> Any:
    """The draft as it is trained: itself, or with adapters on it, or on its 4-bit copy."""
    if config.trainable in ("all", "layers"):
        return load_model(config.draft)
    model = load_in_4bit(config.draft) if config.trainable == "qlora" else load_model(config.draft)
    attach(model, **config.lora.model_dump(), seed=config.seed)
    return model


def _trained(
    config: DistillConfig, accelerator: Accelerator, rows: Rows, heldout: dict[str, Rows], scoring: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """The trained drafter as a plain model, from its checkpoint, and what is to be said of it: the step, and what a merge did."""
    model = _student(config)
    params = freeze(model, config.trainable)
    said = {"taken_step": load_weights(config.out / "checkpoints", _WHICH[config.take], params)["step"]}
    model.to(accelerator.device)
    if config.trainable in ("all", "layers"):
        return model, said
    plain = merged(model, config.draft).float().to(accelerator.device)  # never into 4-bit weights (fault D17)
    K = config.num_speculative_tokens
    return plain, said | {
        "merge_drift": merge_record(accelerator, model, plain, config.draft, heldout, rows, K, **scoring)
    }


def _trained_for(settings: Settings) -> dict[str, Any]:
    """What pair.json and the card say of a quantizer in training."""
    quantizer = settings.quantizer
    if quantizer is None:
        return {}
    said = {"quantizer": quantizer.format, "quantizer_from": settings.quantizer_from}
    said |= {"quantizer_group_size": quantizer.group_size} if quantizer.format == "w4a16" else {}
    return said | {
        "weights": f"full precision; trained so that their {quantizer.format} copy, by `draftsmith quantize`, serves"
    }


def _tracker(config: DistillConfig, accelerator: Accelerator, notes: Console) -> tuple[Send, Callable[[], None]]:
    """What rows of metrics are sent to, and how it is closed. A tracker that dies or hangs is noted and forgotten."""
    if config.tracker == "none" or not accelerator.is_main_process:
        return lambda row, step: None, lambda: None
    where = {config.tracker: {"dir": str(config.out), "name": config.out.name}}

    def start() -> None:
        accelerator.init_trackers("draftsmith", config.model_dump(mode="json"), where)

    def finish() -> None:
        for one in accelerator.trackers:
            one.finish()

    def forget() -> None:
        close()
        accelerator.trackers = []  # closed or dead: accelerate need not ask it again

    send, close = tracker(
        start, lambda row, step: accelerator.log(row, step=step), lambda line: notes.print(line, markup=False), finish
    )
    return send, forget


def _digests(config: DistillConfig) -> dict[str, str]:
    """What a checkpoint belongs to: the draft's weights, and target, tokenizer, prompts and sampling of the answers."""
    meta = read_json(config.data / "meta.json")
    described = describe_model(resolve(str(config.draft)))["digests"]
    answers = {k: v for k, v in meta.items() if k not in ("versions", "stats", "complete")}
    compared = (
        {}
        if config.reference is None
        else {"reference": describe_model(resolve(str(config.reference)))["digests"]["weights"]}
    )
    return compared | {"draft": described["weights"], "target": meta["target"]["digests"]["weights"],
            "tokenizer": meta["target"]["digests"]["tokenizer"], "data": digest_json(answers)}  # fmt: skip


def _accelerator(config: DistillConfig) -> Accelerator:
    if config.tracker == "wandb" and importlib.util.find_spec("wandb") is None:
        raise InputError(
            "tracker=wandb: wandb is not installed: `pip install 'draftsmith[track]'`, or leave tracker out"
        )
    cpu = not torch.cuda.is_available()
    give_back_memory()
    torch.set_float32_matmul_precision(config.matmul_precision)
    accelerator = Accelerator(cpu=cpu, log_with=None if config.tracker == "none" else config.tracker)
    kind_of(accelerator)
    if accelerator.mixed_precision not in ("no", "bf16"):
        raise InputError(f"mixed_precision {accelerator.mixed_precision}: distill trains in no or bf16 precision")
    if cpu:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        torch.set_num_threads(config.threads or max(1, cores // accelerator.num_processes))
    return accelerator


def _parallel(config: DistillConfig, draft: Path, texts: list[Rows]) -> tuple[Parallel | None, dict[str, Any] | None]:
    """How masks are trained, and what pair.json says of it. Raises InputError where no text leaves a mask free, or the draft's
    layers are of kinds that are not trained with masks."""
    if config.parallel_drafting is None:
        return None, None
    window_of(load_config(draft).get_text_config())
    mask = choose_mask(draft, texts, config.masks.token, _rows_learn(config))
    parallel = Parallel(config.parallel_drafting, mask.id, config.masks.keep, config.masks.least)
    said = {"num_speculative_tokens": config.parallel_drafting, "mask_id": mask.id, "mask_token": mask.token}
    return parallel, said


def _rows_learn(config: DistillConfig) -> bool:
    return config.trainable == "all" or (config.trainable in ("lora", "qlora") and config.lora.vocabulary)


def _made_rows(config: DistillConfig, draft: Path, rows: Rows) -> tuple[set[int], str | None]:
    """Of the rows that `repair` or a transplant made and marked: the ids that this run trains, and a line on the others."""
    marked = set(read_pair(draft).get("needs_training") or ())
    learnt = marked & supervised_ids(rows) if marked and _rows_learn(config) else set()
    left = sorted(marked - learnt)
    if not left:
        return learnt, None
    ids = ", ".join(map(str, left[:8])) + (", …" if len(left) > 8 else "")
    why = (
        "stand in none of these answers: add some that hold them"
        if _rows_learn(config)
        else f"do not learn with trainable={config.trainable}: give trainable=all, or trainable=lora lora.vocabulary=true"
    )
    return learnt, f"rows of the draft that were made and never trained: {len(left)} (ids {ids}); they {why}"


def _masks_line(config: DistillConfig, said: dict[str, Any]) -> str:
    trained, served, token = said["num_speculative_tokens"], config.num_speculative_tokens, said["mask_token"]
    line = f"parallel drafting: {trained} tokens a pass; mask {said['mask_id']} ({repr(token) if token else 'a padding row'})"
    if served > trained:
        line += f"; num_speculative_tokens={served} is more than that: the drafts past {trained} are not trained"
    return line


def _settings(config: DistillConfig, answered_at: float, parallel: Parallel | None = None) -> tuple[Settings, str]:
    """The loop's settings, and in one sentence what is minimised and why."""
    served_at = answered_at if config.serve_temperature is None else config.serve_temperature
    losses, why = config.losses.given(), "as given"
    if not losses:
        losses, why = auto(served_at, config.draft_sample_method)
    values = config.model_dump(include={f.name for f in fields(Settings)} - {"losses", "survival", "quantizer"})
    survival = config.draft_sample_method if config.survival else None
    quantizer = None
    if config.quantizer is not None:
        dtype = getattr(torch, stored_dtype(config.draft))
        quantizer = Quantizer(config.quantizer, config.quantizer_group_size, dtype)
    settings = Settings(**values, losses=losses, survival=survival, parallel=parallel, quantizer=quantizer)
    require_possible(settings, online=config.signal == "online", reference=config.reference is not None)
    said = ", ".join(
        f"{name} {weight if isinstance(weight, list) else f'{weight:g}'}" for name, weight in losses.items()
    )
    return settings, f"{said} at temperature {config.temperature:g} ({why})"


def _target(config: DistillConfig, accelerator: Accelerator) -> Target | None:
    if config.signal == "cached" or config.target is None:
        return None
    source = resolve(config.target)
    model = own_weights(load_model(source.path, _target_dtype(config, source.path, accelerator)))
    return online(
        model, config.target, config.target_device or accelerator.device, accelerator.device, config.temperature
    )


def _target_dtype(config: DistillConfig, folder: Path, accelerator: Accelerator) -> torch.dtype:
    name = config.target_dtype or (stored_dtype(folder) if accelerator.device.type == "cuda" else "float32")
    return getattr(torch, name)


def _beside(config: DistillConfig, accelerator: Accelerator) -> dict[Path, int]:
    """What runs frozen beside the drafter, and the bytes of a weight of it."""
    beside = {} if config.reference is None else {resolve(str(config.reference)).path: 4}
    if config.signal == "online" and config.target is not None:
        folder = resolve(config.target).path
        beside[folder] = _target_dtype(config, folder, accelerator).itemsize
    return beside


def _require_device(name: str) -> None:
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as e:  # torch asserts where it was built without that kind of device
        reason = str(e).splitlines()[0].split(". ")[0]
        raise InputError(f"target_device={name}: {reason}: name one that is here, such as cuda:0 or cpu") from e


def _result(config: DistillConfig, evaluation: dict[str, Any]) -> dict[str, Any]:
    return {"drafter": str(config.out / "drafter"), **evaluation}


def _plain(result: dict[str, Any]) -> str:
    if "plan" in result:
        result["plan"]["losses"] = result["objective"]
        return "\n".join(f"{k}: {v:,}" if isinstance(v, int) else f"{k}: {v}" for k, v in result["plan"].items())
    lines = [f"{result['verdict']}"]
    for name, s in result["sets"].items():
        b, a = s["before"], s["after"]
        lines.append(
            f"{name}: {s['prompts']} prompts; top-1 {b['top1']:.3f} -> {a['top1']:.3f}; alpha {a['alpha_low']:.3f} to "
            f"{a['alpha_high']:.3f}; acceptance length at K=4 {_tau(b, 4)} -> {_tau(a, 4)}"
        )
        if p := s.get("parallel"):
            k = p["num_speculative_tokens"]
            top1 = [x if x is None else round(x, 3) for x in p["after"]["top1_by_offset"]]
            lines.append(
                f"{name}, all drafts in one pass: acceptance length at K={k} {_tau(p['before'], k)} -> "
                f"{_tau(p['after'], k)}; top-1 by offset {top1}"
            )
    return "\n".join([*lines, f"wrote {result['drafter']}"])


def _tau(figures: dict[str, Any], K: int) -> str:
    tau = figures["tau"][str(K)]
    return "not known" if tau is None else f"{tau:.3f}"


if __name__ == "__main__":
    raise SystemExit(guarded(main))
