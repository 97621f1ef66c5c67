"""The chunked head against the whole matrix: values, both gradients, padding rows, nothing supervised."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from distill import head_pieces
from distill.head import Head, Scores, head_loss, head_scores, positions_at_once
from distill.losses import LOSSES, NEED_ALL, FullSignal, Outcomes, Signal
from pairing.acceptance import expected_acceptance, top1_agreement

N, H, V, REAL, K = 37, 24, 112, 100, 8
WEIGHTS = {"forward_kl": 1.0, "cross_entropy": 0.3}


@pytest.fixture(autouse=True, params=[1024, 9], ids=["one piece", "pieces of 9"])
def piece(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it holds whether a chunk's logits are one piece, or several that are kept."""
    monkeypatch.setattr(head_pieces, "PIECE", 1)
    monkeypatch.setattr(head_pieces, "LEAST_COLUMNS", request.param)


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
    loss, _ = head_loss(hidden, weight, signal, WEIGHTS, Head(REAL, chunk))
    got_hidden, got_weight = torch.autograd.grad(loss, [hidden, weight])
    torch.testing.assert_close(loss.double(), reference, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(got_hidden, true_hidden, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(got_weight, true_weight, rtol=1e-4, atol=1e-5 * scale)


def test_gradient_by_finite_differences() -> None:
    """Independent of any autograd: the loss moves as its gradient says."""
    hidden, weight, signal, _ = problem(1)
    loss, _ = head_loss(hidden, weight, signal, WEIGHTS, Head(REAL, 8))
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
    loss, _ = head_loss(hidden, weight, signal, WEIGHTS, Head(REAL, 8))
    (got,) = torch.autograd.grad(loss, [hidden])
    assert torch.isfinite(got).all()
    torch.testing.assert_close(got, true, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("weights", [{"forward_kl": 1.0}, {"cross_entropy": 1.0}, {"forward_kl": 0.0}])
def test_parts_of_the_mixture(weights: dict[str, float]) -> None:
    hidden, weight, signal, _ = problem()
    loss, scores = head_loss(hidden, weight, signal, weights, Head(REAL, 8))
    (grad,) = torch.autograd.grad(loss, [hidden])
    assert loss.item() == pytest.approx(sum(w * scores.losses[n].sum().item() for n, w in weights.items()), rel=1e-5)
    assert bool(grad.any()) == any(weights.values())


def test_gradient_of_the_head_only_where_it_learns() -> None:
    hidden, weight, signal, _ = problem()
    weight.requires_grad_(False)
    loss, _ = head_loss(hidden, weight, signal, WEIGHTS, Head(REAL, 8))
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
        loss, _ = head_loss(hidden, weight, signal, WEIGHTS, Head(REAL, 8))
        loss.backward()
    assert largest.numel == 400 * H < 400 * V
    with Largest() as largest:
        head_scores(hidden, weight, signal, Head(REAL, 8))
    assert largest.numel < 400 * K < 400 * V


def test_padding_rows_get_no_probability_and_no_gradient() -> None:
    """D1, D10: 112 rows of which 100 are real; the other twelve never win, whatever they hold."""
    hidden, weight, signal, _ = problem()
    with torch.no_grad():
        weight[REAL:] *= 100
    loss, scores = head_loss(hidden, weight, signal, WEIGHTS, Head(REAL, 8))
    loss.backward()
    assert weight.grad is not None
    assert not weight.grad[REAL:].any()
    with torch.no_grad():
        weight[REAL:] = 0
    other, same = head_loss(hidden, weight, signal, WEIGHTS, Head(REAL, 8))
    assert torch.equal(other, loss)
    assert torch.equal(same.accepted_N, scores.accepted_N)


def test_nothing_supervised_is_zero_and_finite() -> None:
    """D12: a batch in which no position counts."""
    hidden, weight, signal, _ = problem(n=0)
    loss, scores = head_loss(hidden, weight, signal, WEIGHTS, Head(REAL, 8))
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
        lambda: head_scores(hidden, weight, signal, Head(REAL, 8)),
        lambda: head_loss(hidden, weight, signal, WEIGHTS, Head(REAL, 8))[1],
    ]
    for scores in (f() for f in run):
        assert torch.equal(scores.top1_N, top1_agreement(p, q))
        assert torch.equal(scores.accepted_N, (q.argmax(-1) == signal.answer_N).float())
        assert (scores.alpha_low_N <= alpha + 1e-6).all()
        assert (alpha <= scores.alpha_high_N + 1e-6).all()


# ---------------------------------------------------------------- every loss, the whole distribution, blocks of the vocabulary


def full(n: int = N, temperature: float = 1.0, dtype: torch.dtype = torch.float32) -> FullSignal:
    """A target of another hidden size, and answers that it may have written."""
    g = torch.Generator().manual_seed(7)
    hidden, weight = torch.randn(n, 17, generator=g).to(dtype), torch.randn(V, 17, generator=g).to(dtype)
    return FullSignal(torch.randint(0, REAL, (n,), generator=g), hidden, weight, temperature)


def dense_outcomes(hidden: torch.Tensor, weight: torch.Tensor, signal: FullSignal) -> Outcomes:
    """The reference: all at once, in float64."""
    T = signal.temperature
    logp = (signal.hidden_NH.double() @ signal.weight_VH.double().T / T)[:, :REAL].log_softmax(-1)
    logq = (hidden.double() @ weight.double().T / T)[:, :REAL].log_softmax(-1)
    p, q = logp.exp(), logq.exp()
    alpha, above = torch.minimum(p, q).sum(-1).detach(), (q * (p > q)).sum(-1).detach()
    at = logq.gather(-1, torch.stack([signal.answer_N, p.argmax(-1)], 1))
    return Outcomes(logp, logq, p, at[:, 0], at[:, 1], alpha, above)


@pytest.mark.parametrize("name", list(LOSSES))
@pytest.mark.parametrize(("chunk", "block"), [(8, 1000), (N, 32), (5, 7)])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_every_loss_on_the_whole_distribution(name: str, chunk: int, block: int, temperature: float) -> None:
    hidden, weight, _, _ = problem()
    signal, factor = full(temperature=temperature), torch.linspace(0.1, 2, N)
    reference = (factor * LOSSES[name](dense_outcomes(hidden, weight, signal))).sum()
    true = torch.autograd.grad(reference, [hidden, weight])
    head = Head(REAL, chunk, block, {name: LOSSES[name]})
    loss, scores = head_loss(hidden, weight, signal, {name: 1.0}, head, lambda w, a, i: factor[i : len(w)])
    assert loss.item() == pytest.approx(reference.item(), rel=1e-5)
    for got, expected in zip(torch.autograd.grad(loss, [hidden, weight]), true, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=2e-5 * float(expected.abs().max()))
    o = dense_outcomes(hidden, weight, signal)
    torch.testing.assert_close(scores.alpha_N.double(), o.alpha_N, rtol=1e-5, atol=1e-6)
    p, q = o.logp_NX.exp(), o.logq_NX.exp()
    assert torch.equal(scores.top1_N, (p.argmax(-1) == q.argmax(-1)).float())
    assert torch.equal(scores.accepted_N, (q.argmax(-1) == signal.answer_N).float())
    ratio = (q / p).gather(-1, signal.answer_N[:, None]).squeeze(-1).clamp(max=1)
    torch.testing.assert_close(scores.ratio_N.double(), ratio, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("block", [7, 50, 112])
@pytest.mark.parametrize("draws", [0, 3])
def test_blocks_of_the_vocabulary_change_nothing_from_the_cache(block: int, draws: int) -> None:
    hidden, weight, signal, p = problem()
    signal = with_draws(signal, p, draws) if draws else signal
    weights = {name: 0.5 for name in LOSSES if name not in NEED_ALL}
    losses = {name: LOSSES[name] for name in weights}
    one, apart = (head_loss(hidden, weight, signal, weights, Head(REAL, 8, b, losses)) for b in (1000, block))
    torch.testing.assert_close(apart[0], one[0])
    for a, b in zip(*(torch.autograd.grad(x[0], [hidden, weight]) for x in (apart, one)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    for field in ("top1_N", "accepted_N", "ratio_N", "alpha_low_N", "alpha_N"):
        torch.testing.assert_close(getattr(apart[1], field), getattr(one[1], field))


def with_draws(signal: Signal, p: torch.Tensor, draws: int) -> Signal:
    tail = p.scatter(-1, signal.head_ids_NK, 0.0)
    ids = torch.multinomial(tail, draws, replacement=True, generator=torch.Generator().manual_seed(5))
    return replace(signal, tail_ids_NM=ids, tail_logp_NM=p.log().gather(-1, ids))


def test_gradient_of_the_kl_from_sampled_tails_is_unbiased() -> None:
    """Each tail id drawn once, weighted by its chance: the mean over all draws is the whole KL's gradient, exactly."""
    hidden, weight, signal, p = problem(n=3)
    tail = p.scatter(-1, signal.head_ids_NK, 0.0).double()
    chance = tail / tail.sum(-1, keepdim=True)
    mean = torch.zeros(3, H, dtype=torch.float64)
    for v in range(REAL):
        ids = torch.full((3, 1), v)
        drawn = replace(signal, tail_ids_NM=ids, tail_logp_NM=p.log().gather(-1, ids))
        keep = (chance[:, v] > 0).float()  # ids of the head are never drawn
        loss, _ = head_loss(hidden, weight, drawn, {"forward_kl": 1.0}, Head(REAL, 8), lambda w, a, i, keep=keep: keep)
        (grad,) = torch.autograd.grad(loss, [hidden])
        mean += chance[:, v, None] * grad.double()
    logq = (hidden.double() @ weight.double().T)[:, :REAL].log_softmax(-1)
    (true,) = torch.autograd.grad(-(p.double() * logq).sum(), [hidden])
    torch.testing.assert_close(mean, true.double(), rtol=1e-4, atol=1e-5)
    biased, _ = head_loss(hidden, weight, signal, {"forward_kl": 1.0}, Head(REAL, 8))  # the bucket is not the whole
    (other,) = torch.autograd.grad(biased, [hidden])
    assert (other.double() - true.double()).abs().max() > 1e-2


def test_alpha_from_draws_is_unbiased_and_may_leave_no_bracket() -> None:
    hidden, weight, signal, p = problem(n=200)
    with torch.no_grad():
        alpha = expected_acceptance(p, (hidden @ weight.T)[:, :REAL].softmax(-1))
    scores = head_scores(hidden, weight, with_draws(signal, p, 200), Head(REAL, 64))
    assert abs((scores.alpha_N - alpha).mean()) < 0.004
    assert (scores.alpha_high_N - alpha).mean() > 0.02


def test_memory_is_bounded_in_the_vocabulary_too() -> None:
    hidden, weight, signal, _ = problem(n=40)
    for s in (signal, full(40)):
        with Largest() as largest:
            loss, _ = head_loss(hidden, weight, s, {"forward_kl": 1.0}, Head(REAL, 40, 16))
            loss.backward()
        assert largest.numel == V * H < 40 * V  # the gradient of the head itself


def test_a_wide_targets_bfloat16_head() -> None:
    """The target stays in its own type; its logits are made there and softmax is taken in float32."""
    hidden, weight, _, _ = problem()
    signal = full(dtype=torch.bfloat16)
    loss, _ = head_loss(hidden, weight, signal, {"forward_kl": 1.0}, Head(REAL, 8))
    logp = (signal.hidden_NH @ signal.weight_VH.T).float()[:, :REAL].log_softmax(-1)
    logq = (hidden @ weight.T)[:, :REAL].log_softmax(-1)
    assert loss.item() == pytest.approx((logp.exp() * (logp - logq)).sum().item(), rel=1e-4)


def test_bfloat16_hidden_states_are_scored_in_float32() -> None:
    hidden, weight, signal, _ = problem()
    half = hidden.detach().bfloat16().requires_grad_()
    loss, _ = head_loss(half, weight, signal, WEIGHTS, Head(REAL, 8))
    loss.backward()
    assert loss.dtype == torch.float32
    assert half.grad is not None
    assert half.grad.dtype == torch.bfloat16
    assert loss.item() == pytest.approx(whole(half.detach().float(), weight, signal, torch.float64).item(), rel=1e-5)


CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("real", "quantities", "positions"),
    [(512, 1, 81_920), (49_152, 1, 853), (49_152, 4, 213), (151_936, 1, 276), (151_936, 4, 69), (3 * 10**8, 1, 80)],
)
def test_a_chunk_is_as_many_positions_as_fill_the_buffers(real: int, quantities: int, positions: int) -> None:
    """160 MiB in all, of a very wide vocabulary a block; and chunks are as few as that makes them, and equally long."""
    assert positions_at_once(min(real, 1 << 19), CPU, quantities) == positions
    some = Head(real).chunks(300, CPU, quantities)
    assert (some[0].start, some[-1].stop, len(some)) == (0, 300, -(-300 // positions))
    assert all(a.stop == b.start for a, b in pairwise(some))
    lengths = [s.stop - s.start for s in some]
    assert max(lengths) - min(lengths) < len(some)


def test_a_chunk_is_as_long_as_one_asks() -> None:
    assert Head(512, 7).chunks(10, CPU, 1) == [slice(0, 7), slice(7, 10)]
    assert positions_at_once(10**9, CPU, 4) == 64  # fewer would make slow products
    assert Head(512).chunks(0, CPU, 1) == []


@pytest.mark.parametrize("chunk", [None, 5])
def test_buffers_that_a_call_left_are_used_again_and_change_nothing(chunk: int | None) -> None:
    """Calls of more and of fewer positions, with the record and the whole distribution, by one head and by a new one each."""
    one = Head(REAL, chunk)
    left: set[int] = set()
    for n in (N, 5, N, 11):
        hidden, weight, signal, _ = problem(seed=n, n=n)
        g = torch.Generator().manual_seed(n)
        full = FullSignal(signal.answer_N, torch.randn(n, H, generator=g), torch.randn(V, H, generator=g))
        for each in (signal, full):
            for head in (one, Head(REAL, chunk)):
                hidden.grad = weight.grad = None
                loss, _ = head_loss(hidden, weight, each, WEIGHTS, head)
                loss.backward()
                assert hidden.grad is not None
                assert weight.grad is not None
                if head is one:
                    expected = loss.item(), hidden.grad, weight.grad
            assert expected[0] == loss.item()
            assert torch.equal(expected[1], hidden.grad)
            assert torch.equal(expected[2], weight.grad)
        left |= {flat.data_ptr() for flat in one.kept.values()}
    assert len(left) == 2  # the first call of each kind was the largest
