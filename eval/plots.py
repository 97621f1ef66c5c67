"""The report's plots: matplotlib to inline SVG text, no files, the same bytes for the same numbers."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import matplotlib as mpl

mpl.use("Agg")  # never a window, on any machine

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

Row = Mapping[str, Any]

INK, MUTED, RULE = "#1b1f24", "#59636e", "#d8dee4"
# Okabe-Ito, dark enough on white; markers differ too, so that nothing hangs on colour alone.
STYLES = (("#0072b2", "o"), ("#b35900", "s"), ("#007a5a", "^"), ("#a3437f", "D"), ("#5c5c5c", "v"), ("#7a6a00", "P"))
FONTS = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
STEPS = 80  # points that a distribution is drawn with
WIDTH = 4.6  # inches: a phone's width at the text size below, and two side by side on a desk

RC = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 10,
    "text.parse_math": False,  # names may hold a dollar sign
    "text.color": INK,
    "axes.labelcolor": MUTED,
    "axes.edgecolor": RULE,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "grid.color": RULE,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "lines.linewidth": 1.8,
    "lines.markersize": 5,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
}


def style(names: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Arm -> (colour, marker), by the order of the run: an arm looks alike in every plot."""
    return {name: STYLES[i % len(STYLES)] for i, name in enumerate(names)}


def _short(name: str) -> str:
    return name if len(name) <= 20 else f"{name[:18]}…"


def _svg(title: str, height: float, draw: Callable[[Axes], None], salt: str) -> str:
    """One pair of axes as an <svg> element: text stays text in the reader's own font, and no id is left to clash."""
    with mpl.rc_context({**RC, "svg.hashsalt": salt}):
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        axes = figure.subplots()
        draw(axes)
        figure.suptitle(title, x=0.005, ha="left", fontsize=10.5, fontweight="bold")
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = out.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", text, flags=re.DOTALL)  # would style the whole page
    text = re.sub(r' id="[A-Za-z0-9.]+_\d+"', "", text)  # figure_1, axes_1, …: the same in every plot
    text = re.sub(r"font: ((?:\w+ )*[\d.]+px) [^;\"]+", lambda m: f"font: {m[1]} {FONTS}", text)
    text = re.sub(r"font-family: [^;\"]+", f"font-family: {FONTS}", text)
    label = title.replace("&", "&amp;").replace("<", "&lt;").replace('"', "&quot;")
    return text.replace("<svg ", f'<svg role="img" aria-label="{label}" style="stroke-linejoin: round" ', 1)


def speedups(title: str, arms: Sequence[Mapping[str, Any]], styles: Mapping[str, tuple[str, str]]) -> str | None:
    """Bars of end-to-end speedup with their intervals, fastest on top; the line at 1 is the target alone."""
    shown = [a for a in arms if a["speedup"] is not None and a["interval"]]
    if not shown:
        return None
    labels = [a.get("label") or f"{_short(a['arm'])}, K = {a['num_speculative_tokens']}" for a in shown]

    def draw(axes: Axes) -> None:
        right = max(1.0, *(a["interval"][1] for a in shown))
        for y, arm in enumerate(shown):
            colour = styles[arm["arm"]][0]
            low, high = arm["interval"]
            axes.barh(y, arm["speedup"], height=0.5, color=colour, alpha=0.75)
            axes.plot([low, high], [y, y], color=INK, linewidth=1.4, solid_capstyle="butt")
            axes.plot([low, high], [y, y], "|", color=INK, markersize=8, markeredgewidth=1.4)
            axes.text(right * 1.03, y, f"{arm['speedup']:.2f}x", va="center", fontweight="bold")
        axes.axvline(1.0, color=INK, linewidth=1, linestyle=(0, (3, 2)))
        _scale_of_bars(axes, labels, right * 1.18, 5, "{x:g}")
        axes.set_xlabel("target alone = 1")

    return _svg(title, 0.95 + 0.36 * len(shown), draw, f"speedups {title}")


