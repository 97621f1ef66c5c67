"""Two runs compared: speed and acceptance length arm by arm, with intervals, and what else was not the same in them.

Each run has its own target alone, so what is compared is a ratio of speedups, S_B / S_A: a machine that was slower for all of
a run cancels. What the machine did between an arm and its target does not; the A/A arm (`target-again`), where there
is one, says how much that is, and a difference no larger than it is none.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from math import exp, log
from statistics import NormalDist
from typing import Any

import numpy as np

from eval.run_results import Run
from eval.verdict import REFERENCE_ARMS, judge, latest, void_reason
from pairing.bootstrap import Array, interval

Row = Mapping[str, Any]
LEVEL = 0.95
AGAIN = "target-again"  # the target measured twice
HARDWARE = ("cpu", "cores", "memory_mib", "gpus", "platform", "python", "git")
OWN = ("out", "run_dir", "record", "drafter", "drafters", "target")  # of a config: where it lies, and what is compared
DONE = ("faster", "slower", "no measurable difference")


def compare(a: Run, b: Run) -> dict[str, Any]:
    """{"answer": "faster"|"slower"|"no measurable difference"|"not comparable" (B against A, in the headline), "sentence",
    "regression" (whether some drafter of B is measurably slower or no longer lossless), "differences": [{"what", "a", "b"}],
    "cells": [{"workload", "temperature", "concurrency", "rate", "target_tokens_per_s": [A, B], "noise" (the A/A arms'
    largest distance from 1, or None), "arms": [arm]}], "only_a", "only_b": [str]}, where an arm is {"arm_a", "arm_b", "kind",
    "k_a", "k_b", "speedup_a", "interval_a", "speedup_b", "interval_b", "ratio", "ratio_interval", "prompts" (that both runs
    hold, over which the interval is paired; None: from the two intervals), "tau_a", "tau_b", "tau_ratio", "tau_interval",
    "answer", "reason"}.
    """
    differences = differing(a, b)
    judged_a, judged_b = _cells(a), _cells(b)
    held_a, held_b = _requests(a), _requests(b)
    cells, only_a, only_b = [], [], []
    for key in dict.fromkeys([*judged_b, *judged_a]):
        arms_a, arms_b = judged_a.get(key, []), judged_b.get(key, [])
        pairs, rest_a, rest_b = _matched(arms_a, arms_b)
        only_a += [f"{_named(x)} on {where(key)}" for x in rest_a]
        only_b += [f"{_named(y)} on {where(key)}" for y in rest_b]
        again = [r["speedup"] for run in (a, b) for r in _rows(run, key, AGAIN) if r.get("speedup")]
        if pairs:
            cells.append({
                **dict(zip(("workload", "temperature", "concurrency", "rate"), key, strict=True)),
                "target_tokens_per_s": [_target_speed(run, key) for run in (a, b)],
                "noise": max((abs(s - 1) for s in again), default=None),
                "arms": [_arm(x, y, key, held_a, held_b) for x, y in pairs],
            })  # fmt: skip
    many = sum(len(c["arms"]) for c in cells)
    headline = _headline(cells)
    for cell in cells:
        for arm in cell["arms"]:
            # many intervals: one of twenty leaves out 1 by chance. The headline is one, and chosen before they are seen
            bounds = arm.pop("bounds")(1 - (1 - LEVEL) / (1 if arm is headline else many))
            arm["answer"], arm["reason"] = _answer(arm, bounds, cell["noise"])
    found = {"schema": 1, "differences": differences, "cells": cells, "only_a": only_a, "only_b": only_b}
    return {**_verdict(a, b, found, headline), **found}


def differing(a: Run, b: Run) -> list[dict[str, Any]]:
    """What isn't the same in both runs, beside what they measured: config, versions, machine. Unknown is None."""
    facts = [_facts(run) for run in (a, b)]
    keys = list(dict.fromkeys([*facts[0], *facts[1]]))
    return [
        {"what": key, "a": facts[0].get(key), "b": facts[1].get(key)}
        for key in keys
        if facts[0].get(key) != facts[1].get(key)
    ]


def _facts(run: Run) -> dict[str, Any]:
    origin = run.provenance or next(iter(run.jobs.values()), None) or {}
    versions = next((r["versions"] for r in run.results if r.get("versions")), None) or origin.get("versions") or {}
    config = {k: v for k, v in _flat(run.asked).items() if k.split(".")[0] not in OWN and not k.endswith(".answers")}
    settings = next((r.get("settings") for r in run.results if r["kind"] == "target"), None) or {}
    measured = {k: v for k, v in _flat(settings).items() if k.split(".")[-1] not in ("command", "port")}
    return (
        {"target": _target(run)}
        | {f"machine: {k}": origin.get(k) for k in HARDWARE}
        | {f"version: {k}": v for k, v in versions.items()}
        | {f"setting: {k}": v for k, v in {**measured, **config}.items()}
    )


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in values.items():
        out |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return out


