"""Proves that a target and a drafter fit: tokens, rows, special ids, templates, context. Exit 1 where they don't.

draftsmith check HuggingFaceTB/SmolLM2-135M-Instruct runs/drafter
draftsmith check ./target ./drafter out=check.json record=true --json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # launched by path: sys.path[0] is recipes/, where `import distill` would find a script
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from rich.console import Console
from rich.table import Table

from pairing.alignment import check_pair, summary
from pairing.card import write_card
from pairing.files import write_json
from pairing.pair import read_pair, update_pair
from pairing.source import resolve
from recipes.config import Strict, guarded, parse

COLOURS = {"blocks": "bold red", "repairable": "red", "warns": "yellow", "info": "dim"}


class CheckConfig(Strict):
    target: str
    """the target: a hub id, a folder or a .gguf file"""
    draft: str
    """the drafter: the same"""
    out: Path | None = None
    """writes the whole report there as JSON"""
    record: bool = False
    """also writes the report's summary into the drafter's pair.json and model card"""


def run(config: CheckConfig) -> dict[str, Any]:
    """The report of `pairing.alignment.check_pair`, written where the config says so."""
    target, drafter = resolve(config.target), resolve(config.draft)
    if config.record:
        read_pair(drafter.path)  # refused before the work, not after it
    report = check_pair(target, drafter)
    if config.out is not None:
        write_json(config.out, report)
    if config.record:
        update_pair(drafter.path, alignment=summary(report))
        write_card(drafter.path)
    return report


def main(argv: list[str]) -> int:
    about = "Proves that a target and a drafter fit."
    config, args = parse(CheckConfig, argv, positional=("target", "draft"), about=about)
    if args.dry_run:
        print(json.dumps(config.model_dump(mode="json"), indent=2))
        return 0
    report = run(config)
    if args.json:
        print(json.dumps(report, indent=2, ensure_ascii=False))
    else:
        table = Table("level", "where", "what", "what to do", title=f"{report['target']} + {report['drafter']}")
        for f in report["findings"]:
            table.add_row(*(_plain(f[k]) for k in ("level", "where", "what", "fix")), style=COLOURS[f["level"]])
        console = Console(highlight=False)
        console.print(table)
        console.print(report["verdict"], style="green" if report["aligned"] else "bold red", markup=False)
    return 0 if report["aligned"] else 1


def _plain(text: str) -> str:
    return text.replace("[", r"\[")  # rich would take an id list for markup


if __name__ == "__main__":
    raise SystemExit(guarded(main))
