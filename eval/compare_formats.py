"""Which form of a drafter to serve: as it is or one of its 4-bit copies, from figures measured side by side.

4 bits cost acceptance and, where no kernel is fast, time per draft step; they save memory, which becomes KV cache. Only the
end-to-end speed says what that comes to, so it decides (fault D24), and where it can't tell, the memory does.

A row is a form of the drafter, the first one the drafter as it is: {"form", "bits", "folder", "top1", "alpha" [low, high], "tau",
"top1_change" and "tau_change" ([change from the first row, 95 % interval], None in it), "step_ms", "step_of_target",
"weights_mib", "kv_blocks", "speedup" and "against_drafter" ([ratio, 95 % interval], None where not measured), "why_not"
(None, or why it was not measured or is not lossless), "drafts" (how it drafted: "4 one by one", "6 in one pass") and
"tau_served" (so)}. A form that was taught to draft in one pass is served both ways, and stands for the faster one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from eval import statistics
from eval.verdict import explained, void_reason
from pairing.budgets import itemsize, memory_numbers
from pairing.engine import Engine
from pairing.files import read_json
from pairing.serving_plan import Memory, Model, Serving
from pairing.weights import read_headers

Row = Mapping[str, Any]

KV_BLOCK = 16  # tokens of a block, as vLLM has them on GPUs
KV_WORTH = 0.02  # more KV cache than by this part is a reason to serve a copy that is as fast


def room(target: Path, drafter: Path, installed: Engine, budget: int, serving: Serving) -> dict[str, Any]:
    """{"bits", "weights_mib", "kv_blocks"} of a drafter in `drafter`: the type that the pair is served in, what the drafter's
    weights take by its files' headers, and how many blocks of KV cache an engine with `budget` bytes has left beside
    both models."""
    t, d = (Model(read_json(folder / "config.json"), read_headers(folder)) for folder in (target, drafter))
    all_of_it = replace(serving, gpu_memory_utilization=1.0, kv_cache_gib=None)
    tokens = memory_numbers(t, d, installed, Memory(budget, budget), all_of_it)["kv_tokens"]
    return {
        "bits": 8 * itemsize(serving),
        "weights_mib": round(sum(t.bytes for t in d.tensors.values()) / 2**20, 2),
        "kv_blocks": (tokens or 0) // KV_BLOCK,
    }


def served(form: str, results: Sequence[Row], requests: Sequence[Row], drafter: str) -> dict[str, Any]:
    """{"speedup", "against_drafter", "why_not", "drafts", "tau_served"} of `form` in the first cell of results.jsonl, from its
    rows and those of requests.jsonl; `drafter` is the form of the drafter as it is."""
    cell = {k: results[0][k] for k in ("workload", "temperature", "concurrency")}

    def faster_way(form: str) -> Row:
        ways = [r for r in results if r["arm"] in (form, f"{form}-parallel") and r["group"] is None]
        return max(
            (r for r in ways if cell.items() <= r.items()), key=lambda r: (not void_reason(r), r["speedup"] or 0.0)
        )

    row, own = faster_way(form), faster_way(drafter)
    mine, base = ([r for r in requests if r["arm"] == one["arm"] and cell.items() <= r.items()] for one in (row, own))
    gone = [m for m in row["mismatches"] or [] if not explained(m)]
    why_not = void_reason(row)
    if gone:
        why_not = why_not or f"{len(gone)} of its outputs {'are' if len(gone) > 1 else 'is'} not the target's"
    interval = row["speedup_interval"]
    gain = None if why_not or form == drafter else statistics.speedup(mine, base)
    return {
        "speedup": [row["speedup"], *interval] if interval and not why_not else None,
        "against_drafter": [gain.ratio, *gain.interval] if gain and gain.interval else None,
        "why_not": why_not,
        "drafts": f"{row['num_speculative_tokens']} {'in one pass' if row['parallel_drafting'] else 'one by one'}",
        "tau_served": row["acceptance_length"],
    }


def choose(rows: Sequence[Row]) -> dict[str, Any]:
    """{"serve": the form, None where nothing is known, "sentence", "reasons": {copy: why or why not}}.

    The fastest copy that is measurably faster than the drafter as it is; else one as fast that leaves KV_WORTH more KV
    cache; else the drafter as it is.
    """
    drafter, copies = rows[0], rows[1:]
    if drafter["speedup"] is None:
        why = drafter["why_not"] or "its speed was not measured"
        return {"serve": None, "sentence": f"Not measurable: {_name(drafter)}: {why}.", "reasons": {}}
    known = [c for c in copies if c["against_drafter"] is not None]
    faster = [c for c in known if c["against_drafter"][1] > 1]
    alike = [c for c in known if c["against_drafter"][1] <= 1 <= c["against_drafter"][2]]
    roomier = [c for c in alike if _more_kv(c, drafter) >= KV_WORTH]
    if faster:
        best = max(faster, key=lambda c: c["against_drafter"][0])
    elif roomier:
        best = max(roomier, key=lambda c: c["kv_blocks"])
    else:
        best = drafter
    reasons = {c["form"]: _reason(c, drafter) for c in copies}
    low = best["speedup"][1]
    parts = [f"Serve {_name(best)}, {_times(best['speedup'])} the target's own speed"]
    if low <= 1:
        parts = [f"Serve the target alone: {_name(best)}, the best form, is at {_times(best['speedup'])} its speed"]
    parts += [f"{_name(c)} {reasons[c['form']]}" for c in copies]
    serve = best["form"] if low > 1 else "target"
    return {"serve": serve, "sentence": "; ".join(parts) + ".", "reasons": reasons}


def _reason(copy: Row, drafter: Row) -> str:
    """What a copy costs and saves, and what that comes to."""
    if copy["against_drafter"] is None:
        return f"was not measured ({copy['why_not'] or 'no prompts in common'})"
    ratio, low, high = copy["against_drafter"]
    comes_to = "faster than" if low > 1 else "slower than" if high < 1 else "not measurably faster or slower than"
    saved, kv = drafter["weights_mib"] - copy["weights_mib"], _more_kv(copy, drafter)
    return (
        f"saves {saved:.0f} MiB ({kv:+.1%} KV blocks), changes top-1 agreement by {_signed(copy['top1_change'])} and takes "
        f"{copy['step_ms'] / drafter['step_ms']:.2f}x the time of a draft step: {comes_to} {_name(drafter)}, "
        f"{_times([ratio, low, high])} its speed"
    )


def markdown(rows: Sequence[Row], num_speculative_tokens: int) -> str:
    """The table, a form a line."""
    header = ["form", "top-1", "change", "α", f"τ, K = {num_speculative_tokens}", "change", "ms a draft step", "of the target's",
              "weights, MiB", "KV blocks", "drafts", "τ served", "speed / target", "speed / drafter"]  # fmt: skip
    lines = ["| " + " | ".join(header) + " |", "|---|" + "--:|" * (len(header) - 1)]
    for r in rows:
        cells = [_name(r), f"{r['top1']:.4f}", _signed(r["top1_change"]), "–".join(f"{a:.4f}" for a in r["alpha"])]
        cells += [f"{r['tau']:.3f}" if r["tau"] else "–", _signed(r["tau_change"])]
        cells += [f"{r['step_ms']:.2f}", f"{r['step_of_target']:.3f}", f"{r['weights_mib']:.1f}", f"{r['kv_blocks']:,}"]
        cells += [r["drafts"], f"{r['tau_served']:.2f}" if r["tau_served"] else "–"]
        cells += [_times(r[k]) if r[k] else "–" for k in ("speedup", "against_drafter")]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _more_kv(copy: Row, drafter: Row) -> float:
    return float(copy["kv_blocks"] / max(drafter["kv_blocks"], 1) - 1)


def _name(row: Row) -> str:
    return f"the {row['bits']}-bit drafter" if row["form"] == "drafter" else str(row["form"])


def _times(figure: Sequence[float]) -> str:
    return "{:.2f}x ({:.2f} to {:.2f})".format(*figure)


def _signed(figure: Sequence[Any] | None) -> str:
    return "–" if figure is None or None in figure else "{:+.4f} ({:+.4f} to {:+.4f})".format(*figure)
