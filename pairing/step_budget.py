"""The drafter that a budget of time allows: layers and width chosen by measured decode steps, the chosen one measured too.

A draft step goes by layers first: time(layers) = rest + layers x one. Two measured points of a width give the line, the
line names a number of layers, and that one is measured; where it misses, the line through it names a smaller one. Few wide
layers go before many narrow ones, as in `pairing.init.fit_budget`: narrower widths are tried only where two layers of
a wider one are too slow already.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pairing.decode_time import StepTime, Timer, engine_name
from pairing.errors import InputError
from pairing.files import read_json
from pairing.init import Width, plan_init, spaced
from pairing.source import ModelSource
from pairing.width import Shape, shape_of, shapes_below

FEW, MORE = 2, 6  # layers of the two points of a line
MOST_WIDTHS = 5


@dataclass(frozen=True)
class Limit:
    """At most `value` of the target's decode step, or at most `value` ms."""

    value: float
    unit: str  # "share" or "ms"

    def __str__(self) -> str:
        return f"{self.value:g} ms" if self.unit == "ms" else f"{self.value:g} of the target's step"

    def of(self, time: StepTime) -> float:
        return time.ms[0] if self.unit == "ms" else time.share[0]


@dataclass(frozen=True)
class Tried:
    """One measured shape; `cost` and `predicted` are in the limit's unit, `predicted` None where nothing was."""

    layers: int
    shape: Shape
    cost: float
    predicted: float | None


def parse_limit(text: float | str) -> Limit:
    """`0.15` is a share of the target's step, `12ms` a time. Raises InputError."""
    try:
        word = str(text).strip()
        limit = Limit(float(word[:-2]), "ms") if word.endswith("ms") else Limit(float(word), "share")
    except ValueError:
        limit = Limit(0, "share")
    if not limit.value > 0 or (limit.unit == "share" and limit.value >= 1):
        raise InputError(f"draft_step={text}: give a share of the target's step, such as 0.15, or a time, such as 12ms")
    return limit


Measure = Callable[[Sequence[tuple[int, Shape]]], Sequence[float]]


def choose_steps(
    shapes: Sequence[Shape], sizes: Sequence[int], of: int, limit: Limit, whole: float, measure: Measure
) -> tuple[Tried, list[Tried]]:
    """The chosen one, which keeps the limit by measurement, and all that was measured on the way.

    `shapes` are the widths to try, the target's own first; `sizes` the parameters of two layers of each. `whole` is the
    target's own cost, of all its `of` layers. `measure` takes pairs of a number of layers and a shape. Raises InputError with
    the figures where even two layers of the narrowest are too slow.
    """
    if whole <= limit.value:
        raise InputError(f"draft_step: the target itself takes {whole:.4g} {limit.unit} a step: give less than that")
    tried: list[Tried] = []
    # parameters and cost; the first guess, a line through the origin, is too hopeful, so that no width is missed
    points = [(0, 0.0)]
    few, more, at = min(FEW, of), min(MORE, of), 0
    predicted: float | None = None
    while True:
        cost = measure([(few, shapes[at])])[0]
        tried.append(Tried(few, shapes[at], cost, predicted))
        if cost <= limit.value:
            break
        points.append((sizes[at], cost))
        below = [i for i in range(at + 1, len(shapes)) if _line(points[-2:], sizes[i]) <= limit.value]
        if not below or len(points) > MOST_WIDTHS:
            raise _too_slow(tried, limit, len(shapes))
        at, predicted = below[0], _line(points[-2:], sizes[below[0]])
    costs = {of: whole, few: cost} if at == 0 else {few: cost}
    if at and more > few:
        costs[more] = measure([(more, shapes[at])])[0]
        tried.append(Tried(more, shapes[at], costs[more], None))
    tried += _more_layers(shapes[at], costs, of, limit, measure)
    good = [t for t in tried if t.shape == shapes[at] and t.cost <= limit.value]
    return max(good, key=lambda t: t.layers), tried


