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

from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from functools import partial
from math import ceil, prod
from typing import Any

import torch

from distill.losses import LOSSES, NEED_WHOLE, FullSignal, Loss, Outcomes, Signal
from pairing.acceptance import acceptance_bracket

LOWEST = -1e4  # log q of a padding row in the target's head: finite, so that p = 0 times it is 0
SMALLEST = torch.finfo(torch.float32).tiny  # under the tail's mass where every logit outside the head underflows

REPORTED = ("forward_kl", "cross_entropy")  # what every run's log gives, whatever it minimises
PIECE = 1 << 19  # logits that a CPU's cache holds while the passes over them are made: 2 MiB
LEAST_COLUMNS = 1024  # of a piece: products of fewer are slow
POINTWISE = frozenset(
    {"cross_entropy", "top1_ce"}
)  # they look at one id, so blocks of the vocabulary have no part in them
AnySignal = Signal | FullSignal
QUANTITIES = {Signal: 1, FullSignal: 4}  # of a chunk's logits that are kept: see `_look_at_cached`, `_look_at_all`


@dataclass(frozen=True)
class Head:
    """How the head is applied. Its rows from `real` on are padding and get no probability (fault D1)."""

    real: int
    chunk: int | None = None  # positions at a time; None: as many as `positions_at_once` says
    block: int = 1 << 19  # vocabulary rows whose logits are kept; more than these are made again for each pass
    losses: Mapping[str, Loss] = field(default_factory=lambda: {name: LOSSES[name] for name in REPORTED})
    kept: dict[int, torch.Tensor] = field(
        default_factory=dict, compare=False, repr=False
    )  # a CPU's buffers, by quantities

    @property
    def keep(self) -> bool:
        """Whether a chunk's pieces are all kept."""
        return self.real <= self.block

    def chunks(self, positions: int, device: torch.device, quantities: int) -> list[slice]:
        """As few as there may be, and then equally long ones: short products are slow."""
        size = self.chunk
        if size is None and positions:
            most = positions_at_once(min(self.real, self.block), device, quantities)
            size = ceil(positions / ceil(positions / most))
        return [slice(i, min(i + size, positions)) for i in range(0, positions, size)] if size else []


