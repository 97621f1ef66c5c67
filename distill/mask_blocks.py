"""Mask tokens that teach a drafter to write all K drafts in one pass (PARD, arXiv 2504.18583), placed as vLLM places them.

vLLM's `parallel_drafting` (0.32, `copy_and_expand_eagle_inputs_kernel`) runs the drafter over the accepted tokens, the target's
own token at column t, and K − 1 mask tokens at t + 1, t + 2, …, causally: the mask at t + i is read as the draft for t + i + 1.
The next round writes real tokens over the masks' keys and values, so a prefix never holds a mask. Here a row carries
many such rounds at once, behind its own columns: a mask of the block that starts at column t sees the columns up to t and
the masks before it in its own block, and nothing sees a mask from outside.

Shapes: B rows, L columns of their own, M mask columns, Q columns that are computed and S that are seen, N positions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from distill.batches import Batch, Blocks
from distill.emphasis import noise, starts
from pairing.errors import InputError


@dataclass(frozen=True)
class Parallel:
    """How parallel drafting is trained."""

    num_speculative_tokens: int  # K: the plain next token and K − 1 masks; serving may use fewer
    mask_id: int
    keep: float = (
        0.5  # the mask at offset i of a block is trained with chance max(keep^i, least) (PARD's conditional drop)
    )
    least: float = 0.1

    @property
    def shares(self) -> list[float]:
        """The chance that offset 1, 2, … K − 1 is trained: never rising, so a mask's earlier ones are always there."""
        return [max(self.keep**i, self.least) for i in range(1, self.num_speculative_tokens)]


def drawn(batch: Batch, parallel: Parallel, seed: int) -> Batch:
    """`batch` with the masks of one step: a function of (seed, prompt), however rows are batched."""
    shares = torch.tensor(parallel.shares, device=batch.row_N.device)
    masks_N = (noise(batch.ids, batch.row_N, seed)[:, None] < shares).sum(-1)
    return with_blocks(batch, masks_N, parallel.mask_id)


def with_blocks(batch: Batch, masks_N: torch.Tensor, mask_id: int) -> Batch:
    """`batch` with `masks_N` masks after each of its positions, as far as the answer goes on.

    No block follows a prompt's last token: the target itself writes the token after it, and rounds begin behind that.
    """
    row_N, column_N, device = batch.row_N, batch.column_N, batch.row_N.device
    first_N, at_N = starts(row_N, column_N), torch.arange(len(row_N), device=device)
    ends = torch.cat([at_N[first_N][1:] - 1, at_N[-1:]])
    left_N = ends[first_N.cumsum(0) - 1] - at_N
    masks_N = torch.minimum(masks_N, left_N).masked_fill(first_N, 0)
    owner_X = torch.repeat_interleave(at_N, masks_N)  # X masks
    at_X = torch.arange(len(owner_X), device=device)
    offset_X = at_X - torch.repeat_interleave(masks_N.cumsum(0) - masks_N, masks_N) + 1
    B, L = batch.input_BL.shape
    row_X = row_N[owner_X]
    count_B = torch.bincount(row_X, minlength=B)
    place_X = at_X - torch.repeat_interleave(count_B.cumsum(0) - count_B, count_B)
    start_BM = torch.zeros(B, int(count_B.max()), dtype=torch.long, device=device)
    offset_BM = torch.zeros_like(start_BM)
    start_BM[row_X, place_X], offset_BM[row_X, place_X] = column_N[owner_X], offset_X
    source_N = torch.cat([at_N, owner_X + offset_X])
    before_N = torch.cat([torch.full_like(at_N, -1), torch.where(offset_X == 1, owner_X, len(at_N) + at_X - 1)])
    blocks = Blocks(batch, start_BM, offset_BM, source_N, before_N, torch.cat([torch.zeros_like(at_N), offset_X]))
    return replace(
        batch,
        input_BL=torch.cat([batch.input_BL, torch.full_like(start_BM, mask_id)], 1),
        row_N=torch.cat([row_N, row_X]),
        column_N=torch.cat([column_N, L + place_X]),
        signal=batch.signal[source_N],
        blocks=blocks,
    )