def _more_layers(shape: Shape, costs: dict[int, float], of: int, limit: Limit, measure: Measure) -> list[Tried]:
    """What was measured to find the most layers within the limit, from known costs of this width. Each miss is a point of
    the next line, so the guess falls until one keeps the limit."""
    tried: list[Tried] = []
    fits = max(n for n, cost in costs.items() if cost <= limit.value)
    while True:
        too_many = min((n for n, cost in costs.items() if n > fits), default=None)
        low = fits if too_many is not None else min(costs)
        ends = [(n, costs[n]) for n in (low, too_many or fits)]
        count = max(n for n in range(fits, too_many or of + 1) if n == fits or _line(ends, n) <= limit.value)
        if count == fits:
            return tried
        costs = costs | {count: measure([(count, shape)])[0]}
        tried.append(Tried(count, shape, costs[count], _line(ends, count)))
        if costs[count] <= limit.value:
            return tried


def _line(points: Sequence[tuple[int, float]], x: int) -> float:
    (x0, y0), (x1, y1) = points
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0) if x1 != x0 else math.inf  # one point says nothing of others


def _too_slow(tried: Sequence[Tried], limit: Limit, widths: int) -> InputError:
    best = min(tried, key=lambda t: t.cost)
    unit = " ms" if limit.unit == "ms" else " of the target's step"
    narrow = "" if widths > 1 else "; with answers=… narrower ones are tried too"
    return InputError(
        f"draft_step: {limit} is less than {best.layers} layers of hidden size {best.shape.hidden} take: "
        f"{best.cost:.4g}{unit}, much of it the vocabulary's head{narrow}"
    )


def fit_step(
    target: ModelSource, limit: Limit, timer: Timer, narrower: bool
) -> tuple[list[int], Width | None, dict[str, Any]]:
    """Evenly spaced layers, the width (None: the target's) and what was measured, for pair.json.

    `narrower`: whether widths below the target's may be taken. All run in the target's type, as vLLM serves a drafter,
    whatever type it is stored in. Raises InputError where nothing is fast enough, PartFailedError where nothing can be
    measured.
    """
    plan_init(target, [0])  # what no drafter can be cut from is said before an engine starts
    config = read_json(target.path / "config.json")
    of, old = int(config["num_hidden_layers"]), shape_of(config)
    shapes = list(shapes_below(old, config["architectures"][0])) if narrower else [old]

    def plan(count: int, shape: Shape) -> dict[str, Any]:
        layers = spaced(count, of) if of > 1 else [0]
        return plan_init(target, layers, None, None if shape == old else Width(shape))

    own = timer([config])[0]
    times: dict[tuple[int, Shape], tuple[StepTime, StepTime]] = {}  # the target's beside it, and its own

    def measure(wanted: Sequence[tuple[int, Shape]]) -> list[float]:
        first, *rest = timer([config, *(plan(*w)["config"] for w in wanted)])
        times.update((w, (first, time)) for w, time in zip(wanted, rest, strict=True))
        return [limit.of(time) for time in rest]

    sizes = [int(plan(min(FEW, of), shape)["parameters"]) for shape in shapes]
    chosen, tried = choose_steps(shapes, sizes, of, limit, limit.of(own), measure)
    beside, time = times[chosen.layers, chosen.shape]
    record = {
        "asked": limit.value,
        "unit": limit.unit,
        "engine": engine_name(),
        "predicted": chosen.predicted,
        "measured": chosen.cost,
        "share": list(time.share),
        "ms": list(time.ms),
        "target_ms": list(beside.ms),
        "tried": [{"layers": t.layers, **asdict(t.shape), "predicted": t.predicted, "measured": t.cost} for t in tried],
    }
    layers = spaced(chosen.layers, of) if of > 1 else [0]
    return layers, None if chosen.shape == old else Width(chosen.shape), record
