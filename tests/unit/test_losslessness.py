"""The check that sampled output is the target's own: false alarms at the stated rate, and power against known faults.

Synthetic target and drafter: a distribution for every prefix, drawn from a hash of it, so that prefixes repeat and diverge as
in a language model. Speculative decoding is done here by the book (Leviathan et al. 2022) and with faults put in.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

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
    return int(np.searchsorted(rest.cumsum(), chance.random() * rest.sum(), side="right"))


def check(sample: Sampler, temperature: float, seed: int, prompts: int = losslessness.PROMPTS) -> dict[str, Any]:
    """A whole check of an engine that samples so."""
    chance = np.random.default_rng(seed)
    draws, heads = [], []
    for i in range(losslessness.DRAWS):
        prompt = (1000 * seed + i % prompts,)
        out: list[int] = []
        here: list[dict[int, float]] = []
        for at in range(losslessness.LENGTH):
            prefix = (*prompt, *out)
            p = probs(prefix, "target", temperature)
            if at:
                raw = probs(prefix, "target", 1.0)
                here.append({int(t): float(np.log(raw[t])) for t in np.argsort(-raw)[: losslessness.HEADS]})
                out.append(sample(p, probs(prefix, "draft", temperature), chance))
            else:
                out.append(lossless(p, p, chance))  # of the prefill
        draws.append(Draw(list(prompt), out))
        heads.append(here)
    return losslessness.judge(draws, heads, temperature, 1)


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
def test_a_sound_engine_raises_the_stated_alarms_only(temperature: float) -> None:
    """At most a fifth of sound checks may have p < 0.2; of 25, more than 12 come by chance once in 2,500. And ranks are uniform,
    so that this is not bought with blindness: their mean has a standard error of 0.058."""
    found = [check(lossless, temperature, seed) for seed in range(25)]
    assert sum(f["p"] < 0.2 for f in found) <= 12
    assert all(f["passed"] for f in found)
    assert 0.3 < np.mean([f["statistics"]["rank"] for f in found]) < 0.7
    assert found[0]["tokens"] == 528
    assert all(f["tail"][1] <= f["tail"][0] + 0.05 for f in found)  # a bound indeed


def shifted(by: float) -> Sampler:
    """Moves that much of the mass onto the likeliest token: a fault of that total variation, or what is left to move."""

    def sample(p: np.ndarray, q: np.ndarray, chance: np.random.Generator) -> int:
        return int(p.argmax()) if chance.random() < by / (1 - p.max()) else lossless(p, q, chance)

    return sample


def softer(p: np.ndarray, q: np.ndarray, chance: np.random.Generator) -> int:
    """The temperature ignored: 1 instead of 0.6."""
    r = p**0.6 / (p**0.6).sum()
    return lossless(r, r, chance)


FAULTS: dict[str, tuple[float, Sampler]] = {
    "greedy": (1.0, lambda p, q, chance: int(p.argmax())),
    "temperature 1 instead of 0.6": (0.6, softer),
    "argmax drafts always accepted": (0.6, lambda p, q, chance: int(q.argmax())),
    "the recovered token is drawn as if nothing had been rejected": (
        1.0,
        lambda p, q, chance: int(q.argmax()) if chance.random() < p[q.argmax()] else lossless(p, p, chance),
    ),
    "noise": (1.3, lambda p, q, chance: int(chance.integers(V))),
    "a total variation of 0.15": (1.0, shifted(0.15)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_caught(fault: str) -> None:
    temperature, sample = FAULTS[fault]
    found = [check(sample, temperature, seed) for seed in range(4)]
    assert not any(f["passed"] for f in found)
    assert found[0]["reason"].startswith(f"not lossless at temperature {temperature:g}: of 528 tokens ")


def test_too_few_tokens_are_no_pass() -> None:
    found = losslessness.judge([Draw([1], [2, 3])] * 48, [[{3: -0.01, 4: -5.0}]] * 48, 1.0, 1)
    assert not found["passed"]
    assert "could not be judged: 48 tokens" in found["reason"]


@given(st.floats(0.3, 3.0), st.integers(0, 2**32 - 1))
def test_the_mass_outside_the_head_is_bounded_from_above(temperature: float, seed: int) -> None:
    chance = np.random.default_rng(seed)
    x = chance.standard_normal(500) * chance.uniform(0.1, 5)
    log_p = x - np.log(np.exp(x).sum())
    order = np.argsort(-log_p)
    ids, mass, outside = losslessness.tempered(
        {int(t): float(log_p[t]) for t in order[: losslessness.HEADS]}, temperature
    )
    p = np.exp(log_p / temperature) / np.exp(log_p / temperature).sum()
    assert ids == order[: losslessness.HEADS].tolist()
    np.testing.assert_allclose(mass, p[ids] / p[ids].sum(), rtol=1e-9)
    assert outside >= 1 - p[ids].sum() - 1e-12
    if temperature == 1:
        assert outside == pytest.approx(1 - p[ids].sum(), abs=1e-4)
