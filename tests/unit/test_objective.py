"""Weights over the run, refusals, and the choice made for those who name no loss."""

from __future__ import annotations

import pytest

from distill.losses import LOSSES, NEED_ALL
from distill.objective import auto, require_losses, weights_at, without_answers
from pairing.errors import InputError


def test_weights_run_between_their_points() -> None:
    losses = {"forward_kl": [(0.2, 1.0), (0.4, 0.0)], "lk_hybrid": [(0.2, 0.0), (0.4, 1.0)], "cross_entropy": 0.1}
    assert weights_at(losses, 0.0) == {"forward_kl": 1, "lk_hybrid": 0, "cross_entropy": 0.1}
    assert weights_at(losses, 0.3) == pytest.approx({"forward_kl": 0.5, "lk_hybrid": 0.5, "cross_entropy": 0.1})
    assert weights_at(losses, 0.4) == weights_at(losses, 1.0) == {"forward_kl": 0, "lk_hybrid": 1, "cross_entropy": 0.1}
    assert weights_at({"top1_ce": [(0.5, 2.0)]}, 0.1) == weights_at({"top1_ce": [(0.5, 2.0)]}, 0.9) == {"top1_ce": 2}


@pytest.mark.parametrize(
    ("losses", "said"),
    [
        ({"kl": 1.0}, "losses.kl: no such loss"),
        ({"forward_kl": -1.0}, "weight of 0 or more"),
        ({"forward_kl": float("inf")}, "weight of 0 or more"),
        ({"forward_kl": []}, "weight of 0 or more"),
        ({"forward_kl": [(0.0, 1.0), (1.5, 0.0)]}, "progress 0 to 1"),
        ({"forward_kl": [(0.3, 1.0), (0.3, 0.0)]}, "must rise"),
        ({"forward_kl": 0.0, "top1_ce": [(0.0, 0.0)]}, "nothing would be learnt"),
        ({"reverse_kl": 1.0}, "signal=online"),
        ({"jsd": [(0.0, 0.0), (1.0, 1.0)]}, "signal=online"),
    ],
)
def test_bad_losses_are_refused_in_one_line(losses: dict, said: str) -> None:  # type: ignore[type-arg]
    with pytest.raises(InputError, match=said) as e:
        require_losses(losses, whole=False)
    assert "\n" not in str(e.value)
    if said == "signal=online":
        require_losses(losses, whole=True)


def test_the_drafters_own_answers_weigh_nothing() -> None:
    assert without_answers({"cross_entropy": 0.1}) == {"cross_entropy": 0.0, "forward_kl": 0.1}
    assert without_answers({"forward_kl": 0.5, "cross_entropy": 0.5, "jsd": 2.0}) == {
        "forward_kl": 1.0, "cross_entropy": 0.0, "jsd": 2.0,
    }  # fmt: skip
    assert without_answers({"jsd": 1.0}) == {"jsd": 1.0}


def test_auto_looks_at_how_the_pair_is_served() -> None:
    found = {}
    for temperature, sampling in ((0.0, "greedy"), (0.7, "greedy"), (0.7, "probabilistic")):
        losses, why = auto(temperature, sampling)  # type: ignore[arg-type]
        require_losses(losses, whole=False)
        assert set(losses) <= set(LOSSES) - NEED_ALL
        found[why] = losses
        assert f"{temperature:g}" in why or temperature == 0
    assert len(found) == 3
    assert auto(0.0, "greedy") == auto(0.0, "probabilistic")
    # one draft, the drafter's argmax: accepted with p of it, and that is largest where it is p's own argmax
    for temperature in (0.0, 0.7, 1.0):
        losses, why = auto(temperature, "greedy")
        assert losses == {"forward_kl": 0.5, "top1_ce": 0.5}
        assert "cross-entropy on that token" in why
    assert auto(0.7, "probabilistic")[0] == {
        "forward_kl": [(0.0, 1.0), (0.3, 1.0), (0.4, 0.0)], "lk_hybrid": [(0.3, 0.0), (0.4, 1.0)],
    }  # fmt: skip
