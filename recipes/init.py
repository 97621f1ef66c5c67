"""Makes an untrained drafter from the target's own layers.

draftsmith init target=HuggingFaceTB/SmolLM2-135M-Instruct layers=[0,1,14,28,29] out=runs/drafter
python recipes/init.py target=./my-target count=4 out=./drafter dtype=bfloat16
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Literal

if __package__ in (None, ""):  # launched by path: sys.path[0] is recipes/, where `import distill` would find a script
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from pydantic import Field, model_validator
from rich.console import Console

from pairing.errors import InputError
from pairing.files import read_json
from pairing.init import init_drafter, plan_init, spaced
from pairing.source import ModelSource, resolve
from recipes.config import Strict, guarded, parse


class InitConfig(Strict):
    target: str
    """the target: a hub id, a folder or a .gguf file"""
    out: Path
    """the drafter's folder; must be new or empty"""
    layers: list[int] | Literal["all"] | None = None
    """numbers of the target's layers to keep, ascending, such as [0,1,14,28,29]; or all"""
    count: int | None = Field(default=None, ge=2)
    """how many evenly spaced layers to keep where `layers` is not given; 5 where neither is"""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """casts the weights; null keeps the target's type"""

    @model_validator(mode="after")
    def _one_choice(self) -> InitConfig:
        if self.layers is not None and self.count is not None:
            raise ValueError("give layers or count, not both")
        return self


def chosen_layers(config: InitConfig, target: ModelSource) -> list[int]:
    of = read_json(target.path / "config.json").get("num_hidden_layers")
    if not isinstance(of, int):
        raise InputError(f"{target.name}: its config.json names no num_hidden_layers, so no layers can be chosen")
    if isinstance(config.layers, list):
        return config.layers
    return list(range(of)) if config.layers == "all" else spaced(config.count or min(5, of), of)


def run(config: InitConfig) -> dict[str, Any]:
    """Makes the drafter and returns its figures: drafter, target, layers, of, dtype, parameters, bytes."""
    target = resolve(config.target)
    return init_drafter(target, config.out, chosen_layers(config, target), config.dtype)


def main(argv: list[str]) -> int:
    config, args = parse(InitConfig, argv, about="Makes an untrained drafter from the target's own layers.")
    notes = Console(stderr=True, highlight=False, soft_wrap=True)
    target = resolve(config.target)
    if target.note:
        notes.print(target.note, markup=False)
    if args.dry_run:
        plan = plan_init(target, chosen_layers(config, target), config.dtype)
        result: dict[str, Any] = {"drafter": str(config.out), "target": config.target}
        result |= {k: v for k, v in plan.items() if k not in ("config", "tensors")}
    else:
        result = run(config)
    if args.json:
        print(json.dumps(result, indent=2))
    else:
        what = "would write" if args.dry_run else "wrote"
        print(
            f"{what} {result['drafter']}: layers {result['layers']} of {result['of']}, "
            f"{result['parameters']:,} parameters, {result['dtype']}, {int(result['bytes']) / 2**20:.1f} MiB"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(guarded(main))
