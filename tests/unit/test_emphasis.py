"""Survival weights against the derivative of the exact E[τ]; the filter's share, per row."""

from __future__ import annotations

import pytest
import torch

from distill.emphasis import starts, survival_weights, worth_learning


def expected_length(w_T: torch.Tensor, K: int) -> torch.Tensor:
    """Σ over every round start t ≥ 1 of the tokens accepted, drafts past the end rejected: the slow definition."""
    total = torch.zeros((), dtype=w_T.dtype)
    for t in range(1, len(w_T)):
        alive = torch.ones((), dtype=w_T.dtype)
        for j in range(t, min(t + K, len(w_T))):
            alive = alive * w_T[j]
            total = total + alive
    return total


@pytest.mark.parametrize("K", [1, 2, 4, 7])
def test_weights_are_the_derivative_of_tau(K: int) -> None:
    """a_t stands at the end of its products and w before it, so the derivative is by the last factor only."""
    torch.manual_seed(0)
    w = torch.rand(12, dtype=torch.float64)
    slow = torch.zeros(12, dtype=torch.float64)
    for t in range(1, 12):
        for j in range(t, min(t + K, 12)):
            slow[j] += w[t:j].prod()
    first = torch.zeros(12, dtype=torch.bool)
    first[0] = True
    weights = survival_weights(w, first, K)
    torch.testing.assert_close(weights[1:], slow[1:])
    assert weights[0] == 1
    assert (weights * torch.where(first, 0.0, w)).sum().item() == pytest.approx(expected_length(w, K).item())


def test_answers_do_not_reach_into_each_other() -> None:
    w = torch.tensor([0.9, 0.5, 0.8, 0.9, 0.5, 0.8])
    row, column = torch.tensor([0, 0, 0, 0, 0, 1]), torch.tensor([4, 5, 6, 9, 10, 3])
    first = starts(row, column)
    assert first.tolist() == [True, False, False, True, False, True]
    assert survival_weights(w, first, 4).tolist() == [1, 1, 1.5, 1, 1, 1]


def test_the_filter_keeps_a_share_of_each_row() -> None:
    gap = torch.tensor([0.1, 3.0, 2.0, -1.0, 0.0, 9.0, 8.0])
    row = torch.tensor([0, 0, 0, 0, 0, 1, 1])
    assert worth_learning(gap, row, 0.4).tolist() == [False, True, True, False, False, True, False]
    assert worth_learning(gap, row, 0.01).tolist() == [False, True, False, False, False, True, False]
    assert worth_learning(gap, row, 1.0).all()
