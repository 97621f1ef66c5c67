"""What a report says of a sweep: its verdict, and its surface as tables and plots that stay readable with many K."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eval import plots
from eval.verdict import elsewhere

Row = Mapping[str, Any]


def sweep_verdict(found: dict[str, Any], sweep: Row) -> dict[str, Any]:
    """`found` (of eval.verdict.judge) with the sweep's answer over it: a schedule, not an arm, is what it recommends."""
    answer = {"schedule": "deploy", "fixed": "deploy", "not measurable": "not measurable"}
    chosen = {b["concurrency"]: b["num_speculative_tokens"] for b in sweep["best"]}
    small = next((c for c in found["cells"] if chosen.get(c["concurrency"])), None)
    best = next(
        (
            a
            for a in (small["arms"] if small else ())
            if a["arm"] == f"{sweep['mode']}-k{chosen[small['concurrency']]}"  # type: ignore[index]
        ),
        None,
    )
    return found | {
        "answer": answer.get(sweep["answer"], "do not deploy"),
        "sentence": "; ".join([sentence(sweep).removesuffix("."), *(losses(found, sweep) if sweep["serve"] else [])])
        + ".",
        "best": best if sweep["serve"] else None,
        "serve": sweep["serve"],
    }


def losses(found: Row, sweep: Row) -> list[str]:
    """Where the same drafter, drafting alike, gains nothing on what `measure` sent it and the sweep did not."""
    drafter, served = Path(sweep["drafter"]).resolve(), sweep["serve"]
    alike = [
        arm
        for cell in found["cells"]
        for arm in cell["arms"]
        if arm["model"] and Path(arm["model"]).resolve() == drafter and not arm["arm"].startswith(f"{sweep['mode']}-k")
        and all(arm[key] == served[key] for key in ("parallel_drafting", "draft_sample_method"))
    ]  # fmt: skip
    return elsewhere(alike[0], found["cells"]) if alike else []


def sentence(sweep: Row) -> str:
    if sweep["answer"] == "not measurable":
        return "Not measurable: the target alone was measured at no number of requests in flight."
    if sweep["answer"] == "none":
        return "Do not deploy: speculation pays at no number of requests in flight that was measured."
    served = next(
        (c["arm"] for c in reversed(sweep["confirmed"])), None
    )  # after the schedule, where one K took its place
    confirmed = [c for c in sweep["confirmed"] if c["arm"] == served and c["interval"] and not c["void"]]
    speeds = ", ".join(
        f"{c['speedup']:.2f}x ({c['interval'][0]:.2f} to {c['interval'][1]:.2f}) at {c['concurrency']}"
        for c in confirmed
    )
    if sweep["answer"] == "not confirmed":
        told = f": measured once more it serves at {speeds} in flight" if speeds else ""
        return f"Do not deploy: the choice did not hold{told}."
    k = sweep["serve"]["num_speculative_tokens"]
    what = f"K = {k} at every batch size"
    if sweep["answer"] == "schedule":
        parts = [f"{k} at {low}" + (f" to {high}" if high > low else "") for low, high, k in sweep["schedule"]]
        what = f"the schedule K = {', '.join(parts)} in a batch"
    told = f": measured once more it serves at {speeds} in flight, the target alone being 1" if speeds else ""
    return f"Deploy the drafter with {what}{told}."


def section(sweep: Row) -> dict[str, Any]:
    """sweep.json, its plots, and for each way of drafting a grid of concurrency by K."""
    surface = sweep["surface"]
    modes = list(dict.fromkeys(c["mode"] for c in surface if c["mode"]))
    drawn, grids = [], []
    for mode in modes:
        cells = [c for c in surface if c["mode"] in (mode, None) and not c["void"]]
        of = f", {mode}" if len(modes) > 1 else ""
        ks = sorted({c["num_speculative_tokens"] for c in cells if c["mode"]})
        lines = {f"K = {k}": [c for c in cells if c["num_speculative_tokens"] == k] for k in ks}
        drawn += [plots.by_load(f"Speed by requests in flight{of}", lines),
                  plots.pareto(f"Throughput against each stream{of}", cells)]  # fmt: skip
        grids.append(_grid(mode, surface))
    return {**sweep, "plots": [p for p in drawn if p], "grids": grids}


def _grid(mode: str, surface: Sequence[Row]) -> dict[str, Any]:
    """{"mode", "ks", "rows": [{"concurrency", "target" (tokens/s), "cells": [cell or None], "best" (the fastest cell)}]}."""
    mine = [c for c in surface if c["mode"] == mode]
    ks = sorted({c["num_speculative_tokens"] for c in mine})
    rows = []
    for size in dict.fromkeys(c["concurrency"] for c in surface):
        here = {c["num_speculative_tokens"]: c for c in mine if c["concurrency"] == size}
        alone = next((c for c in surface if c["mode"] is None and c["concurrency"] == size), None)
        measured = [c for c in here.values() if c["speedup"]]
        rows.append({
            "concurrency": size,
            "target": alone["output_tokens_per_s"] if alone else None,
            "cells": [here.get(k) for k in ks],
            "best": max(measured, key=lambda c: float(c["speedup"]), default=None),
        })  # fmt: skip
    return {"mode": mode, "ks": ks, "rows": rows}
