"""What the pages of a report and of a comparison share: their templates, figures in words, names of cells and folders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jinja2

from eval.run_results import Run
from eval.verdict import explained
from pairing.portable import roots_of

Row = Mapping[str, Any]


def environment() -> jinja2.Environment:
    """The templates beside this file, with the filters that they share."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"times": times, "percent": percent, "figure": figure, "ms": ms, "mebibytes": mebibytes,
                            "p_value": p_value}  # fmt: skip
    environment.filters["unbroken"] = lambda text: text.replace(" %", "\u00a0%")
    environment.filters["without"] = lambda v, *keys: {k: x for k, x in v.items() if k not in keys}
    environment.tests["explained"] = explained
    environment.tests["mapping_list"] = lambda v: (
        isinstance(v, list) and bool(v) and all(isinstance(i, dict) for i in v)
    )
    return environment


def folders(run: Run) -> list[tuple[str, str]]:
    """The folders of this machine that `pairing.portable.portable` takes out of what is published of a run."""
    config = run.config or {}
    return roots_of(run.folder, *(str(config[k]) for k in ("run_dir", "out") if config.get(k)))


def measured_on(requests: Sequence[Row]) -> str | None:
    """When the measuring began, from the run itself: the page of a run doesn't depend on when it is built."""
    started = [r["started_at"] for r in requests if r.get("started_at")]
    if not started:
        return None
    first = min(started, key=str)
    return first[:10] if isinstance(first, str) else datetime.fromtimestamp(first, UTC).strftime("%Y-%m-%d")


def cell_name(cell: Row) -> str:
    if cell.get("rate") is not None:
        at = f"{cell['rate']:g} requests sent a second"
    elif cell["concurrency"] is None:
        at = "offline"
    else:
        at = "one request at a time" if cell["concurrency"] == 1 else f"{cell['concurrency']} requests in flight"
    return f"{cell['workload']}, temperature {cell['temperature']:g}, {at}"


def times(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}x"


def percent(value: float | None, digits: int = 0) -> str:
    """A share just under 1, or over 0, gets the digits that tell it from that."""
    if value is None:
        return "–"
    while digits < 3 and 0 < value < 1 and round(value, digits + 2) in (0, 1):
        digits += 1
    return f"{value * 100:.{digits}f}\u00a0%"


def ms(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}" if value >= 10 else f"{value:.1f}"


def mebibytes(value: float | None) -> str:
    return "–" if value is None else f"{value / 2**20:,.1f} MiB"


def p_value(value: float | None) -> str:
    return "–" if value is None else "< 0.001" if value < 0.001 else f"{value:.3f}"


def figure(value: Any, digits: int | None = None) -> str:
    """Anything a table cell may hold, as a reader wants it."""
    if value is None or value == "":
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.{digits}f}" if digits is not None else f"{value:.4g}"
    if isinstance(value, list):
        return ", ".join(figure(v, digits) for v in value)
    return str(value)
