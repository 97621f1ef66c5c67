"""Whether an engine with a drafter emits the target's own distribution at temperature > 0: draws, judged token by token.

The server with the drafter continues a few prompts many times, each draw with a seed of its own. The target alone then reads
these continuations and gives, at every position, its HEADS likeliest tokens with exact log-probs *after the prefix that was
emitted* (prompt_logprobs: from the prefill, where nothing is speculated). So nothing of the target is sampled, and the null is
exact: whatever came before, a token is drawn from the target's distribution there. Judged from the second token on: the
first one comes of the prefill. Draws are long enough for recovered and bonus tokens to be among them.

Four tests, each at a quarter of the level:
- rank: u = P(a likelier token) + U·P(this token), within the head, is uniform whatever the prefixes were (Rosenblatt 1952).
  Neyman's smooth test of that, with four Legendre polynomials: a χ² of 4 degrees. Sees a wrong temperature, flat noise.
- top1: a bettor with an equal stake on each of ODDS gives the likeliest token that many times its mass (within the head). His
  gain is a martingale of mean 1, so P(gain ≥ x) ≤ 1/x (Ville). Sees greedy output, and drafts accepted too often.
- repeats: draws of one prompt that have come the same way so far. A bettor expects the tokens that earlier draws took there
  (Dirichlet, WEIGHT times the target's distribution as prior). Sees a token that is forced where the target leaves a choice,
  though ranks come out right on average.
- tail: a bettor who gives the tokens outside the head twice their mass. Sees garbage, and at any temperature: the mass is
  exact at temperature 1, else bounded from above (Hölder), which errs towards no alarm.

False alarms: FALSE_ALARM over all checks of a run together (Bonferroni): one sound run in a hundred voids some cell by chance.

Power, with the 528 tokens of a usual check in a run of one (simulated, as in tests/unit/test_losslessness.py): a fault that moves
a tenth of the mass onto the likeliest token at every position (total variation 0.1) is caught 9 times in 10, one of 0.15 always,
one of 0.05 once in 15. Greedy output, temperature 1 for 0.6, argmax drafts always accepted, recovered tokens drawn as if
nothing had been rejected, and noise: always (30 of 30).
What it cannot see: drafts that are *sampled* and always accepted, from a drafter whose ranks come out as often as the target's
(total variation 0.2: 1 in 10); faults that only long contexts, other prompts or other batch sizes than the draws' bring about; a
target that is itself served wrong (exact match at temperature 0 looks at that); seeds that repeat each other across requests.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, log
from typing import Any

import numpy as np
from numpy.polynomial import legendre

from eval import client

PROMPTS = 4
DRAWS = 48  # of all prompts together
LENGTH = 12  # tokens of a draw; more for a large K, so that rounds end within it
HEADS = 20  # what a vLLM server gives unless told otherwise (--max-logprobs)
LEAST = 100  # tokens: with fewer a pass would say nothing
FALSE_ALARM = 0.01  # of a whole run
ODDS = np.array([1 / 3, 1 / 2, 2 / 3, 3 / 2, 2.0, 3.0])
WEIGHT = 4.0  # of the target's distribution in the bettor's prior, in draws
LARGEST_VOCABULARY = 2**18  # for the bound on the tail above temperature 1


@dataclass(frozen=True)
class Draw:
    prompt_ids: list[int]
    output_ids: list[int]


Head = Mapping[int, float]  # the likeliest tokens of a position: id -> log p at temperature 1


def draw(
    url: str,
    model: str,
    prompts: Sequence[Sequence[int]],
    temperature: float,
    max_tokens: int,
    seed: str,
    timeout_s: float,
    in_flight: int,
) -> list[Draw]:
    """DRAWS continuations of `prompts` in turn, as the measured requests are sent but each with another seed."""
    asked = [list(prompts[i % len(prompts)]) for i in range(DRAWS)]
    chance = random.Random(seed)
    seeds = [chance.randrange(2**31) for _ in asked]
    sampling = {"temperature": temperature, "max_tokens": max_tokens, "ignore_eos": False}
    answers = client.complete(url, model, asked, sampling, timeout_s, in_flight, seeds=seeds)
    return [Draw(p, a.output_ids) for p, a in zip(asked, answers, strict=True)]


def score(
    url: str, model: str, draws: Sequence[Draw], timeout_s: float, in_flight: int
) -> list[list[dict[int, float]]]:
    """The head of each output position of each draw from the second on, by the target alone."""
    whole = [[*d.prompt_ids, *d.output_ids] for d in draws]
    found = client.prompt_log_probs(url, model, whole, HEADS, timeout_s, in_flight)
    return [heads[len(d.prompt_ids) + 1 :] for d, heads in zip(draws, found, strict=True)]


def length_for(num_speculative_tokens: int) -> int:
    return max(LENGTH, num_speculative_tokens + 4)


def judge(draws: Sequence[Draw], heads: Sequence[Sequence[Head]], temperature: float, checks: int) -> dict[str, Any]:
    """Compares draws with the target's heads of `score`; `checks` is how many the run makes in all.

    {"passed", "p", "limit", "tokens", "draws", "statistics": {test: its p}, "top1": [expected, seen share of the target's
    likeliest token], "tail": [expected at most, seen share of tokens outside the head], "reason": None where passed}.
    """
    # u is drawn within the token's own mass: by the draws, so that judging again gives the same and no two checks share chance
    chance = np.random.default_rng([t for d in draws for t in d.output_ids])
    places: list[float] = []
    repeats = outside = 0.0  # log gains of the bettors
    likeliest = np.zeros(len(ODDS))
    taken: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
    top1, tail = np.zeros(2), np.zeros(2)
    tokens = 0
    for one, positions in zip(draws, heads, strict=True):
        for at, head in enumerate(positions, start=1):
            token, tokens = one.output_ids[at], tokens + 1
            ids, mass, rest = tempered(head, temperature)
            missed = token not in head
            outside += log(2.0) * missed - log(1 + rest)
            tail += rest, missed
            top1 += mass[0] * (1 - rest), token == ids[0]
            if missed:
                continue
            likeliest += np.log(ODDS) * (token == ids[0]) - np.log1p(mass[0] * (ODDS - 1))
            where = ids.index(token)
            places.append(float(mass[:where].sum() + chance.random() * mass[where]))
            before = taken[*one.prompt_ids, -1, *one.output_ids[:at]]
            repeats += log((WEIGHT * mass[where] + before[token]) / (WEIGHT + before.total()) / mass[where])
            before[token] += 1
    statistics = {
        "rank": smooth_p(np.array(places)),
        "top1": exp(-max(0.0, float(np.logaddexp.reduce(likeliest)) - log(len(ODDS)))),
        "repeats": exp(-max(0.0, repeats)),
        "tail": exp(-max(0.0, outside)),
    }
    p = min(1.0, len(statistics) * min(statistics.values()))
    limit = FALSE_ALARM / checks
    found: dict[str, Any] = {
        "passed": p >= limit and tokens >= LEAST, "p": p, "limit": limit, "tokens": tokens, "draws": len(draws),
        "temperature": temperature, "statistics": statistics, "top1": (top1 / max(1, tokens)).tolist(),
        "tail": (tail / max(1, tokens)).tolist(),
    }  # fmt: skip
    return found | {"reason": None if found["passed"] else _reason(found)}


def tempered(head: Head, temperature: float) -> tuple[list[int], np.ndarray, float]:
    """Ids by falling likelihood, their masses *within the head* at `temperature`, and an upper bound on the mass outside.

    With s = 1/T and m outside at temperature 1, the sum of p^s outside is at most m^s·V^(1−s) for s < 1 (Hölder), and m·h^(s−1)
    for s ≥ 1, h being the head's least p.
    """
    ids = sorted(head, key=lambda i: -head[i])
    log_p = np.array([head[i] for i in ids])
    s = 1 / temperature
    missing = max(1e-4, 1 - float(np.exp(log_p).sum()))  # floored: the log-probs are rounded
    outside = (
        s * log(missing) + (1 - s) * log(LARGEST_VOCABULARY) if s < 1 else log(missing) + (s - 1) * float(log_p[-1])
    )
    mass = np.exp(s * (log_p - log_p[0]))
    bound = exp(min(50.0, outside - s * float(log_p[0])))
    return ids, mass / mass.sum(), bound / (bound + float(mass.sum()))


def smooth_p(u: np.ndarray) -> float:
    """Neyman's smooth test that `u` is uniform on (0, 1), of order 4 (χ² of 4 degrees, its tail in closed form)."""
    if not len(u):
        return 1.0
    components = [
        np.sqrt(2 * k + 1) * legendre.Legendre.basis(k)(2 * u - 1).sum() / np.sqrt(len(u)) for k in (1, 2, 3, 4)
    ]
    x = float(np.square(components).sum())
    return exp(-x / 2) * (1 + x / 2)


def _reason(found: Mapping[str, Any]) -> str:
    if found["tokens"] < LEAST:
        return (
            f"losslessness at temperature {found['temperature']:g} could not be judged: {found['tokens']} tokens were drawn "
            f"after the first of each answer, {LEAST} are needed: give the workload more max_tokens or longer answers"
        )
    (expected, seen), (most, out) = found["top1"], found["tail"]
    return (
        f"not lossless at temperature {found['temperature']:g}: of {found['tokens']} tokens {seen:.0%} were the target's "
        f"likeliest (its own distribution: {expected:.0%}) and {out:.0%} none of its {HEADS} likeliest (at most {most:.0%}); "
        f"p = {found['p']:.1g}, limit {found['limit']:.1g}"
    )
