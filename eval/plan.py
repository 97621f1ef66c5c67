"""What a drafter would give, before one is trained: speed from step costs and an acceptance, and what acceptance it takes.

All costs are in the target's own steps at the same batch size, per K = num_speculative_tokens: v a verify step of K + 1 tokens,
c a draft step, o the rest of a round (negative where a pair saves what single models pay for). S = τ / (v + K·c + o), with
τ = (1 − α^{K+1}) / (1 − α) where every draft is accepted with the same chance α (Leviathan et al. 2022, arXiv 2211.17192).
A drafter that drafts in parallel takes one step for all K (PARD, arXiv 2504.18583): its rounds are measured whole.
Shapes: P prompts, R bootstrap resamples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pairing.acceptance import acceptance_length_of, replay, replay_rounds
from pairing.bootstrap import interval
from pairing.decode_time import StepTime, Timer
from pairing.serving_plan import Model

Floats = NDArray[np.float64]
ALPHAS = (0.6, 0.7, 0.8, 0.9)  # for which speeds are shown
GOALS = (1.2, 1.5)  # speedups for which the α that they take is shown


def acceptance_length(alpha: float, K: int) -> float:
    """τ = 1 + α + … + α^K, the bonus token included: what a round emits where every draft is accepted with chance α."""
    return float(sum(alpha**i for i in range(K + 1)))


def at(points: Mapping[int, float], K: int) -> float:
    """Linear between the measured K, flat beyond them; 0 where nothing was measured."""
    ks = sorted(points)
    return float(np.interp(K, ks, [points[k] for k in ks])) if ks else 0.0


def round_costs(
    ks: Sequence[int], verify: Mapping[int, float], draft: float, rest: Mapping[int, float]
) -> dict[int, float]:
    """K -> v + K·c + o, in target steps."""
    return {K: at(verify, K) + K * draft + at(rest, K) for K in ks}


def rest_of_round(rounds: Mapping[int, float], verify: Mapping[int, float], draft: float) -> dict[int, float]:
    """K -> o, from rounds measured whole with a drafter whose step alone takes `draft`."""
    return {K: cost - at(verify, K) - K * draft for K, cost in rounds.items()}


def best(tau: Mapping[int, float], cost: Mapping[int, float]) -> tuple[int, float]:
    """(K, S) of the largest S = τ / cost; the smaller K of equals."""
    speeds = {K: tau[K] / cost[K] for K in sorted(cost)}
    K = max(speeds, key=lambda k: speeds[k])
    return K, speeds[K]


def best_at(alpha: float, cost: Mapping[int, float]) -> tuple[int, float]:
    """(K, S) at a constant α."""
    return best({K: acceptance_length(alpha, K) for K in cost}, cost)


def needed(speedup: float, cost: Mapping[int, float]) -> tuple[int, float] | None:
    """(K, α) of the least α at which some K reaches `speedup`; None where not even α = 1 does. speedup = 1: the break-even.

    τ rises with α, so α is found by bisection on the best K's speed; K is the best one there.
    """
    if best_at(1.0, cost)[1] < speedup:
        return None
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (low, middle) if best_at(middle, cost)[1] >= speedup else (middle, high)
    return best_at(high, cost)[0], high


def recommend(costs: Sequence[Mapping[int, float]], alpha: float, worth: float) -> int:
    """Which of these drafters, smallest first, to train.

    At equal α the cheapest is the fastest, and a larger one accepts more, by how much no one knows before it is trained.
    So: the last that is as fast as the fastest at `alpha` with at most `worth` more α.
    """
    goal = max(best_at(alpha, cost)[1] for cost in costs)
    return max(i for i, cost in enumerate(costs) if best_at(min(alpha + worth, 1.0), cost)[1] >= goal)


def shape_figures(cost: Mapping[int, float]) -> dict[str, Any]:
    """{"break_even", "needed": {speedup: …}, "at": {α: …}}; {"K", "alpha"} or None, {"K", "S"}."""

    def of(speedup: float) -> dict[str, float] | None:
        found = needed(speedup, cost)
        return {"K": found[0], "alpha": found[1]} if found else None

    speeds = {str(alpha): best_at(alpha, cost) for alpha in ALPHAS}
    return {
        "round": {str(K): c for K, c in cost.items()},
        "break_even": of(1.0),
        "needed": {str(goal): of(goal) for goal in GOALS},
        "at": {alpha: {"K": K, "S": S} for alpha, (K, S) in speeds.items()},
    }


def request_speedup(
    prompt_P: Floats, tokens_P: Floats, rounds_P: Floats, *, own: float, pair: float, first: float, cost: float
) -> tuple[float, float, float]:
    """Speedup of whole requests, prompts included, with its 95 % interval over prompts: what `measure` measures.

    `own` and `pair` are the cost of a prompt's token in the target alone and in both; `first` of the drafts that follow the
    prompt; `cost` of a round. The first answer token comes with the prompt, so the target alone makes one step fewer
    than tokens, and `rounds_P` (of the replay) bring the rest.
    """
    alone_P = own * prompt_P + tokens_P - 1
    both_P = pair * prompt_P + first + cost * rounds_P
    low, high = interval(lambda w_RP: (w_RP @ alone_P) / (w_RP @ both_P), len(prompt_P))
    return float(alone_P.sum() / both_P.sum()), low, high


@dataclass(frozen=True)
class Drafter:
    """A candidate shape, or a trained drafter."""

    name: str
    model: Model
    parameters: int


@dataclass(frozen=True)
class Scored:
    """A trained drafter on the target's own answers."""

    w: Sequence[Sequence[float]]  # [P][tokens] chance that its draft there is accepted
    prompt_P: Floats  # tokens before each answer
    parallel: Sequence[NDArray[np.int8]] | None = (
        None  # [P][tokens, K] as `replay_rounds` takes it; None: it has no mask
    )

    @property
    def alpha(self) -> float:
        return sum(map(sum, self.w)) / sum(map(len, self.w))


