"""Makes an untrained drafter: from the target's own layers and channels, from a donor, or from a config.

draftsmith init target=HuggingFaceTB/SmolLM2-135M-Instruct layers=[0,1,14,28,29] out=runs/drafter
python recipes/init.py target=./my-target count=4 out=./drafter dtype=bfloat16
draftsmith init target=./my-target count=4 by=influence ffn=1024 heads=6 answers=runs/answers out=./drafter
draftsmith init target=./my-target params=30M answers=runs/answers out=./drafter
draftsmith init target=./my-target draft_step=0.15 out=./drafter
draftsmith init target=./my-target donor=./other-family-small map={"<|im_end|>": "</s>"} out=./drafter
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any, Literal

if __package__ in (None, ""):  # launched by path: sys.path[0] is recipes/, where `import distill` would find a script
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from pydantic import Field, model_validator
from rich.console import Console

from distill.answers import open_answers, require_target
from pairing.decode_time import BLOCK, BLOCKS, CONTEXT, engine_name, open_timer
from pairing.errors import InputError
from pairing.files import read_json, require_outside
from pairing.init import Width, chosen_width, fit_budget, init_drafter, init_from_config, plan_init, spaced
from pairing.mask_token import Mask, free_mask, write_mask
from pairing.source import ModelSource, load_model, resolve
from pairing.step_budget import fit_step, parse_limit
from pairing.transplant import plan_transplant, transplant
from pairing.weights import parameters, read_headers
from pairing.width import choose, importance, influential, shape_of
from recipes.config import Strict, guarded, parse

LONGEST = 512  # tokens of a text that importance is measured on
UNITS = {"k": 10**3, "m": 10**6, "b": 10**9}
WAYS = (  # keys that go together; one way at a time
    ("layers",),
    ("count", "by", "hidden", "ffn", "heads", "kv_heads"),
    ("params",),
    ("ratio",),
    ("draft_step",),
    ("donor", "map"),
    ("config", "seed"),
)


class InitConfig(Strict):
    target: str
    """the target: a hub id, a folder or a .gguf file"""
    out: Path
    """the drafter's folder; must be new or empty"""
    layers: list[int] | Literal["all"] | None = None
    """numbers of the target's layers to keep, ascending, such as [0,1,14,28,29]; or all"""
    count: int | None = Field(default=None, ge=2)
    """how many layers to keep where `layers` is not given; 5 where neither is"""
    by: Literal["spaced", "influence"] = "spaced"
    """which `count` layers: evenly spaced, or of the largest block influence on `answers`"""
    hidden: int | None = Field(default=None, ge=1)
    """hidden channels to keep, the most important on `answers`"""
    ffn: int | None = Field(default=None, ge=1)
    """FFN channels to keep in each layer, likewise"""
    heads: int | None = Field(default=None, ge=1)
    """attention heads to keep in each layer, likewise"""
    kv_heads: int | None = Field(default=None, ge=1)
    """key/value groups to keep; null: all where `heads` divides over them, else whole groups go"""
    params: int | str | None = None
    """at most so many parameters, such as 30M: the widest two layers that fit, then as many layers as do"""
    ratio: float | str | None = None
    """the same as a share of the target's, such as 1/50"""
    draft_step: float | str | None = None
    """at most so long a decode step, measured here: a share of the target's own, such as 0.15, or a time, such as 12ms"""
    answers: Path | None = None
    """a folder of `draftsmith generate`: the text on which layers and channels are chosen"""
    texts: int = Field(default=64, ge=1)
    """how many of its answers are read"""
    donor: str | None = None
    """a model whose layers are taken under the target's tokenizer: a smaller one of the family, or of another"""
    map: dict[str, str] = Field(default_factory=dict)
    """with donor: target's token to donor's token, before every other rule"""
    config: Path | None = None
    """a config.json whose model is made with random weights"""
    seed: int = 0
    """with config: of the random weights"""
    mask_token: str | int | None = None
    """names a mask in the drafter's config for parallel drafting: a token, an id, or auto: one that nothing else uses"""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """casts the weights; null keeps the target's type (with config: float32)"""

    @model_validator(mode="after")
    def _one_choice(self) -> InitConfig:
        if self.layers is not None and self.count is not None:
            raise ValueError("give layers or count, not both")
        given = [[key for key in way if key in self.model_fields_set and getattr(self, key)] for way in WAYS]
        alone = [keys for keys in given[2:] if keys]
        if alone and sum(map(bool, given)) > 1:
            named = ", ".join(key for keys in given for key in keys)
            raise ValueError(f"give one way to make a drafter, not {named} together")
        if self.draft_step is not None:
            parse_limit(self.draft_step)
        if self.map and self.donor is None:
            raise ValueError("map needs donor=…")
        if self.donor is not None and self.dtype is not None:
            raise ValueError("a donor keeps its type: leave dtype out")
        narrowed = [key for key in ("hidden", "ffn", "heads", "kv_heads") if getattr(self, key)]
        narrowed += ["by"] if self.by == "influence" else []
        if narrowed and self.answers is None:
            raise ValueError(f"{narrowed[0]} needs answers=…: the text on which channels and layers are chosen")
        return self


