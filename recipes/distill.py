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
from typing import Any, Literal

if __package__ in (None, ""):  # launched by path: sys.path[0] is recipes/, where `import distill` would find a script
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch
from accelerate import Accelerator
from pydantic import ConfigDict, Field, model_validator
from rich.console import Console
from transformers.utils.logging import disable_progress_bar

from distill.adapters import attach, drift, load_in_4bit, merged
from distill.batches import Rows
from distill.checkpoint import Which, load_weights
from distill.evaluate import compare, score_prompts, verdict, verdict_of_copy
from distill.evaluate_parallel import compare_rounds, score_rounds
from distill.fake_quantize import Format, Quantizer, quantized, require_whole
from distill.guards import tracker
from distill.inputs import choose_mask, open_inputs, require_reference
from distill.mask_blocks import Parallel
from distill.objective import Weight, auto
from distill.options import give_back_memory
from distill.parallel import kind_of
from distill.plan import plan_run
from distill.quantize import Choice, plan_quantize
from distill.save import stored_dtype, write_drafter
from distill.settings import Settings, require_possible
from distill.signals import Target, online, require_recorded
from distill.student import Trainable, freeze
from distill.train import Send, fit
from pairing.errors import InputError
from pairing.files import append_jsonl, digest_json, read_json, write_json
from pairing.pair import describe_model
from pairing.source import load_model, resolve
from recipes.config import Strict, guarded, parse
from recipes.run_folder import open_run

_WHICH: dict[str, Which] = {"last": "newest", "best": "best"}


Points = float | list[tuple[float, float]]


class LossWeights(Strict):
    """A weight, or points [progress, weight]: [[0, 1], [0.3, 1], [0.4, 0]] falls from 1 to 0 in the second third."""

    forward_kl: Points | None = None
    """KL from the target's distribution to the drafter's"""
    reverse_kl: Points | None = None
    """KL from the drafter's to the target's; signal=online"""
    jsd: Points | None = None
    """the generalised Jensen-Shannon divergence at jsd_beta; signal=online"""
    total_variation: Points | None = None
    """1 − Σ min(p, q): the rejection probability itself"""
    tvd_plus_plus: Points | None = None
    """total variation with a normalised reward (Goel et al. 2024)"""
    lk_hybrid: Points | None = None
    """KL that turns into total variation as acceptance grows (LK losses, 2026)"""
    neg_log_alpha: Points | None = None
    """−log Σ min(p, q) (LK losses, 2026)"""
    cross_entropy: Points | None = None
    """−log q of the answer's tokens"""
    top1_ce: Points | None = None
    """−log q of the target's most likely token"""

    def given(self) -> dict[str, Weight]:
        return {name: weight for name, weight in self if weight is not None}


class LoraConfig(Strict):
    rank: int = Field(default=16, ge=1)
    """of the two factors whose product is added to a weight"""
    alpha: float = Field(default=32.0, gt=0)
    """the product is scaled by alpha / rank"""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """of a layer's inputs on their way through the factors"""
    vocabulary: bool = False
    """adapts the embedding and the head too"""


class MaskConfig(Strict):
    keep: float = Field(default=0.5, gt=0, le=1)
    """the mask at offset i of a round is trained with chance max(keep^i, least), so that a step stays cheap (PARD)"""
    least: float = Field(default=0.1, gt=0, le=1)
    """see keep"""
    token: int | str | None = None
    """the mask token or its id; null: the draft config's own, else a spare special token"""


