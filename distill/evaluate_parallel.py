"""Acceptance of a drafter that writes all its drafts in one pass, on the target's own text: τ for every K, and by offset.

From every start the drafts of K positions given the prefix alone (`mask_blocks`), held against what the target wrote; then
rounds are replayed over the answer. A mask sees none behind it, so drafts for a smaller K are the first of those for a larger.
Drafts that are drawn are accepted with min(1, q/p) here too: p is given the drafts before it, which by then are the text's own.
Shapes: T tokens of an answer, K drafts of a round, N positions of a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from numpy.typing import NDArray

from distill.batches import Batch, Ints, Rows, answer_lengths
from distill.emphasis import starts
from distill.evaluate import By, in_order, require_finite, told_by
from distill.head import Head, head_scores
from distill.mask_blocks import with_blocks
from distill.objective import DraftSampling
from distill.options import decoder_autocast
from distill.student import supervised_hidden
from pairing.acceptance import replay_rounds
from pairing.bootstrap import interval

MASKS = 1024  # mask columns of a row in one pass: attention sees all of them at once


@dataclass(frozen=True)
class PromptRounds:
    """One held-out prompt: every round that could start, answer by answer [T, K], by both ways of choosing drafts. Row 0 starts
    no round and is 0.
    """

    id: str
    accepted: list[NDArray[np.int8]]  # 1 where the likeliest draft j, with s tokens known, is the answer's token
    ratio: list[NDArray[np.float32]] = field(default_factory=list)  # min(1, q/p) there
    by: By | None = "accepted"  # which of the two is w as the drafter is served: see `distill.evaluate.told_by`
    masks: list[NDArray[np.int8]] = field(default_factory=list)  # 1 where the likeliest draft is the mask token itself

    @property
    def w(self) -> Sequence[NDArray[Any]]:
        """As `pairing.acceptance.replay_rounds` takes it; nothing where it is not known."""
        return [] if self.by is None else self.ratio if self.by == "ratio" else self.accepted


def score_rounds(
    accelerator: Accelerator,
    model: Any,
    rows: Rows,
    mask_id: int,
    num_speculative_tokens: int,
    *,
    batch_size: int,
    chunk: int | None = None,
    block: int = Head.block,
    most: int | None = None,
    draft_sample_method: DraftSampling = "greedy",
    where: str = "evaluation",
) -> list[PromptRounds]:
    """Every start of the first `most` prompts (None: all), shared out over the ranks and gathered; in the rows' order. τ of what
    follows from them is that of a drafter served with `draft_sample_method`. Raises PartFailedError as `score_prompts` does."""
    K, head, weight = num_speculative_tokens, Head(rows.real, chunk, block), model.get_output_embeddings().weight
    by = told_by(rows, draft_sample_method)

    def score(batch: Batch, piece: Ints) -> list[PromptRounds]:
        first_N = starts(batch.row_N, batch.column_N)
        kinds = (torch.int8, torch.float32, torch.int8)
        accepted_NK, ratio_NK, mask_NK = (torch.zeros(len(first_N), K, dtype=kind) for kind in kinds)
        place_N = torch.arange(len(first_N), device=first_N.device) - torch.searchsorted(batch.row_N, batch.row_N)
        part_N = place_N * (K - 1) // MASKS  # which of several passes a start's masks go into
        for part in range(int(part_N.max()) + 1):
            masked = with_blocks(batch, (part_N == part) * (K - 1), mask_id)
            assert masked.blocks is not None
            with decoder_autocast(accelerator.device, accelerator.mixed_precision == "bf16"):
                hidden = supervised_hidden(model, masked)
            scores = head_scores(hidden, weight, masked.signal, head)
            offset_N = masked.blocks.offset_N.cpu()
            start_N = masked.blocks.source_N.cpu() - offset_N
            accepted_NK[start_N, offset_N] = scores.accepted_N.to(torch.int8).cpu()
            ratio_NK[start_N, offset_N] = scores.ratio_N.cpu()
            mask_NK[start_N, offset_N] = (scores.argmax_N == mask_id).to(torch.int8).cpu()
        for w_NK in (accepted_NK, ratio_NK, mask_NK):
            w_NK[first_N.cpu()] = 0
        found = []
        for b, i in enumerate(piece):
            mine_N, lengths = (batch.row_N == b).cpu(), answer_lengths(rows, int(i))
            accepted, ratio, masks = (
                [w.numpy() for w in w_NK[mine_N].split(lengths)] for w_NK in (accepted_NK, ratio_NK, mask_NK)
            )
            found.append(PromptRounds(batch.ids[b], accepted, ratio, by, masks))
        return found

    rounds = in_order(accelerator, model, rows, batch_size, most, score)
    for s in rounds:
        require_finite(f"{where}, with masks", s.id, np.concatenate(s.ratio))
    return rounds


def rounds_summary(scores: Sequence[PromptRounds]) -> dict[str, Any]:
    """τ for each K, and at each offset the share of starts whose draft is the target's token ("top1_by_offset": given the
    text alone, whatever the drafts before it were) and the share of rounds at the largest K that get past it ("survival");
    of all these drafts the share that is the mask token itself ("mask_share"), which no target accepts. What no round tells, or
    no known w, is null."""
    answers, likeliest = [w for s in scores for w in s.w], [w for s in scores for w in s.accepted]
    K = likeliest[0].shape[1]
    tau = {k: replay_rounds(answers, k).acceptance_length for k in range(1, K + 1)}
    hits, counts = np.zeros(K), np.zeros(K)
    for w in likeliest:
        for j in range(K):
            of = _drafts(w, j)
            hits[j], counts[j] = hits[j] + of.sum(), counts[j] + len(of)
    masks = [_drafts(w, j) for s in scores for w in s.masks for j in range(K)]
    drafts = sum(map(len, masks))
    longest = replay_rounds(answers, K)
    known = bool(longest.rounds_P.any())
    return {
        "tau": {str(k): _figure(t) for k, t in tau.items()},
        "top1_by_offset": [_figure(h / n) if n else None for h, n in zip(hits, counts, strict=True)],
        "survival": [_figure(s) if known else None for s in longest.survival_per_pos],
        "mask_share": sum(float(m.sum()) for m in masks) / drafts if drafts else None,
    }


def _drafts(w_TK: NDArray[Any], j: int) -> NDArray[Any]:
    """Of every round that could start, draft j, where the answer goes on that far."""
    return w_TK[1 : max(1, len(w_TK) - j), j]


def compare_rounds(
    before: Sequence[PromptRounds], after: Sequence[PromptRounds], num_speculative_tokens: int
) -> dict[str, Any]:
    """Both summaries and the change of τ at K with its interval, prompts drawn in pairs."""
    assert [s.id for s in before] == [s.id for s in after]
    K = num_speculative_tokens
    counts = [np.array([_counts(s, K) for s in scores]) for scores in (before, after)]  # [P, 2]: accepted, rounds

    def change(w_RP: NDArray[np.float64]) -> NDArray[np.float64]:
        old, new = (w_RP @ c_P2 for c_P2 in counts)
        return np.asarray(new[:, 0] / new[:, 1] - old[:, 0] / old[:, 1])

    first, last = rounds_summary(before), rounds_summary(after)
    known = bool(counts[0][:, 1].any())
    points = interval(change, len(after)) if known else (np.nan, np.nan)
    point = float(change(np.ones((1, len(after))))[0]) if known else np.nan
    return {
        "num_speculative_tokens": K,
        "before": first,
        "after": last,
        "change": [_figure(x) for x in (point, *points)],
    }


def _counts(score: PromptRounds, num_speculative_tokens: int) -> tuple[float, float]:
    one = replay_rounds(score.w, num_speculative_tokens)
    return float(one.accepted_PK.sum()), float(one.rounds_P.sum())


def _figure(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None