def chosen_layers(config: InitConfig, target: ModelSource) -> list[int]:
    of = read_json(target.path / "config.json").get("num_hidden_layers")
    if not isinstance(of, int):
        raise InputError(f"{target.name}: its config.json names no num_hidden_layers, so no layers can be chosen")
    if isinstance(config.layers, list):
        return config.layers
    return list(range(of)) if config.layers == "all" else spaced(config.count or min(5, of), of)


def budget(config: InitConfig, target: ModelSource) -> int | None:
    """`params` or `ratio` as a number of parameters."""
    own = parameters(read_headers(target.path)) if config.ratio is not None else 0
    try:
        if config.ratio is not None:
            top, _, bottom = str(config.ratio).partition("/")
            return int(float(top) / float(bottom or 1) * own)
        text = str(config.params or "")
        unit = UNITS.get(text[-1:].lower(), 1)
        return int(float(text[:-1] if unit > 1 else text) * unit) if text else None
    except (ValueError, ZeroDivisionError, OverflowError):  # the last: of "inf"
        raise InputError("give params as 30M or 30000000, ratio as 1/50 or 0.02") from None


def shape(config: InitConfig, target: ModelSource) -> tuple[list[int], Width | None]:
    """Layers and width, before any text is read: with by=influence only the number of layers is meant."""
    most = budget(config, target)
    if most is not None:
        return fit_budget(target, most)
    sizes = {key: getattr(config, key) for key in ("hidden", "ffn", "heads", "kv_heads")}
    return chosen_layers(config, target), chosen_width(target, **sizes) if any(sizes.values()) else None


def chosen_on_text(
    config: InitConfig, target: ModelSource, layers: list[int], width: Width | None
) -> tuple[list[int], Width | None, dict[str, Any]]:
    """The same with what the target's activations on `answers` say; and the record of it for pair.json."""
    if config.answers is None:
        raise InputError("a narrower drafter needs answers=…: the text on which its channels are chosen")
    answers = open_answers(config.answers)
    require_target(answers, target)
    rows = answers.data.select(range(min(config.texts, len(answers.data))))
    texts = [row["input_ids"][:LONGEST] for row in rows]
    old = shape_of(read_json(target.path / "config.json"))
    found = importance(load_model(target.path), texts, old)
    if config.by == "influence":
        layers = influential(found.influence_L, len(layers))
    if width is not None:
        width = Width(width.shape, choose(found, old, width.shape))
    record = {"by": config.by, "answers": str(config.answers), "texts": len(texts), "tokens": found.tokens,
              "influence": [round(x, 5) for x in found.influence_L.tolist()]}  # fmt: skip
    return layers, width, record


def run(config: InitConfig) -> dict[str, Any]:
    """Makes the drafter and returns its figures: drafter, target, layers, of, width, dtype, parameters, bytes; mask_id."""
    target = resolve(config.target)
    mask = chosen_mask(config, target)
    result = make(config, target)
    if mask is None:
        return result
    write_mask(config.out, mask)
    return result | {"mask_id": mask.id, "mask_token": mask.token}


def chosen_mask(config: InitConfig, target: ModelSource) -> Mask | None:
    """By the target's tokenizer and rows, which the drafter gets."""
    if config.mask_token is None:
        return None
    return free_mask(target.path, None if config.mask_token == "auto" else config.mask_token)