def _target(run: Run) -> str | None:
    """The target's weights where they are known, else its name."""
    made_for = (run.pair or {}).get("target") or {}
    named = made_for.get("name") or run.asked.get("target")
    digest = (made_for.get("digests") or {}).get("weights")
    return f"{named} ({digest[:19]})" if digest else named


def _other_target(a: Run, b: Run) -> bool:
    """By the weights' digests where both runs have them, since a name says little; else by name. Unknown is no other."""
    digests = [(((run.pair or {}).get("target") or {}).get("digests") or {}).get("weights") for run in (a, b)]
    if all(digests):
        return digests[0] != digests[1]
    names = [((run.pair or {}).get("target") or {}).get("name") or run.asked.get("target") for run in (a, b)]
    return bool(all(names)) and names[0] != names[1]


Key = tuple[Any, ...]


def _cells(run: Run) -> dict[Key, list[dict[str, Any]]]:
    """(workload, temperature, concurrency, rate) -> the arms as judged."""
    return {
        (c["workload"], c["temperature"], c["concurrency"], c.get("rate")): c["arms"]
        for c in judge(run.results, run.evaluation)["cells"]
    }


def _requests(run: Run) -> dict[Key, list[Row]]:
    """(workload, temperature, concurrency, rate, arm) -> its lines of requests.jsonl."""
    out: dict[Key, list[Row]] = defaultdict(list)
    for r in run.requests:
        out[r["workload"], r.get("temperature"), r.get("concurrency"), r.get("rate"), r["arm"]].append(r)
    return out


def _target_speed(run: Run, key: Key) -> float | None:
    own = _rows(run, key, "target")
    return own[-1].get("output_tokens_per_s") if own else None


def _rows(run: Run, key: Key, arm: str) -> list[Row]:
    return [r for r in latest(run.results) if r.get("group") is None and r["arm"] == arm and not void_reason(r)
            and (r["workload"], r["temperature"], r["concurrency"], r.get("rate")) == key]  # fmt: skip


def _matched(
    arms_a: Sequence[dict[str, Any]], arms_b: Sequence[dict[str, Any]]
) -> tuple[list[tuple[dict[str, Any], dict[str, Any]]], list[dict[str, Any]], list[dict[str, Any]]]:
    """Arms of one cell that answer each other: alike in all, else by name, else the fastest drafter of each run."""
    rest_a, rest_b = list(arms_a), list(arms_b)
    pairs = []
    for keys in (("arm", "num_speculative_tokens", "draft_sample_method", "parallel_drafting"), ("arm",)):
        for y in list(rest_b):
            like = [x for x in rest_a if all(x.get(k) == y.get(k) for k in keys)]
            alone = sum(all(z.get(k) == y.get(k) for k in keys) for z in rest_b) == 1
            if len(like) == 1 and alone:
                pairs.append((like[0], y))
                rest_a.remove(like[0])
                rest_b.remove(y)
    if not any(y["kind"] == "draft_model" and y["arm"] not in REFERENCE_ARMS for _, y in pairs):
        ours = [next((z for z in rest if z["kind"] == "draft_model" and z["arm"] not in REFERENCE_ARMS), None)
                for rest in (rest_a, rest_b)]  # fmt: skip
        if ours[0] and ours[1]:
            pairs.insert(0, (ours[0], ours[1]))
            rest_a.remove(ours[0])
            rest_b.remove(ours[1])
    return pairs, rest_a, rest_b


Bounds = Callable[[float], tuple[float, float] | None]  # level -> interval


def _arm(
    x: Row, y: Row, key: Key, held_a: Mapping[Key, Sequence[Row]], held_b: Mapping[Key, Sequence[Row]]
) -> dict[str, Any]:
    """What is known of one arm in both runs. "bounds", the interval of the ratio by its level, is for `compare` alone."""
    mine_a, mine_b = held_a.get((*key, x["arm"]), []), held_b.get((*key, y["arm"]), [])
    base_a, base_b = held_a.get((*key, "target"), []), held_b.get((*key, "target"), [])
    both = x["speedup"] and y["speedup"]
    paired = paired_ratio([mine_b, base_a], [base_b, mine_a], _speed) if both else None
    rounds = paired_ratio([mine_b], [mine_a], _rounds) if both else None
    ratio = paired.ratio if paired else y["speedup"] / x["speedup"] if both else None
    bounds: Bounds = paired.bounds if paired else lambda level: _independent(x, y, level) if both else None
    return {
        "arm_a": x["arm"], "arm_b": y["arm"], "kind": y["kind"],
        "k_a": x["num_speculative_tokens"], "k_b": y["num_speculative_tokens"],
        "speedup_a": x["speedup"], "interval_a": x["interval"], "speedup_b": y["speedup"], "interval_b": y["interval"],
        "ratio": ratio, "ratio_interval": _listed(bounds(LEVEL)), "prompts": paired.prompts if paired else None,
        "tau_a": x["acceptance_length"], "tau_b": y["acceptance_length"],
        "tau_ratio": rounds.ratio if rounds else None,
        "tau_interval": _listed(rounds.bounds(LEVEL)) if rounds else None,
        "judged_a": x["answer"], "judged_b": y["answer"],
        "bounds": bounds, "reason": next((f"in {n}: {z['reason']}" for n, z in (("A", x), ("B", y))
                                          if z["answer"] not in DONE and z["reason"]), None),
    }  # fmt: skip


