"""The head against the target's stored head: what the recorded ids, the answer and the tail as one bucket say of a chunk.

Shapes: C positions, H hidden, V vocabulary rows, B of them in a piece, K ids of the target's head, M draws from outside it, S of
draws and answer.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from distill.head_pieces import Head, Pieces, Places, Scores, View, derivative, running_max
from distill.losses import Outcomes, Signal
from pairing.acceptance import acceptance_bracket

LOWEST = -1e4  # log q of a padding row in the target's head: finite, so that p = 0 times it is 0
SMALLEST = torch.finfo(torch.float32).tiny  # under the tail's mass where every logit outside the head underflows


def look_at_recorded(
    hidden_CH: torch.Tensor, weight_VH: torch.Tensor, signal: Signal, head: Head, pieces: Pieces
) -> View:
    """A piece's exponentials, less the largest logit so far, serve the log-sum-exp, the tail's mass (summed, not 1 − Σ head,
    which cancels) and, scaled in place, the gradient; where pieces are not kept they are made again for it.
    """
    draws_CM = signal.tail_ids_NM if signal.tail_ids_NM is not None else signal.head_ids_NK[:, :0]
    more_CS = torch.cat([draws_CM, signal.answer_N[:, None]], 1)
    K, M = signal.head_ids_NK.shape[1], draws_CM.shape[1]
    at_head, at_more = Places(signal.head_ids_NK, pieces.rows), Places(more_CS, pieces.rows)
    head_logits_CK, more_logits_CS = (
        torch.full(i.shape, -torch.inf, device=i.device) for i in (signal.head_ids_NK, more_CS)
    )
    largest_C1 = torch.full_like(head_logits_CK[:, :1], -torch.inf)
    argmax_C, tail_C = torch.zeros_like(signal.answer_N), torch.zeros_like(head_logits_CK[:, 0])
    relative_to: list[torch.Tensor] = []  # [C, 1] a piece: what was taken from its logits

    def logits(piece: int, rows: slice) -> torch.Tensor:
        return torch.mm(hidden_CH, weight_VH[rows].T, out=pieces.buffer(0, piece, len(hidden_CH)))

    for piece, rows in pieces:
        logits_CB = logits(piece, rows)
        at_head.read(piece, logits_CB, head_logits_CK)
        at_more.read(piece, logits_CB, more_logits_CS)
        now_C1, higher, columns = running_max(logits_CB, largest_C1)
        argmax_C[higher] = columns + rows.start
        exp_CB = at_head.write(piece, logits_CB.sub_(now_C1).exp_(), 0.0)
        tail_C = tail_C * (largest_C1 - now_C1).exp().squeeze(-1) + exp_CB.sum(-1)
        largest_C1 = now_C1
        relative_to.append(now_C1)
    tail_C = tail_C.clamp_(min=SMALLEST)
    seen_CS = torch.cat([head_logits_CK, more_logits_CS], 1).sub_(largest_C1)
    total_C = tail_C + seen_CS[:, :K].exp().sum(-1)
    log_total_C = total_C.log()
    logq_CS = seen_CS.sub_(log_total_C[:, None]).clamp_(min=LOWEST)
    head_CK, draws_q_CM, answer_C = logq_CS[:, :K], logq_CS[:, K : K + M], logq_CS[:, -1]
    bucket_C = tail_C.log() - log_total_C

    p_CK, q_CK, q_tail_C = signal.head_logp_NK.exp(), head_CK.exp(), bucket_C.exp()
    low_C, high_C = acceptance_bracket(p_CK, signal.tail_N, q_CK, q_tail_C)
    if M:
        assert signal.tail_logp_NM is not None
        more_CM = (draws_q_CM - signal.tail_logp_NM).clamp(max=0.0).exp()
        alpha_C = (low_C + signal.tail_N * more_CM.mean(-1)).clamp(max=1.0)
        above_C = (q_CK * (p_CK > q_CK)).sum(-1)
    else:
        alpha_C = high_C
        above_C = (q_CK * (p_CK > q_CK)).sum(-1) + q_tail_C * (signal.tail_N > q_tail_C)

    def outcomes(
        head_CK: torch.Tensor, draws_CM: torch.Tensor, bucket_C: torch.Tensor, answer_C: torch.Tensor
    ) -> Outcomes:
        if M:
            rest_p, rest_q = signal.tail_logp_NM, draws_CM
            rest_mass = (signal.tail_N / M)[:, None].expand(-1, M)
        else:
            rest_p, rest_q = signal.tail_N.clamp(min=SMALLEST).log()[:, None], bucket_C[:, None]
            rest_mass = signal.tail_N[:, None]
        assert rest_p is not None
        return Outcomes(
            torch.cat([signal.head_logp_NK, rest_p], 1),
            torch.cat([head_CK, rest_q], 1),
            torch.cat([p_CK, rest_mass], 1),
            answer_C,
            head_CK[:, 0],
            alpha_C,
            above_C,
        )

    o = outcomes(head_CK, draws_q_CM, bucket_C, answer_C)
    scores = Scores(
        {name: loss(o) for name, loss in head.losses.items()},
        (argmax_C == signal.head_ids_NK[:, 0]).float(),
        (argmax_C == signal.answer_N).float(),
        _ratio(signal, answer_C),
        low_C,
        high_C,
        alpha_C,
        argmax_C,
    )

    def gradient(weights: dict[str, float], factor_C: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
        leaves = [t.detach().requires_grad_() for t in (head_CK, draws_q_CM, bucket_C, answer_C)]
        g_CK, g_CM, g_tail_C, g_answer_C = derivative(leaves, outcomes, head.losses, weights, factor_C)
        all_C = g_CK.sum(-1) + g_CM.sum(-1) + g_tail_C + g_answer_C
        scale_C1 = ((g_tail_C / q_tail_C.clamp(min=SMALLEST) - all_C) / total_C)[:, None]
        g_head_CK = g_CK - q_CK * all_C[:, None]
        g_more_CS = torch.cat([g_CM, g_answer_C[:, None]], 1)
        for piece, rows in pieces:
            if pieces.keep:
                exp_CB = pieces.buffer(0, piece, len(hidden_CH))
                grad_CB = exp_CB.mul_(scale_C1 * (relative_to[piece] - largest_C1).exp())
            else:
                grad_CB = logits(piece, rows).sub_(largest_C1).exp_().mul_(scale_C1)
            at_head.write(piece, grad_CB, g_head_CK)
            at_more.add(piece, grad_CB, g_more_CS)
            yield rows, grad_CB

    return View(scores, gradient)


def _ratio(signal: Signal, answer_C: torch.Tensor) -> torch.Tensor:
    """min(1, q/p) at the answer. Where the answer is outside the head its p is not recorded, but at most the tail's mass and the
    head's least: taken as that, the ratio is at least this.
    """
    is_CK = signal.head_ids_NK == signal.answer_N[:, None]
    in_head_C = torch.where(is_CK, signal.head_logp_NK, -torch.inf).amax(-1)
    most_C = torch.minimum(signal.tail_N.clamp(min=SMALLEST).log(), signal.head_logp_NK[:, -1])
    return (answer_C - torch.where(is_CK.any(-1), in_head_C, most_C)).clamp(max=0.0).exp()
