"""Proves that a target and a drafter fit: tokens, rows, special ids, templates, context. Exit 1 where they don't.

draftsmith check HuggingFaceTB/SmolLM2-135M-Instruct runs/drafter
draftsmith check ./target ./drafter out=check.json record=true --json
draftsmith check ./target ./drafter tensor_parallel_size=2 max_model_len=4096 preflight=require
draftsmith check ./target ./drafter --markdown >> $GITHUB_STEP_SUMMARY
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any, Literal

if __package__ in (None, ""):  # launched by path: sys.path[0] is recipes/, where `import distill` would find a script
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from pydantic import Field
from rich.console import Console
from rich.table import Table

from pairing.alignment import check_pair, summary, without_gc
from pairing.card import write_card
from pairing.files import write_json
from pairing.pair import read_pair, update_pair
from pairing.preflight import preflight_report
from pairing.serving_plan import Serving
from pairing.source import resolve
from pairing.without_torch import transformers_without_torch
from recipes.config import Strict, guarded, parse

COLOURS = {"blocks": "bold red", "repairable": "red", "warns": "yellow", "info": "dim"}
COLUMNS = {"level": "level", "where": "where", "what": "what", "fix": "what to do"}
SWITCH = {"0": False, "1": True}


class CheckConfig(Strict):
    target: str
    """the target: a hub id, a folder or a .gguf file"""
    draft: str
    """the drafter: the same"""
    out: Path | None = None
    """writes the whole report there as JSON"""
    record: bool = False
    """also writes the report's summary into the drafter's pair.json and model card"""
    format: Literal["table", "markdown"] = "table"
    """how it is printed; --markdown is short for markdown"""
    preflight: Literal["show", "require", "skip"] = "show"
    """whether this machine's vLLM would start the pair with the keys below: shown, required for exit 0, or left out"""
    num_speculative_tokens: int = Field(default=4, ge=1)
    """K"""
    tensor_parallel_size: int = Field(default=1, ge=1)
    """devices that both models are split over"""
    max_model_len: int | None = Field(default=None, ge=1)
    """--max-model-len; null: what the target's config says"""
    max_num_seqs: int | None = Field(default=None, ge=1)
    """--max-num-seqs; null: vLLM's own"""
    max_num_batched_tokens: int | None = Field(default=None, ge=1)
    """--max-num-batched-tokens; null: vLLM's own"""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """--dtype"""
    gpu_memory_utilization: float = Field(default=0.9, gt=0, le=1)
    """--gpu-memory-utilization; vLLM's CPU back end takes it too"""
    kv_cache_gib: int | None = Field(default=None, ge=1)
    """CPU back end: VLLM_CPU_KVCACHE_SPACE; null: the environment's"""
    hf_overrides: dict[str, Any] = Field(default_factory=dict)
    """--hf-overrides, such as {rope_parameters: {rope_type: yarn, factor: 4.0}}; they reach the target only"""
    speculative_config: dict[str, Any] = Field(default_factory=dict)
    """more keys of --speculative-config, as you mean to give them"""


def serving(config: CheckConfig) -> Serving:
    space = os.environ.get("VLLM_CPU_KVCACHE_SPACE", "")
    return Serving(
        num_speculative_tokens=config.num_speculative_tokens,
        max_model_len=config.max_model_len,
        tensor_parallel_size=config.tensor_parallel_size,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        dtype=config.dtype,
        gpu_memory_utilization=config.gpu_memory_utilization,
        kv_cache_gib=config.kv_cache_gib or (int(space) if space.isdigit() else None),
        hf_overrides=config.hf_overrides,
        speculative_config=config.speculative_config,
        force_v2=SWITCH.get(os.environ.get("VLLM_USE_V2_MODEL_RUNNER", "")),
    )


@without_gc()
def run(config: CheckConfig) -> dict[str, Any]:
    """The report of `pairing.alignment.check_pair`, with "preflight", written where the config says so."""
    target, drafter = resolve(config.target), resolve(config.draft)
    if config.record:
        read_pair(drafter.path)  # refused before the work, not after it
    transformers_without_torch(target.path, drafter.path)
    report = check_pair(
        target, drafter, hf_overrides=config.hf_overrides, tensor_parallel_size=config.tensor_parallel_size
    )
    skip = config.preflight == "skip"
    report["preflight"] = None if skip else preflight_report(target, drafter, serving(config))
    if config.out is not None:
        write_json(config.out, report)
    if config.record:
        update_pair(drafter.path, alignment=summary(report))
        write_card(drafter.path)
    return report


def main(argv: list[str]) -> int:
    about = "Proves that a target and a drafter fit."
    words = ["format=markdown" if word == "--markdown" else word for word in argv]
    config, args = parse(CheckConfig, words, positional=("target", "draft"), about=about)
    if args.dry_run:
        print(json.dumps(config.model_dump(mode="json"), indent=2))
        return 0
    report = run(config)
    if args.json:
        print(json.dumps(report, indent=2, ensure_ascii=False))
    elif config.format == "markdown":
        print(markdown(report))
    else:
        show(report)
    starts = config.preflight != "require" or report["preflight"]["starts"]
    return 0 if report["aligned"] and starts else 1


def show(report: dict[str, Any]) -> None:
    console = Console(highlight=False)
    flight = report["preflight"]
    tables = [(f"{report['target']} + {report['drafter']}", report["findings"])]
    tables += [("vLLM on this machine", flight["findings"])] if flight else []
    for title, findings in tables:
        table = Table(*COLUMNS.values(), title=_plain(title))
        for f in findings:
            table.add_row(*(_plain(f[k]) for k in COLUMNS), style=COLOURS[f["level"]])
        console.print(table)
    for user, need in report["needs"].items():
        console.print(f"{user}: {'runs' if need['runs'] else 'no'}: {'; '.join(need['because'])}", markup=False)
    if flight:
        console.print(flight["command"], markup=False, soft_wrap=True)
    console.print(report["verdict"], style="green" if report["aligned"] else "bold red", markup=False)


def _plain(text: str) -> str:
    return text.replace("[", r"\[")  # rich would take an id list for markup


def markdown(report: dict[str, Any]) -> str:
    """GitHub's tables: for a pull request's comment or a job's summary."""
    flight = report["preflight"]
    lines = [f"### {_cell(report['verdict'])}", "", f"`{report['target']}` + `{report['drafter']}`", ""]
    lines += ["| user | runs | because |", "|---|---|---|"]
    for user, need in report["needs"].items():
        lines.append(f"| {user} | {'yes' if need['runs'] else 'no'} | {_cell('; '.join(need['because']))} |")
    lines += ["", *_markdown_table(report["findings"])]
    if flight:
        lines += ["", "#### vLLM on this machine", "", *_markdown_table(flight["findings"])]
        lines += ["", "```sh", flight["command"], "```"]
    return "\n".join(lines)


def _markdown_table(findings: list[dict[str, Any]]) -> list[str]:
    rows = ["| " + " | ".join(_cell(f[k]) for k in COLUMNS) + " |" for f in findings]
    return ["| " + " | ".join(COLUMNS.values()) + " |", "|---|---|---|---|", *rows]


def _cell(text: str) -> str:
    """Safe within a table: bars, line ends, and outside of code what would read as markup (tokens look like <s>)."""
    parts = text.replace("\n", " ").replace("|", r"\|").split("`")
    for i in range(0, len(parts), 2):
        for raw, safe in (("<", "&lt;"), ("*", r"\*"), ("_", r"\_")):
            parts[i] = parts[i].replace(raw, safe)
    return "`".join(parts)


if __name__ == "__main__":
    raise SystemExit(guarded(main))
