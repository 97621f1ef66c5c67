"""Open loop: requests arrive by a Poisson process whether or not the ones before are answered; who can't keep up is named."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np

Row = Mapping[str, Any]
# a queue that grows evenly makes the last third of the requests wait about five times as long as the first
GROWTH = 2.0
FEWEST = 6  # requests of a stream below which its thirds tell nothing
UNFINISHED = 0.25  # part of the requests still at work when the last one arrives: that many a steady run does not hold


def arrival_times(rate: float, count: int, seed: int, repeat: int) -> list[float]:
    """Seconds from the start at which `count` requests arrive, `rate` a second on average, the first one at 0.

    A pure function of its arguments: every arm gets the same times. Other rates get the same pattern, stretched.
    """
    gaps = np.random.default_rng([seed, repeat]).exponential(1 / rate, max(0, count - 1))
    return [0.0, *np.cumsum(gaps).tolist()]


def figures(requests: Sequence[Row]) -> dict[str, Any]:
    """What an arm did at a rate, from its rows of requests.jsonl, streams (a repeat of a group) apart.

    "offered_requests_per_s" and "completed_requests_per_s" (to the last answer's end); "unfinished_at_last_arrival", a
    part of the requests; "e2e_growth", the median time of the last third over that of the first third, by arrival;
    "kept_up": False where both say that the queue grew as long as requests came, None with too few requests to tell.
    """
    streams: dict[tuple[Any, Any], list[tuple[float, float]]] = defaultdict(list)
    for r in requests:
        streams[r["repeat"], r["group"]].append((r["started_at"], r["e2e_s"]))
    n = arrived_s = busy_s = unfinished = 0.0
    growths = []
    for stream in streams.values():
        stream.sort()
        first, last = stream[0][0], stream[-1][0]
        n += len(stream)
        arrived_s += last - first
        busy_s += max(at + e2e for at, e2e in stream) - first
        unfinished += sum(at + e2e > last for at, e2e in stream[:-1])
        third = len(stream) // 3
        if len(stream) >= FEWEST:
            growths.append(median(e for _, e in stream[-third:]) / median(e for _, e in stream[:third]))
    growth = median(growths) if growths else None
    part = unfinished / n if n else None
    return {
        "offered_requests_per_s": (n - len(streams)) / arrived_s if arrived_s else None,
        "completed_requests_per_s": n / busy_s if busy_s else None,
        "unfinished_at_last_arrival": part,
        "e2e_growth": growth,
        "kept_up": None if growth is None or part is None else not (growth > GROWTH and part > UNFINISHED),
    }


def fell_behind(row: Row) -> str | None:
    """In words, for a row of results.jsonl; None where the arm kept up, or nothing tells that it did not."""
    if row.get("kept_up") is not False:
        return None
    return (
        f"it does not keep up with {row['rate']:g} requests/s: {row['completed_requests_per_s']:.2f} were completed a second, "
        f"{row['unfinished_at_last_arrival']:.0%} of all were unfinished when the last one came, and the last third took "
        f"{row['e2e_growth']:.1f} times as long as the first"
    )
