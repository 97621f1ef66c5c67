"""The output head and the loss in chunks, forward and backward: no [positions, vocabulary] matrix ever exists whole.

Shapes: N supervised positions, C of them in a chunk, H hidden, V vocabulary rows, K ids of the target's head.

Any loss here sees the drafter through log q of the head ids, of the answer and of the tail as a whole. With g their
derivatives and G = Σ g, the derivative by logit v is Σ_id 1[v = id] g_id + 1[v in tail] g_tail q_v / q_tail − G q_v. So
one buffer [C, V] of exponentials serves the log-sum-exp, the tail's mass (summed, not 1 − Σ head, which cancels) and,
scaled in place, the gradient; the backward product follows while the chunk is at hand.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from distill.losses import LOSSES, Signal, Student
from pairing.acceptance import acceptance_bracket

LOWEST = -1e4  # log q of a padding row in the target's head: finite, so that p = 0 times it is 0
SMALLEST = torch.finfo(torch.float32).tiny  # under the tail's mass where every logit outside the head underflows


@dataclass(frozen=True)
class Scores:
    """Per-position results [N], float32 without gradient: the losses by name, and the agreement with the target."""

    losses: dict[str, torch.Tensor]
    top1_N: torch.Tensor  # 1[argmax q = argmax p]
    accepted_N: torch.Tensor  # 1[argmax q = answer token]: w of the replay for argmax drafting
    alpha_low_N: torch.Tensor
    alpha_high_N: torch.Tensor


def head_loss(
    hidden_NH: torch.Tensor,
    weight_VH: torch.Tensor,
    signal: Signal,
    weights: Mapping[str, float],
    real: int,
    chunk: int,
) -> tuple[torch.Tensor, Scores]:
    """The weighted loss *summed* over positions (scalar, differentiable), and scores.

    `weight_VH` is the head's matrix; its rows from `real` on are padding and get no probability (fault D1). Its
    gradient is computed only where it requires one. Everything inside is float32.
    """
    scores: list[Scores] = []
    loss = _HeadLoss.apply(hidden_NH, weight_VH, signal, dict(weights), real, chunk, scores)
    return loss, scores[0]


def head_scores(hidden_NH: torch.Tensor, weight_VH: torch.Tensor, signal: Signal, real: int, chunk: int) -> Scores:
    """The scores alone, without gradient."""
    with torch.no_grad():
        parts = [
            _forward(hidden_NH[i : i + chunk].float(), weight_VH.float(), _part(signal, i, chunk), real)[3]
            for i in range(0, len(hidden_NH), chunk)
        ]
    return _join(parts, hidden_NH)


class _HeadLoss(torch.autograd.Function):
    """Computes both gradients in the forward pass, where the chunk's logits are; backward only scales them."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: torch.Tensor,
        weight_VH: torch.Tensor,
        signal: Signal,
        weights: dict[str, float],
        real: int,
        chunk: int,
        scores: list[Scores],
    ) -> torch.Tensor:
        dtype, weight_VH = weight_VH.dtype, weight_VH.float()
        grad_hidden = torch.zeros_like(hidden_NH, dtype=torch.float32)
        grad_weight = torch.zeros_like(weight_VH) if ctx.needs_input_grad[1] else None
        parts: list[Scores] = []
        for i in range(0, len(hidden_NH), chunk):
            hidden_CH, part = hidden_NH[i : i + chunk].float(), _part(signal, i, chunk)
            exp_CV, total_C, student, part_scores = _forward(hidden_CH, weight_VH, part, real)
            grad_CV = _backward(exp_CV, total_C, student, part, weights)
            torch.mm(grad_CV, weight_VH, out=grad_hidden[i : i + chunk])
            if grad_weight is not None:
                grad_weight.addmm_(grad_CV.T, hidden_CH)
            parts.append(part_scores)
        scores.append(_join(parts, hidden_NH))
        ctx.save_for_backward(grad_hidden.to(hidden_NH.dtype), grad_weight)
        ctx.weight_dtype = dtype
        total = sum(w * scores[0].losses[name].sum() for name, w in weights.items())
        return torch.as_tensor(total, dtype=torch.float32, device=hidden_NH.device)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Any, ...]:
        (grad_output,) = grad_outputs
        grad_hidden, grad_weight = ctx.saved_tensors
        if grad_weight is not None:
            grad_weight = (grad_weight * grad_output).to(ctx.weight_dtype)
        return grad_hidden * grad_output, grad_weight, None, None, None, None, None


