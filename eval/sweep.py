"""From the cells of a sweep to where speculation pays: the surface, the best K at each concurrency, the schedule.

A cell is an arm at a number of requests in flight, all workloads of the run together: the traffic as it was given. A mode is a
way of drafting (one by one or in parallel, argmax or probabilistic) with an arm for every K.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from math import exp, log
from typing import Any

from eval import schedule, statistics
from eval.measure import AGAIN, Arm
from eval.schedule import Ratio
from eval.verdict import explained, void_reason

Row = Mapping[str, Any]

FULL = 0.75  # a cell with fewer requests in flight than this part of what it says is named


def arm_name(mode: str, k: int) -> str:
    return f"{mode}-k{k}"


def mode_of(arm: str) -> str:
    return arm.rpartition("-k")[0]


def pooled(requests: Sequence[Row], arm: str, concurrency: int) -> list[dict[str, Any]]:
    """The arm's lines of requests.jsonl in that cell; ids name the workload, so that prompts of all of them pair up."""
    mine = (r for r in requests if r["arm"] == arm and r["concurrency"] == concurrency)
    return [{**r, "id": f"{r['workload']}/{r['id']}"} for r in mine]


def ratio(arm: Sequence[Row], base: Sequence[Row]) -> Ratio | None:
    """Speed over `base`'s with its paired interval; None where there is no interval (fewer than two prompts in both)."""
    found = statistics.speedup(arm, base)
    return (found.ratio, *found.interval) if found and found.interval else None


def surface(arms: Sequence[Arm], results: Sequence[Row], requests: Sequence[Row]) -> list[dict[str, Any]]:
    """A row per concurrency and arm, the target first, from the lines of results.jsonl and requests.jsonl:

    {"concurrency", "arm", "mode", "parallel_drafting", "num_speculative_tokens", "void", "speedup", "interval" (both None for
    the target and void cells), "output_tokens_per_s" (of the server), "tokens_per_s_per_request" (what one stream sees),
    "in_flight" (on average), "num_draft_tokens", "drafted_per_round" (rounds without a draft count), "acceptance_length",
    "draft_acceptance_rate", "exact_match", "unexplained" (outputs that differ from the target's not by rounding)}.
    """
    sizes = sorted({r["concurrency"] for r in results})
    return [_cell(arm, size, results, requests) for size in sizes for arm in arms if arm.name != AGAIN]


def again(arms: Sequence[Arm], results: Sequence[Row], requests: Sequence[Row]) -> list[dict[str, Any]]:
    """The target alone served again (A/A), over its first: {"concurrency", "void", "speedup", "interval"} per concurrency."""
    one = next(arm for arm in arms if arm.name == AGAIN)
    keys = ("concurrency", "void", "speedup", "interval")
    sizes = sorted({r["concurrency"] for r in results})
    return [{key: cell[key] for key in keys} for size in sizes for cell in [_cell(one, size, results, requests)]]


def drift(again: Sequence[Row]) -> list[str]:
    """What `again` says of differences between servers, in a sentence."""
    told = [f"{c['speedup']:.2f}x with {c['concurrency']} in flight" for c in again if c["speedup"]]
    return [
        f"The target alone, served a second time, has {', '.join(told)} of its own speed: an arm that differs from another by no "
        "more than that may owe it to the machine."
    ] if told else []  # fmt: skip


