"""Losses by hand on three tokens, their direction, the bucket's bound, draws without bias (faults D10, D12)."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

from distill.losses import LOSSES, NEED_ALL, Outcomes, cross_entropy, forward_kl, jsd, reverse_kl, top1_ce

P, Q = [0.7, 0.2, 0.1], [0.5, 0.3, 0.2]
LN = math.log
KL_PQ = 0.7 * LN(0.7 / 0.5) + 0.2 * LN(0.2 / 0.3) + 0.1 * LN(0.1 / 0.2)
KL_QP = 0.5 * LN(0.5 / 0.7) + 0.3 * LN(0.3 / 0.2) + 0.2 * LN(0.2 / 0.1)
M = [0.6, 0.25, 0.15]  # their mean
JSD = 0.5 * sum(p * LN(p / m) for p, m in zip(P, M, strict=True)) + 0.5 * sum(
    q * LN(q / m) for q, m in zip(Q, M, strict=True)
)
# β = 0.9: the mixture is nine tenths p; with the mixture reversed (fault D12) it would be nine tenths q
M9 = [0.68, 0.21, 0.11]
JSD9 = 0.9 * sum(p * LN(p / m) for p, m in zip(P, M9, strict=True)) + 0.1 * sum(
    q * LN(q / m) for q, m in zip(Q, M9, strict=True)
)


def dense(p_NV: torch.Tensor, q_NV: torch.Tensor, answer: int = 0) -> Outcomes:
    """All ids, as an online target gives them."""
    alpha = torch.minimum(p_NV, q_NV).sum(-1).detach()
    above = (q_NV * (p_NV > q_NV)).sum(-1).detach()
    top = q_NV.gather(-1, p_NV.argmax(-1, keepdim=True)).squeeze(-1).log()
    return Outcomes(p_NV.log(), q_NV.log(), p_NV, q_NV[:, answer].log(), top, alpha, above)


def bucketed(p_NV: torch.Tensor, q_NV: torch.Tensor, k: int) -> Outcomes:
    """The k most likely ids, and one outcome for the rest."""
    ids = p_NV.topk(k).indices
    parts = [
        torch.cat([x.gather(-1, ids), (1 - x.gather(-1, ids).sum(-1, keepdim=True)).clamp(min=1e-30)], 1)
        for x in (p_NV, q_NV)
    ]
    return dense(*parts)


def test_by_hand() -> None:
    """Values on p = (.7, .2, .1), q = (.5, .3, .2): Σ min = .8; only the first id has p > q, and q is .5 there, so σ = .5."""
    o = dense(torch.tensor([P]), torch.tensor([Q]), answer=2)
    share = math.exp(-3 * 0.8)
    expected = {
        "forward_kl": KL_PQ,
        "reverse_kl": KL_QP,
        "jsd": JSD,
        "total_variation": 0.2,
        "tvd_plus_plus": 0.2 / 0.5,
        "lk_hybrid": share * KL_PQ + (1 - share) * 0.2,
        "neg_log_alpha": -LN(0.8),
        "cross_entropy": -LN(0.2),
        "top1_ce": -LN(0.5),
    }
    assert list(expected) == list(LOSSES)
    for name, value in expected.items():
        assert LOSSES[name](o).item() == pytest.approx(value, rel=1e-5), name
    assert abs(KL_PQ - KL_QP) > 1e-3


@pytest.mark.parametrize(("beta", "value"), [(0.0, KL_PQ), (0.5, JSD), (1.0, KL_QP), (0.9, JSD9)])
def test_jsd_has_its_mixture_the_right_way_round(beta: float, value: float) -> None:
    assert jsd(dense(torch.tensor([P]), torch.tensor([Q])), beta).item() == pytest.approx(value, rel=1e-5)
    assert abs(jsd(dense(torch.tensor([Q]), torch.tensor([P])), 0.9).item() - JSD9) > 1e-4


def test_gradients_are_those_of_the_papers() -> None:
    """By log q at p, q above. TV: −q where p > q, then −q Σ; TVD++ the same over σ; −log α the same over α."""
    p = torch.tensor([P], dtype=torch.float64)

    def gradient(name: str) -> torch.Tensor:
        logits = torch.tensor([Q], dtype=torch.float64).log().requires_grad_()
        (g,) = torch.autograd.grad(LOSSES[name](dense(p, logits.softmax(-1))).sum(), [logits])
        return g

    # ∂(1 − Σ min)/∂logit: only ids 2 and 3 have q > p, so Σ min = q1 + .2 + .1 and its derivative is q1 (1[v = 1] − q_v)
    tv = -0.5 * (torch.tensor([[1.0, 0, 0]], dtype=torch.float64) - torch.tensor([Q], dtype=torch.float64))
    torch.testing.assert_close(gradient("total_variation"), tv)
    torch.testing.assert_close(gradient("tvd_plus_plus"), tv / 0.5)
    torch.testing.assert_close(gradient("neg_log_alpha"), tv / 0.8)
    kl = torch.tensor([Q], dtype=torch.float64) - p
    torch.testing.assert_close(gradient("forward_kl"), kl)
    share = math.exp(-3 * 0.8)
    torch.testing.assert_close(gradient("lk_hybrid"), share * kl + (1 - share) * tv)


def test_no_renormalisation() -> None:
    """Where head and tail masses differ the loss is above 0, though the head's shape agrees exactly."""
    o = bucketed(torch.tensor([[0.6, 0.3, 0.1]]), torch.tensor([[0.4, 0.2, 0.4]]), 2)
    expected = 0.9 * LN(1.5) + 0.1 * LN(0.1 / 0.4)
    assert forward_kl(o).item() == pytest.approx(expected, rel=1e-5)
    assert expected > 0.2