class DistillConfig(Strict):
    model_config = ConfigDict(allow_inf_nan=False)  # with what Strict says

    draft: Path
    """the drafter's folder, from `draftsmith init`; it is not changed"""
    data: Path
    """the target's answers to train on, from `draftsmith generate`"""
    out: Path = Path("runs/distill")
    """the run's folder; the same config goes on in it, another one is refused"""
    heldout: dict[str, Path] = Field(default_factory=dict)
    """answers to evaluate on, by a name of your choice: heldout.orders=runs/held"""
    target: str | None = None
    """the target; checks that the answers were written by it, and with signal=online gives its whole distribution"""
    signal: Literal["cached", "online"] = "cached"
    """cached: what `generate` recorded; online: the target runs beside the drafter"""
    top_logprobs: int | None = Field(default=None, ge=1)
    """with signal=cached: how many of the recorded ids are used; null: all"""
    target_dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """with signal=online: the target's type; null: as its weights are stored, float32 on a CPU"""
    target_device: str | None = None
    """with signal=online: where the target runs, such as cuda:1; null: beside the drafter"""
    epochs: float | None = Field(default=None, gt=0)
    """passes over the data; of epochs, max_steps and minutes the first that is reached ends the run; 3 where none is given"""
    max_steps: int | None = Field(default=None, gt=0)
    """optimizer steps"""
    minutes: float | None = Field(default=None, gt=0)
    """minutes of training, evaluation while training included; the rate decays to reach 0 then"""
    seed: int = Field(default=0, ge=0, lt=1 << 31)
    batch_size: int = Field(default=8, gt=0)
    """prompts per process and accumulation step"""
    accumulation: int = Field(default=1, gt=0)
    """batches per optimizer step"""
    lr: float = Field(default=1e-3, ge=0)
    """peak learning rate of AdamW"""
    warmup: float = Field(default=0.04, ge=0, lt=1)
    """part of the run in which the rate rises"""
    weight_decay: float = Field(default=0.0, ge=0)
    beta2: float = Field(default=0.98, gt=0, lt=1)
    """AdamW's memory of squared gradients; short runs want it short"""
    clip: float = Field(default=1.0, gt=0)
    """largest norm of the gradient"""
    trainable: Trainable = "layers"
    """layers: the embedding and the head stay the target's own; all: they learn too; lora: adapters on the layers; qlora:
    the same on a 4-bit copy (bitsandbytes); adapters are merged into the draft's own weights at the end"""
    lora: LoraConfig = LoraConfig()
    objective: Literal["auto", "losses"] | None = None
    """auto chooses the losses from how the pair is served, and says why; null: losses where any is given, else auto"""
    losses: LossWeights = LossWeights()
    jsd_beta: float = Field(default=0.5, ge=0, le=1)
    """losses.jsd: 0 is forward KL, 1 is reverse KL"""
    serve_temperature: float | None = Field(default=None, ge=0)
    """the temperature that the pair is served at; null: the one at which the answers were drawn"""
    temperature: float = Field(default=1.0, gt=0)
    """with signal=online: at which target and drafter are compared. 1 gave more acceptance than the serving temperature
    itself, also at that one (docs/notebook.md); stored answers hold 1 alone"""
    draft_sample_method: Literal["greedy", "probabilistic"] = "greedy"
    """how the served drafter proposes, as in vLLM"""
    num_speculative_tokens: int = Field(default=4, ge=1)
    """tokens drafted a round, as served: for survival and for the best checkpoint"""
    survival: bool = False
    """weights positions by their chance to be reached in a round"""
    parallel_drafting: int | None = Field(default=None, ge=2, le=64)
    """also trains mask tokens, so that up to so many drafts come from one pass (vLLM's parallel_drafting); docs/parallel.md"""
    masks: MaskConfig = MaskConfig()
    """with parallel_drafting"""
    reference: Path | None = None
    """a drafter that was distilled before: with keep_share, the positions where it is ahead are learnt"""
    keep_share: float = Field(default=1.0, gt=0, le=1)
    """the share of an answer's positions that is learnt (AdaSPEC; 0.4 there)"""
    selection: Literal["gap", "random"] = "gap"
    """random: keep_share's control, the same work on positions drawn at random"""
    on_policy: float = Field(default=0.0, ge=0, le=1)
    """share of steps whose answers the drafter writes; signal=online"""
    on_policy_temperature: float = Field(default=1.0, ge=0)
    """at which it writes them"""
    chunk: int | None = Field(default=None, gt=0)
    """positions whose logits exist at one time; null: 24 MiB of logits on a CPU, 256 MiB on a GPU"""
    block: int = Field(default=1 << 19, gt=0)
    """vocabulary rows whose logits exist at one time; fewer save memory and cost time"""
    gradient_checkpointing: bool = False
    """layers keep their input alone and run again in the backward pass: less memory, more time (docs/scale.md)"""
    compile: bool = False
    """torch.compile of each layer; for GPUs"""
    eval_every: int = Field(default=50, gt=0)
    """steps between evaluations"""
    eval_prompts: int = Field(default=64, gt=0)
    """prompts of each held-out set used while training; the last evaluation uses all"""
    checkpoint_every: int = Field(default=50, gt=0)
    """steps between checkpoints"""
    keep: int = Field(default=2, gt=0)
    """newest checkpoints kept; the best by τ on the held-out sets is kept besides"""
    take: Literal["last", "best"] = "last"
    """whose weights the drafter gets: the last step's, or those of the best checkpoint"""
    tracker: Literal["none", "wandb"] = "none"
    """where metrics go beside metrics.jsonl"""
    quantizer: Format | None = None
    """the format that the drafter will be served in, where that is 4 bits: rounding to it is in the forward pass of the
    run's last part, and in all evaluations. The drafter is written in its own type still; `draftsmith quantize` makes the copy"""
    quantizer_from: float = Field(default=0.9, ge=0, lt=1)
    """the part of the run after which it is; 0 is for a short run on a trained drafter"""
    quantizer_group_size: Literal[32, 64, 128] = 64
    """with quantizer=w4a16: weights that share a scale"""
    threads: int | None = Field(default=None, gt=0)
    """CPU threads per process; null shares out the cores (launchers like to set 1)"""

    @model_validator(mode="after")
    def _is_possible(self) -> DistillConfig:
        if self.epochs is None and self.max_steps is None and self.minutes is None:
            self.epochs = 3.0
        given = self.losses.given()
        if self.objective == "auto" and given:
            raise ValueError(f"objective=auto chooses the losses: leave out losses.{next(iter(given))}, or objective")
        if self.objective == "losses" and not given:
            raise ValueError("objective=losses needs at least one: losses.forward_kl=1")
        if self.signal == "online" and self.target is None:
            raise ValueError("signal=online needs the target: target=…")
        if self.take == "best" and not self.heldout:
            raise ValueError("take=best is told by the held-out sets: give heldout.NAME=…, or take=last")
        if self.quantizer is not None and self.trainable in ("lora", "qlora"):
            raise ValueError(
                "quantizer rounds the weights, which adapters are merged into at the end only: train them without it, then "
                "run a short part on the result with trainable=layers quantizer_from=0"
            )
        self._require_used(given)
        if self.keep_share < 1 and self.parallel_drafting is not None:
            raise ValueError(
                "keep_share compares with a reference that knows no masks: leave it or parallel_drafting out"
            )
        if self.keep_share < 1 and self.reference is None:
            raise ValueError("keep_share compares with a drafter that was distilled before: give reference=…")
        if self.reference is not None and self.keep_share == 1:
            raise ValueError("reference is for keep_share: give keep_share=0.4, or leave reference out")
        return self

    def _require_used(self, given: dict[str, Weight]) -> None:
        """Raises ValueError for a key that nothing would look at beside the others."""
        online, adapters = self.signal == "online", self.trainable in ("lora", "qlora")
        used = {
            "temperature": (online, "signal=online (stored answers hold temperature 1 alone)"),
            "target_dtype": (online, "signal=online"),
            "target_device": (online, "signal=online"),
            "lora": (adapters, "trainable=lora or qlora"),
            "masks": (self.parallel_drafting is not None, "parallel_drafting"),
            "jsd_beta": ("jsd" in given, "losses.jsd"),
            "quantizer_from": (self.quantizer is not None, "quantizer=nf4 or w4a16"),
            "quantizer_group_size": (self.quantizer == "w4a16", "quantizer=w4a16"),
            "selection": (self.keep_share < 1, "keep_share below 1"),
            "on_policy_temperature": (self.on_policy > 0, "on_policy above 0"),
            "serve_temperature": (not given, "objective=auto"),
            "draft_sample_method": (not given or self.survival, "objective=auto, or survival=true"),
        }
        for key, (looked_at, needs) in used.items():
            if not looked_at and getattr(self, key) != type(self).model_fields[key].default:
                raise ValueError(f"{key} is for {needs}: nothing would look at it here; leave it out")


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
    rows, heldout, answered_at = open_inputs(
        draft, config.data, config.heldout, config.target, lambda line: notes.print(line, markup=False)
    )
    if config.target_device is not None:
        _require_device(config.target_device)
    if config.reference is not None:
        require_reference(config.reference, draft)
    if config.signal == "cached":
        require_recorded(rows, config.top_logprobs)
    parallel, said = _parallel(config, draft, [rows, *heldout.values()])
    settings, why = _settings(config, answered_at, parallel)
    if settings.quantizer is not None:
        # whether the format holds it at all; where it will be served is not known here
        plan_quantize(draft, Choice(settings.quantizer.format, group_size=config.quantizer_group_size, serve_on="cuda"))
        require_whole(kind_of(accelerator))
    notes.print(f"losses: {why}", markup=False)
    if said is not None:
        notes.print(_masks_line(config, said), markup=False)
    if dry_run:
        sizes = plan_run(_student(config), config.draft, _beside(config, accelerator), settings, rows, heldout,
                         accelerator.num_processes, accelerator.device)  # fmt: skip
        return {"plan": sizes, "objective": why}
    with accelerator.main_process_first():
        if accelerator.is_main_process:
            open_run(config.out, config)
    if (config.out / "drafter" / "pair.json").is_file():
        notes.print(f"{config.out} is finished already", markup=False)
        return _result(config, read_json(config.out / "evaluation.json"))
    send, close = _tracker(config, accelerator, notes)
    model, target = _student(config), _target(config, accelerator)
    reference = load_model(config.reference).to(accelerator.device).eval() if config.reference is not None else None
    summary = fit(accelerator, model, rows, heldout, settings, config.out, target, reference, _digests(config), send)
    close()
    del model, target, reference
    model, taken = _trained(config, accelerator, heldout)
    before = load_model(config.draft).to(accelerator.device)
    summary |= {"losses": dict(settings.losses), "objective": why, "signal": config.signal}
    summary |= {"temperature": config.temperature} | taken | _trained_for(settings)
    sets, lines = {}, []
    for name, held in heldout.items():
        sizes = {"batch_size": config.batch_size, "chunk": config.chunk, "block": config.block}
        scores = [score_prompts(accelerator, m, held, **sizes) for m in (before, model)]
        sets[name] = compare(*scores)
        if parallel is not None:
            K = max(config.num_speculative_tokens, parallel.num_speculative_tokens)
            old, new = (score_rounds(accelerator, m, held, parallel.mask_id, K, **sizes) for m in (before, model))
            sets[name]["parallel"] = compare_rounds(old, new, config.num_speculative_tokens)
        if settings.quantizer is not None:
            with quantized(model, settings.quantizer):
                copy = compare(scores[1], score_prompts(accelerator, model, held, **sizes))
            sets[name]["quantized"] = {"after": copy["after"], "change": copy["change"]}
        for b, a in zip(*scores, strict=True):
            lines.append({"set": name, "id": a.id, "tags": a.tags, "w_before": b.accepted, "w_after": a.accepted})
    evaluation = {"sets": sets, "verdict": verdict(sets) + verdict_of_copy(sets), "training": summary}
    if accelerator.is_main_process:
        (config.out / "evaluation_prompts.jsonl").unlink(missing_ok=True)
        for line in lines:
            append_jsonl(config.out / "evaluation_prompts.jsonl", line)
        write_json(config.out / "evaluation.json", evaluation)
        how = config.model_dump(mode="json", include={"lr", "seed", "trainable"})
        write_drafter(config.out / "drafter", config.draft, model, evaluation, how, config.data, said)
    return _result(config, evaluation)


