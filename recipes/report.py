"""One HTML page, verdict.json and a verdict on the terminal, from a run folder. Exit 1: the verdict is no.

draftsmith report runs/demo
draftsmith report runs/demo --json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # launched by path: sys.path[0] is recipes/, where `import distill` would find a script
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from rich.console import Console

from eval import report
from pairing.files import write_json, write_text
from recipes.config import Strict, guarded, parse


class ReportConfig(Strict):
    run_dir: Path
    """folder of `run`, `measure` or `distill`"""


def write_report(run_dir: Path) -> dict[str, Any]:
    """Writes report.html and verdict.json into `run_dir` and returns the verdict; whether yes or no, it is written.

    Raises InputError where the folder is missing or holds no results.
    """
    found = report.verdict(run_dir)
    write_text(run_dir / "report.html", report.build(run_dir))
    write_json(run_dir / "verdict.json", found)
    return found


def print_verdict(run_dir: Path, found: dict[str, Any], console: Console) -> None:
    """The table, the sentence, and what is wrong with either."""
    if found["cells"]:
        console.print(report.tables(run_dir))
    console.print(found["sentence"], style="bold", markup=False)
    for void in found["void"]:
        console.print(f"! {void['arm']} on {void['workload']} is void: {void['reason']}", style="yellow", markup=False)
    for alarm in found["alarms"]:
        console.print(f"! {alarm}", style="yellow", markup=False)
    if found["serve"]:
        console.print(f"\n{found['serve']['command']}", markup=False, soft_wrap=True)
    console.print(f"\n{run_dir / 'report.html'}", style="dim", markup=False, soft_wrap=True)


def main(argv: list[str]) -> int:
    config, args = parse(ReportConfig, argv, ("run_dir",), "One page, one verdict, from a run folder.")
    if args.dry_run:
        report.verdict(config.run_dir)  # the same complaints as without --dry-run
        print(f"would write {config.run_dir / 'report.html'} and {config.run_dir / 'verdict.json'}")
        return 0
    found = write_report(config.run_dir)
    if args.json:
        print(json.dumps(found, indent=2, ensure_ascii=False))
    else:
        print_verdict(config.run_dir, found, Console(highlight=False))
    return 0 if found["answer"] == "deploy" else 1


if __name__ == "__main__":
    raise SystemExit(guarded(main))
