"""τ from what a client saw: by the length of the context, and all in all against the engine's counters.

Each streamed chunk after the first one is a round (the first is the prefill's): as many tokens as it emitted. That holds
where the client takes each chunk before the next one is there; the counters tell whether it did.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from eval.counters import Counts

MERGED = 0.01  # part of the rounds that reached the client within another's chunk, from which on chunks are no rounds

Row = Mapping[str, Any]


def figures(requests: Sequence[Row], counts: Counts | None, K: int) -> dict[str, Any]:
    """{"acceptance_length_by_context", "emitted_check"} of an arm with up to K drafts a round; None for both without counts.

    By context: [{"from", "to", "rounds", "acceptance_length"}], where a round's context is the prompt and all that was
    emitted before it, from <= context < to, bands by powers of two. Left out where chunks are no rounds.
    """
    if counts is None or any(r.get("chunk_tokens") is None for r in requests):
        return {"acceptance_length_by_context": None, "emitted_check": None}
    check = _check(requests, counts, K)
    merged = check["merged"] > MERGED * max(1, counts.num_drafts)
    return {"acceptance_length_by_context": None if merged else bands(requests), "emitted_check": check}


def bands(requests: Sequence[Row]) -> list[dict[str, Any]]:
    rounds: dict[int, list[int]] = defaultdict(list)
    for r in requests:
        context = r["prompt_tokens"] + sum(r["chunk_tokens"][:1])
        for emitted in r["chunk_tokens"][1:]:
            rounds[context.bit_length()].append(emitted)
            context += emitted
    return [
        {"from": 2 ** (bits - 1), "to": 2**bits, "rounds": len(n), "acceptance_length": sum(n) / len(n)}
        for bits, n in sorted(rounds.items())
    ]


def _check(requests: Sequence[Row], counts: Counts, K: int) -> dict[str, Any]:
    """Rounds and accepted tokens as emitted, beside the counters'. They may differ by what the end of an answer cut off, which
    is counted and not emitted: at most K + 1 less its last chunk. A proposer that finds nothing to draft makes a round
    that the counters leave out; so more rounds than counted are none of a fault, fewer are chunks that were merged.
    """
    later = [r["chunk_tokens"][1:] for r in requests]
    rounds, accepted = sum(map(len, later)), sum(n - 1 for chunks in later for n in chunks)
    cut = sum(K + 1 - chunks[-1] for chunks in later if chunks)
    too_long = sum(n > K + 1 for chunks in later for n in chunks)
    merged = max(counts.num_drafts - rounds, too_long)
    missing = counts.num_accepted_tokens - accepted
    alarm = None
    if merged > MERGED * max(1, counts.num_drafts):
        alarm = (
            f"{rounds} chunks brought {counts.num_drafts} rounds: the client was late, so times between tokens are coarse and "
            "τ by context is left out"
        )
    elif not -merged <= missing <= cut + merged:
        alarm = (
            f"{accepted} accepted tokens were emitted and {counts.num_accepted_tokens} counted, of which the ends of answers "
            f"cut off at most {cut}"
        )
    return {"rounds": rounds, "accepted_tokens": accepted, "cut_at_most": cut, "merged": merged, "alarm": alarm}
