"""From blocks to results.jsonl: one line per arm and workload (and group), with rates, speed, speedup and exactness."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from eval import by_context, effective, open_loop, statistics
from eval.counters import Counts
from eval.measure import Arm, Plan
from eval.verdict import TIE
from pairing.files import read_jsonl, write_jsonl

MAX_CACHE_HIT_RATE = 0.01  # above it a cell measured the cache (fault D20)


@dataclass(frozen=True)
class Offline:
    """What is to be expected of a drafter on a workload, from the target's recorded answers."""

    temperature: float  # of those answers
    acceptance_length: float  # τ by replay
    interval: tuple[float, float]
    """What drafts past an answer's end, which no answer holds, leave open; at temperature > 0 also the spread over prompts,
    as other answers are served than were recorded."""
    teacher_forced: float | None  # τ from acceptance at every start, not only where rounds begin


# (workload, prompt id, position) -> log p of tokens there under the target, after the target's own answer so far
LogProbs = Mapping[tuple[str, str, int], Mapping[int, float]]


def write_results(
    plan: Plan,
    out: Path,
    versions: Mapping[str, Any],
    offline: Mapping[tuple[str, str, str | None], Offline],
    log_probs: LogProbs,
    references: Mapping[tuple[str, str], Sequence[int]],
) -> list[dict[str, Any]]:
    """Writes out/results.jsonl and returns its rows.

    offline: (arm, workload, group or None) -> what was predicted; it stands beside cells of the same temperature.
    references: (workload, id) -> the answer that the target wrote when its distribution was recorded; `log_probs` hold along it.
    """
    blocks, requests = read_jsonl(out / "blocks.jsonl"), read_jsonl(out / "requests.jsonl")
    checks = {(r["arm"], r["temperature"]): r for r in read_jsonl(out / "losslessness.jsonl")}
    rows = []
    for workload, measured in plan.workloads.items():
        names = list(dict.fromkeys(r.group for r in measured))
        groups = [None, *(g for g in names if g is not None)]
        for temperature, (concurrency, rate), group, arm in product(plan.temperatures, plan.loads, groups, plan.arms):
            cell = {
                "workload": workload,
                "group": group,
                "temperature": temperature,
                "concurrency": concurrency,
                "rate": rate,
            }
            here = [r for r in requests if _within(r, cell)]
            base = [r for r in here if r["arm"] == "target"]
            mine = [b for b in blocks if b["arm"] == arm.name and _within(b, cell)]
            check = checks.get((arm.name, temperature))
            alone = _served([b for b in blocks if b["arm"] == "target"])
            targets = [b for b in blocks if b["arm"] == "target" and _within(b, cell)]
            target_void = _void(plan.arms[0], temperature, targets, None, alone)
            own = [r for r in here if r["arm"] == arm.name]
            row = _row(plan, arm, cell, mine, own, base, check, alone, target_void)
            for mismatch in row["mismatches"] or []:
                mismatch["why"] = _explain(workload, mismatch, log_probs, references, base)
            one = offline.get((arm.name, workload, group))
            one = one if one and one.temperature == temperature else None
            row["teacher_forced_acceptance_length"] = one.teacher_forced if one else None
            row["replay_acceptance_length"] = one.acceptance_length if one else None
            row["replay_interval"] = list(one.interval) if one else None
            rows.append(row | {"versions": dict(versions)})
    write_jsonl(out / "results.jsonl", rows)
    return rows


def _within(row: Mapping[str, Any], cell: Mapping[str, Any]) -> bool:
    """A cell without a group holds all groups of its workload."""
    return all(row.get(name) == value for name, value in cell.items() if not (name == "group" and value is None))


def _void(
    arm: Arm,
    temperature: float,
    blocks: Sequence[Mapping[str, Any]],
    check: Mapping[str, Any] | None,
    alone: Mapping[str, str],
) -> str | None:
    """Why these blocks of an arm, a cell, are no measurement; None where they are one."""
    if void := next((b["void"] for b in blocks if b["void"]), None if blocks else "not measured"):
        return str(void)
    counts = _sum([b["counts"] for b in blocks if b["counts"]])
    if counts and (counts.prefix_cache_hit_rate or 0) > MAX_CACHE_HIT_RATE:
        return f"prefix cache hit rate {counts.prefix_cache_hit_rate:.1%}: the cell measured the cache"
    if temperature and arm.speculation():  # a speedup stands beside its check, or does not stand
        if not check:
            return "whether its output is the target's own was not checked"
        if not check["passed"]:
            return str(check["reason"])
    if other := effective.differences(_served(blocks), alone)[0]:
        return f"served otherwise than the target alone: {', '.join(other)}"
    return None


def _served(blocks: Sequence[Mapping[str, Any]]) -> Mapping[str, str]:
    """What the server of these blocks really ran with."""
    return next((b["effective"] for b in blocks if b.get("effective")), {})


