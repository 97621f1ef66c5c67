"""The check that sampled output is the target's own: false alarms at the stated rate, and power against known faults.

Synthetic target and drafter: a distribution for every prefix, drawn from a hash of it, so that prefixes repeat and diverge as
in a language model. Speculative decoding is done here by the book (Leviathan et al. 2022) and with faults put in.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from functools import cache

import numpy as np
import pytest

from eval import losslessness
from eval.losslessness import Draw

V = 60
Sampler = Callable[[np.ndarray, np.ndarray, np.random.Generator], int]  # (p, q, chance) -> token


@cache
def logits(prefix: tuple[int, ...], who: str) -> np.ndarray:
    """Peaked as a language model's: the likeliest token has about half of the mass. The drafter is the target, blurred."""
    chance = np.random.default_rng(zlib.crc32(repr((prefix, "target")).encode()))
    own = chance.standard_normal(V) * chance.uniform(1.0, 4.0)
    if who == "draft":
        own = own + 0.7 * np.random.default_rng(zlib.crc32(repr((prefix, who)).encode())).standard_normal(V)
    return own


def probs(prefix: tuple[int, ...], who: str, temperature: float) -> np.ndarray:
    x = logits(prefix, who) / temperature
    p = np.exp(x - x.max())
    return np.asarray(p / p.sum())


def lossless(p: np.ndarray, q: np.ndarray, chance: np.random.Generator) -> int:
    """Argmax drafting: the draft is accepted with its own mass, else the token comes of the rest."""
    drafted = int(q.argmax())
    if chance.random() < p[drafted]:
        return drafted
    rest = p.copy()
    rest[drafted] = 0
    return int(chance.choice(V, p=rest / rest.sum()))


def check(sample: Sampler, temperature: float, seed: int, prompts: int = losslessness.PROMPTS) -> dict[str, object]:
    """A whole check of an engine that samples so."""
    chance = np.random.default_rng(seed)
    draws, heads = [], []
    for i in range(losslessness.DRAWS):
        prompt, out, here = (1000 * seed + i % prompts,), [], []
        for at in range(losslessness.LENGTH):
            prefix = (*prompt, *out)
            p = probs(prefix, "target", temperature)
            if at:
                raw = probs(prefix, "target", 1.0)
                here.append({int(t): float(np.log(raw[t])) for t in np.argsort(-raw)[: losslessness.HEADS]})
                out.append(sample(p, probs(prefix, "draft", temperature), chance))
            else:
                out.append(int(chance.choice(V, p=p)))  # of the prefill
        draws.append(Draw(list(prompt), out))
        heads.append(here)
    return losslessness.judge(draws, heads, temperature, 1)


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
def test_a_sound_engine_raises_the_stated_alarms_only(temperature: float) -> None:
    """At the 20 % level each test may alarm in a fifteenth of runs; 150 runs give at most 40 (one in 50, all three at most)."""
    found = [check(lossless, temperature, seed) for seed in range(150)]
    assert sum(f["p"] < 0.2 for f in found) <= 40
    assert sum(not f["passed"] for f in found) <= 5
    ranks = [f["statistics"]["rank"] for f in found]
    assert 0.4 < np.mean(ranks) < 0.6