def _student(config: DistillConfig) -> Any:
    """The draft as it is trained: itself, or with adapters on it, or on its 4-bit copy."""
    if config.trainable in ("all", "layers"):
        return load_model(config.draft)
    model = load_in_4bit(config.draft) if config.trainable == "qlora" else load_model(config.draft)
    attach(model, **config.lora.model_dump(), seed=config.seed)
    return model


def _trained(config: DistillConfig, accelerator: Accelerator, heldout: dict[str, Rows]) -> tuple[Any, dict[str, Any]]:
    """The trained drafter as a plain model, from its checkpoint, and what is to be said of it: the step, a merge's drift."""
    model = _student(config)
    params = freeze(model, config.trainable)
    said = {"taken_step": load_weights(config.out / "checkpoints", _WHICH[config.take], params)["step"]}
    model.to(accelerator.device)
    if config.trainable in ("all", "layers"):
        return model, said
    plain = merged(model, config.draft).float().to(accelerator.device)  # never into 4-bit weights (fault D17)
    real = next(iter(heldout.values())).real if heldout else None
    texts = [rows.data[i]["input_ids"] for rows in heldout.values() for i in range(min(8, len(rows)))]
    return plain, said | ({"merge_drift": drift(model, plain, texts, real)} if texts else {})


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
    accelerator = Accelerator(cpu=cpu, log_with=None if config.tracker == "none" else config.tracker)
    kind_of(accelerator)
    if accelerator.mixed_precision not in ("no", "bf16"):
        raise InputError(f"mixed_precision {accelerator.mixed_precision}: distill trains in no or bf16 precision")
    if cpu:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        torch.set_num_threads(config.threads or max(1, cores // accelerator.num_processes))
    return accelerator


def _parallel(config: DistillConfig, draft: Path, texts: list[Rows]) -> tuple[Parallel | None, dict[str, Any] | None]:
    """How masks are trained, and what pair.json says of it."""
    if config.parallel_drafting is None:
        return None, None
    rows_learn = config.trainable == "all" or (config.trainable in ("lora", "qlora") and config.lora.vocabulary)
    mask = choose_mask(draft, texts, config.masks.token, rows_learn)
    parallel = Parallel(config.parallel_drafting, mask.id, config.masks.keep, config.masks.least)
    said = {"num_speculative_tokens": config.parallel_drafting, "mask_id": mask.id, "mask_token": mask.token}
    return parallel, said


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
    model = load_model(source.path, _target_dtype(config, source.path, accelerator))
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
            f"{a['alpha_high']:.3f}; acceptance length at K=4 {b['tau']['4']} -> {a['tau']['4']}"
        )
        if p := s.get("parallel"):
            k = p["num_speculative_tokens"]
            lines.append(
                f"{name}, all drafts in one pass: acceptance length at K={k} {p['before']['tau'][str(k)]} -> "
                f"{p['after']['tau'][str(k)]}; top-1 by offset {[round(x, 3) for x in p['after']['top1_by_offset'] if x]}"
            )
    return "\n".join([*lines, f"wrote {result['drafter']}"])


if __name__ == "__main__":
    raise SystemExit(guarded(main))
