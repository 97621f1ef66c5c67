"""GPTQ: nearest codes where inputs are independent, smaller errors where they are not, and never better than the best."""

from __future__ import annotations

from itertools import product

import torch

from distill.gptq import blocks_of, gptq_codes
from distill.w4a16 import LEAST, MOST, codes_of, scales_of, values_of
from tests import tiny


def weights(outputs: int, inputs: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(seed))


def inputs_like(inputs: int, tokens: int = 500) -> torch.Tensor:
    """[T, I] with strong correlations between neighbours and very different strengths."""
    draw = torch.Generator().manual_seed(1)
    mix_II = torch.randn(inputs, inputs // 4, generator=draw) @ torch.randn(inputs // 4, inputs, generator=draw)
    x_TI = torch.randn(tokens, inputs, generator=draw) @ (0.1 * mix_II + torch.eye(inputs))
    return x_TI * torch.linspace(0.1, 3, inputs)


def error(x_TI: torch.Tensor, weight_OI: torch.Tensor, codes_OI: torch.Tensor, scales_OG: torch.Tensor) -> float:
    return float((x_TI @ (weight_OI - values_of(codes_OI, scales_OG, torch.float32)).T).norm())


def test_independent_inputs_of_equal_strength_give_nearest_codes() -> None:
    weight_OI = weights(8, 256)
    scales_OG = scales_of(weight_OI, 64)
    codes_OI = gptq_codes(weight_OI, 3 * torch.eye(256), scales_OG, LEAST, MOST)
    assert torch.equal(codes_OI, codes_of(weight_OI, scales_OG))
    unseen_OI = gptq_codes(weight_OI, torch.zeros(256, 256), scales_OG, LEAST, MOST)
    assert torch.equal(unseen_OI, codes_OI)


def test_errors_make_up_for_each_other() -> None:
    """Over more columns than a lazy batch has, and with scales by group in the stored order."""
    weight_OI, x_TI = weights(16, 320), inputs_like(320)
    scales_OG = scales_of(weight_OI, 32)
    codes_OI = gptq_codes(weight_OI, x_TI.T @ x_TI, scales_OG, LEAST, MOST)
    assert int(codes_OI.min()) >= LEAST
    assert int(codes_OI.max()) <= MOST
    nearest = error(x_TI, weight_OI, codes_of(weight_OI, scales_OG), scales_OG)
    assert error(x_TI, weight_OI, codes_OI, scales_OG) < 0.7 * nearest


def test_between_the_best_and_the_nearest() -> None:
    """Rows of four values, against all 16^4 choices of each."""
    weight_OI = weights(16, 4)
    hessian_II = torch.full((4, 4), 0.8) + 0.2 * torch.eye(4)
    scales_OG = scales_of(weight_OI, 4)
    every_XI = torch.tensor(list(product(range(LEAST, MOST + 1), repeat=4)), dtype=torch.float32)

    def errors(codes_XI: torch.Tensor, row: int) -> torch.Tensor:
        gap_XI = weight_OI[row] - codes_XI * scales_OG[row].float()
        return ((gap_XI @ hessian_II) * gap_XI).sum(-1)

    ours_OI = gptq_codes(weight_OI, hessian_II, scales_OG, LEAST, MOST)
    best, ours, nearest = (
        torch.cat([errors(codes[row], row).min().reshape(1) for row in range(16)])
        for codes in (every_XI.expand(16, -1, -1), ours_OI[:, None], codes_of(weight_OI, scales_OG)[:, None])
    )
    assert (best <= ours + 1e-6).all()
    assert best.sum() < ours.sum() < 0.7 * nearest.sum()


def test_the_blocks_are_the_decoders() -> None:
    model = tiny.model(layers=3)
    assert blocks_of(model) == list(model.model.layers)
