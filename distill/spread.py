"""How sure the target is of its own next token on recorded answers, and what that allows a drafter: E[max p], ceilings.

Shapes: N positions, H recorded ids of the target's head, P prompts, R bootstrap resamples.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distill.answers import Answers, supervised_index
from pairing.acceptance import replay
from pairing.bootstrap import interval
from pairing.errors import InputError

Floats = NDArray[np.float64]
LEAST_LOG_P = -80.0  # stands for anything less likely, so that no power of it overflows


def spread(
    answers: Answers, prompts: int, *, real: int, temperature: float | None, ks: Sequence[int]
) -> dict[str, Any]:
    """Of the first `prompts` rows; `temperature` None is the one at which the answers were drawn.

    {"prompts", "tokens", "temperature", "max_p_at_1": [mean, low, high], "max_p": [lower, upper bound], "max_p_interval",
    "argmax_share", "alpha_ceiling", "tau_ceiling": {K: τ}, "tau_ceiling_by"}. Intervals are of 95 %, over prompts. The
    ceilings are those of a perfect argmax drafter (vLLM's default); one that draws from its distribution can reach 1 and K + 1.
    Raises InputError where there is no answer token, or but one prompt.
    """
    H, drawn_at = int(answers.meta["top_logprobs"]), answers.temperature
    T = (drawn_at or 0.0) if temperature is None else temperature
    sums: list[list[float]] = []
    argmax: list[list[float]] = []  # of each answer: 1 where the token is the target's most likely one
    for row in answers.data.with_format("numpy").select(range(min(prompts, len(answers.data)))):
        if not len(row["tail_mass"]):
            continue
        head_NH = np.asarray(row["head_logprobs"], np.float64).reshape(-1, H)
        low_N, high_N = max_p(head_NH, np.asarray(row["tail_mass"], np.float64), real - H, T)
        said = np.asarray(row["input_ids"])[supervised_index(row["spans"])]
        same_N = said == np.asarray(row["head_ids"]).reshape(-1, H)[:, 0]
        argmax += [part.astype(float).tolist() for part in np.split(same_N, np.cumsum(np.diff(row["spans"])[::2])[:-1])]
        sums.append([float(x.sum()) for x in (np.exp(head_NH[:, 0]), low_N, high_N, same_N)] + [len(same_N)])
    if not sums:
        raise InputError(f"no answer token in the first {prompts} answers: generate them again")
    if len(sums) == 1:
        raise InputError("one prompt has an answer, and intervals are over prompts: generate answers to two or more")
    *parts, tokens_P = np.array(sums).T
    own, low, high, same = (_mean(part_P, tokens_P) for part_P in parts)
    if T == 0:
        tau, by = {K: K + 1.0 for K in ks}, "greedy sampling: every draft can be accepted"
    elif drawn_at == T:  # the answers are draws of this very law
        tau = {K: replay(argmax, K, past_end="alike").acceptance_length for K in ks}
        by = "replay of the target's own argmax"
    else:
        tau, by = {K: sum(high[0] ** i for i in range(K + 1)) for K in ks}, "α = E[max p] at every position"
    return {
        "prompts": len(tokens_P),
        "tokens": int(tokens_P.sum()),
        "temperature": T,
        "max_p_at_1": list(own),
        "max_p": [low[0], high[0]],
        "max_p_interval": [low[1], high[2]],
        "argmax_share": same[0],
        "alpha_ceiling": high[0],
        "tau_ceiling": {str(K): t for K, t in tau.items()},
        "tau_ceiling_by": by,
    }


def max_p(head_logp_NH: Floats, tail_N: Floats, outside: int, temperature: float) -> tuple[Floats, Floats]:
    """Lower and upper bound of the target's largest probability [N] at `temperature`: the α of a perfect argmax drafter.

    The head (most likely first) and the mass outside it are recorded at temperature 1. With β = 1/T, Σ p^β over the
    `outside` ids of the tail lies between m·(smallest of the head)^(β−1) and n·(m/n)^β, m their mass and n their number
    (each of them is at most the smallest of the head; power means). At T = 1 both are m, at T = 0 the largest is 1.
    """
    if temperature == 0:
        return np.ones(len(tail_N)), np.ones(len(tail_N))
    beta = 1 / temperature
    logp_NH = np.maximum(head_logp_NH, LEAST_LOG_P)
    largest_N, smallest_N = logp_NH[:, 0], logp_NH[:, -1]
    head_N = np.exp(beta * (logp_NH - largest_N[:, None])).sum(-1)  # all sums in units of the largest's p^β
    n = max(outside, 1)
    bounds_2N = np.stack(
        [
            tail_N * np.exp((beta - 1) * smallest_N - beta * largest_N),
            n * (tail_N / n) ** beta * np.exp(-beta * largest_N),
        ]
    )
    return 1 / (head_N + bounds_2N.max(0)), 1 / (head_N + bounds_2N.min(0))


def _mean(sums_P: Floats, tokens_P: Floats) -> tuple[float, float, float]:
    """Mean per token with its 95 % interval over prompts."""
    low, high = interval(lambda w_RP: (w_RP @ sums_P) / (w_RP @ tokens_P), len(tokens_P))
    return float(sums_P.sum() / tokens_P.sum()), low, high
