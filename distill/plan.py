"""What a run would take, before it starts: steps, sizes on disk and in memory, and a rough time."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from distill.batches import Rows
from distill.evaluate_parallel import MASKS
from distill.head import QUANTITIES, positions_at_once
from distill.losses import FullSignal, Signal
from distill.settings import Settings, steps_of
from distill.student import freeze
from pairing.weights import parameters, read_headers


def plan_run(
    model: Any,
    draft: Path,
    beside: Mapping[Path, int],
    settings: Settings,
    rows: Rows,
    heldout: Mapping[str, Rows],
    processes: int,
    device: torch.device,
) -> dict[str, Any]:
    """Sizes, and a rough time from a matrix product's speed on this machine.

    `model` is the draft as it is trained; `beside` are the folders of what runs frozen beside it (an online target, a
    reference drafter) and the bytes of a weight of each, once per process.
    """
    params = sum(p.numel() for _, p in freeze(model, settings.trainable))
    head = model.get_output_embeddings().weight
    body = sum(p.numel() for p in model.parameters()) - head.numel()
    body -= 0 if model.config.tie_word_embeddings else model.get_input_embeddings().weight.numel()
    frozen = {folder: parameters(read_headers(folder)) for folder in beside}
    per_epoch, total = steps_of(settings, rows, settings.batch_size * settings.accumulation * processes)
    tokens, supervised = int(rows.tokens_P.sum()), int(rows.supervised_P.sum())
    head_passes = 4 if settings.trainable == "layers" else 6
    masks = round(supervised * sum(settings.parallel.shares)) if settings.parallel else 0  # at most: answers end
    products = 6 * body * (tokens + masks) + 2 * sum(frozen.values()) * tokens
    products += head_passes * head.numel() * (supervised + masks)
    copy = (
        4 * body if settings.quantizer is not None else 0
    )  # the weights themselves, while their 4-bit values stand in
    weights = copy + 4 * sum(p.numel() for p in model.parameters()) + sum(n * beside[f] for f, n in frozen.items())
    columns = min(head.shape[0], settings.block)
    quantities = QUANTITIES[FullSignal if beside else Signal]
    chunk = settings.chunk or positions_at_once(columns, device, quantities)
    return {
        "prompts": len(rows),
        "tokens": tokens,
        "supervised_tokens": supervised,
        "mask_tokens": masks,
        "heldout": {n: len(r) for n, r in heldout.items()},
        "processes": processes,
        "steps_per_epoch": per_epoch,
        "steps": total,
        "minutes": settings.minutes,
        "rough_minutes_per_epoch": round(products / _flops(device) / processes / 60, 2),
        "trainable_parameters": params,
        "checkpoint_bytes": 12 * params,
        "drafter_bytes": sum(f.stat().st_size for f in draft.glob("*.safetensors")),
        "memory_bytes": weights
        + 12 * params
        + 4 * quantities * chunk * columns
        + _attention_bytes(settings, rows, heldout),
    }


def _attention_bytes(settings: Settings, rows: Rows, heldout: Mapping[str, Rows]) -> int:
    """The attention mask of a batch whose rows are all as long as the longest: float32, (columns + masks)² a row.

    Of training masks their expected number, as answers end and columns are shared at most; an evaluation has all of a block, and
    `MASKS` of a row in one pass.
    """
    parallel = settings.parallel
    if parallel is None:
        return 0
    K = max(parallel.num_speculative_tokens, settings.num_speculative_tokens)
    seen = [_longest(rows, sum(parallel.shares), math.inf)]
    seen += [_longest(held, K - 1, math.ceil(MASKS / (K - 1)) * (K - 1)) for held in heldout.values()]
    return 4 * settings.batch_size * max(seen) ** 2


def _longest(rows: Rows, masks: float, most: float) -> int:
    """Columns that the row with the most of them has with so many masks a supervised token; the last token is no input."""
    return max(
        int(tokens) - 1 + round(min(int(supervised) * masks, most))
        for tokens, supervised in zip(rows.tokens_P, rows.supervised_P, strict=True)
    )


def _flops(device: torch.device) -> float:
    """What matrix products of a small model's size reach here, after a first one to warm up."""
    a, b = torch.ones(512, 576, device=device), torch.ones(576, 4096, device=device)
    started, n = time.perf_counter(), 0
    while time.perf_counter() - started < 0.2 or n < 3:
        started = time.perf_counter() if n == 1 else started
        (a @ b).sum().item()
        n += 1
    return 2 * 512 * 576 * 4096 * (n - 1) / (time.perf_counter() - started)