@pytest.mark.parametrize("name", ["forward_kl", "total_variation"])
def test_the_bucket_never_exceeds_the_whole_and_grows_with_the_head(name: str) -> None:
    torch.manual_seed(0)
    p, q = (2 * torch.randn(2, 300, 50, dtype=torch.float64)).softmax(-1)
    true, last = LOSSES[name](dense(p, q)), torch.zeros(300, dtype=torch.float64)
    for k in (1, 4, 16, 50):
        value = LOSSES[name](bucketed(p, q, k))
        assert (value <= true + 1e-9).all()
        assert (value >= last - 1e-9).all()
        last = value
    torch.testing.assert_close(last, true)


def test_equal_distributions_cost_nothing() -> None:
    torch.manual_seed(0)
    p = (2 * torch.randn(20, 50, dtype=torch.float64)).softmax(-1)
    for name, loss in LOSSES.items():
        if name not in ("cross_entropy", "top1_ce"):
            torch.testing.assert_close(loss(dense(p, p)), torch.zeros(20, dtype=torch.float64), msg=name)


def test_each_position_has_its_own_value_whatever_the_vocabulary() -> None:
    """No reduction inside a loss: 5 positions give 5 values, and ids that nobody uses change none of them (D12)."""
    p, q = torch.tensor([P]).repeat(5, 1), torch.tensor([Q]).repeat(5, 1)
    wide_p, wide_q = (torch.cat([x, torch.full((5, 40), 1e-12)], -1) for x in (p, q))
    for name, loss in LOSSES.items():
        assert loss(dense(p, q)).shape == (5,)
        torch.testing.assert_close(loss(dense(p, q)), loss(dense(wide_p, wide_q)), msg=name)


@pytest.mark.parametrize("name", [n for n in LOSSES if n not in ("cross_entropy", "top1_ce")])
def test_vanishing_probabilities_give_finite_values_and_gradients(name: str) -> None:
    for p, q in (([1.0, 0.0, 0.0], Q), (P, [1e-38, 1e-38, 1.0]), ([1.0, 0.0, 0.0], [1e-38, 1.0, 1e-38])):
        logp = torch.tensor([p]).log().clamp(min=-1e4)
        logq = torch.tensor([q]).log().requires_grad_()
        o = Outcomes(logp, logq, logp.exp(), logq[:, 0], logq[:, 0], torch.tensor([0.1]), torch.tensor([0.0]))
        value = LOSSES[name](o)
        (g,) = torch.autograd.grad(value.sum(), [logq])
        assert torch.isfinite(value).all()
        assert torch.isfinite(g).all()


def test_a_loss_is_a_constant_plus_a_sum_over_outcomes() -> None:
    """What the head's blocks rest on: a loss on two halves, less the loss on nothing, is the loss on the whole."""
    torch.manual_seed(1)
    p, q = (2 * torch.randn(2, 9, 50, dtype=torch.float64)).softmax(-1)
    o = dense(p, q)

    def part(s: slice) -> Outcomes:
        return Outcomes(o.logp_NX[:, s], o.logq_NX[:, s], o.mass_NX[:, s], o.answer_N, o.top_N, o.alpha_N, o.above_N)

    for name, loss in (LOSSES | {"jsd at 0.1": partial(jsd, beta=0.1)}).items():
        halves = loss(part(slice(0, 20))) + loss(part(slice(20, 50))) - loss(part(slice(0, 0)))
        torch.testing.assert_close(halves, loss(o), msg=name)


def test_kl_of_draws_has_the_right_mean() -> None:
    """Σ over every possible draw from the tail, each by its chance, is the whole KL: exactly, no sampling in the test."""
    torch.manual_seed(2)
    p, q = (2 * torch.randn(2, 1, 12, dtype=torch.float64)).softmax(-1)
    ids = p.topk(4).indices[0].tolist()
    rest = [v for v in range(12) if v not in ids]
    tail = p[0, rest].sum()
    mean = torch.zeros(1, dtype=torch.float64)
    for v in rest:
        mass = torch.cat([p[:, ids], tail.reshape(1, 1)], 1)
        o = Outcomes(
            p[:, [*ids, v]].log(), q[:, [*ids, v]].log(), mass, q[:, 0].log(), q[:, 0].log(), tail[None], tail[None]
        )
        mean += p[0, v] / tail * forward_kl(o)
    torch.testing.assert_close(mean, forward_kl(dense(p, q)))


def test_what_draws_and_buckets_cannot_tell_is_named() -> None:
    assert {name for name in LOSSES if LOSSES[name] in (reverse_kl, jsd)} == NEED_ALL
    assert LOSSES["cross_entropy"] is cross_entropy
    assert LOSSES["top1_ce"] is top1_ce
