"""Figures from per-request rows: paired speedup with its interval, percentiles, gaps per token and chunk, exact match.

A row is a line of requests.jsonl: {"id", "repeat", "output_tokens", "e2e_s", "output_ids", …}. Prompts are the unit of
chance everywhere: repeats of a prompt are averaged first, and intervals come from pairing.bootstrap over prompts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from pairing.bootstrap import Array, interval
from pairing.errors import PartFailedError

Row = Mapping[str, Any]
PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class Speedup:
    """An arm's output tokens/s over the target alone's, on the same prompts."""

    ratio: float
    interval: tuple[float, float] | None
    """None with one prompt, from which no spread can be told."""
    prompts: int
    """Prompts that both arms answered: the only ones counted."""
    unpaired: int
    """Prompts that one arm answered and the other didn't: anything but 0 wants an explanation."""

    @property
    def half_width(self) -> float | None:
        """Of the interval, as a part of the ratio: 0.03 is ± 3 %."""
        return (self.interval[1] - self.interval[0]) / 2 / self.ratio if self.interval else None


def _per_prompt(rows: Sequence[Row]) -> dict[str, tuple[float, float]]:
    """id -> (output tokens, seconds from sent to finished), means over repeats."""
    grouped: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for row in rows:
        grouped[row["id"]].append((row["output_tokens"], row["e2e_s"]))
    return {id: (float(np.mean([t for t, _ in v])), float(np.mean([s for _, s in v]))) for id, v in grouped.items()}


def speedup(arm: Sequence[Row], base: Sequence[Row], *, level: float = 0.95, seed: int = 0) -> Speedup | None:
    """(Σ tokens_arm / Σ seconds_arm) / (Σ tokens_base / Σ seconds_base) over prompts in both; None where there is none.

    With c requests in flight an arm's throughput is c times Σ tokens / Σ seconds, so c cancels. The interval redraws
    whole prompts, the same ones for both arms (pairing.bootstrap).
    """
    a, b = _per_prompt(arm), _per_prompt(base)
    ids = sorted(a.keys() & b.keys())
    if not ids:
        return None
    tokens_a, seconds_a = np.array([a[i] for i in ids]).T
    tokens_b, seconds_b = np.array([b[i] for i in ids]).T

    def ratio(w: Array) -> Array:
        return (w @ tokens_a) / (w @ seconds_a) / ((w @ tokens_b) / (w @ seconds_b))

    low, high = interval(ratio, len(ids), level=level, seed=seed)
    return Speedup(
        ratio=float(ratio(np.ones((1, len(ids))))[0]),
        interval=(low, high) if len(ids) > 1 else None,
        prompts=len(ids),
        unpaired=len(a.keys() ^ b.keys()),
    )


def tokens_per_s(rows: Sequence[Row]) -> float | None:
    """Σ output tokens / Σ seconds: what one stream sees. Times the requests in flight: the server's throughput."""
    seconds = sum(row["e2e_s"] for row in rows)
    return sum(row["output_tokens"] for row in rows) / seconds if seconds else None


def percentiles(values: Sequence[float], scale: float = 1.0) -> dict[str, float | None]:
    """{"p50", "p90", "p99"} of `values` times `scale` (1000: seconds to ms), linear between ranks; None where empty."""
    if not len(values):
        return {f"p{p}": None for p in PERCENTILES}
    return {f"p{p}": float(v) * scale for p, v in zip(PERCENTILES, np.percentile(values, PERCENTILES), strict=True)}


@dataclass(frozen=True)
class Gaps:
    """The waiting within one streamed answer, in seconds. With a drafter a chunk holds several tokens (fault D21)."""

    per_chunk: list[float]
    """Between arrivals: what a reader sees as stutter. Not a time per token."""
    per_token: list[float]
    """Each chunk's gap shared evenly by its tokens: inter-token latency, ITL."""
    tpot: float | None
    """First to last arrival / tokens after the first chunk; None where one chunk was all."""


def gaps(arrivals: Sequence[tuple[float, int]], output_tokens: int) -> Gaps:
    """From [(arrival time in s, tokens in the chunk)], the first chunk included; chunks without tokens don't count.

    `output_tokens` is the server's own usage figure. Raises PartFailedError where the chunks hold another number: then
    the client counted chunks, or lost some, and every per-token figure would be wrong.
    """
    chunks = [(at, n) for at, n in arrivals if n]
    held = sum(n for _, n in chunks)
    if held != output_tokens:
        raise PartFailedError(f"the streamed chunks hold {held} tokens, the server's usage says {output_tokens}")
    per_chunk = [b - a for (a, _), (b, _) in pairwise(chunks)]
    per_token = [gap / n for gap, (_, n) in zip(per_chunk, chunks[1:], strict=True) for _ in range(n)]
    return Gaps(per_chunk, per_token, sum(per_chunk) / len(per_token) if per_token else None)


@dataclass(frozen=True)
class ExactMatch:
    """Whether an arm's greedy outputs are the target's own, token for token."""

    fraction: float | None
    """Identical / compared outputs; None where nothing could be compared."""
    compared: int
    mismatches: list[dict[str, Any]]
    """{"id", "repeat", "position", "target_token", "arm_token"}: the first differing position of each; a token is None
    where that output had ended."""


def exact_match(arm: Sequence[Row], base: Sequence[Row]) -> ExactMatch:
    """Compares output ids request by request: the same prompt and repeat, else the target's first repeat."""
    targets: dict[str, dict[int, Sequence[int]]] = defaultdict(dict)
    for row in base:
        targets[row["id"]][row["repeat"]] = row["output_ids"]
    compared, mismatches = 0, []
    for row in sorted(arm, key=lambda r: (r["id"], r["repeat"])):
        repeats = targets.get(row["id"])
        if not repeats:
            continue
        compared += 1
        want, got = repeats.get(row["repeat"], repeats[min(repeats)]), row["output_ids"]
        if list(want) == list(got):
            continue
        both = min(len(want), len(got))
        at = next((i for i in range(both) if want[i] != got[i]), both)
        mismatches.append(
            {
                "id": row["id"],
                "repeat": row["repeat"],
                "position": at,
                "target_token": want[at] if at < len(want) else None,
                "arm_token": got[at] if at < len(got) else None,
            }
        )
    return ExactMatch(1 - len(mismatches) / compared if compared else None, compared, mismatches)
