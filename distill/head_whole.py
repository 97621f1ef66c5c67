"""The head against the target's whole distribution, which its own hidden states and head give piece by piece.

Shapes: C positions, H hidden, V vocabulary rows, B of them in a piece.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from functools import partial

import torch

from distill.head_pieces import POINTWISE, Head, Pieces, Places, Scores, View, derivative, running_max
from distill.losses import NEED_WHOLE, FullSignal, Outcomes

_P, _Q, _LOGP, _LOGQ = range(4)  # what of a piece has a buffer


def look_at_whole(
    hidden_CH: torch.Tensor, weight_VH: torch.Tensor, signal: FullSignal, head: Head, pieces: Pieces
) -> View:
    """Passes over the vocabulary: the normalisers; α; the losses without gradient; and for the gradient its sum G, then itself.
    Where pieces are kept, so are their logs and probabilities from the first pass on, and the gradient is made once.
    """
    C, T = len(hidden_CH), signal.temperature
    target_CH, target_VH = signal.hidden_NH, signal.weight_VH

    def logits(piece: int, rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
        p_CB, q_CB = (pieces.buffer(which, piece, C) for which in (_LOGP, _LOGQ))
        if target_CH.dtype == target_VH.dtype == torch.float32:
            torch.mm(target_CH, target_VH[rows].T, out=p_CB)
        else:
            p_CB.copy_(target_CH @ target_VH[rows].T)
        torch.mm(hidden_CH, weight_VH[rows].T, out=q_CB)
        return (p_CB, q_CB) if T == 1 else (p_CB.div_(T), q_CB.div_(T))

    at_answer = Places(signal.answer_N[:, None], pieces.rows)
    best_p, best_q = (torch.full_like(hidden_CH[:, :1], -torch.inf) for _ in range(2))
    argmax_p, argmax_q = (torch.zeros_like(signal.answer_N) for _ in range(2))
    sum_p, sum_q = torch.zeros_like(best_p), torch.zeros_like(best_q)  # of exponentials of logits less the best so far
    at_p, at_q, top_q = (torch.full_like(best_p, -torch.inf) for _ in range(3))
    relative_to: list[tuple[torch.Tensor, torch.Tensor]] = []  # [C, 1] each: what a piece's exponentials are less of
    for piece, rows in pieces:
        p_CB, q_CB = logits(piece, rows)
        at_answer.read(piece, p_CB, at_p)
        at_answer.read(piece, q_CB, at_q)
        now_p, higher, columns = running_max(p_CB, best_p)
        argmax_p[higher], top_q[higher, 0] = columns + rows.start, q_CB[higher, columns]
        now_q, higher, columns = running_max(q_CB, best_q)
        argmax_q[higher] = columns + rows.start
        exp_p = torch.sub(p_CB, now_p, out=pieces.buffer(_P, piece, C)).exp_()
        exp_q = torch.sub(q_CB, now_q, out=pieces.buffer(_Q, piece, C)).exp_()
        sum_p = sum_p * (best_p - now_p).exp_() + exp_p.sum(-1, keepdim=True)
        sum_q = sum_q * (best_q - now_q).exp_() + exp_q.sum(-1, keepdim=True)
        best_p, best_q = now_p, now_q
        relative_to.append((now_p, now_q))
    log_p, log_q = best_p + sum_p.log(), best_q + sum_q.log()

    def normalised(piece: int, rows: slice) -> tuple[torch.Tensor, ...]:
        """log p, log q, p, q. Kept pieces are normalised in place, so once."""
        if pieces.keep:
            p_CB, q_CB, logp_CB, logq_CB = (pieces.buffer(which, piece, C) for which in range(4))
            was_p, was_q = relative_to[piece]
            p_CB.mul_((was_p - log_p).exp())
            q_CB.mul_((was_q - log_q).exp())
            return logp_CB.sub_(log_p), logq_CB.sub_(log_q), p_CB, q_CB
        logp_CB, logq_CB = logits(piece, rows)
        logp_CB, logq_CB = logp_CB.sub_(log_p), logq_CB.sub_(log_q)
        p_CB, q_CB = (pieces.buffer(which, piece, C) for which in (_P, _Q))
        return logp_CB, logq_CB, torch.exp(logp_CB, out=p_CB), torch.exp(logq_CB, out=q_CB)

    def parts(piece: int, rows: slice) -> tuple[torch.Tensor, ...]:
        """The same once more."""
        if pieces.keep:
            return tuple(pieces.buffer(which, piece, C) for which in (_LOGP, _LOGQ, _P, _Q))
        return normalised(piece, rows)

    alpha_C, above_C = torch.zeros_like(hidden_CH[:, 0]), torch.zeros_like(hidden_CH[:, 0])
    answer_C, top_C = (at_q - log_q).squeeze(-1), (top_q - log_q).squeeze(-1)
    none_C0 = hidden_CH[:, :0]

    def outcomes(
        logp_CB: torch.Tensor,
        p_CB: torch.Tensor,
        logq_CB: torch.Tensor,
        answer_C: torch.Tensor = answer_C,
        top_C: torch.Tensor = top_C,
    ) -> Outcomes:
        return Outcomes(logp_CB, logq_CB, p_CB, answer_C, top_C, alpha_C, above_C)

    over_pieces = head.losses.keys() - POINTWISE
    # over pieces, of what a loss has more than its constant
    sums = {name: torch.zeros_like(alpha_C) for name in over_pieces}

    def add(names: Set[str], found: tuple[torch.Tensor, ...]) -> None:
        logp_CB, logq_CB, p_CB, _ = found
        for name in names:
            loss = head.losses[name]
            sums[name] += loss(outcomes(logp_CB, p_CB, logq_CB)) - loss(outcomes(none_C0, none_C0, none_C0))

    for piece, rows in pieces:
        found = normalised(piece, rows)
        p_CB, q_CB = found[2:]
        alpha_C += torch.minimum(p_CB, q_CB).sum(-1)
        if "tvd_plus_plus" in head.losses:
            above_C += (q_CB * (p_CB > q_CB)).sum(-1)
        add(over_pieces - NEED_WHOLE, found)
    alpha_C.clamp_(max=1.0)
    if late := over_pieces & NEED_WHOLE:
        for piece, rows in pieces:
            add(late, parts(piece, rows))
    nothing = outcomes(none_C0, none_C0, none_C0)
    values = {name: loss(nothing) + sums.get(name, 0.0) for name, loss in head.losses.items()}
    scores = Scores(
        values,
        (argmax_q == argmax_p).float(),
        (argmax_q == signal.answer_N).float(),
        (answer_C - (at_p - log_p).squeeze(-1)).clamp(max=0.0).exp(),
        alpha_C,
        alpha_C,
        alpha_C,
        argmax_q,
    )

    def gradient(weights: dict[str, float], factor_C: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
        factor_C = factor_C / T
        ends = [t.detach().requires_grad_() for t in (answer_C, top_C)]
        g_answer_C, g_top_C = derivative(
            ends, partial(outcomes, none_C0, none_C0, none_C0), head.losses, weights, factor_C
        )
        over_all = {name: w for name, w in weights.items() if name not in POINTWISE}

        def direct(piece: int, rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
            """g of all outcomes, in the place of log p, and q."""
            logp_CB, logq_CB, p_CB, q_CB = parts(piece, rows)
            leaf_CB = logq_CB.detach().requires_grad_()
            (g_CB,) = derivative([leaf_CB], partial(outcomes, logp_CB, p_CB), head.losses, over_all, factor_C)
            return logp_CB.copy_(g_CB), q_CB

        ends_C2 = torch.stack([g_answer_C, g_top_C], 1)
        at_ends = Places(torch.stack([signal.answer_N, argmax_p], 1), pieces.rows)
        all_C1 = ends_C2.sum(-1, keepdim=True)
        for piece, rows in pieces:
            all_C1 = all_C1 + direct(piece, rows)[0].sum(-1, keepdim=True)
        for piece, rows in pieces:
            if pieces.keep:
                g_CB, q_CB = (pieces.buffer(which, piece, C) for which in (_LOGP, _Q))
            else:
                g_CB, q_CB = direct(piece, rows)
            grad_CB = g_CB.addcmul_(q_CB, all_C1, value=-1)
            at_ends.add(piece, grad_CB, ends_C2)
            yield rows, grad_CB

    return View(scores, gradient)