def _row(
    plan: Plan,
    arm: Arm,
    cell: Mapping[str, Any],
    blocks: Sequence[Mapping[str, Any]],
    requests: Sequence[Mapping[str, Any]],
    base: Sequence[Mapping[str, Any]],
    check: Mapping[str, Any] | None,
    alone: Mapping[str, str],
    target_void: str | None,
) -> dict[str, Any]:
    counts = _sum([b["counts"] for b in blocks if b["counts"]])
    void = _void(arm, cell["temperature"], blocks, check, alone)
    served = _served(blocks)
    sampling: Mapping[str, Any] = next((b["sampling"] for b in blocks if b.get("sampling")), {})
    differs = effective.differences(served, alone)[1]
    row: dict[str, Any] = {
        "arm": arm.name,
        "kind": arm.kind,
        "model": str(arm.model) if arm.model else None,
        "method": arm.method,
        **cell,
        "num_speculative_tokens": arm.num_speculative_tokens,
        "draft_sample_method": arm.draft_sample_method if arm.kind == "draft_model" else None,
        "parallel_drafting": arm.parallel_drafting if arm.kind == "draft_model" else None,
        "void": void,
        "prompts": len({r["id"] for r in requests}),
        "repeats": len({r["repeat"] for r in requests}),
    }
    speculates = counts is not None and arm.kind != "target"
    for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens"):
        row[name] = getattr(counts, name) if speculates else None
    row["num_accepted_tokens_per_pos"] = list(counts.num_accepted_tokens_per_pos) if counts and speculates else None
    for name in ("draft_acceptance_rate", "acceptance_length", "survival_per_pos", "conditional_per_pos"):
        row[name] = getattr(counts, name) if speculates else None
    seconds = sum(b.get("seconds", 0.0) for b in blocks)
    tokens = sum(r["output_tokens"] for r in requests)
    row |= {
        # what a client sees: tokens per chunk after the first. Cut at the end of the text, where counters are not
        "emitted_acceptance_length": _emitted(requests),
        "output_tokens": tokens,
        "output_tokens_per_s": tokens / seconds if seconds else None,
        "in_flight": sum(r["e2e_s"] for r in requests) / seconds if seconds else None,  # on average
        "ttft_ms": statistics.percentiles([r["ttft_s"] for r in requests], 1000),
        "tpot_ms": statistics.percentiles([r["tpot_s"] for r in requests if r["tpot_s"] is not None], 1000),
        "itl_ms": statistics.percentiles([g for r in requests for g in r["itl_s"]], 1000),
        "chunk_gap_ms": statistics.percentiles([g for r in requests for g in r["chunk_gap_s"]], 1000),
        "e2e_ms": statistics.percentiles([r["e2e_s"] for r in requests], 1000),
    }
    row |= by_context.figures(requests, counts if speculates else None, arm.num_speculative_tokens)
    told = True
    if cell["rate"]:  # where one of the two falls behind, times grow with the length of the run and compare nothing
        row |= open_loop.figures(requests)
        told = row["kept_up"] is not False and open_loop.figures(base)["kept_up"] is not False
    compared = arm.name != "target" and not void and not target_void  # a figure over a void target is none
    gain = statistics.speedup(requests, base) if compared and told else None
    exact = statistics.exact_match(requests, base) if compared and not cell["temperature"] else None
    width = gain.half_width if gain else None
    row |= {
        "speedup": gain.ratio if gain else None,
        "speedup_interval": list(gain.interval) if gain and gain.interval else None,
        "speedup_half_width": width,  # of the interval, as a part of the speedup
        "precision": plan.precision,
        "precision_reached": width is not None and width <= plan.precision if gain and plan.precision else None,
        "exact_match": exact.fraction if exact else None,
        "losslessness": {k: v for k, v in check.items() if k != "arm"} if check else None,
        "mismatches": exact.mismatches if exact else None,
        "memory_mib": max((b.get("memory_mib", 0.0) for b in blocks), default=None),
        "prefix_cache_hit_rate": counts.prefix_cache_hit_rate if counts else None,
        "startup_s": next((b.get("startup_s") for b in blocks), None),
        "settings": {"command": next((b.get("command") for b in blocks), None), "seed": plan.seed,
                     "ignore_eos": sampling.get("ignore_eos"), "resident": plan.resident, "warmup": plan.warmup,
                     "effective": served, "differs": differs},
    }  # fmt: skip
    return row


def _sum(counts: Sequence[Mapping[str, Any]]) -> Counts | None:
    """Counts of several blocks as one."""
    if not counts:
        return None
    width = max(len(c["num_accepted_tokens_per_pos"]) for c in counts)
    per_pos = tuple(
        sum(c["num_accepted_tokens_per_pos"][i] for c in counts if i < len(c["num_accepted_tokens_per_pos"]))
        for i in range(width)
    )
    totals = {k: sum(c[k] for c in counts) for k in counts[0] if k != "num_accepted_tokens_per_pos"}
    return Counts(**totals, num_accepted_tokens_per_pos=per_pos)


def _emitted(requests: Sequence[Mapping[str, Any]]) -> float | None:
    """Tokens per chunk after the first chunk, which the prefill brings."""
    chunks = sum(r["chunks"] - 1 for r in requests)
    return sum(len(r["itl_s"]) for r in requests) / chunks if chunks else None


def _explain(
    workload: str,
    mismatch: Mapping[str, Any],
    log_probs: LogProbs,
    references: Mapping[tuple[str, str], Sequence[int]],
    base: Sequence[Mapping[str, Any]],
) -> str:
    """How close the two tokens were for the target: a tie in rounding is no loss, anything else wants an explanation."""
    id, at = mismatch["id"], mismatch["position"]
    reference = list(references.get((workload, id), ()))
    own = {r["repeat"]: list(r["output_ids"]) for r in base if r["id"] == id}
    served = own.get(mismatch["repeat"], own[min(own)])  # as statistics.exact_match compared them
    if served[:at] != reference[:at]:
        return "the target alone had left its recorded answer before, so no log-probs are at hand here"
    known = log_probs.get((workload, id, at), {})
    a, b = known.get(mismatch["target_token"]), known.get(mismatch["arm_token"])
    if a is None or b is None:
        return "one of the two tokens is not among the target's most likely ones here: no tie"
    kind = TIE if abs(a - b) < 0.01 else "no tie"
    return f"log-probs under the target {a:.4f} and {b:.4f}: {kind}"
