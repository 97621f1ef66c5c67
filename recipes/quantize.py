"""Writes a 4-bit copy of a drafter, NF4 or W4A16, reloaded and compared with what was in memory.

draftsmith quantize drafter=runs/demo/distill/drafter out=runs/demo/nf4 answers=runs/demo/data/test
draftsmith quantize ./drafter ./drafter-nf4 compute_dtype=bfloat16 --json
draftsmith quantize ./drafter ./drafter-w4a16 format=w4a16 calibration=runs/demo/data/train answers=runs/demo/data/test
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Literal, Self

if __package__ in (None, ""):  # launched by path: sys.path[0] is recipes/, where `import distill` would find a script
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from pydantic import Field, model_validator

from distill.quantize import Choice, plan_quantize, quantize_drafter
from pairing.errors import InputError
from pairing.files import write_json
from pairing.lora import is_adapter
from pairing.source import ModelSource, resolve
from recipes.config import Strict, guarded, parse


class QuantizeConfig(Strict):
    drafter: str
    """the drafter's folder, in 16 or 32 bit"""
    out: Path
    """folder of the 4-bit copy; must be new or empty"""
    format: Literal["nf4", "w4a16"] = "nf4"
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

    @model_validator(mode="after")
    def _of_the_format(self) -> Self:
        """A key of the other format would be ignored in silence."""
        for key, needed in (("compute_dtype", "nf4"), ("group_size", "w4a16"), ("calibration", "w4a16")):
            if getattr(self, key) is not None and self.format != needed:
                raise ValueError(f"{key} is of format={needed}, and the format is {self.format}: leave one of them out")
        return self

    def choice(self) -> Choice:
        return Choice(self.format, self.compute_dtype, self.group_size or 64, self.serve_on)


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
    config, args = parse(QuantizeConfig, argv, positional=("drafter", "out"), about=about)
    if args.dry_run:
        plan = plan_quantize(_drafter(config.drafter).path, config.choice())
        print(json.dumps(plan, indent=2) if args.json else "\n".join(f"{k}: {v}" for k, v in plan.items()))
        return 0
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
