"""Writes a 4-bit copy of a drafter, NF4 or W4A16, reloaded and compared with what was in memory.

draftsmith quantize drafter=runs/demo/distill/drafter out=runs/demo/nf4 answers=runs/demo/data/test
draftsmith quantize ./drafter ./drafter-nf4 compute_dtype=bfloat16 --json
draftsmith quantize ./drafter ./drafter-w4a16 format=w4a16 calibration=runs/demo/data/train answers=runs/demo/data/test
draftsmith quantize ./drafter runs/formats --measure answers=runs/demo/data/test     # which form to serve
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any, Literal, Self, get_args

if __package__ in (None, ""):  # launched by path: sys.path[0] is recipes/, where `import distill` would find a script
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from accelerate import Accelerator
from pydantic import Field, model_validator

from distill.answers import Answers
from distill.batches import check_rows
from distill.evaluate import PromptScore, acceptance, score_prompts
from distill.fake_quantize import Format
from distill.objective import DraftSampling
from distill.quantize import Choice, plan_quantize, quantize_drafter
from eval.compare_formats import choose, markdown, room, served
from eval.measure import measure
from eval.results import write_results
from pairing.alignment import tokens_by_id
from pairing.budgets import device_memory
from pairing.card import write_card
from pairing.decode_time import engine_name, open_timer
from pairing.engine import require_vllm
from pairing.errors import InputError
from pairing.files import read_json, read_jsonl, write_json
from pairing.lora import is_adapter
from pairing.pair import read_pair, update_pair
from pairing.source import ModelSource, load_model, load_tokenizer, resolve
from recipes.config import Strict, guarded, parse, validate
from recipes.measure import expected, record, recorded
from recipes.measure_config import MeasureConfig
from recipes.measure_plan import plan_of, preflight_of
from recipes.run_folder import open_run, provenance

FORMATS: tuple[Format, ...] = get_args(Format)


class SideBySide(Strict):
    copies: dict[str, str] | None = None
    """name -> folder of copies made before; null makes both formats, in OUT/nf4 and OUT/w4a16"""
    target: str | None = None
    """hub id, folder or .gguf file; null is the one that the drafter was made for"""
    memory_gib: float | None = Field(default=None, gt=0)
    """what the engine may take, for the KV blocks that are left; null is 0.9 of the device's memory"""
    limit: int = Field(default=16, ge=2)
    """prompts of `answers` that are served; acceptance is counted on all"""
    max_tokens: int = Field(default=128, ge=1)
    """longest answer"""
    serving: dict[str, Any] = Field(default_factory=dict)
    """keys of `draftsmith measure`, such as measure.serving.repeats=3"""


class QuantizeConfig(Strict):
    drafter: str
    """the drafter's folder, in 16 or 32 bit"""
    out: Path
    """folder of the 4-bit copy; must be new or empty"""
    format: Format = "nf4"
    """how the weights are written: by bitsandbytes, or as 4-bit integers in groups (compressed-tensors)"""
    compute_dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """nf4: the type that weights are multiplied in; null takes the drafter's own"""
    group_size: Literal[32, 64, 128] | None = None
    """w4a16: weights that share a scale; null is 64"""
    calibration: Path | None = None
    """w4a16: an answers folder whose rows the rounding is fitted to (GPTQ); null rounds to nearest"""
    calibration_rows: int = Field(default=64, ge=1)
    """how many of its answers"""
    serve_on: Literal["here", "cpu", "cuda"] = "here"
    """whose kernels must take it: the installed vLLM's, or that back end's"""
    answers: Path | None = None
    """an answers folder to measure the drift on; null measures it on random ids"""
    rows: int = Field(default=32, ge=1)
    """how many of its answers"""
    report: Path | None = None
    """writes the figures there as JSON"""
    measure: SideBySide | None = None
    """--measure: the drafter and its copies side by side in vLLM, and which one to serve; OUT is then a run folder, and
    `answers` are the target's answers to held-out prompts"""

    @model_validator(mode="after")
    def _of_the_format(self) -> Self:
        """A key of the other format would be ignored in silence."""
        for key, needed in (("compute_dtype", "nf4"), ("group_size", "w4a16"), ("calibration", "w4a16")):
            if getattr(self, key) is not None and self.format != needed and self.measure is None:
                raise ValueError(f"{key} is of format={needed}, and the format is {self.format}: leave one of them out")
        if self.measure is not None and self.answers is None:
            raise ValueError(
                "--measure needs the target's answers to held-out prompts, from `draftsmith generate`: answers=…"
            )
        return self

    def choice(self, format_: Format | None = None) -> Choice:
        return Choice(format_ or self.format, self.compute_dtype, self.group_size or 64, self.serve_on)


def run(config: QuantizeConfig) -> dict[str, Any]:
    """The figures of `distill.quantize.quantize_drafter`; a whole folder always has its report."""
    source = _drafter(config.drafter)
    report = config.report

    def write(result: dict[str, Any]) -> None:
        if report is not None:
            write_json(report, result)

    return quantize_drafter(
        source.path, config.out, config.choice(), config.answers, config.rows, config.calibration,
        config.calibration_rows, write,
    )  # fmt: skip