@dataclass(frozen=True)
class Steps:
    """Measured side by side at one batch size."""

    batch: int
    target: StepTime
    drafts: list[StepTime]
    verify: dict[int, float]  # v at the measured K
    round: dict[int, float]  # of the target with the last drafter, at the measured K
    rest: dict[int, float]  # o, from it
    parallel: dict[int, float] = field(default_factory=dict)  # as `round`, all drafts from one pass


def measure(
    timer: Timer,
    target: Mapping[str, Any],
    drafters: Sequence[Drafter],
    ks: Sequence[int],
    batch: int,
    *,
    rounds: bool,
    one_pass: bool,
) -> Steps:
    """v at the smallest, middle and largest K; whole `rounds`, where the engine runs a pair, at the smallest and largest, and
    with `one_pass` also those whose drafts come from one pass (one draft is the same round both ways, and measured once)."""
    three, two = sorted({ks[0], ks[len(ks) // 2], ks[-1]}), sorted({ks[0], ks[-1]}) if rounds else []
    wide = [K for K in two if K > 1 and one_pass]
    models = [target, *(d.model.config for d in drafters)]
    own, *others = timer(models, verify=three, rounds=two, parallel=wide, batch=batch)
    drafts, others = others[: len(drafters)], others[len(drafters) :]
    shares = [time.share[0] for time in others]
    verify, whole = dict(zip(three, shares, strict=False)), dict(zip(two, shares[len(three) :], strict=False))
    parallel = {K: whole[K] for K in two if K == 1 and one_pass} | dict(
        zip(wide, shares[len(three) + len(two) :], strict=True)
    )
    return Steps(batch, own, drafts, verify, whole, rest_of_round(whole, verify, drafts[-1].share[0]), parallel)


def figures(
    steps: Steps, drafters: Sequence[Drafter], ks: Sequence[int], alpha: float, ceiling: Mapping[int, float]
) -> dict[str, Any]:
    """One batch size, JSON as it stands. `alpha` is what a drafter is taken to reach, `ceiling` the τ that none exceeds."""
    shapes = []
    for drafter, time in zip(drafters, steps.drafts, strict=True):
        cost = round_costs(ks, steps.verify, time.share[0], steps.rest)
        K, S = best_at(alpha, cost)
        row = {"name": drafter.name, "parameters": drafter.parameters, "ms": list(time.ms), "c": list(time.share)}
        shapes.append(row | shape_figures(cost) | {"assumed": {"alpha": alpha, "K": K, "S": S}})
    if steps.parallel:  # of the last shape, whose rounds they are
        cost = {K: at(steps.parallel, K) for K in ks}
        K, S = best_at(alpha, cost)
        shapes[-1]["parallel"] = shape_figures(cost) | {"assumed": {"alpha": alpha, "K": K, "S": S}}
    K, S = best(ceiling, round_costs(ks, steps.verify, 0.0, {}))
    points = {"verify": steps.verify, "pair_round": steps.round, "rest": steps.rest, "parallel_round": steps.parallel}
    return {
        "batch_size": steps.batch,
        "target_ms": list(steps.target.ms),
        **{name: {str(k): x for k, x in measured.items()} for name, measured in points.items()},
        "perfect_free": {"K": K, "S": S},
        "shapes": shapes,
    }


def foretell(steps: Steps, ks: Sequence[int], scored: Scored, *, parallel: bool = False) -> dict[str, Any] | None:
    """K -> τ by replay and speedups of decoding and of whole requests, for the trained drafter, which comes last in `steps`. τ
    and decoding are None where no answer is long enough for a round.

    `parallel`: with all drafts from one pass; None where the drafter has no mask or the engine ran no such round."""
    if parallel and not (scored.parallel and steps.parallel):
        return None
    target, draft = steps.target, steps.drafts[-1]
    cost = round_costs(ks, steps.verify, draft.share[0], steps.rest)
    if parallel:
        cost = {K: at(steps.parallel, K) for K in ks}
    # while a prompt is read the whole batch waits, so a request waits for as many prompts as there are requests
    own, more = (time.prompt_ms / time.prompt_tokens / target.ms[0] for time in (target, draft))
    tokens_P = np.array([len(w) for w in scored.w], float)
    told: dict[str, Any] = {}
    for K in ks:
        played = replay_rounds(scored.parallel, K) if parallel and scored.parallel else replay(scored.w, K)
        low, high = interval(lambda w_RP, played=played: acceptance_length_of(played, w_RP), len(tokens_P))  # type: ignore[misc]
        whole = request_speedup(
            scored.prompt_P, tokens_P, played.rounds_P,
            own=own, pair=own + more, first=0.0 if parallel else (K - 1) * draft.share[0], cost=cost[K],
        )  # fmt: skip
        tau = played.acceptance_length if played.rounds_P.any() else None
        told[str(K)] = {"tau": tau, "tau_interval": [low, high] if tau else None}
        told[str(K)] |= {"round": cost[K], "decode": tau / cost[K] if tau else None}
        told[str(K)] |= {"request": whole[0], "request_interval": [*whole[1:]]}
    return told


def length(tau: float | None) -> str:
    return "no answer long enough for a round" if tau is None else f"τ {tau:.2f}"


def verdict(result: Mapping[str, Any], least: float) -> tuple[bool, str]:
    """Go or no-go, and the numbers that explain it: a go where one batch size gains `least`, and memory holds both."""
    said, go = [], False
    for batch in result["batches"]:
        if batch["foretold"]:
            ways = [("one by one", batch["foretold"]), ("in one pass", batch["foretold_parallel"] or {})]
            K, way, told = max(
                ((K, way, told) for way, of_K in ways for K, told in of_K.items()),
                key=lambda found: found[2]["request"],
            )
            S = told["request"]
            why = f"drafts {way}, {length(told['tau'])} at K = {K}, a round of {told['round']:.2f} target steps"
        else:
            row = next(s for s in batch["shapes"] if s["name"] == result["recommended"])
            alpha, K, S = (row["assumed"][key] for key in ("alpha", "K", "S"))
            even = f"breaks even at α = {row['break_even']['alpha']:.2f}" if row["break_even"] else "never breaks even"
            why = f"{row['name']} at an assumed α of {alpha:.2f}, K = {K}, draft step {row['c'][0]:.2f}; {even}"
        enough = bool(least <= S)
        go = go or enough
        no = f", less than {least:g}x; a perfect free drafter: {batch['perfect_free']['S']:.2f}x"
        said.append(f"batch {batch['batch_size']}: {S:.2f}x ({why}){'' if enough else no}")
    if result["memory"] and not result["memory"]["fits"]:
        go = False
        said.append(f"memory: {result['memory']['says']}")
    return go, f"{'go' if go else 'no-go'}: {'; '.join(said)}"
