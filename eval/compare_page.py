"""Two runs compared (eval/compare.py) as one HTML page and as Markdown."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

from eval import plots
from eval.compare import change, compare, key_of, span, where
from eval.page import cell_name, environment, figure, folders, measured_on, times
from eval.run_results import Run, load
from pairing.portable import portable

DRAWN = 16  # rows of the plot

Found = dict[str, Any]


def compare_folders(a: Path, b: Path) -> Found:
    """`compare` of two run folders. Raises InputError as eval.run_results.load."""
    return compare(load(a), load(b))


def names(a: Path, b: Path) -> tuple[str, str]:
    """Each folder by its name; by its parent's too where they are called the same."""
    x, y = a.resolve(), b.resolve()
    return (x.name, y.name) if x.name != y.name else (f"{x.parent.name}/{x.name}", f"{y.parent.name}/{y.name}")


def page(a: Path, b: Path, found: Found) -> str:
    """The whole page of `found` (of compare_folders); no script, no request, no folder of this machine."""
    runs = load(a), load(b)
    shown = published(found, *runs)
    rows = [
        {**x, "label": f"{x['arm_b']}, {where(key_of(cell))}" if len(shown["cells"]) > 1 else x["arm_b"]}
        for cell in shown["cells"]
        for x in cell["arms"]
    ]
    template = environment()
    template.filters |= {"change": change, "span": span}
    name_a, name_b = names(a, b)
    return template.get_template("compare.html.jinja").render(
        found=shown,
        a=name_a,
        b=name_b,
        day_a=measured_on(runs[0].requests),
        day_b=measured_on(runs[1].requests),
        plot=plots.changes("End-to-end speed, B over A", rows[:DRAWN]),
    )


def published(found: Found, *runs: Run) -> Found:
    """`found` with its cells named and without folders of this machine."""
    shown: Found = portable(found, [root for run in runs for root in folders(run)])
    for cell in shown["cells"]:
        cell["name"] = cell_name(cell)
    return shown


def markdown(a: Path, b: Path, found: Found) -> str:
    """The sentence, what differs and the table, for a pull request."""
    shown = published(found, load(a), load(b))
    name_a, name_b = names(a, b)

    def plain(value: Any) -> str:
        return escape(figure(value), quote=False).replace("|", "\\|")

    lines = [f"**{shown['answer'].capitalize()}.** {plain(shown['sentence'])}", "", f"A: {name_a}, B: {name_b}.", ""]
    if shown["differences"]:
        lines += ["| differs | A | B |", "|---|---|---|"]
        lines += [f"| {plain(d['what'])} | {plain(d['a'])} | {plain(d['b'])} |" for d in shown["differences"]] + [""]
    for cell in shown["cells"]:
        lines += [f"{plain(cell['name'])}:", "", "| arm | K | A | B | B over A | τ | result |",
                  "|---|--:|--:|--:|--:|--:|---|"]  # fmt: skip
        lines += [_line(x, plain) for x in cell["arms"]] + [""]
    return "\n".join(lines).rstrip() + "\n"


def _line(x: Mapping[str, Any], plain: Any) -> str:
    over = change(x["ratio"]) + (f" ({span(x['ratio_interval'])})" if x["ratio_interval"] else "")
    tau = f"{figure(x['tau_a'], 2)} → {figure(x['tau_b'], 2)}"
    texts = [x["arm_b"], x["k_b"], times(x["speedup_a"]), times(x["speedup_b"]), over, tau, x["answer"]]
    return "| " + " | ".join(plain(t) for t in texts) + " |"