def _listed(bounds: tuple[float, float] | None) -> list[float] | None:
    return list(bounds) if bounds else None


def _speed(r: Row) -> tuple[float, float]:
    return r["output_tokens"], r["e2e_s"]


def _rounds(r: Row) -> tuple[float, float]:
    """Tokens and chunks after the first chunk, which the prefill brings: a chunk is a round."""
    return len(r.get("itl_s") or ()), r["chunks"] - 1


class Paired:
    """A product of ratios of sums over the same prompts: Π over `top` of Σ x / Σ y, over that of `bottom`."""

    def __init__(self, top: Sequence[Array], bottom: Sequence[Array]) -> None:
        self.top, self.bottom = top, bottom
        self.prompts = top[0].shape[1]
        self.ratio = float(self._of(np.ones((1, self.prompts)))[0])

    def _of(self, w: Array) -> Array:
        with np.errstate(divide="ignore", invalid="ignore"):
            up = np.prod([(w @ x) / (w @ y) for x, y in self.top], axis=0)
            down = np.prod([(w @ x) / (w @ y) for x, y in self.bottom], axis=0)
            return np.asarray(up / down, dtype=np.float64)

    def bounds(self, level: float) -> tuple[float, float]:
        return interval(self._of, self.prompts, level=level)


def paired_ratio(
    top: Sequence[Sequence[Row]], bottom: Sequence[Sequence[Row]], value: Callable[[Row], tuple[float, float]]
) -> Paired | None:
    """Over the prompts that all of these lists of requests hold, repeats averaged; None where that is fewer than two, or
    fewer than half of what some list holds: then the rest would be thrown away for the sake of pairing."""
    means: list[dict[str, Array]] = []
    for rows in (*top, *bottom):
        grouped: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for r in rows:
            grouped[r["id"]].append(value(r))
        means.append({id: np.mean(v, axis=0) for id, v in grouped.items()})
    ids = sorted(set.intersection(*(set(m) for m in means)))
    if len(ids) < max(2, *(len(m) / 2 for m in means)):
        return None
    sums = [np.array([m[id] for id in ids]).T for m in means]
    found = Paired(sums[: len(top)], sums[len(top) :])
    return found if np.isfinite(found.ratio) and found.ratio > 0 else None


def _independent(x: Row, y: Row, level: float) -> tuple[float, float] | None:
    """The interval of S_B / S_A from both intervals, as of independent and, in logs, normal figures."""
    if not x["interval"] or not y["interval"] or min(x["interval"][0], y["interval"][0]) <= 0:
        return None
    half = NormalDist().inv_cdf((1 + LEVEL) / 2)
    spread = sum((log(z["interval"][1] / z["interval"][0]) / 2 / half) ** 2 for z in (x, y)) ** 0.5
    centre, reach = log(y["speedup"] / x["speedup"]), NormalDist().inv_cdf((1 + level) / 2) * spread
    return exp(centre - reach), exp(centre + reach)


def _headline(cells: Sequence[Row]) -> dict[str, Any] | None:
    """The first cell's drafter; of several the one that is fastest in both runs together, which favours neither."""
    for cell in cells:
        known = [x for x in cell["arms"] if x["ratio"] and x["arm_b"] not in REFERENCE_ARMS]
        ours = [x for x in known if x["kind"] == "draft_model"]
        if ours or known:
            return max(ours or known, key=lambda x: float(x["speedup_a"] * x["speedup_b"]))
    return None


def _answer(arm: Row, bounds: tuple[float, float] | None, noise: float | None) -> tuple[str, str | None]:
    lossless = "differs from the target"
    if arm["judged_b"] == lossless and arm["judged_a"] != lossless:
        return lossless, arm["reason"]
    if arm["ratio"] is None or bounds is None:
        return "not comparable", arm["reason"] or "no interval in one of the runs"
    if bounds[0] <= 1 <= bounds[1]:
        return "no measurable difference", None
    if noise is not None and abs(arm["ratio"] - 1) <= noise:
        return "no measurable difference", f"no more than the target itself measured twice ({noise * 100:.1f} %)"
    return ("faster" if arm["ratio"] > 1 else "slower"), None


