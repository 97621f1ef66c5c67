"""Writes a 4-bit (NF4) copy of a drafter, reloaded and compared with what was in memory.

draftsmith quantize drafter=runs/demo/distill/drafter out=runs/demo/nf4 answers=runs/demo/data/test
draftsmith quantize ./drafter ./drafter-nf4 compute_dtype=bfloat16 --json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Literal

if __package__ in (None, ""):  # launched by path: sys.path[0] is recipes/, where `import distill` would find a script
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from pydantic import Field

from distill.quantize import plan_quantize, quantize_drafter
from pairing.files import write_json
from pairing.source import resolve
from recipes.config import Strict, guarded, parse


class QuantizeConfig(Strict):
    drafter: str
    """the drafter's folder, in 16 or 32 bit"""
    out: Path
    """folder of the 4-bit copy; must be new or empty"""
    format: Literal["nf4"] = "nf4"
    """how the weights are written"""
    compute_dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """the type that 4-bit weights are multiplied in; null takes the drafter's own"""
    answers: Path | None = None
    """an answers folder to measure the drift on; null measures it on random ids"""
    rows: int = Field(default=32, ge=1)
    """how many of its answers"""
    report: Path | None = None
    """writes the figures there as JSON"""


def run(config: QuantizeConfig) -> dict[str, Any]:
    """The figures of `distill.quantize.quantize_drafter`; a whole folder always has its report."""
    source = resolve(config.drafter)
    report = config.report

    def write(result: dict[str, Any]) -> None:
        if report is not None:
            write_json(report, result)

    return quantize_drafter(source.path, config.out, config.compute_dtype, config.answers, config.rows, write)


def main(argv: list[str]) -> int:
    about = "Writes a 4-bit (NF4) copy of a drafter."
    config, args = parse(QuantizeConfig, argv, positional=("drafter", "out"), about=about)
    if args.dry_run:
        plan = plan_quantize(resolve(config.drafter).path, config.compute_dtype)
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
            f"on average, {drift['max_abs']:.3g} at most"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(guarded(main))
