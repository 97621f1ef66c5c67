"""Where the target's distribution comes from: `get_signal` gives a function from a batch to the signal at its positions.

Two sources, one shape of answer: the cache (recorded by `draftsmith generate`, perhaps cut to fewer ids), or the target
itself, frozen, on its own device and in its own type. Shapes: N supervised positions, K ids of the head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from distill.batches import Batch, Rows, to_device
from distill.head import AnySignal
from distill.losses import FullSignal, Signal
from distill.student import require_plain_head, supervised_hidden
from pairing.errors import InputError

GetSignal = Callable[[Batch], AnySignal]


@dataclass(frozen=True)
class Target:
    """A target online. It never learns."""

    model: Any
    name: str  # for messages
    head_VH: torch.Tensor  # its head's matrix, on the drafter's device
    temperature: float = 1.0  # p is softmax(logits / temperature), and q likewise


def online(
    model: Any, name: str, device: torch.device | str, draft_device: torch.device | str, temperature: float = 1.0
) -> Target:
    """Freezes `model` and moves it to `device`. Its type stays: bfloat16 weights are scored in bfloat16."""
    model.requires_grad_(False).eval().to(device)
    return Target(model, name, model.get_output_embeddings().weight.to(draft_device), temperature)


def get_signal(rows: Rows, target: Target | None = None, top_logprobs: int | None = None) -> GetSignal:
    """The source for batches of `rows`: `target` where one is given, else their cache, of which `top_logprobs` ids are used.

    Raises InputError where the cache holds fewer ids, or the target's rows are others than the drafter's (fault D10).
    """
    if target is not None:
        have = len(target.head_VH)
        if have < rows.real:
            raise InputError(
                f"{target.name} has {have} vocabulary rows, the draft's vocabulary {rows.real} ids: they are no pair; see "
                "`draftsmith check`"
            )
        return lambda batch: _ask(target, batch)
    require_recorded(rows, top_logprobs)
    if top_logprobs is None or top_logprobs == rows.head:
        return lambda batch: batch.signal
    return lambda batch: cut(batch.signal, top_logprobs)


def require_recorded(rows: Rows, top_logprobs: int | None) -> None:
    """Raises InputError where more ids a position are asked for than the answers hold."""
    if top_logprobs is not None and top_logprobs > rows.head:
        raise InputError(
            f"top_logprobs={top_logprobs}: the answers hold {rows.head} ids a position: generate them with more, or ask for "
            f"at most {rows.head}"
        )


def cut(signal: Signal, k: int) -> Signal:
    """The signal that recording only k ids would have given: the others' mass goes into the bucket.

    Draws from outside the longer head are no draws from outside the shorter one, so they go.
    """
    rest_N = signal.head_logp_NK[:, k:].exp().sum(-1)
    return Signal(signal.answer_N, signal.head_ids_NK[:, :k], signal.head_logp_NK[:, :k], signal.tail_N + rest_N)


def require_plain_target(target: Target, batch: Batch) -> None:
    """Raises InputError for a target whose logits are not its last hidden states times its head."""
    require_plain_head(target.model, to_device(batch, target.model.device), "target")


def _ask(target: Target, batch: Batch) -> FullSignal:
    device, back = target.model.device, batch.input_BL.device
    with torch.no_grad():
        hidden_NH = supervised_hidden(target.model, to_device(batch, device))
    if not bool(torch.isfinite(hidden_NH).all()):
        bad = int(batch.row_N[(~torch.isfinite(hidden_NH).all(-1)).nonzero()[0].item()])
        raise InputError(
            f"{target.name} gives values that are not finite on prompt {batch.ids[bad]}: load it in another type "
            "(target_dtype=float32), or leave that prompt out"
        )
    return FullSignal(batch.signal.answer_N, hidden_NH.to(back), target.head_VH, target.temperature)