def attention(blocks: Blocks, shared: int, dtype: torch.dtype, window: int | None) -> dict[str, torch.Tensor]:
    """What the decoder needs for the columns from `shared` on: `position_ids` [B, Q], and `attention_mask` [B, 1, Q, S],
    0 where a column is seen and the type's least value elsewhere. `window`: the model's own sliding one.
    """
    L = blocks.plain.input_BL.shape[1]
    column_BL = torch.arange(L, device=blocks.start_BM.device).expand(len(blocks.start_BM), L)
    position_BS = torch.cat([column_BL, blocks.start_BM + blocks.offset_BM], 1)
    last_BQ = torch.cat([column_BL, blocks.start_BM], 1)[:, shared:]  # the last plain column that is seen
    offset_BS = torch.cat([torch.zeros_like(column_BL), blocks.offset_BM], 1)
    offset_BQ = offset_BS[:, shared:]
    plain_BQL = column_BL[:, None] <= last_BQ[..., None]
    own_BQM = (blocks.start_BM[:, None] == last_BQ[..., None]) & (blocks.offset_BM[:, None] > 0)
    own_BQM &= blocks.offset_BM[:, None] <= offset_BQ[..., None]
    sees_BQS = torch.cat([plain_BQL, own_BQM], 2)
    position_BQ = position_BS[:, shared:]
    if window is not None:
        sees_BQS &= position_BQ[..., None] - position_BS[:, None] < window
    mask_B1QS = torch.zeros_like(sees_BQS, dtype=dtype).masked_fill_(~sees_BQS, torch.finfo(dtype).min)[:, None]
    return {"position_ids": position_BQ, "attention_mask": mask_B1QS}


def window_of(config: Any) -> int | None:
    """The sliding window that all layers of a drafter attend within; None where they see everything. Raises InputError where
    its layers are of several kinds, or of one that no mask is made for."""
    kinds = set(getattr(config, "layer_types", None) or ["sliding_attention"])
    if not kinds <= {"full_attention", "sliding_attention"} or len(kinds) > 1:
        raise InputError(
            f"parallel_drafting: the draft has layers of the kinds {', '.join(sorted(kinds))}, and masks are trained where all "
            "attend fully or all within one window: leave parallel_drafting out, or `draftsmith init` with layers of one kind"
        )
    return getattr(config, "sliding_window", None) if kinds == {"sliding_attention"} else None


def signal_of(plain: Callable[[Batch], Any]) -> Callable[[Batch], Any]:
    """The signal of a batch with masks: that of its own tokens, a mask's being the one of the token that it stands for."""
    return lambda batch: plain(batch) if batch.blocks is None else plain(batch.blocks.plain)[batch.blocks.source_N]


def reach_weights(w_N: torch.Tensor, blocks: Blocks, parallel: Parallel) -> torch.Tensor:
    """The chance that a round that starts at a position's block gets as far as it, over the chance that it is trained [N].

    E[τ] = 1 + Σ_j E[Π_{i<j} w_i · a_j] over a block's offsets: Π w_i is how much a_j counts, w without gradient. Offsets that
    are seldom trained count the more, so that on average over steps that is the weight. `w_N`: the acceptance at all positions
    so far, or at the first n of them.
    """
    before_N, offset_N = blocks.before_N[: len(w_N)], blocks.offset_N[: len(w_N)]
    reach_N = torch.ones_like(w_N)
    for _ in range(parallel.num_speculative_tokens - 1):
        reach_N = torch.where(before_N < 0, 1.0, (w_N * reach_N)[before_N])
    return reach_N / w_N.new_tensor([1.0, *parallel.shares])[offset_N]
