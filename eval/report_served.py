"""The report's sections on what was served and measured: its tables' rows, and their plots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from eval import plots
from eval.page import cell_name, percent
from eval.verdict import explained, void_reason

MISMATCHES = 12  # shown of each cell; results.jsonl has them all
FEW = 8  # rows of a table that are read at a glance; of more, the best of each arm is shown and the rest folded
LATENCIES = (
    ("ttft_ms", "first token (TTFT)"),
    ("tpot_ms", "per output token (TPOT)"),
    ("itl_ms", "between tokens (ITL)"),
    ("chunk_gap_ms", "between chunks"),
    ("e2e_ms", "whole answer"),
)
Row = Mapping[str, Any]
Styles = Mapping[str, tuple[str, str]]  # of each arm or family, colour and marker


def family(row: Row) -> str:
    """The arm's name without the K that a sweep puts into it: its arms of every K are one way of drafting."""
    return str(row["arm"]).removesuffix(f"-k{row['num_speculative_tokens']}")


def styles_of(rows: Sequence[Row]) -> dict[str, tuple[str, str]]:
    """Arm or family -> colour and marker: all K of one way of drafting look alike."""
    families = {r["arm"]: family(r) for r in rows if r["arm"] != "target"}
    by_family = plots.style(list(dict.fromkeys(families.values())))
    return {"target": (plots.INK, "x"), **by_family, **{arm: by_family[name] for arm, name in families.items()}}


def cache_hits(rows: Sequence[Row]) -> str | None:
    """What of the prompts these arms found in the prefix cache (D20); None where none found any, as is usual."""
    found = [f"{r['arm']} {percent(r['prefix_cache_hit_rate'], 1)}" for r in rows if r.get("prefix_cache_hit_rate")]
    return f"Prefix cache hit rate: {', '.join(found)}." if found else None


def rows_of(cell: Row, rows: Sequence[Row]) -> list[Row]:
    return [r for r in rows if r.get("group") is None
            and all(r.get(k) == cell.get(k) for k in ("workload", "temperature", "concurrency", "rate"))]  # fmt: skip