def compare(config: QuantizeConfig, side: SideBySide) -> dict[str, Any]:
    """Measures the drafter and its copies in one run, writes OUT/formats.json and into each form's pair.json, and returns
    {"num_speculative_tokens", "engine", "memory_gib", "prompts", "rows", "serve", "sentence", "reasons"}; rows as
    `eval.compare_formats` has them."""
    installed, drafter = require_vllm("quantize --measure"), _drafter(config.drafter).path
    made = {str(f): config.choice(f) for f in FORMATS} if side.copies is None else {}
    for choice in made.values():
        plan_quantize(drafter, choice)
    given = {name: resolve(folder).path for name, folder in (side.copies or {}).items()}
    forms = {"drafter": drafter, **given, **{name: config.out / name for name in made}}
    words = {"answers": str(config.answers), "limit": side.limit, "max_tokens": side.max_tokens}
    served_as = validate(
        MeasureConfig,
        {"ngram": False, **side.serving, "target": side.target or read_pair(drafter)["target"]["name"],
         "drafters": {n: str(f) for n, f in forms.items()}, "workloads": {"heldout": words}, "out": str(config.out / "measure")},
        "measure.serving",
    )  # fmt: skip
    open_run(config.out, config)
    if (config.out / "formats.json").is_file():  # the last file: all is done
        return dict(read_json(config.out / "formats.json"))
    for name, choice in made.items():
        if not forms[name].exists():
            fitted = config.calibration if name == "w4a16" else None
            quantize_drafter(drafter, forms[name], choice, config.answers, config.rows, fitted, config.calibration_rows)
    plan, target, answers = plan_of(served_as, installed)
    with open_timer(os.environ, config.out / "logs" / "steps.log", plan.settings.dtype) as timer:
        _, *times = timer([target.path, *forms.values()])
    measure(plan, served_as.out)
    real = max(tokens_by_id(load_tokenizer(target.path))) + 1
    taus, (log_probs, references) = expected(plan, answers, real), recorded(answers)
    where = provenance()
    results = write_results(plan, served_as.out, where["versions"], taus, log_probs, references)
    record(plan, results, where)
    requests = read_jsonl(served_as.out / "requests.jsonl")
    method = served_as.draft_sample_method
    scores = {name: _scores(folder, answers["heldout"], real, method) for name, folder in forms.items()}
    budget = int(2**30 * side.memory_gib if side.memory_gib else 0.9 * device_memory(installed.backend).total)
    serving, k = preflight_of(plan.settings, plan.arms[1], installed.backend), served_as.num_speculative_tokens
    rows = [
        {"form": name, "folder": str(folder), "step_ms": step.ms[0], "step_of_target": step.share[0]}
        | acceptance(scores[name], k, scores["drafter"] if name != "drafter" else None)
        | room(target.path, folder, installed, budget, serving)
        | served(name, results, requests, "drafter")
        for (name, folder), step in zip(forms.items(), times, strict=True)
    ]
    found = {"num_speculative_tokens": k, "engine": engine_name(), "memory_gib": round(budget / 2**30, 2),
             "prompts": len(scores["drafter"]), "rows": rows, **choose(rows)}  # fmt: skip
    for folder in forms.values():
        update_pair(folder, formats=found)
        write_card(folder)
    write_json(config.out / "formats.json", found)
    return found


def _scores(folder: Path, answers: Answers, real: int, draft_sample_method: DraftSampling) -> list[PromptScore]:
    model, accelerator = load_model(folder), Accelerator()
    limits = {"rows": model.config.vocab_size, "real": real, "context": model.config.max_position_embeddings}
    rows = check_rows(answers, "answers", **limits)
    sizes: dict[str, Any] = {"batch_size": 8, "chunk": 256, "draft_sample_method": draft_sample_method}
    return score_prompts(accelerator, model.to(accelerator.device), rows, **sizes)


def _drafter(name: str) -> ModelSource:
    """Raises InputError for an adapter, too: what is merged into a rounded base, or rounded twice, loses quality (D17)."""
    if is_adapter(Path(name).expanduser()):
        raise InputError(
            f"{name}: a LoRA adapter: quantize the drafter that it was merged into, once. `draftsmith distill` with "
            "trainable=lora or qlora writes it merged, in 16 or 32 bit"
        )
    return resolve(name)


def main(argv: list[str]) -> int:
    about = "Writes a 4-bit copy of a drafter."
    # in front, so that measure.key=… fills the group that it opens
    argv = ["measure={}" if word == "--measure" else word for word in sorted(argv, key=lambda w: w != "--measure")]
    config, args = parse(QuantizeConfig, argv, positional=("drafter", "out"), about=about)
    if args.dry_run:
        formats = FORMATS if config.measure and config.measure.copies is None else (config.format,)
        plans = [plan_quantize(_drafter(config.drafter).path, config.choice(f)) for f in formats]
        if args.json:
            print(json.dumps(plans if config.measure else plans[0], indent=2))
        else:
            print("\n\n".join("\n".join(f"{k}: {v}" for k, v in plan.items()) for plan in plans))
        return 0
    if config.measure is not None:
        found = compare(config, config.measure)
        print(
            json.dumps(found, indent=2)
            if args.json
            else f"{markdown(found['rows'], found['num_speculative_tokens'])}\n"
        )
        print("" if args.json else found["sentence"])
        return 3 if found["serve"] is None else int(found["serve"] == "target")
    result = run(config)
    if args.json:
        print(json.dumps(result, indent=2))
    else:
        drift = result["logit_drift"]
        print(
            f"wrote {config.out}: {result['mib_before']} -> {result['mib_after']} MiB "
            f"(linear layers {result['linear_mib_before']} -> {result['linear_mib_after']} MiB)\n"
            f"reloaded: equal to the copy in memory; against the drafter, on {drift['on']}: same argmax at "
            f"{drift['top1_agreement']:.1%} of {drift['positions']} positions, logits off by {drift['mean_abs']:.3g} "
            f"on average, {drift['max_abs']:.3g} at most, KL {drift['kl']:.3g} nats"
        )
        for note in result["notes"]:
            print(f"note: {note}")
    return 0


if __name__ == "__main__":
    raise SystemExit(guarded(main))
