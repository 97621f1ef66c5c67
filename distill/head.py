"""The output head and the loss in chunks, forward and backward: no [positions, vocabulary] matrix ever exists whole.

Shapes: N supervised positions, C of them in a chunk, H hidden, V vocabulary rows, B of them in a piece, K ids of the target's
head, M draws from outside it, X outcomes that the loss sees.

Positions go in chunks, and a chunk's logits in pieces of the vocabulary that a CPU's cache holds while the passes over them
are made, each in a buffer that all chunks share: fresh ones would be mapped and cleared page by page, which takes longer than
the passes (docs/notebook.md). Where the vocabulary is wider than `block`, pieces are not kept but made again for each pass, so
that memory is C · B whatever N and V are.

With g the loss's derivative by log q of what it sees and G = Σ g, the derivative by logit v is g_v − q_v G. From the cache the
loss sees only the head's ids, the draws, the answer and the tail as one bucket: then g_v is 0 but there, and the bucket's part
is 1[v in tail] g_tail q_v / q_tail.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from distill.head_pieces import REPORTED, Head, Pieces, Scores, View, positions_at_once
from distill.head_recorded import look_at_recorded
from distill.head_whole import look_at_whole
from distill.losses import FullSignal, Signal

__all__ = [
    "QUANTITIES",
    "REPORTED",
    "AnySignal",
    "Head",
    "Scores",
    "Weigh",
    "head_loss",
    "head_scores",
    "positions_at_once",
]

AnySignal = Signal | FullSignal
QUANTITIES = {Signal: 1, FullSignal: 4}  # of a chunk's logits that are kept: see `look_at_recorded`, `look_at_whole`

# Which factor each position's loss gets, from the scores of all positions up to the chunk's end: [positions so far] -> [C]
Weigh = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]


def head_loss(
    hidden_NH: torch.Tensor,
    weight_VH: torch.Tensor,
    signal: AnySignal,
    weights: Mapping[str, float],
    head: Head,
    weigh: Weigh | None = None,
) -> tuple[torch.Tensor, Scores]:
    """The weighted loss *summed* over positions (scalar, differentiable), and scores.

    `weight_VH` is the head's matrix; its gradient is computed only where it requires one. `weigh(accepted, alpha, start)` is
    given 1[argmax q = answer] and α of all positions from 0 to the chunk's end, and returns the factors of those from `start`
    on. Everything inside is float32.
    """
    scores: list[Scores] = []
    loss = _HeadLoss.apply(hidden_NH, weight_VH, signal, dict(weights), head, weigh, scores)
    return loss, scores[0]


def head_scores(hidden_NH: torch.Tensor, weight_VH: torch.Tensor, signal: AnySignal, head: Head) -> Scores:
    """The scores alone, without gradient."""
    with torch.no_grad():
        W_VH, pieces = weight_VH.float(), _pieces(signal, head, hidden_NH)
        parts = [_view(hidden_NH[some].float(), W_VH, signal[some], head, pieces).scores for some in pieces.chunks]
    return _join(parts, hidden_NH, head)


class _HeadLoss(torch.autograd.Function):
    """Computes both gradients in the forward pass, where the chunk's logits are; backward only scales them."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: torch.Tensor,
        weight_VH: torch.Tensor,
        signal: AnySignal,
        weights: dict[str, float],
        head: Head,
        weigh: Weigh | None,
        scores: list[Scores],
    ) -> torch.Tensor:
        dtype, weight_VH = weight_VH.dtype, weight_VH.float()
        grad_hidden = torch.zeros_like(hidden_NH, dtype=torch.float32)
        grad_weight = torch.zeros_like(weight_VH) if ctx.needs_input_grad[1] else None
        parts: list[Scores] = []
        pieces = _pieces(signal, head, hidden_NH)

        def chunk(some: slice) -> torch.Tensor:
            """Its loss. In a function of its own, so that what it makes is gone before the next chunk makes others."""
            hidden_CH = hidden_NH[some].float()
            view = _view(hidden_CH, weight_VH, signal[some], head, pieces)
            parts.append(view.scores)
            factor_C = torch.ones_like(view.scores.alpha_N)
            if weigh is not None:
                accepted_N, alpha_N = (torch.cat([getattr(s, n) for s in parts]) for n in ("accepted_N", "alpha_N"))
                factor_C = weigh(accepted_N, alpha_N, some.start)
            for rows, grad_CB in view.gradient(weights, factor_C):
                grad_hidden[some].addmm_(grad_CB, weight_VH[rows])
                if grad_weight is not None:
                    grad_weight[rows].addmm_(grad_CB.T, hidden_CH)
            losses = (w * (factor_C * view.scores.losses[name]).sum() for name, w in weights.items())
            return sum(losses, start=torch.zeros((), device=hidden_NH.device))

        total = torch.zeros((), dtype=torch.float32, device=hidden_NH.device)
        for some in pieces.chunks:
            total += chunk(some)
        scores.append(_join(parts, hidden_NH, head))
        ctx.save_for_backward(grad_hidden.to(hidden_NH.dtype), grad_weight)
        ctx.weight_dtype = dtype
        return total

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Any, ...]:
        (grad_output,) = grad_outputs
        grad_hidden, grad_weight = ctx.saved_tensors
        if grad_weight is not None:
            grad_weight = (grad_weight * grad_output).to(ctx.weight_dtype)
        return grad_hidden * grad_output, grad_weight, None, None, None, None, None


def _pieces(signal: AnySignal, head: Head, hidden_NH: torch.Tensor) -> Pieces:
    return Pieces(head, hidden_NH, QUANTITIES[type(signal)])


def _view(hidden_CH: torch.Tensor, weight_VH: torch.Tensor, signal: AnySignal, head: Head, pieces: Pieces) -> View:
    look = look_at_whole if isinstance(signal, FullSignal) else look_at_recorded
    return look(hidden_CH, weight_VH, signal, head, pieces)  # type: ignore[arg-type]


def _join(parts: list[Scores], like: torch.Tensor, head: Head) -> Scores:
    """Chunks joined; with no position at all, empty tensors, whose sums are zero (fault D12)."""
    none = torch.zeros(0, device=like.device)

    def cat(tensors: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat(tensors) if tensors else none

    return Scores(
        {name: cat([s.losses[name] for s in parts]) for name in head.losses},
        cat([s.top1_N for s in parts]),
        cat([s.accepted_N for s in parts]),
        cat([s.ratio_N for s in parts]),
        cat([s.alpha_low_N for s in parts]),
        cat([s.alpha_high_N for s in parts]),
        cat([s.alpha_N for s in parts]),
        cat([s.argmax_N for s in parts]),
    )
