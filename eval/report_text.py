"""A report's verdict and tables without the page: as Markdown, and for the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from eval.page import cell_name, figure, folders, percent, times
from eval.report import verdict_of
from eval.report_served import cache_hits, rows_of, table_rows
from eval.run_results import load
from eval.verdict import judge, latest
from pairing.portable import portable

Row = Mapping[str, Any]


def markdown(run_dir: Path) -> str:
    """The sentence and the table of every whole-workload row, for a pull request or a README."""
    run = load(run_dir)
    roots = folders(run)
    return _markdown(portable(verdict_of(run), roots), portable(run.results, roots))


def markdown_results(results: Sequence[Row], evaluation: Mapping[str, Any] | None = None) -> str:
    """`markdown` of rows at hand."""
    return _markdown(judge(results, evaluation), results)


def _markdown(found: Mapping[str, Any], results: Sequence[Row]) -> str:
    lines = [f"**{found['answer'].capitalize()}.** {escape(found['sentence'], quote=False)}", ""]
    for cell in found["cells"]:
        lines += [f"{escape(cell_name(cell), quote=False)}:", ""]
        lines += ["| arm | K | speed | tokens/s | τ | accepted | identical | |", "|---|--:|--:|--:|--:|--:|--:|---|"]
        for row in table_rows(cell, latest(results)):
            lines.append("| " + " | ".join(escape(t, quote=False).replace("|", "\\|") for t in _texts(row)) + " |")
        if hits := cache_hits(rows_of(cell, latest(results))):
            lines += ["", escape(hits, quote=False)]
        lines.append("")
    lines += [f"- {escape(alarm, quote=False)}" for alarm in found["alarms"]]
    return "\n".join(lines).rstrip() + "\n"


def _texts(row: Row) -> list[str]:
    low_high = row["interval"]
    speed = times(row["speedup"]) + (f" ({low_high[0]:.2f}–{low_high[1]:.2f})" if low_high else "")
    return [
        row["arm"],
        figure(row["num_speculative_tokens"]),
        speed,
        figure(row["output_tokens_per_s"], 1),
        figure(row["acceptance_length"], 2) + _offline_tau(row),
        percent(row["draft_acceptance_rate"]),
        percent(row["exact_match"]),
        row["answer"] + (f": {row['reason']}" if row["answer"] in ("void", "not measurable") else ""),
    ]


def _offline_tau(row: Row) -> str:
    """What was expected of the τ beside it, where anything was."""
    named = (("replay", "replay_acceptance_length"), ("teacher-forced", "teacher_forced_acceptance_length"))
    said = [f"{name} {row[key]:.2f}" for name, key in named if row[key] is not None]
    return f" ({', '.join(said)})" if said else ""


def tables(run_dir: Path) -> Group:
    """The same rows for a terminal of 80 columns: a rich table for each workload, temperature and concurrency."""
    run = load(run_dir)
    shown = []
    for cell in verdict_of(run)["cells"]:
        one = Table(title=cell_name(cell), title_justify="left", title_style="bold", box=None, pad_edge=False)
        for i, head in enumerate(("arm", "K", "speed", "95 %", "tok/s", "τ", "identical", "result")):
            one.add_column(head, justify="left" if i in (0, 7) else "right", no_wrap=True)
        for row in table_rows(cell, latest(run.results)):
            # Text, not str: names must not be read as rich's markup
            colour = {"faster": "green", "void": "yellow", "slower": "red", "differs from the target": "red"}
            texts = (
                row["arm"],
                figure(row["num_speculative_tokens"]),
                times(row["speedup"]),
                f"{row['interval'][0]:.2f}–{row['interval'][1]:.2f}" if row["interval"] else "–",
                figure(row["output_tokens_per_s"], 1),
                figure(row["acceptance_length"], 2),
                percent(row["exact_match"]),
                {"no measurable difference": "no difference", "differs from the target": "differs"}.get(
                    row["answer"], row["answer"]
                ),
            )
            one.add_row(*(Text(t, style=colour.get(row["answer"], "")) for t in texts))
        shown.append(Padding(one, (0, 0, 1, 0)))
    return Group(*shown)
