"""What both looks at the head share: its chunks and pieces with their buffers, what a look brings, and where ids lie.

Shapes: N supervised positions, C of them in a chunk, V vocabulary rows, B of them in a piece, S ids of a position.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import ceil, prod

import torch

from distill.losses import LOSSES, Loss, Outcomes

REPORTED = ("forward_kl", "cross_entropy")  # what every run's log gives, whatever it minimises
PIECE = 1 << 19  # logits that a CPU's cache holds while the passes over them are made: 2 MiB
LEAST_COLUMNS = 1024  # of a piece: products of fewer are slow
# they look at one id, so blocks of the vocabulary have no part in them
POINTWISE = frozenset({"cross_entropy", "top1_ce"})


@dataclass(frozen=True)
class Head:
    """How the head is applied. Its rows from `real` on are padding and get no probability (fault D1)."""

    real: int
    chunk: int | None = None  # positions at a time; None: as many as `positions_at_once` says
    block: int = 1 << 19  # vocabulary rows whose logits are kept; more than these are made again for each pass
    losses: Mapping[str, Loss] = field(default_factory=lambda: {name: LOSSES[name] for name in REPORTED})
    # a CPU's buffers, by quantities, from one call to the next
    kept: dict[int, torch.Tensor] = field(default_factory=dict, compare=False, repr=False)

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


class Pieces:
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


Gradient = Callable[[dict[str, float], torch.Tensor], Iterator[tuple[slice, torch.Tensor]]]


@dataclass(frozen=True)
class View:
    """A chunk that was looked at: its scores, and how its gradient by the logits is had, block by block."""

    scores: Scores
    gradient: Gradient


def derivative(
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


def running_max(logits_CB: torch.Tensor, best_C1: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The best so far with this piece; which positions have it from here, and in which column each. After a few pieces these
    are few, and to look for a place takes three times as long as for a value.
    """
    top_C1 = logits_CB.amax(-1, keepdim=True)
    higher = (top_C1 > best_C1).squeeze(-1).nonzero().squeeze(-1)
    theirs = logits_CB if len(higher) == len(logits_CB) else logits_CB[higher]
    return torch.maximum(best_C1, top_C1), higher, theirs.argmax(-1)


class Places:
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