class _Pieces:
    """A chunk's pieces of the vocabulary (blocks, and on a CPU parts of them that its cache holds) and their buffers,
    `quantities` for each, which the next chunk uses again, and on a CPU the next call.

    Where pieces are not kept all share the first one's, so that a pass makes anew what it looks at.
    """

    def __init__(self, head: Head, hidden_NH: torch.Tensor, quantities: int) -> None:
        self.chunks, self.keep = head.chunks(len(hidden_NH), hidden_NH.device, quantities), head.keep
        positions = max((c.stop - c.start for c in self.chunks), default=0)
        widest = min(head.real, head.block)
        if hidden_NH.device.type == "cpu":
            widest = min(widest, max(LEAST_COLUMNS, PIECE // max(1, positions)))
        self.rows = [slice(i, min(i + widest, head.real)) for i in range(0, head.real, widest)]
        shape = (quantities, len(self.rows) if self.keep else 1, positions * widest)
        flat = head.kept.get(quantities)
        if flat is None or flat.numel() < prod(shape):
            flat = hidden_NH.new_empty(prod(shape), dtype=torch.float32)
            if flat.device.type == "cpu":
                head.kept[quantities] = flat
        self._buffers = flat[: prod(shape)].view(shape)

    def __iter__(self) -> Iterator[tuple[int, slice]]:
        return iter(enumerate(self.rows))

    def buffer(self, quantity: int, piece: int, positions: int) -> torch.Tensor:
        """[positions, columns of the piece], contiguous, uninitialised or as it was left."""
        columns = self.rows[piece].stop - self.rows[piece].start
        flat = self._buffers[quantity, piece if self.keep else 0]
        return flat[: positions * columns].view(positions, columns)


def positions_at_once(columns: int, device: torch.device, quantities: int) -> int:
    """Positions whose logits, `columns` wide, and what else is kept of them fill 160 MiB on a CPU, but 64 at least, below which
    products are slow; elsewhere, where many small kernels are what costs, 256 MiB a quantity (docs/notebook.md)."""
    if device.type == "cpu":
        return max(64, 160 * 2**20 // (4 * columns * quantities))
    return max(1, 256 * 2**20 // (4 * columns))


@dataclass(frozen=True)
class Scores:
    """Per-position results [N], float32 without gradient: the losses by name, and the agreement with the target."""

    losses: dict[str, torch.Tensor]
    top1_N: torch.Tensor  # 1[argmax q = argmax p]
    accepted_N: torch.Tensor  # 1[argmax q = answer token]: w of the replay for argmax drafting
    ratio_N: torch.Tensor  # min(1, q/p) at the answer token: w for probabilistic drafting; see `_ratio`
    alpha_low_N: torch.Tensor  # α's bracket; both ends are α itself where the whole distribution is known
    alpha_high_N: torch.Tensor
    alpha_N: torch.Tensor  # α, or its unbiased estimate from draws, or the bracket's upper end
    argmax_N: torch.Tensor  # argmax q: the draft of argmax drafting


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


Gradient = Callable[[dict[str, float], torch.Tensor], Iterator[tuple[slice, torch.Tensor]]]


@dataclass(frozen=True)
class _View:
    """A chunk that was looked at: its scores, and how its gradient by the logits is had, block by block."""

    scores: Scores
    gradient: Gradient


def _pieces(signal: AnySignal, head: Head, hidden_NH: torch.Tensor) -> _Pieces:
    return _Pieces(head, hidden_NH, QUANTITIES[type(signal)])


def _view(hidden_CH: torch.Tensor, weight_VH: torch.Tensor, signal: AnySignal, head: Head, pieces: _Pieces) -> _View:
    look = _look_at_all if isinstance(signal, FullSignal) else _look_at_cached
    return look(hidden_CH, weight_VH, signal, head, pieces)  # type: ignore[arg-type]


# ---------------------------------------------------------------- the target's stored head


def _look_at_cached(
    hidden_CH: torch.Tensor, weight_VH: torch.Tensor, signal: Signal, head: Head, pieces: _Pieces
) -> _View:
    """A piece's exponentials, less the largest logit so far, serve the log-sum-exp, the tail's mass (summed, not 1 − Σ head,
    which cancels) and, scaled in place, the gradient; where pieces are not kept they are made again for it.
    """
    draws_CM = signal.tail_ids_NM if signal.tail_ids_NM is not None else signal.head_ids_NK[:, :0]
    more_CS = torch.cat([draws_CM, signal.answer_N[:, None]], 1)
    K, M = signal.head_ids_NK.shape[1], draws_CM.shape[1]
    at_head, at_more = _Places(signal.head_ids_NK, pieces.rows), _Places(more_CS, pieces.rows)
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
        now_C1, higher, columns = _higher(logits_CB, largest_C1)
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
        g_CK, g_CM, g_tail_C, g_answer_C = _derivative(leaves, outcomes, head.losses, weights, factor_C)
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

    return _View(scores, gradient)


def _ratio(signal: Signal, answer_C: torch.Tensor) -> torch.Tensor:
    """min(1, q/p) at the answer. Where the answer is outside the head its p is not recorded, but at most the tail's mass and the
    head's least: taken as that, the ratio is at least this.
    """
    is_CK = signal.head_ids_NK == signal.answer_N[:, None]
    in_head_C = torch.where(is_CK, signal.head_logp_NK, -torch.inf).amax(-1)
    most_C = torch.minimum(signal.tail_N.clamp(min=SMALLEST).log(), signal.head_logp_NK[:, -1])
    return (answer_C - torch.where(is_CK.any(-1), in_head_C, most_C)).clamp(max=0.0).exp()


# ---------------------------------------------------------------- the whole distribution


_P, _Q, _LOGP, _LOGQ = range(4)  # what of a piece has a buffer


def _look_at_all(
    hidden_CH: torch.Tensor, weight_VH: torch.Tensor, signal: FullSignal, head: Head, pieces: _Pieces
) -> _View:
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

    at_answer = _Places(signal.answer_N[:, None], pieces.rows)
    best_p, best_q = (torch.full_like(hidden_CH[:, :1], -torch.inf) for _ in range(2))
    argmax_p, argmax_q = (torch.zeros_like(signal.answer_N) for _ in range(2))
    sum_p, sum_q = torch.zeros_like(best_p), torch.zeros_like(best_q)  # of exponentials of logits less the best so far
    at_p, at_q, top_q = (torch.full_like(best_p, -torch.inf) for _ in range(3))
    relative_to: list[tuple[torch.Tensor, torch.Tensor]] = []  # [C, 1] each: what a piece's exponentials are less of
    for piece, rows in pieces:
        p_CB, q_CB = logits(piece, rows)
        at_answer.read(piece, p_CB, at_p)
        at_answer.read(piece, q_CB, at_q)
        now_p, higher, columns = _higher(p_CB, best_p)
        argmax_p[higher], top_q[higher, 0] = columns + rows.start, q_CB[higher, columns]
        now_q, higher, columns = _higher(q_CB, best_q)
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
        g_answer_C, g_top_C = _derivative(
            ends, partial(outcomes, none_C0, none_C0, none_C0), head.losses, weights, factor_C
        )
        over_all = {name: w for name, w in weights.items() if name not in POINTWISE}

        def direct(piece: int, rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
            """g of all outcomes, in the place of log p, and q."""
            logp_CB, logq_CB, p_CB, q_CB = parts(piece, rows)
            leaf_CB = logq_CB.detach().requires_grad_()
            (g_CB,) = _derivative([leaf_CB], partial(outcomes, logp_CB, p_CB), head.losses, over_all, factor_C)
            return logp_CB.copy_(g_CB), q_CB

        ends_C2 = torch.stack([g_answer_C, g_top_C], 1)
        at_ends = _Places(torch.stack([signal.answer_N, argmax_p], 1), pieces.rows)
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

    return _View(scores, gradient)


# ---------------------------------------------------------------- small parts


def _derivative(
    leaves: list[torch.Tensor],
    outcomes: Callable[..., Outcomes],
    losses: Mapping[str, Loss],
    weights: dict[str, float],
    factor_C: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """Of the weighted sum by the leaves; zeros where no loss looks at one."""
    with torch.enable_grad():
        seen = outcomes(*leaves)
        terms = [w * (factor_C * losses[name](seen)).sum() for name, w in weights.items() if w]
        total = sum(terms) if terms else None
    if not isinstance(total, torch.Tensor) or not total.requires_grad:
        return tuple(torch.zeros_like(t) for t in leaves)
    return torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)


def _higher(logits_CB: torch.Tensor, best_C1: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The best so far with this piece; which positions have it from here, and in which column each. After a few pieces these
    are few, and to look for a place takes three times as long as for a value.
    """
    top_C1 = logits_CB.amax(-1, keepdim=True)
    higher = (top_C1 > best_C1).squeeze(-1).nonzero().squeeze(-1)
    theirs = logits_CB if len(higher) == len(logits_CB) else logits_CB[higher]
    return torch.maximum(best_C1, top_C1), higher, theirs.argmax(-1)


class _Places:
    """Where a chunk's ids [C, S] lie: sorted, so that each piece is asked for its own alone. Ids of padding rows lie nowhere."""

    def __init__(self, ids_CS: torch.Tensor, pieces: list[slice]) -> None:
        flat, self._order = ids_CS.flatten().sort()
        self._position, self._id = self._order // max(1, ids_CS.shape[1]), flat
        edges = torch.tensor([0, *(rows.stop for rows in pieces)], device=flat.device)
        self._start = [rows.start for rows in pieces]
        self._edges = torch.searchsorted(flat, edges).tolist()

    def _of(self, piece: int) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        """Of the ids in a piece: which of the C·S they are; their positions and columns."""
        here = slice(self._edges[piece], self._edges[piece + 1])
        return self._order[here], (self._position[here], self._id[here] - self._start[piece])

    def read(self, piece: int, from_CB: torch.Tensor, into_CS: torch.Tensor) -> None:
        which, at = self._of(piece)
        into_CS.view(-1)[which] = from_CB[at]

    def write(self, piece: int, into_CB: torch.Tensor, value: torch.Tensor | float) -> torch.Tensor:
        """`into` with value[c, s], or the one number, at each id; the ids of a position differ."""
        which, at = self._of(piece)
        into_CB[at] = value.flatten()[which] if isinstance(value, torch.Tensor) else value
        return into_CB

    def add(self, piece: int, into_CB: torch.Tensor, value_CS: torch.Tensor) -> None:
        """value[c, s] added at each id, once for each time that it is there."""
        which, at = self._of(piece)
        into_CB.index_put_(at, value_CS.flatten()[which], accumulate=True)


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
