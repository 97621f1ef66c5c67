"""What the runs of `recipes/distill.py` in some folders say, as one Markdown table: speed, memory, held-out figures.

python -m scripts.gpu_summary out.jsonl NAME=RUN [NAME=RUN …] [same=NAME,NAME]

out.jsonl gets a line per run, with the loss of every step. `same` gives the largest relative difference of two runs' losses,
step by step, and exits 1 where it is over 1e-3. A folder's memory.csv, where there is one, is nvidia-smi's memory.used in MiB
over time.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from pairing.files import append_jsonl, read_json, read_jsonl
from scripts.bench_common import table

MOST = 1e-3  # relative difference of two runs' losses; sums in another order drift apart over the steps
Row = dict[str, Any]


def summarised(name: str, run: Path) -> Row:
    """One line of the run in `run`; `evaluation.json` is missing where it did not end."""
    rows = [row for row in read_jsonl(run / "metrics.jsonl") if row["kind"] == "train"]
    memory = run / "memory.csv"
    used = [int(line) for line in memory.read_text().split() if line.isdigit()] if memory.is_file() else []
    ended = run / "evaluation.json"
    sets = read_json(ended)["sets"] if ended.is_file() else {}
    return {
        "run": name,
        "steps": len(rows),
        "tokens_per_s": median(row["tokens_per_s"] for row in rows) if rows else None,
        "supervised": rows[-1]["tokens"] if rows else 0,
        "seconds": rows[-1]["seconds"] if rows else None,
        "peak_mib": max(used, default=None),
        "sets": {
            n: {when: {k: s[when][k] for k in ("top1", "tau")} for when in ("before", "after")} for n, s in sets.items()
        },
        "losses": [row["loss"] for row in rows],
    }


def difference(one: Row, other: Row) -> float:
    """The largest relative difference of the losses, step by step; infinite where one has fewer steps or none."""
    a, b = one["losses"], other["losses"]
    if not a or len(a) != len(b):
        return float("inf")
    return max(abs(x - y) / max(abs(y), 1e-12) for x, y in zip(a, b, strict=True))


def report(rows: Sequence[Row]) -> str:
    lines = []
    for row in rows:
        held = "; ".join(
            f"{name}: top-1 {s['before']['top1']:.3f} to {s['after']['top1']:.3f}, τ {s['before']['tau']['4']:.2f} to "
            f"{s['after']['tau']['4']:.2f}"
            for name, s in row["sets"].items()
        )
        lines.append(
            [row["run"], row["steps"], row["tokens_per_s"], row["supervised"], row["peak_mib"], held or "not ended"]
        )
    header = ("run", "steps", "tokens/s, all", "supervised tokens", "peak MiB on the GPU", "held out, K = 4")
    return table(header, lines)


def main(argv: Sequence[str]) -> int:
    out, pairs = Path(argv[0]), [arg.split("=", 1) for arg in argv[1:]]
    rows = {name: summarised(name, Path(run)) for name, run in pairs if name != "same"}
    out.unlink(missing_ok=True)
    for row in rows.values():
        append_jsonl(out, row)
    print(report(list(rows.values())))
    worst = 0.0
    for one, other in (value.split(",") for name, value in pairs if name == "same"):
        found = difference(rows[one], rows[other])
        worst = max(worst, found)
        print(f"{one} against {other}: losses differ by at most {found:.1e}, relative")
    return 1 if worst > MOST else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
