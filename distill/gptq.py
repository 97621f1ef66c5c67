"""Calibrated rounding to 4-bit codes: the errors of a row make up for each other on the inputs that its layer really meets.

GPTQ (Frantar et al. 2022, arXiv 2210.17323). Texts of the pair's own domain go through the drafter block by block, each block
on what the quantized blocks before it give.

Shapes: O outputs, I inputs of a layer, G groups of a row, L columns of a lazy batch, T tokens of a text, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from distill.drift import Text
from pairing.progress import bar

DAMPING = 0.01  # of the Hessian's mean diagonal, as in the paper
LAZY = 128  # columns between two updates of all that follow, as in the paper


def gptq_codes(
    weight_OI: torch.Tensor, hessian_II: torch.Tensor, scales_OG: torch.Tensor, least: int, most: int
) -> torch.Tensor:
    """[O, I] int8 in least…most: codes that make Σ (x·W − x·Q)² small over the inputs x of `hessian_II` = Σ x xᵀ.

    Columns are rounded one at a time, those with the strongest inputs first, and the error of each is spread over the
    columns to come (the paper's equations 2 and 3, by the Cholesky factor of H⁻¹). Which group a column belongs to
    does not change with that order, so the file needs to know nothing of it.
    """
    diagonal_I = hessian_II.diagonal().double()
    order = diagonal_I.argsort(descending=True)
    group_of = (order // (weight_OI.shape[1] // scales_OG.shape[1])).tolist()
    damping = DAMPING * float(diagonal_I.mean()) or 1.0  # inputs that are all zero
    damped_II = hessian_II.double()[order][:, order] + damping * torch.eye(len(order), device=order.device)
    inverse_II = torch.cholesky_inverse(torch.linalg.cholesky(damped_II))
    upper_II = torch.linalg.cholesky(inverse_II, upper=True).float()
    left_OI, scales_OG = weight_OI.float()[:, order], scales_OG.float()
    codes_OI = torch.empty_like(left_OI)
    for start in range(0, len(order), LAZY):
        end = min(start + LAZY, len(order))
        errors_OL = left_OI.new_zeros(len(left_OI), end - start)
        for i in range(start, end):
            scale_O = scales_OG[:, group_of[i]]
            codes_OI[:, i] = (left_OI[:, i] / scale_O).round().clamp(least, most)
            errors_OL[:, i - start] = (left_OI[:, i] - codes_OI[:, i] * scale_O) / upper_II[i, i]
            left_OI[:, i + 1 : end] -= errors_OL[:, i - start, None] * upper_II[i, i + 1 : end]
        left_OI[:, end:] -= errors_OL @ upper_II[start:end, end:]
    return codes_OI[:, order.argsort()].to(torch.int8)


def calibrate(
    model: Any,
    modules: Mapping[str, torch.nn.Module],
    texts: Sequence[Text],
    quantize: Callable[[str, torch.nn.Module, torch.Tensor | None], None],
) -> None:
    """Calls `quantize(name, module, hessian_II)` for each linear layer in `modules`, block after block; it puts the quantized
    values into the module. The Hessian is None for layers outside the blocks.

    Memory: the hidden states of all texts, and the Hessians of one block, float32.
    """
    blocks, left = blocks_of(model), dict(modules)
    with torch.no_grad(), bar("calibrating", total=len(blocks)) as advance:
        hidden_1TH, others = _inputs(model, blocks, texts)
        for block, rest in zip(blocks, others, strict=True):
            within = set(block.modules())
            inside = {name: left.pop(name) for name, module in modules.items() if module in within}
            hessians, _ = _pass(block, inside, hidden_1TH, rest)
            for name, module in inside.items():
                quantize(name, module, hessians.pop(name))
            _, hidden_1TH = _pass(block, {}, hidden_1TH, rest)
            advance(1, "")
    for name, module in left.items():
        quantize(name, module, None)


def blocks_of(model: Any) -> list[torch.nn.Module]:
    """The decoder's layers, in their order."""
    count = model.config.get_text_config().num_hidden_layers
    lists = [m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == count]
    return list(lists[0])


Arguments = tuple[tuple[Any, ...], dict[str, Any]]  # what a block is given beside the hidden states


def _inputs(
    model: Any, blocks: Sequence[torch.nn.Module], texts: Sequence[Text]
) -> tuple[list[torch.Tensor], list[list[Arguments]]]:
    """By text what the first block is given, and by block and text its other arguments."""
    hidden_1TH: list[torch.Tensor] = []
    others: list[list[Arguments]] = [[] for _ in blocks]

    def note(number: int, _block: torch.nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        others[number].append((args[1:], keywords))
        if number == 0:
            hidden_1TH.append(args[0])

    hooks = [b.register_forward_pre_hook(partial(note, i), with_kwargs=True) for i, b in enumerate(blocks)]
    for text in texts:
        model(torch.tensor([text.ids], device=model.device), use_cache=False, logits_to_keep=1)
    for hook in hooks:
        hook.remove()
    return hidden_1TH, others


def _pass(
    block: torch.nn.Module,
    modules: Mapping[str, torch.nn.Module],
    hidden_1TH: Sequence[torch.Tensor],
    rest: Sequence[Arguments],
) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
    """Each text through `block`: Σ x xᵀ over the inputs x of each of `modules`, and the block's outputs."""
    hessians: dict[str, torch.Tensor] = {}

    def add(name: str, _module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        x_TI = args[0].flatten(0, -2).float()
        hessians[name] = hessians.get(name, 0) + x_TI.T @ x_TI

    hooks = [module.register_forward_pre_hook(partial(add, name)) for name, module in modules.items()]
    given = [block(x_1TH, *args, **keywords) for x_1TH, (args, keywords) in zip(hidden_1TH, rest, strict=True)]
    for hook in hooks:
        hook.remove()
    return hessians, [out[0] if isinstance(out, tuple) else out for out in given]
