"""Which positions count for how much: by their chance to be reached in a round, or those that are worth learning.

Shapes: N supervised positions in a batch's order (row by row, answer by answer), K tokens drafted per round.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def noise(ids: Sequence[str], row_N: torch.Tensor, seed: int) -> torch.Tensor:
    """A random number per position [N], on `row_N`'s device: the same however rows are batched and after a resume."""
    rows = [int.from_bytes(id_.encode()[:7], "big") for id_ in ids]
    counts = torch.bincount(row_N.cpu(), minlength=len(rows)).tolist()
    draws = [
        torch.rand(n, generator=torch.Generator().manual_seed(row + seed)) for row, n in zip(rows, counts, strict=True)
    ]
    return torch.cat(draws).to(row_N.device)


def starts(row_N: torch.Tensor, column_N: torch.Tensor) -> torch.Tensor:
    """Whether a position is the first of its answer [N]: the one before it is another row's or no neighbour."""
    first_N = torch.ones_like(row_N, dtype=torch.bool)
    first_N[1:] = (row_N[1:] != row_N[:-1]) | (column_N[1:] != column_N[:-1] + 1)
    return first_N


def survival_weights(w_N: torch.Tensor, first_N: torch.Tensor, num_speculative_tokens: int) -> torch.Tensor:
    """s_t = 1 + w_{t−1} (1 + w_{t−2} (…)), K − 1 deep [N]: the derivative of E[τ] by the acceptance at t, up to a constant.

    Derived: with rounds starting anywhere E[τ] = 1 + Σ_j E[Π_{i<j} w_{t+i} · a_{t+j}], so a_t appears once per round that
    reaches t: those that start at t, at t − 1 if w_{t−1} was accepted, and so on. The first token of an answer comes from
    prefill and is never drafted, so no round passes over it; it keeps weight 1, which costs nothing. `w_N`: chance of
    acceptance given the target's prefix, without gradient.
    """
    w_N = torch.where(first_N, 0.0, w_N)
    weight_N = torch.ones_like(w_N)
    for _ in range(num_speculative_tokens - 1):
        passed_N = torch.cat([w_N.new_zeros(1), (w_N * weight_N)[:-1]])
        weight_N = 1 + torch.where(first_N, 0.0, passed_N)
    return weight_N


def worth_learning(gap_N: torch.Tensor, row_N: torch.Tensor, share: float) -> torch.Tensor:
    """The `share` of each row's positions with the largest gap, at least one [N, bool]: AdaSPEC's filter.

    gap is the drafter's loss less a reference drafter's (AdaSPEC, 2025): large where there is something left to learn, small
    where the token is beyond a small model. AdaSPEC ranks within a batch; here within a row, so that how a window is split over
    ranks and accumulation steps changes nothing (fault D11).
    """
    keep_N = torch.zeros_like(row_N, dtype=torch.bool)
    for row in row_N.unique().tolist():
        at = (row_N == row).nonzero().squeeze(-1)
        most = gap_N[at].topk(max(1, round(share * len(at)))).indices
        keep_N[at[most]] = True
    return keep_N