def _verdict(a: Run, b: Run, found: Row, headline: dict[str, Any] | None) -> dict[str, Any]:
    if _other_target(a, b):
        other = next(d for d in found["differences"] if d["what"] == "target")
        sentence = f"Not comparable: another target ({other['a']} in A, {other['b']} in B)."
        return {"answer": "not comparable", "sentence": sentence, "regression": False}
    if headline is None:
        why = "no workload, temperature and load with an arm that both runs measured"
        return {"answer": "not comparable", "sentence": f"Not comparable: {why}.", "regression": False}
    cell = next(c for c in found["cells"] if any(x is headline for x in c["arms"]))
    parts = [_headline_words(headline, cell)]
    ours = [(c, x) for c in found["cells"] for x in c["arms"] if x is not headline and x["arm_b"] not in REFERENCE_ARMS]
    for answer in ("slower", "faster"):
        said = [f"{_both(x)} on {where(key_of(c))} ({change(x['ratio'])})" for c, x in ours if x["answer"] == answer]
        if said:
            more = f" and {len(said) - 3} more" if len(said) > 3 else ""
            parts.append(f"{answer} too: {', '.join(said[:3])}{more}" if headline["answer"] == answer
                         else f"but {answer}: {', '.join(said[:3])}{more}")  # fmt: skip
    lost = [f"{_both(x)} on {where(key_of(c))}" for c, x in [(cell, headline), *ours]
            if x["answer"] == "differs from the target"]  # fmt: skip
    if lost:
        parts.append(f"B's outputs are no longer the target's own: {', '.join(lost[:3])}")
    machine = [d["what"].removeprefix("machine: ") for d in found["differences"]
               if d["what"] in ("machine: cpu", "machine: cores", "machine: gpus")]  # fmt: skip
    if machine:
        parts.append(f"on another machine ({', '.join(machine)} differ), which may be what made the difference")
    drafters = [x for c in found["cells"] for x in c["arms"]
                if x["kind"] == "draft_model" and x["arm_b"] not in REFERENCE_ARMS]  # fmt: skip
    worse = any(x["answer"] in ("slower", "differs from the target") for x in (drafters or [headline]))
    return {"answer": headline["answer"], "sentence": "; ".join(parts) + ".", "regression": worse}


def _headline_words(x: Row, cell: Row) -> str:
    at, tau = where(key_of(cell)), ""
    if x["tau_a"] and x["tau_b"]:
        tau = f", τ {x['tau_a']:.2f} and {x['tau_b']:.2f}"
    speeds = f"{x['speedup_a']:.2f}x in A and {x['speedup_b']:.2f}x in B over each run's own target{tau}"
    low_high = f" (95 % interval {span(x['ratio_interval'])})" if x["ratio_interval"] else ""
    if x["answer"] in ("faster", "slower"):
        return f"B's {_both(x)} is {abs(x['ratio'] - 1) * 100:.1f} % {x['answer']} than A's on {at}{low_high}: {speeds}"
    why = f", {x['reason']}" if x["reason"] else ""
    return f"{x['answer'].capitalize()}: {_both(x)} on {at} {change(x['ratio'])}{low_high}{why}: {speeds}"


def change(ratio: float | None) -> str:
    """1.06 -> "+6.0 %"."""
    return "–" if ratio is None else f"{(ratio - 1) * 100:+.1f} %".replace("-", "−")


def span(bounds: Sequence[float]) -> str:
    low, high = bounds
    return f"{change(low)} to {change(high)}"


def key_of(cell: Row) -> Key:
    return cell["workload"], cell["temperature"], cell["concurrency"], cell["rate"]


def where(key: Key) -> str:
    """The cell, and what of it is out of the ordinary (temperature 0, one request at a time)."""
    workload, temperature, concurrency, rate = key
    text = str(workload) + (f" at temperature {temperature:g}" if temperature else "")
    if rate is not None:
        return text + f" at {rate:g} requests/s"
    return text + (f" with {concurrency} in flight" if concurrency not in (None, 1) else "")


def _named(x: Row) -> str:
    return f"{x['arm']} at K = {x['num_speculative_tokens']}" if x["num_speculative_tokens"] else str(x["arm"])


def _both(x: Row) -> str:
    """The arm, with A's name and K where they are others."""
    name = x["arm_b"] if x["arm_a"] == x["arm_b"] else f"{x['arm_b']} (A: {x['arm_a']})"
    if not x["k_b"]:
        return str(name)
    return f"{name} at K = {x['k_b']}" + ("" if x["k_a"] == x["k_b"] else f" (A: {x['k_a']})")