def make(config: InitConfig, target: ModelSource) -> dict[str, Any]:
    if config.donor is not None:
        donor = resolve(config.donor)
        require_outside(config.out, donor.path)
        return transplant(target, donor, config.out, config.map)
    if config.config is not None:
        return init_from_config(target, config.out, read_json(config.config), config.seed, config.dtype or "float32")
    steps: dict[str, Any] = {}
    if config.draft_step is not None:
        log = config.out.with_name(f"{config.out.name}.draft_step.log")
        limit, narrower = parse_limit(config.draft_step), config.answers is not None
        with open_timer(os.environ, log) as timer:
            layers, width, measured = fit_step(target, limit, timer, narrower)
        steps = {"draft_step": measured}
    else:
        layers, width = shape(config, target)
    record: dict[str, Any] = {}
    if width is not None or config.by == "influence":
        layers, width, record = chosen_on_text(config, target, layers, width)
    return init_drafter(target, config.out, layers, config.dtype, width, record | steps) | steps


def dry(config: InitConfig, target: ModelSource) -> dict[str, Any]:
    result: dict[str, Any] = {"drafter": str(config.out), "target": config.target}
    if config.donor is not None:
        plan = plan_transplant(target, resolve(config.donor), config.map)
        return result | {k: v for k, v in plan.items() if k not in ("sources", "real", "listed", "tensors")}
    if config.config is not None:
        return result | {"config": read_json(config.config), "dtype": config.dtype or "float32"}
    if config.draft_step is not None:
        plan_init(target, [0])  # raises what a run would, before it measures
        widths = "its own and narrower widths" if config.answers else "its own width (narrower ones need answers=…)"
        would = f"decode steps of the target and of drafters with 2 or more layers in {widths}, in {engine_name()}, " \
            f"one request, from {CONTEXT} tokens of context on, {BLOCKS} blocks of {BLOCK} steps each in turns"  # fmt: skip
        return result | {"draft_step": str(parse_limit(config.draft_step)), "would_measure": would}
    layers, width = shape(config, target)
    plan = plan_init(target, layers, config.dtype, width)
    return result | {k: v for k, v in plan.items() if k not in ("config", "tensors")} | {"by": config.by}


def draft_step_line(step: dict[str, Any]) -> str:
    unit = " ms" if step["unit"] == "ms" else ""
    foretold = "" if step["predicted"] is None else f" (predicted {step['predicted']:.3g}{unit})"
    (ms, low, high), (share, least, most) = step["ms"], step["share"]
    return (
        f"draft step {ms:.1f} ms ({low:.1f} to {high:.1f}), {share:.3f} ({least:.3f} to {most:.3f}) of the target's "
        f"{step['target_ms'][0]:.1f} ms{foretold}; asked for at most {step['asked']:g}{unit}; {step['engine']}"
    )


def main(argv: list[str]) -> int:
    config, args = parse(InitConfig, argv, about="Makes an untrained drafter.")
    notes = Console(stderr=True, highlight=False, soft_wrap=True)
    target = resolve(config.target)
    require_outside(config.out, target.path)
    if target.note:
        notes.print(target.note, markup=False)
    result = dry(config, target) if args.dry_run else run(config)
    if args.dry_run and (mask := chosen_mask(config, target)):
        result |= {"mask_id": mask.id, "mask_token": mask.token}
    if args.json:
        print(json.dumps(result, indent=2, ensure_ascii=False))
        return 0
    show(config, args.dry_run, result)
    if "mask_id" in result:
        token = repr(result["mask_token"]) if result["mask_token"] else "a padding row"
        print(f"mask for parallel drafting: {result['mask_id']} ({token})")
    return 0


def show(config: InitConfig, dry_run: bool, result: dict[str, Any]) -> None:
    what = f"{'would write' if dry_run else 'wrote'} {result['drafter']}"
    if config.donor is not None:
        counts = ", ".join(
            f"{result[how]} {how}" for how in ("user", "copied", "role", "pieces", "mean") if how in result
        )
        print(f"{what}: {result['tokens']} tokens ({counts}), {result['rows'][0]} rows to {result['rows'][1]}")
        for row in result["special"]:
            print(f"  {row['id']} {row['token']!r}: {' + '.join(row['of']) or 'mean of all real rows'} ({row['how']})")
    elif config.config is not None:
        print(f"{what}: random weights, {result['dtype']}")
    elif "would_measure" in result:
        print(f"{what} with a step of at most {result['draft_step']}; would measure {result['would_measure']}")
    else:
        wide = "".join(f", {k} {v}" for k, v in (result["width"] or {}).items())
        print(
            f"{what}: layers {result['layers']} of {result['of']}{wide}, "
            f"{result['parameters']:,} parameters, {result['dtype']}, {int(result['bytes']) / 2**20:.1f} MiB"
        )
        if step := result.get("draft_step"):
            print(draft_step_line(step))


if __name__ == "__main__":
    raise SystemExit(guarded(main))
