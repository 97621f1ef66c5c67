"""The chunked head against the whole matrix: values, both gradients, padding rows, nothing supervised."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from distill.head import Scores, head_loss, head_scores
from distill.losses import Signal
from pairing.acceptance import expected_acceptance, top1_agreement

N, H, V, REAL, K = 37, 24, 112, 100, 8
WEIGHTS = {"forward_kl": 1.0, "cross_entropy": 0.3}


def problem(seed: int = 0, scale: float = 1.0, n: int = N) -> tuple[torch.Tensor, torch.Tensor, Signal, torch.Tensor]:
    """Hidden states, head, sparse signal, and the dense target it was taken from (over the real ids)."""
    g = torch.Generator().manual_seed(seed)
    hidden, weight = scale * torch.randn(n, H, generator=g), torch.randn(V, H, generator=g)
    p = (2 * torch.randn(n, REAL, generator=g)).softmax(-1)
    head = p.topk(K)
    answer = torch.multinomial(p, 1, generator=g).squeeze(-1) if n else torch.zeros(0, dtype=torch.int64)
    signal = Signal(answer, head.indices, head.values.log(), 1 - head.values.sum(-1))
    return hidden.requires_grad_(), weight.requires_grad_(), signal, p


def whole(hidden: torch.Tensor, weight: torch.Tensor, signal: Signal, dtype: torch.dtype) -> torch.Tensor:
    """The reference: all logits at once, autograd through everything."""
    logq = (hidden.to(dtype) @ weight.to(dtype).T)[:, :REAL].log_softmax(-1)
    logq_head, logp = logq.gather(-1, signal.head_ids_NK), signal.head_logp_NK.to(dtype)
    outside = torch.ones_like(logq, dtype=torch.bool).scatter(-1, signal.head_ids_NK, False)
    logq_tail = logq.masked_fill(~outside, -torch.inf).logsumexp(-1)
    tail = signal.tail_N.to(dtype)
    kl = (logp.exp() * (logp - logq_head)).sum(-1) + torch.xlogy(tail, tail) - tail * logq_tail
    ce = -logq.gather(-1, signal.answer_N[:, None]).squeeze(-1)
    return (WEIGHTS["forward_kl"] * kl + WEIGHTS["cross_entropy"] * ce).sum()


@pytest.mark.parametrize("chunk", [1, 8, N, 1000])
@pytest.mark.parametrize("scale", [0.1, 1.0, 4.0])
def test_chunked_equals_whole(chunk: int, scale: float) -> None:
    """Value and gradients to float32's rounding, measured against float64; scale 4 makes peaked distributions."""
    hidden, weight, signal, _ = problem(scale=scale)
    reference = whole(hidden, weight, signal, torch.float64)
    true_hidden, true_weight = torch.autograd.grad(reference, [hidden, weight])
    loss, _ = head_loss(hidden, weight, signal, WEIGHTS, REAL, chunk)
    got_hidden, got_weight = torch.autograd.grad(loss, [hidden, weight])
    torch.testing.assert_close(loss.double(), reference, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(got_hidden, true_hidden, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(got_weight, true_weight, rtol=1e-4, atol=1e-5 * scale)


def test_gradient_by_finite_differences() -> None:
    """Independent of any autograd: the loss moves as its gradient says."""
    hidden, weight, signal, _ = problem(1)
    loss, _ = head_loss(hidden, weight, signal, WEIGHTS, REAL, 8)
    (grad,) = torch.autograd.grad(loss, [hidden])
    step = torch.randn(N, H, generator=torch.Generator().manual_seed(2)).double() * 1e-4
    moved = [whole(hidden.double() + s * step, weight, signal, torch.float64) for s in (1, -1)]
    assert (grad.double() * step).sum().item() == pytest.approx(((moved[0] - moved[1]) / 2).item(), rel=1e-4)


def test_tiny_tails_keep_their_gradient() -> None:
    """The drafter's tail at 1e-9 of its mass: 1 − Σ head in float32 would be 0 or noise, a sum over it is not."""
    _, _, signal, _ = problem(3)
    weight = torch.eye(V)[:, :REAL]  # hidden states are the logits
    hidden = torch.zeros(N, REAL).scatter(-1, signal.head_ids_NK, 22.0).requires_grad_()
    q = hidden.double().softmax(-1)
    assert (1 - q.gather(-1, signal.head_ids_NK).sum(-1)).max() < 1e-8
    reference = whole(hidden, weight, signal, torch.float64)
    (true,) = torch.autograd.grad(reference, [hidden])
    loss, _ = head_loss(hidden, weight, signal, WEIGHTS, REAL, 8)
    (got,) = torch.autograd.grad(loss, [hidden])
    assert torch.isfinite(got).all()
    torch.testing.assert_close(got, true, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("weights", [{"forward_kl": 1.0}, {"cross_entropy": 1.0}, {"forward_kl": 0.0}])
def test_parts_of_the_mixture(weights: dict[str, float]) -> None:
    hidden, weight, signal, _ = problem()
    loss, scores = head_loss(hidden, weight, signal, weights, REAL, 8)
    (grad,) = torch.autograd.grad(loss, [hidden])
    assert loss.item() == pytest.approx(sum(w * scores.losses[n].sum().item() for n, w in weights.items()), rel=1e-5)
    assert bool(grad.any()) == any(weights.values())


def test_gradient_of_the_head_only_where_it_learns() -> None:
    hidden, weight, signal, _ = problem()
    weight.requires_grad_(False)
    loss, _ = head_loss(hidden, weight, signal, WEIGHTS, REAL, 8)
    assert [t is None for t in loss.grad_fn.saved_tensors] == [False, True]  # type: ignore[union-attr]
    loss.backward()
    assert weight.grad is None
    assert hidden.grad is not None


class Largest(TorchDispatchMode):
    """Remembers the largest tensor that any operation made."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.numel = max([self.numel, *(t.numel() for t in tree_leaves(out) if isinstance(t, torch.Tensor))])
        return out


def test_no_matrix_of_positions_by_vocabulary_ever_exists() -> None:
    hidden, weight, signal, _ = problem(n=400)
    with Largest() as largest:
        loss, _ = head_loss(hidden, weight, signal, WEIGHTS, REAL, 8)
        loss.backward()
    assert largest.numel == 400 * H < 400 * V
    with Largest() as largest:
        head_scores(hidden, weight, signal, REAL, 8)
    assert largest.numel < 400 * K < 400 * V


def test_padding_rows_get_no_probability_and_no_gradient() -> None:
    """D1, D10: 112 rows of which 100 are real; the other twelve never win, whatever they hold."""
    hidden, weight, signal, _ = problem()
    with torch.no_grad():
        weight[REAL:] *= 100
    loss, scores = head_loss(hidden, weight, signal, WEIGHTS, REAL, 8)
    loss.backward()
    assert weight.grad is not None
    assert not weight.grad[REAL:].any()
    with torch.no_grad():
        weight[REAL:] = 0
    other, same = head_loss(hidden, weight, signal, WEIGHTS, REAL, 8)
    assert torch.equal(other, loss)
    assert torch.equal(same.accepted_N, scores.accepted_N)


def test_nothing_supervised_is_zero_and_finite() -> None:
    """D12: a batch in which no position counts."""
    hidden, weight, signal, _ = problem(n=0)
    loss, scores = head_loss(hidden, weight, signal, WEIGHTS, REAL, 8)
    loss.backward()
    assert loss.item() == 0
    assert scores.top1_N.sum() == 0
    assert hidden.grad is not None
    assert weight.grad is not None
    assert not weight.grad.any()


def test_scores_against_the_dense_reference() -> None:
    hidden, weight, signal, p = problem()
    with torch.no_grad():
        q = (hidden @ weight.T)[:, :REAL].softmax(-1)
    alpha = expected_acceptance(p, q)
    run: list[Callable[[], Scores]] = [
        lambda: head_scores(hidden, weight, signal, REAL, 8),
        lambda: head_loss(hidden, weight, signal, WEIGHTS, REAL, 8)[1],
    ]
    for scores in (f() for f in run):
        assert torch.equal(scores.top1_N, top1_agreement(p, q))
        assert torch.equal(scores.accepted_N, (q.argmax(-1) == signal.answer_N).float())
        assert (scores.alpha_low_N <= alpha + 1e-6).all()
        assert (alpha <= scores.alpha_high_N + 1e-6).all()


def test_bfloat16_hidden_states_are_scored_in_float32() -> None:
    hidden, weight, signal, _ = problem()
    half = hidden.detach().bfloat16().requires_grad_()
    loss, _ = head_loss(half, weight, signal, WEIGHTS, REAL, 8)
    loss.backward()
    assert loss.dtype == torch.float32
    assert half.grad is not None
    assert half.grad.dtype == torch.bfloat16
    assert loss.item() == pytest.approx(whole(half.detach().float(), weight, signal, torch.float64).item(), rel=1e-5)
