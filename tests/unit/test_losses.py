"""Losses by hand on three tokens, their direction, and the bucket's bound (fault D12)."""

from __future__ import annotations

import math

import pytest
import torch

from distill.losses import LOSSES, Signal, Student, cross_entropy, forward_kl

P, Q = torch.tensor([[0.7, 0.2, 0.1]]), torch.tensor([[0.5, 0.3, 0.2]])


def parts(p: torch.Tensor, q: torch.Tensor, k: int, answer: int = 0) -> tuple[Student, Signal]:
    """The dense distributions as the loss sees them: k largest of p, the rest as one mass."""
    ids = p.topk(k).indices
    head_p, head_q = p.gather(-1, ids), q.gather(-1, ids)
    answer_N = torch.full((len(p),), answer)
    tail_p, tail_q = (1 - head_p.sum(-1)).clamp(min=0), (1 - head_q.sum(-1)).clamp(min=1e-30)
    student = Student(q.log().gather(-1, answer_N[:, None]).squeeze(-1), head_q.log(), tail_q.log())
    return student, Signal(answer_N, ids, head_p.log(), tail_p)


def test_forward_kl_by_hand_with_a_bucket() -> None:
    """Head of one id; the other direction would be 0.5 ln(0.5/0.7) + 0.5 ln(0.5/0.3)."""
    expected = 0.7 * math.log(0.7 / 0.5) + 0.3 * math.log(0.3 / 0.5)
    assert forward_kl(*parts(P, Q, 1)).item() == pytest.approx(expected, rel=1e-5)
    assert abs(expected - (0.5 * math.log(0.5 / 0.7) + 0.5 * math.log(0.5 / 0.3))) > 1e-3


def test_forward_kl_with_the_whole_vocabulary_in_the_head() -> None:
    expected = 0.7 * math.log(0.7 / 0.5) + 0.2 * math.log(0.2 / 0.3) + 0.1 * math.log(0.1 / 0.2)
    student, signal = parts(P, Q, 3)
    assert signal.tail_N.item() == pytest.approx(0, abs=1e-6)
    assert forward_kl(student, signal).item() == pytest.approx(expected, abs=1e-5)


def test_no_renormalisation() -> None:
    """Where head and tail masses differ the loss is above 0, though the head's shape agrees exactly."""
    p, q = torch.tensor([[0.6, 0.3, 0.1]]), torch.tensor([[0.4, 0.2, 0.4]])
    expected = 0.9 * math.log(1.5) + 0.1 * math.log(0.1 / 0.4)
    assert forward_kl(*parts(p, q, 2)).item() == pytest.approx(expected, rel=1e-5)
    assert expected > 0.2


def test_bucket_never_exceeds_the_whole_kl_and_grows_with_the_head() -> None:
    torch.manual_seed(0)
    p, q = (2 * torch.randn(2, 300, 50, dtype=torch.float64)).softmax(-1)
    true = (p * (p / q).log()).sum(-1)
    last = torch.zeros(300, dtype=torch.float64)
    for k in (1, 4, 16, 50):
        kl = forward_kl(*parts(p, q, k))
        assert (kl <= true + 1e-9).all()
        assert (kl >= last - 1e-9).all()
        last = kl
    torch.testing.assert_close(last, true)
    torch.testing.assert_close(forward_kl(*parts(p, p, 4)), torch.zeros(300, dtype=torch.float64))


def test_cross_entropy_is_of_the_answer() -> None:
    assert cross_entropy(*parts(P, Q, 2, answer=2)).item() == pytest.approx(-math.log(0.2))


def test_each_position_has_its_own_value_whatever_the_vocabulary() -> None:
    """No reduction inside a loss: 5 positions give 5 values, and unused ids change none of them."""
    p, q = P.repeat(5, 1), Q.repeat(5, 1)
    wide_p, wide_q = (torch.cat([x, torch.full((5, 40), 1e-12)], -1) for x in (p, q))
    for loss in LOSSES.values():
        assert loss(*parts(p, q, 2)).shape == (5,)
        torch.testing.assert_close(loss(*parts(p, q, 2)), loss(*parts(wide_p, wide_q, 2)))


def test_the_recipe_offers_every_loss() -> None:
    from recipes.distill import LossWeights

    assert list(LossWeights.model_fields) == list(LOSSES)