def _cell(arm: Arm, size: int, results: Sequence[Row], requests: Sequence[Row]) -> dict[str, Any]:
    whole = [r for r in results if r["concurrency"] == size and r["group"] is None]
    rows = [r for r in whole if r["arm"] == arm.name]
    mine, base = pooled(requests, arm.name, size), pooled(requests, "target", size)
    void = next((v for r in whole if r["arm"] in (arm.name, "target") and (v := void_reason(r))), None)
    speed = None if void or arm.name == "target" else ratio(mine, base)
    tokens = sum(r["output_tokens"] for r in mine)
    seconds = sum(r["output_tokens"] / r["output_tokens_per_s"] for r in rows if r["output_tokens_per_s"])
    drafted, drafts, accepted = (
        sum(r[key] or 0 for r in rows) for key in ("num_draft_tokens", "num_drafts", "num_accepted_tokens")
    )
    # a stream's chunk is a round; the first chunk comes of the prompt. vLLM counts only rounds that had a draft
    rounds = max(drafts, sum(r["chunks"] - 1 for r in mine))
    compared = [r["exact_match"] for r in rows if r["exact_match"] is not None]
    return {
        "concurrency": size,
        "arm": arm.name,
        "mode": None if arm.kind == "target" else mode_of(arm.name),
        "parallel_drafting": arm.parallel_drafting,
        "num_speculative_tokens": arm.num_speculative_tokens,
        "void": void,
        "speedup": speed[0] if speed else None,
        "interval": list(speed[1:]) if speed else None,
        "output_tokens_per_s": tokens / seconds if seconds else None,
        "tokens_per_s_per_request": statistics.tokens_per_s(mine),
        "in_flight": sum(r["e2e_s"] for r in mine) / seconds if seconds else None,
        "num_draft_tokens": drafted,
        "drafted_per_round": drafted / rounds if rounds and arm.kind != "target" else None,
        "acceptance_length": 1 + accepted / drafts if drafts else None,
        "draft_acceptance_rate": accepted / drafted if drafted else None,
        "exact_match": sum(compared) / len(compared) if compared else None,
        "unexplained": sum(not explained(m) for r in rows for m in r["mismatches"] or []),
    }


def decide(cells: Sequence[Row], requests: Sequence[Row], max_num_seqs: int) -> dict[str, Any] | None:
    """What the surface says: {"mode", "best": [{"concurrency", "num_speculative_tokens", "speedup", "interval"}], "fixed" (the
    best single K), "schedule" (one range with K = 0: never speculate), "pays_up_to", "stops_at" (measured
    concurrencies, or None)}; None where the target was measured nowhere.

    Of several modes that one is taken whose best K gain most over all concurrencies (geometric mean); noise may choose
    between modes that are alike, so `confirmed` measures the choice again. With all drafts in one pass the single K is the
    only one besides 0: a pass makes as many drafts as the engine was started for, and vLLM 0.32 ends where fewer are asked.
    """
    sizes = [c["concurrency"] for c in cells if c["num_speculative_tokens"] == 0 and not c["void"]]
    modes = list(dict.fromkeys(c["mode"] for c in cells if c["mode"]))
    if not sizes or not modes:
        return None
    fixed = {mode: _fixed(cells, mode, sizes) for mode in modes}
    one_pass = {c["mode"] for c in cells if c["parallel_drafting"]}
    allowed = {mode: {fixed[mode]} if mode in one_pass else None for mode in modes}
    choices = {mode: [_best(cells, requests, mode, size, allowed[mode]) for size in sizes] for mode in modes}
    mode = max(modes, key=lambda m: _mean(b["speedup"] for b in choices[m]))
    best = choices[mode]
    winners = {b["concurrency"]: b["num_speculative_tokens"] for b in best}
    pays = [size for size in sizes if winners[size]]
    return {
        "mode": mode,
        "best": best,
        "fixed": fixed[mode],
        "schedule": schedule.filled(winners, max_num_seqs),
        "pays_up_to": max(pays, default=None),
        "stops_at": next((size for size in sizes if size > max(pays, default=0)), None),
    }


def _best(
    cells: Sequence[Row], requests: Sequence[Row], mode: str, size: int, allowed: Collection[int | None] | None
) -> dict[str, Any]:
    """The winner of a mode among the cells of one concurrency that are not void and whose K is allowed (None: every K);
    K = 0 at a speedup of 1 is the target."""
    held = {c["num_speculative_tokens"]: c for c in cells if c["mode"] == mode and c["concurrency"] == size}
    held = {k: c for k, c in held.items() if allowed is None or k in allowed}
    answers = {k: pooled(requests, c["arm"], size) for k, c in held.items() if not c["void"]}
    answers[0] = pooled(requests, "target", size)
    found = {(a, b): ratio(answers[a], answers[b]) for a in answers for b in answers if a > b}
    k = schedule.winner({pair: r for pair, r in found.items() if r})
    return {
        "concurrency": size,
        "num_speculative_tokens": k,
        "speedup": held[k]["speedup"] if k else 1.0,
        "interval": held[k]["interval"] if k else None,
    }


def _fixed(cells: Sequence[Row], mode: str, sizes: Sequence[int]) -> int | None:
    """The single K of the greatest geometric mean over the concurrencies; one that was measured at more goes before."""
    speeds: dict[int, list[float]] = {}
    for c in cells:
        if c["mode"] == mode and c["concurrency"] in sizes and c["speedup"]:
            speeds.setdefault(c["num_speculative_tokens"], []).append(c["speedup"])
    return max(speeds, key=lambda k: (len(speeds[k]), _mean(speeds[k])), default=None)