def _scale_of_bars(axes: Axes, labels: Sequence[str], right: float, ticks: int, form: str) -> None:
    """Names of lying bars, the first on top, and their scale from 0 to `right`, which leaves room for the figures."""
    axes.set_yticks(range(len(labels)), labels)
    axes.tick_params(axis="y", length=0, labelcolor=INK)
    axes.invert_yaxis()
    axes.set_xlim(0, right)
    axes.grid(axis="x")
    axes.xaxis.set_major_locator(MaxNLocator(ticks, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter(form)


def per_position(title: str, rows: Sequence[Row], field: str, styles: Mapping[str, tuple[str, str]]) -> str | None:
    """One line per arm of `survival_per_pos` or `conditional_per_pos` against the draft position, from 1."""
    shown = [r for r in rows if r.get(field)]
    if not shown:
        return None

    def draw(axes: Axes) -> None:
        for row in shown:
            colour, marker = styles[row["arm"]]
            points = [(i, v) for i, v in enumerate(row[field], 1) if v is not None]
            axes.plot(*zip(*points, strict=True), color=colour, marker=marker, label=_short(row["arm"]), clip_on=False)
        longest = max(len(r[field]) for r in shown)
        axes.set_xticks(range(1, longest + 1))
        axes.set_xlim(0.7, longest + 0.3)
        axes.set_ylim(0, 1.04)
        axes.grid(axis="y")
        axes.set_xlabel("draft position")
        _legend_below(axes, len(shown))

    return _svg(title, 2.9 + 0.2 * ((len(shown) - 1) // 3), draw, f"{field} {title}")


def curve(title: str, series: Mapping[str, Sequence[tuple[float, float]]], *, unit: bool = False) -> str | None:
    """Lines against the training step. `unit`: the scale is 0 to 1."""
    shown = {name: points for name, points in series.items() if points}
    if not shown:
        return None

    def draw(axes: Axes) -> None:
        for (name, points), (colour, marker) in zip(shown.items(), STYLES, strict=False):
            many = len(points) > 40
            axes.plot(*zip(*points, strict=True), color=colour, marker="" if many else marker,
                      linewidth=1.2 if many else 1.8, label=_short(name))  # fmt: skip
        if unit:
            axes.set_ylim(0, 1.04)
        axes.grid(axis="y")
        axes.set_xlabel("training step")
        if len(shown) > 1:
            axes.legend(loc="best", handlelength=1.8)

    return _svg(title, 2.5, draw, f"curve {title}")


def offline_against_served(
    title: str,
    before: Mapping[str, float | None] | None,
    after: Mapping[str, float | None] | None,
    served: Mapping[str, Sequence[tuple[int, float]]],
) -> str | None:
    """τ by K from replay, before and after training, and what the engine counted, as dots: arm -> [(K, τ)]. Replay that gave no
    τ (null) is left out."""
    if not after or all(tau is None for tau in after.values()):
        return None

    def draw(axes: Axes) -> None:
        top = 2.0
        for name, taus, dashes in (("replay, trained", after, "-"), ("replay, untrained", before or {}, (0, (3, 2)))):
            points = sorted((int(k), v) for k, v in taus.items() if v is not None)
            if points:
                colour = STYLES[0][0] if dashes == "-" else STYLES[4][0]
                axes.plot(*zip(*points, strict=True), color=colour, linestyle=dashes, label=name)
                top = max(top, *(v for _, v in points))
        for (name, dots), marker in zip(served.items(), "osD^", strict=False):
            axes.plot(*zip(*dots, strict=True), marker, color=STYLES[1][0], markersize=7,
                      label=f"served, {_short(name)}",
                      markerfacecolor="none" if name == "untrained" else None)  # fmt: skip
            top = max(top, *(v for _, v in dots))
        axes.set_ylim(1, top * 1.06)
        ks = sorted(int(k) for k in after)
        axes.set_xticks(ks[:: 1 + (len(ks) - 1) // 12])  # of one pass there may be 64
        axes.grid(axis="y")
        axes.set_xlabel("num_speculative_tokens K")
        axes.legend(loc="upper left", handlelength=1.8)

    return _svg(title, 2.9, draw, f"tau {title}")


def by_load(
    title: str,
    series: Mapping[str, Sequence[Row]],
    load: str = "concurrency",
    styles: Mapping[str, tuple[str, str]] | None = None,
) -> str | None:
    """Speedup with its interval against the requests in flight (or `load` "rate": sent a second), a line per name."""
    shown = {name: [c for c in row if c["interval"]] for name, row in series.items()}
    shown = {name: sorted(row, key=lambda c: float(c[load])) for name, row in shown.items() if row}
    if not shown:
        return None

    def draw(axes: Axes) -> None:
        sizes = sorted({c[load] for row in shown.values() for c in row})
        for i, (name, row) in enumerate(shown.items()):
            colour, marker = styles[name] if styles else STYLES[i % len(STYLES)]
            # side by side, so that intervals of one size do not hide each other
            x = [c[load] * 1.03 ** (i - (len(shown) - 1) / 2) for c in row]
            y = [c["speedup"] for c in row]
            around = [[c["speedup"] - c["interval"][0] for c in row], [c["interval"][1] - c["speedup"] for c in row]]
            axes.errorbar(x, y, yerr=around, color=colour, marker=marker, elinewidth=1.2, capsize=2, label=_short(name))
        axes.axhline(1.0, color=INK, linewidth=1, linestyle=(0, (3, 2)))
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [f"{size:g}" for size in sizes])
        axes.minorticks_off()
        axes.grid(axis="y")
        what = "requests in flight" if load == "concurrency" else "requests sent a second"
        axes.set_xlabel(f"{what} (whiskers: 95 %)")
        _legend_below(axes, len(shown))

    return _svg(title, 3.0 + 0.2 * ((len(shown) - 1) // 3), draw, f"load {title}")


def _legend_below(axes: Axes, entries: int) -> None:
    """Under the axes, where it hides no line."""
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.22), ncols=min(3, entries), handlelength=1.8)


def distribution(
    title: str, series: Mapping[str, Sequence[float]], styles: Mapping[str, tuple[str, str]]
) -> str | None:
    """The share of requests that took no longer than so many milliseconds (the empirical distribution), a line per arm."""
    shown = {name: sorted(values) for name, values in series.items() if values}
    if not shown:
        return None
    seconds = max(v[-1] for v in shown.values()) >= 10_000

    def draw(axes: Axes) -> None:
        for name, values in shown.items():
            n = len(values)
            kept = range(n) if n <= STEPS else sorted({round(i * (n - 1) / (STEPS - 1)) for i in range(STEPS)})
            x = [values[i] / (1000 if seconds else 1) for i in kept]
            y = [(i + 1) / n for i in kept]
            colour = styles[name][0]
            dashes = (0, (3, 2)) if name == "target" else "-"
            axes.step(
                [x[0], *x], [0.0, *y], where="post", color=colour, linestyle=dashes, linewidth=1.5, label=_short(name)
            )
        axes.set_ylim(0, 1.02)
        axes.set_xlim(left=0)
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.grid()
        axes.set_xlabel("seconds" if seconds else "milliseconds")
        axes.set_ylabel("share of requests")
        _legend_below(axes, len(shown))

    return _svg(title, 2.7 + 0.2 * ((len(shown) - 1) // 3), draw, f"distribution {title} {sorted(shown)}")


def bars(title: str, values: Mapping[str, float], unit: str, styles: Mapping[str, tuple[str, str]]) -> str | None:
    """A bar and its figure for each name."""
    if not values:
        return None

    def draw(axes: Axes) -> None:
        top = max(values.values()) or 1.0
        for y, (name, value) in enumerate(values.items()):
            axes.barh(y, value, height=0.5, color=styles[name][0], alpha=0.75)
            axes.text(value + top * 0.02, y, f"{value:,.0f}", va="center", fontweight="bold")
        _scale_of_bars(axes, [_short(name) for name in values], top * 1.2, 4, "{x:,g}")
        axes.set_xlabel(unit)

    return _svg(title, 0.95 + 0.36 * len(values), draw, f"bars {title}")


def changes(title: str, rows: Sequence[Row]) -> str | None:
    """Each {"label", "ratio", "ratio_interval"} as a dot with its interval, in % around the line at no change."""
    shown = [r for r in rows if r["ratio"] and r["ratio_interval"]]
    if not shown:
        return None

    def draw(axes: Axes) -> None:
        for y, row in enumerate(shown):
            low, high = ((bound - 1) * 100 for bound in row["ratio_interval"])
            colour = STYLES[1][0] if high < 0 else STYLES[2][0] if low > 0 else STYLES[4][0]
            axes.plot([low, high], [y, y], "|-", color=colour, markersize=8)
            axes.plot((row["ratio"] - 1) * 100, y, "o", color=colour, markersize=6)
        axes.axvline(0, color=INK, linewidth=1, linestyle=(0, (3, 2)))
        axes.set_yticks(range(len(shown)), [_middle(r["label"]) for r in shown])
        axes.set_ylim(len(shown) - 0.4, -0.6)
        axes.tick_params(axis="y", length=0, labelcolor=INK)
        axes.grid(axis="x")
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.xaxis.set_major_formatter("{x:+g}")
        axes.set_xlabel("% faster in B")

    return _svg(title, 0.95 + 0.3 * len(shown), draw, f"changes {title}")


def _middle(text: str, most: int = 26) -> str:
    """Long labels lose their middle: both ends tell them apart."""
    return text if len(text) <= most else f"{text[: most // 2 - 1]}…{text[-most // 2 + 1 :]}"


def pareto(title: str, cells: Sequence[Row]) -> str | None:
    """Tokens/s of the server against tokens/s of one stream, a line per K through the concurrencies; ringed: no other cell
    is better in both."""
    shown: dict[int, list[tuple[float, float]]] = {}
    for c in cells:
        if c["output_tokens_per_s"] and c["tokens_per_s_per_request"]:
            point = (c["tokens_per_s_per_request"], c["output_tokens_per_s"])
            shown.setdefault(c["num_speculative_tokens"], []).append(point)
    if not shown:
        return None
    points = [p for line in shown.values() for p in line]
    best = sorted(p for p in points if not any(q != p and q[0] >= p[0] and q[1] >= p[1] for q in points))

    def draw(axes: Axes) -> None:
        for i, (k, line) in enumerate(sorted(shown.items())):
            colour, marker = STYLES[(i - 1) % len(STYLES)] if k else (INK, "x")  # K as coloured by `by_load`
            axes.plot(*zip(*line, strict=True), color=colour, marker=marker, label=f"K = {k}" if k else "target alone")
        axes.plot(*zip(*best, strict=True), "o", color=INK, markersize=10, markerfacecolor="none", label="best of both")
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        axes.grid()
        axes.set_xlabel("tokens/s of one stream")
        axes.set_ylabel("tokens/s of the server")
        _legend_below(axes, len(shown) + 1)

    return _svg(title, 3.0 + 0.2 * (len(shown) // 3), draw, f"pareto {title}")


def smoothed(points: Sequence[tuple[float, float]], window: int) -> list[tuple[float, float]]:
    """Means of `window` neighbours, for curves of a noisy loss."""
    if len(points) <= 2 * window:
        return list(points)
    edges = list(pairwise(range(0, len(points) + 1, window)))
    return [(sum(x for x, _ in points[a:b]) / (b - a), sum(y for _, y in points[a:b]) / (b - a)) for a, b in edges]