def table_rows(cell: Row, rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The target, then the arms as judged, fastest first; each the results row with the verdict's fields over it."""
    own = rows_of(cell, rows)
    keys = ("arm", "num_speculative_tokens", "draft_sample_method")
    by_arm = {tuple(r.get(k) for k in keys): r for r in own}
    fields = ("output_tokens_per_s", "exact_match", "acceptance_length", "draft_acceptance_rate", "prompts", "repeats",
              "replay_acceptance_length", "teacher_forced_acceptance_length")  # fmt: skip
    blank = dict.fromkeys((*fields, "mismatches", *(k for k, _ in LATENCIES)))  # a void row may hold none of them
    targets = [
        {**blank, **r, "num_speculative_tokens": None, "reason": void_reason(r),
         "speedup": None if void_reason(r) else 1.0 if r["arm"] == "target" else r.get("speedup"),
         "interval": None if r["arm"] == "target" or void_reason(r) else r.get("speedup_interval"),
         "answer": "void" if void_reason(r) else "baseline"}
        for r in own if r["kind"] == "target"
    ]  # fmt: skip
    return targets + [{**blank, **by_arm[tuple(a.get(k) for k in keys)], **a} for a in cell["arms"]]


def _brief(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The target, and of each way of drafting the fastest (rows are fastest first); one that is void everywhere stays."""
    kept: dict[str, dict[str, Any]] = {}
    for row in rows:
        held = kept.setdefault(family(row), row)
        if held["answer"] == "void" and row["answer"] != "void":
            kept[family(row)] = row
    return list(kept.values())


def cell_section(cell: Row, rows: Sequence[Row], styles: Styles, requests: Sequence[Row]) -> dict[str, Any]:
    """What the page shows of one cell: its tables' rows, its plots, and what is to be said of its outputs."""
    shown = table_rows(cell, rows)
    brief = _brief(shown)  # an arm measured at several K: its fastest in the plots
    survivors = [row for row in brief if row["answer"] not in ("void", "baseline")]
    drawn = [
        plots.speedups("End-to-end speed", survivors, styles),
        plots.per_position("Accepted up to this position (of all rounds)", survivors, "survival_per_pos", styles),
        plots.per_position("Accepted here, if all before were", survivors, "conditional_per_pos", styles),
    ]
    keys = ("workload", "temperature", "concurrency", "rate")
    here = [r for r in requests if all(r.get(k) == cell.get(k) for k in keys)]
    waits = [
        plots.distribution(
            title,
            {row["arm"]: [r[key] * 1000 for r in here if r["arm"] == row["arm"] and r.get(key) is not None]
             for row in brief if row["answer"] != "void"},
            styles,
        )
        for key, title in (
            ("ttft_s", "First token (TTFT)"), ("tpot_s", "Per output token (TPOT)"), ("e2e_s", "Whole answer")
        )
    ]  # fmt: skip
    mismatches = [(row["arm"], m) for row in shown for m in row["mismatches"] or []]
    return {
        **{k: cell.get(k) for k in keys},
        "name": cell_name(cell),
        "rows": shown,
        "brief": brief if len(shown) > FEW else shown,
        "plots": [p for p in drawn if p],
        "waits": [p for p in waits if p],
        # what is not explained first: it is what a reader must see
        "mismatches": sorted(mismatches, key=lambda m: explained(m[1]))[:MISMATCHES],
        "more_mismatches": max(0, len(mismatches) - MISMATCHES),
        "lossless": [row for row in shown if row.get("losslessness") and row["answer"] != "void"],
        "cache_hits": cache_hits(rows_of(cell, rows)),
        "again": next((row for row in shown if row["arm"] == "target-again"), None),
        "imprecise": sorted({row["arm"] for row in shown if row.get("precision_reached") is False}),
    }


def by_load(cells: Sequence[Row], styles: Styles) -> list[str]:
    """Speed by requests in flight, and by requests sent a second, of every workload and temperature with two or more."""
    drawn = []
    for unit in ("concurrency", "rate"):
        series: dict[tuple[str, float], dict[str, list[Row]]] = {}
        for cell in cells:
            for row in cell["rows"]:
                if cell[unit] is not None and row["answer"] not in ("void", "baseline"):
                    here = series.setdefault((cell["workload"], cell["temperature"]), {})
                    here.setdefault(row["arm"], []).append({**row, unit: cell[unit]})
        for (workload, temperature), lines in series.items():
            if len({row[unit] for line in lines.values() for row in line}) > 1:
                at = f", temperature {temperature:g}" if temperature else ""
                drawn.append(plots.by_load(f"{workload}{at}", lines, unit, styles))
    return [p for p in drawn if p]


def groups(rows: Sequence[Row], found: Mapping[str, Any], styles: Styles) -> dict[str, Any]:
    """Rows of parts of a workload, those of the headline's cell first and drawn."""
    parts = [{**r, "load": cell_name(r).split(", ", 1)[1]} for r in rows
             if r.get("group") is not None and r["kind"] != "target"]  # fmt: skip
    drawn = []
    keys = ("workload", "temperature", "concurrency", "rate")
    first = found["cells"][0] if found["cells"] else {}
    here = [r for r in parts if all(r.get(k) == first.get(k) for k in keys) and not void_reason(r)]
    for arm in dict.fromkeys(r["arm"] for r in here):
        bars = [{**r, "label": r["group"], "interval": r.get("speedup_interval")} for r in here if r["arm"] == arm]
        drawn.append(plots.speedups(f"{arm} by part of {first['workload']}", bars, styles))
    main = [r for r in parts if all(r.get(k) == first.get(k) for k in ("temperature", "concurrency", "rate"))]
    return {"groups": main, "more_groups": [r for r in parts if r not in main], "group_plots": [p for p in drawn if p]}


def memory(rows: Sequence[Row], styles: Styles) -> str | None:
    """The largest memory of each arm's server; of several K the largest."""
    most: dict[str, float] = {}
    for r in rows:
        if r.get("memory_mib") and not void_reason(r):
            most[family(r)] = max(most.get(family(r), 0.0), r["memory_mib"])
    return plots.bars("Memory of the server, with everything it loaded", most, "MiB", styles)


def offline(results: Sequence[Row]) -> list[dict[str, Any]]:
    """Arms of another engine (transformers), each cell with its own target alone: no rivals of the served ones."""
    keys = ("arm", "kind", "workload", "temperature", "speedup", "output_tokens_per_s", "acceptance_length",
            "exact_match", "num_speculative_tokens")  # fmt: skip
    return [
        {k: r.get(k) for k in keys} | {"interval": r.get("speedup_interval"), "reason": void_reason(r)}
        for r in results
        if r.get("engine", "vllm") != "vllm" and r.get("group") is None
    ]


def contexts(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """τ by how long the context was, of each arm and cell that has it: {"arm", "cell", "bands"}."""
    return [
        {"arm": r["arm"], "cell": cell_name(r), "bands": r["acceptance_length_by_context"]}
        for r in rows
        if r.get("acceptance_length_by_context") and r.get("group") is None and not void_reason(r)
    ]