def _part(signal: Signal, i: int, chunk: int) -> Signal:
    j = i + chunk
    return Signal(signal.answer_N[i:j], signal.head_ids_NK[i:j], signal.head_logp_NK[i:j], signal.tail_N[i:j])


def _forward(
    hidden_CH: torch.Tensor, weight_VH: torch.Tensor, signal: Signal, real: int
) -> tuple[torch.Tensor, torch.Tensor, Student, Scores]:
    """exp(logit − max) with the head ids' entries set to 0 [C, V], its sum with them [C], the student, the scores."""
    logits_CV = hidden_CH @ weight_VH.T
    logits_CV[:, real:] = -torch.inf
    answer_C1 = signal.answer_N[:, None]
    largest_C1, argmax_C1 = logits_CV.max(-1, keepdim=True)
    head_CK = logits_CV.gather(-1, signal.head_ids_NK) - largest_C1
    answer_C = (logits_CV.gather(-1, answer_C1) - largest_C1).squeeze(-1)
    exp_CV = logits_CV.sub_(largest_C1).exp_().scatter_(-1, signal.head_ids_NK, 0.0)
    tail_C = exp_CV.sum(-1).clamp_(min=SMALLEST)
    total_C = tail_C + head_CK.exp().sum(-1)
    log_total_C = total_C.log()
    head_CK = (head_CK - log_total_C[:, None]).clamp_(min=LOWEST)
    student = Student(answer_C - log_total_C, head_CK, tail_C.log() - log_total_C)
    low_C, high_C = acceptance_bracket(
        signal.head_logp_NK.exp(), signal.tail_N, student.head_NK.exp(), student.tail_N.exp()
    )
    argmax_C = argmax_C1.squeeze(-1)
    scores = Scores(
        {name: loss(student, signal) for name, loss in LOSSES.items()},
        (argmax_C == signal.head_ids_NK[:, 0]).float(),
        (argmax_C == signal.answer_N).float(),
        low_C,
        high_C,
    )
    return exp_CV, total_C, student, scores


def _backward(
    exp_CV: torch.Tensor, total_C: torch.Tensor, student: Student, signal: Signal, weights: dict[str, float]
) -> torch.Tensor:
    """The derivative of the summed loss by the logits [C, V], written over `exp_CV`. See the module's docstring."""
    leaves = [t.detach().requires_grad_() for t in (student.answer_N, student.head_NK, student.tail_N)]
    with torch.enable_grad():
        seen = Student(*leaves)
        loss = sum(w * LOSSES[name](seen, signal).sum() for name, w in weights.items() if w)
        if isinstance(loss, torch.Tensor):
            answer_C, head_CK, tail_C = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
        else:  # every weight is zero
            answer_C, head_CK, tail_C = (torch.zeros_like(t) for t in leaves)
    all_C = answer_C + head_CK.sum(-1) + tail_C
    grad_CV = exp_CV.mul_(((tail_C / student.tail_N.exp().clamp(min=SMALLEST) - all_C) / total_C)[:, None])
    grad_CV.scatter_(-1, signal.head_ids_NK, head_CK - student.head_NK.exp() * all_C[:, None])
    return grad_CV.scatter_add_(-1, signal.answer_N[:, None], answer_C[:, None])


def _join(parts: list[Scores], like: torch.Tensor) -> Scores:
    """Chunks joined; with no position at all, empty tensors, whose sums are zero (fault D12)."""
    none = torch.zeros(0, device=like.device)

    def cat(tensors: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat(tensors) if tensors else none

    return Scores(
        {name: cat([s.losses[name] for s in parts]) for name in LOSSES},
        cat([s.top1_N for s in parts]),
        cat([s.accepted_N for s in parts]),
        cat([s.alpha_low_N for s in parts]),
        cat([s.alpha_high_N for s in parts]),
    )