def _mean(ratios: Iterable[float]) -> float:
    logs = [log(r) for r in ratios]
    return exp(sum(logs) / len(logs))


def notes(cells: Sequence[Row], found: Row | None, results: Sequence[Row], max_num_seqs: int) -> list[str]:
    """What a reader of the surface and the schedule must know, a sentence each."""
    said = [f"{c['arm']} with {c['concurrency']} in flight is void: {c['void']}." for c in cells if c["void"]]
    if found is None:
        return said
    chosen = {b["concurrency"]: b["num_speculative_tokens"] for b in found["best"]}
    for low, high in schedule.gaps(list(chosen), max_num_seqs):
        ks = sorted({schedule.k_at(found["schedule"], s) for s in range(low, high + 1)})
        why = "above what was measured" if low > max(chosen) else "the smaller K of the sizes measured around them"
        why = "as at every size" if len(found["schedule"]) == 1 else why
        where = f"size {low} was" if low == high else f"sizes {low} to {high} were"
        said.append(f"Batch {where} not measured: K = {', '.join(map(str, ks))}, {why}.")
    for c in cells:
        at, arm = c["concurrency"], c["arm"]
        if c["num_speculative_tokens"] == 0 and c["in_flight"] and c["in_flight"] < FULL * at:
            said.append(
                f"The cell of {at} had {c['in_flight']:.1f} requests in flight on average, as its last ones run out: "
                f"its batches were smaller than it says; give it more prompts (workloads.NAME.limit, 4 x {at} or more)."
            )
        if c["unexplained"]:
            n = c["unexplained"]
            said.append(
                f"{arm} with {at} in flight: {n} output{'s differ' if n > 1 else ' differs'} from the target's and not by "
                "a tie in rounding that its recorded distribution shows."
            )
    for r in results:
        k = chosen.get(r["concurrency"])
        mine = k and r["group"] is None and r["arm"] == arm_name(found["mode"], k)
        if mine and r["speedup_interval"] and r["speedup_interval"][1] < 1:
            said.append(
                f"K = {k} with {r['concurrency']} in flight is slower than the target alone on {r['workload']} "
                f"({r['speedup']:.2f}x), though faster on all workloads together."
            )
    return said


def losses(confirmed: Sequence[Row], idle: float) -> list[str]:
    """Where the lines of `confirmed` say that their arm is void or measurably slower than the target alone, a sentence each.

    A drafter that is loaded and asked for no draft may cost `idle`, a part of the speed.
    """
    said = []
    for c in confirmed:
        where = f"Measured once more, {c['arm']} with {c['concurrency']} in flight"
        if c["void"]:
            said.append(f"{where} is void: {c['void']}.")
        elif c["interval"] and c["interval"][1] < (1 if c["asked"] else 1 - idle):
            said.append(f"{where} is slower than the target alone ({c['speedup']:.2f}x).")
    return said


def confirmed(cells: Sequence[Row], requests: Sequence[Row], arm: Arm, fixed: str) -> list[dict[str, Any]]:
    """An arm measured once more beside the target and the best single K, the arm called `fixed`: for each concurrency its
    cell of `surface`, and {"over_fixed", "over_fixed_interval" (None where one is void), "asked" (K by its schedule),
    "ignored" (eval.schedule.ignored)}."""
    voids = {c["concurrency"]: c["void"] for c in cells if c["arm"] == fixed}
    out = []
    for c in (c for c in cells if c["arm"] == arm.name):
        size, drafted = c["concurrency"], c["drafted_per_round"]
        mine, other = (pooled(requests, name, size) for name in (arm.name, fixed))
        over = None if c["void"] or voids[size] or arm.name == fixed else ratio(mine, other)
        told = arm.schedule and drafted is not None and not c["void"]
        out.append(
            {
                **c,
                "over_fixed": over[0] if over else None,
                "over_fixed_interval": list(over[1:]) if over else None,
                "asked": schedule.k_at(arm.schedule, size) if arm.schedule else arm.num_speculative_tokens,
                "ignored": schedule.ignored(arm.schedule, size, drafted) if told else None,
            }
        )
    return out
