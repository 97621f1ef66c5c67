"""`measure --require "speedup>=1.2@c1"`: what a build asks of a measurement, read before anything is served, judged after.

METRIC >= or > NUMBER, then where: @cN (requests in flight), @tT (temperature), @ARM, @WORKLOAD, in any order. Every measured
cell that it names must meet it; what is not named means all. Without an arm it is asked of every drafter, not of rivals that
need none (n-gram …); of all arms where no drafter is measured. A void cell meets nothing.

A speedup is judged by the lower bound of its 95 % interval, so that no build passes by noise, and only where the verdict lets it
stand (eval/verdict.py): not over a void target, not where outputs differ from the target's, and no gain (a bound of 1 or more)
within the noise that the A/A arm shows. The other metrics are judged as measured: they are counts of the run itself.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eval.measure import Plan
from eval.verdict import answers
from pairing.errors import InputError

METRICS = ("speedup", "acceptance_length", "draft_acceptance_rate", "exact_match")
FORM = 'write it as "speedup>=1.2@c1": one of ' + ", ".join(METRICS) + "; >= or >; a number; @cN @tT @ARM @WORKLOAD"


@dataclass(frozen=True)
class Requirement:
    text: str
    metric: str
    strict: bool  # > rather than >=
    bound: float
    arms: tuple[str, ...]
    workloads: tuple[str, ...]
    concurrencies: tuple[int, ...]
    temperatures: tuple[float, ...]


def read(texts: Sequence[str], plan: Plan) -> list[Requirement]:
    """Raises InputError where one is malformed or names what `plan` does not measure."""
    return [_read(text, plan) for text in texts]


def _read(text: str, plan: Plan) -> Requirement:
    said, *parts = (part.strip() for part in text.split("@"))
    found = re.fullmatch(r"(\w+)\s*(>=|>)\s*([0-9]*\.?[0-9]+)", said)
    if not found or found[1] not in METRICS:
        raise InputError(f"require: {text!r} is no requirement: {FORM}")
    metric, sign, bound = found.groups()
    own = [a for a in plan.arms if a.kind != "target"]
    arms = [a.name for a in own if a.model] or [a.name for a in own]
    chosen: dict[str, tuple[Any, ...]] = {
        "arms": tuple(arms),
        "workloads": tuple(plan.workloads),
        "concurrencies": plan.concurrencies,
        "temperatures": plan.temperatures,
    }
    if metric == "exact_match":  # greedy output only can be held against another, token by token
        chosen["temperatures"] = tuple(t for t in plan.temperatures if not t)
    named: set[str] = set()
    for part in parts:
        what, value = _where(part, text, plan, [a.name for a in own])
        if what in named:
            raise InputError(f"require: {text!r} names its {what} twice: write two requirements")
        if what == "temperatures" and value and metric == "exact_match":
            raise InputError(f"require: {text!r}: exact_match is measured at temperature 0 only")
        chosen[what] = (value,)
        named.add(what)
    if empty := next((what for what, values in chosen.items() if not values), None):
        raise InputError(f"require: {text!r} names no cell: of its {empty} none is measured")
    return Requirement(text, metric, sign == ">", float(bound), **chosen)


def _where(part: str, text: str, plan: Plan, arms: Sequence[str]) -> tuple[str, Any]:
    if found := re.fullmatch(r"([ct])(\d*\.?\d+)", part):
        what, held = {"c": ("concurrencies", plan.concurrencies), "t": ("temperatures", plan.temperatures)}[found[1]]
        if float(found[2]) not in held:
            given = ", ".join(f"{v:g}" for v in held)
            raise InputError(f"require: {text!r}: {part} is not measured: {what} are {given}")
        return what, float(found[2])
    if part in arms and part in plan.workloads:
        raise InputError(f"require: {text!r}: {part!r} is an arm and a workload: name one of them otherwise")
    if part in arms or part in plan.workloads:
        return "arms" if part in arms else "workloads", part
    raise InputError(
        f"require: {text!r}: {part!r} is not measured: arms are {', '.join(arms)}; workloads {', '.join(plan.workloads)}; then "
        f"cN and tT"
    )


def judge(requirements: Sequence[Requirement], rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[str]]:
    """(lines on what is met, lines on what is not), a line for each requirement and cell of it."""
    met: list[str] = []
    missed: list[str] = []
    for one in requirements:
        cells = [
            (r, answer, reason) for r, answer, reason in answers(rows)
            if r["arm"] in one.arms and r["workload"] in one.workloads
            and r["concurrency"] in one.concurrencies and r["temperature"] in one.temperatures
        ]  # fmt: skip
        if not cells:
            missed.append(f"not met: {one.text}: no such cell was measured")
        for row, answer, reason in cells:
            value, said = _value(one, row, answer, reason)
            good = value is not None and (value > one.bound if one.strict else value >= one.bound)
            where = (
                f"{row['arm']} on {row['workload']}, temperature {row['temperature']:g}, {row['concurrency']} in flight"
            )
            (met if good else missed).append(f"{'met' if good else 'not met'}: {one.text}: {where}: {said}")
    return met, missed


def _value(one: Requirement, row: Mapping[str, Any], answer: str, reason: str | None) -> tuple[float | None, str]:
    """The figure that is judged (None where the verdict on the row leaves none) and how to say it."""
    metric = one.metric
    if answer == "void":
        return None, f"void: {reason}"
    if metric != "speedup":
        if row.get(metric) is None:
            return None, f"{metric} was not measurable" + (f": {reason}" if answer == "not measurable" else "")
        return float(row[metric]), f"{metric} {row[metric]:.3f}"
    if answer in ("not measurable", "differs from the target"):
        return None, f"{answer}: {reason}"
    low, high = row["speedup_interval"]
    if answer == "no measurable difference" and low > 1 and one.bound >= 1:
        return None, f"speedup {row['speedup']:.3f} is {answer}: {reason}"
    return float(
        low
    ), f"speedup {row['speedup']:.3f}, judged by the lower bound of its 95 % interval, {low:.3f} to {high:.3f}"
