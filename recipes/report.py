"""One HTML page, verdict.json and a verdict on the terminal, from a run folder; or two runs compared. Exit 1: the answer is no.

draftsmith report runs/demo
draftsmith report runs/demo --json
draftsmith report runs/demo --markdown        # for a pull request
draftsmith report runs/before runs/after      # is B slower than A? its page is runs/after/compare.html

Of one run, exit 1 is a verdict other than "deploy". Of two, exit 1: a drafter of B is measurably slower than A's, its outputs are
no longer the target's own, or nothing could be compared.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # launched by path: sys.path[0] is recipes/, where `import distill` would find a script
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from rich.console import Console

from eval import compare_page, report, report_text
from eval.page import figure
from pairing.errors import InputError
from pairing.files import write_json, write_text
from recipes.config import Strict, guarded, parse


class ReportConfig(Strict):
    run_dir: Path
    """folder of `run`, `measure`, `sweep` or `distill`"""
    other: Path | None = None
    """a second one, B, compared with the first, A"""
    out: Path | None = None
    """the page; null: report.html in the folder, of two runs compare.html in B's"""
    markdown: bool = False
    """print Markdown for a pull request; also --markdown"""


def write_report(run_dir: Path, out: Path | None = None) -> dict[str, Any]:
    """Writes the page (run_dir/report.html) and verdict.json into `run_dir`, returns the verdict; whether yes or no, it is
    written.

    Raises InputError where the folder is missing or holds no results.
    """
    found = report.verdict(run_dir)
    write_text(out or run_dir / "report.html", report.build(run_dir))
    write_json(run_dir / "verdict.json", found)
    return found


def print_verdict(run_dir: Path, found: dict[str, Any], console: Console) -> None:
    """The table, the sentence, and what is wrong with either."""
    if found["cells"]:
        console.print(report_text.tables(run_dir))
    console.print(found["sentence"], style="bold", markup=False)
    for void in found["void"]:
        console.print(f"! {void['arm']} on {void['workload']} is void: {void['reason']}", style="yellow", markup=False)
    for alarm in found["alarms"]:
        console.print(f"! {alarm}", style="yellow", markup=False)
    if found["serve"]:
        console.print(f"\n{found['serve']['command']}", markup=False, soft_wrap=True)


def compared(config: ReportConfig, a: Path, b: Path, as_json: bool, dry_run: bool) -> int:
    found = compare_page.compare_folders(a, b)
    out = config.out or b / "compare.html"
    if dry_run:
        print(f"would write {out}")
        return 0
    write_text(out, compare_page.page(a, b, found))
    if as_json:
        print(json.dumps(found, indent=2, ensure_ascii=False))
    elif config.markdown:
        print(compare_page.markdown(a, b, found), end="")
    else:
        console = Console(highlight=False)
        for d in found["differences"]:
            words = f"differs: {d['what']}: {figure(d['a'])} in A, {figure(d['b'])} in B"
            console.print(words, style="yellow", markup=False, soft_wrap=True)
        console.print(found["sentence"], style="bold", markup=False)
        console.print(f"\n{out}", style="dim", markup=False, soft_wrap=True)
    return 1 if found["regression"] or found["answer"] == "not comparable" else 0


def main(argv: list[str]) -> int:
    argv = ["markdown=true" if word == "--markdown" else word for word in argv]
    config, args = parse(ReportConfig, argv, ("run_dir", "other"), "One page, one verdict, from one run folder or two.")
    if args.json and config.markdown:
        raise InputError("--json and --markdown: standard output takes one of them")
    if config.other is not None:
        return compared(config, config.run_dir, config.other, args.json, args.dry_run)
    out = config.out or config.run_dir / "report.html"
    if args.dry_run:
        report.verdict(config.run_dir)  # the same complaints as without --dry-run
        print(f"would write {out} and {config.run_dir / 'verdict.json'}")
        return 0
    found = write_report(config.run_dir, out)
    if args.json:
        print(json.dumps(found, indent=2, ensure_ascii=False))
    elif config.markdown:
        print(report_text.markdown(config.run_dir), end="")
    else:
        console = Console(highlight=False)
        print_verdict(config.run_dir, found, console)
        console.print(f"\n{out}", style="dim", markup=False, soft_wrap=True)
    return 0 if found["answer"] == "deploy" else 1


if __name__ == "__main__":
    raise SystemExit(guarded(main))
