"""From stored answers to batches: checked once, ordered by (seed, epoch), grouped by length, split over ranks.

Shapes: B rows, L columns, N supervised positions, K ids of the target's head. Supervised are the answer's tokens, its
ending token among them; prompts are not. Hidden column t predicts token t + 1, so the last token is no input.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from distill.answers import NO_PROBABILITY, Answers
from distill.losses import Signal
from pairing.errors import InputError

Ints = NDArray[np.int64]
SLICE = 512  # rows that are checked at once
POOL = 16  # windows that are sorted by length together: enough to pad little, few enough to mix lengths over time


@dataclass(frozen=True)
class Batch:
    ids: list[str]
    input_BL: torch.Tensor  # padded on the right
    shared: int  # leading columns that are equal in all rows and hold no supervised position
    row_N: torch.Tensor
    column_N: torch.Tensor
    signal: Signal


@dataclass(frozen=True)
class Rows:
    """Answers that fit a drafter, with what ordering needs in memory and the rest memory-mapped."""

    data: Any  # datasets.Dataset
    head: int  # K
    real: int  # ids from here on are padding rows
    prompt_P: Ints  # tokens per prompt
    answer_P: Ints  # supervised tokens per answer

    def __len__(self) -> int:
        return len(self.prompt_P)

    @property
    def share(self) -> float:
        """Supervised tokens / all tokens."""
        return float(self.answer_P.sum() / (self.prompt_P.sum() + self.answer_P.sum()))


def check_rows(answers: Answers, name: str, *, rows: int, real: int, context: int) -> Rows:
    """Raises InputError where these answers cannot train or test a drafter of `rows` rows (fault D10), of which those
    below `real` are real ids, with `context` positions: other rows, ids past the vocabulary, too long, nothing to learn.
    """
    if answers.meta["rows"] != rows:
        raise InputError(
            f"{name}: the target that wrote them has {answers.meta['rows']} vocabulary rows, the draft {rows}: "
            "vLLM refuses such a pair; make the draft from that target with `draftsmith init`"
        )
    head = int(answers.meta["top_logprobs"])
    lengths: list[tuple[int, int]] = []
    too_long: list[str] = []
    for start in range(0, len(answers.data), SLICE):
        for row in _slice(answers.data, start):
            prompt, answer = len(row["prompt_ids"]), len(row["answer_ids"])
            lengths.append((prompt, answer))
            if prompt + answer > context:
                too_long.append(f"{row['id']} ({prompt} + {answer} tokens)")
            for ids in (row["prompt_ids"], row["answer_ids"]):
                if len(ids) and not 0 <= ids.min() <= ids.max() < real:
                    raise InputError(
                        f"{name}: prompt {row['id']} holds id {ids.max()}, the draft's vocabulary ends at {real - 1}: "
                        "this draft is not of the target's vocabulary (see `draftsmith check`)"
                    )
            if len(row["head_ids"]) != answer * head or (answer and row["head_ids"].max() >= rows):
                raise InputError(
                    f"{name}: prompt {row['id']} lacks part of its recorded distribution: generate it again"
                )
    if too_long:
        raise InputError(
            f"{name}: prompt {too_long[0]} is longer than the draft's context of {context} ({len(too_long)} such rows): "
            "leave it out, or make a draft with a longer context"
        )
    prompt_P, answer_P = np.array(lengths, dtype=np.int64).reshape(-1, 2).T
    if answer_P.sum() == 0:
        raise InputError(
            f"{name}: no answer token in {len(lengths)} rows, so there is nothing to learn: generate again"
        )
    return Rows(answers.data.with_format("numpy"), head, real, prompt_P, answer_P)


def _slice(data: Any, start: int) -> list[dict[str, Any]]:
    columns = data.with_format("numpy")[start : start + SLICE]
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def windows(rows: Rows, seed: int, epoch: int, size: int) -> list[Ints]:
    """The row indices of each optimizer step of an epoch, every row once; the last window may be short.

    A pure function of (rows, seed, epoch, size): how a window is split over ranks and accumulation steps changes
    nothing (faults D11, D14). Windows hold rows of similar length, in random order of windows.
    """
    rng = np.random.default_rng([seed, epoch])
    order = rng.permutation(np.flatnonzero(rows.answer_P > 0))
    full: list[Ints] = []
    short: list[Ints] = []
    for start in range(0, len(order), POOL * size):
        pool = order[start : start + POOL * size]
        pool = pool[np.argsort((rows.prompt_P + rows.answer_P)[pool], kind="stable")]
        for i in range(0, len(pool), size):
            (full if len(pool[i : i + size]) == size else short).append(pool[i : i + size])
    return [full[i] for i in rng.permutation(len(full))] + short


def micro_batches(window: Ints, batch_size: int, rank: int, ranks: int) -> list[Ints]:
    """This rank's part of a window, in pieces of at most `batch_size` rows. May be empty on a short last window."""
    return [window[i : i + batch_size] for i in range(0, len(window), batch_size)][rank::ranks]


def collate(rows: Rows, indices: Ints, device: torch.device | str = "cpu") -> Batch:
    """The batch of these rows, with the target's signal at exactly the supervised positions."""
    picked = [rows.data[int(i)] for i in indices]
    prompts = [np.asarray(r["prompt_ids"], dtype=np.int64) for r in picked]
    answers = [np.asarray(r["answer_ids"], dtype=np.int64) for r in picked]
    lengths = [len(p) + len(a) - 1 for p, a in zip(prompts, answers, strict=True)]
    input_BL = np.zeros((len(picked), max(lengths)), dtype=np.int64)  # causal attention never looks at the padding
    for b, (p, a) in enumerate(zip(prompts, answers, strict=True)):
        input_BL[b, : lengths[b]] = np.concatenate([p, a])[: lengths[b]]
    shortest = min(len(p) for p in prompts) - 1  # the prompt's last column predicts the first answer token
    equal_L = (input_BL[:, :shortest] == input_BL[:1, :shortest]).all(axis=0)
    shared = int(equal_L.argmin()) if not equal_L.all() else shortest

    def flat(column: str, dtype: type[Any]) -> NDArray[Any]:
        return np.concatenate([np.asarray(r[column], dtype=dtype) for r in picked])

    signal = _real_only(
        Signal(
            torch.from_numpy(np.concatenate(answers)),
            torch.from_numpy(flat("head_ids", np.int64).reshape(-1, rows.head)),
            torch.from_numpy(flat("head_logprobs", np.float32).reshape(-1, rows.head)),
            torch.from_numpy(flat("tail_mass", np.float32)),
        ),
        rows.real,
    )
    row_N = np.repeat(np.arange(len(picked)), [len(a) for a in answers])
    column_N = np.concatenate([len(p) - 1 + np.arange(len(a)) for p, a in zip(prompts, answers, strict=True)])
    batch = Batch(
        [str(r["id"]) for r in picked],
        torch.from_numpy(input_BL),
        shared if len(picked) > 1 else 0,
        torch.from_numpy(row_N),
        torch.from_numpy(column_N),
        signal,
    )
    return to_device(batch, device)


def _real_only(signal: Signal, real: int) -> Signal:
    """The target cut to its real vocabulary, as the drafter is: its padding rows' mass goes to no one (D1, D10)."""
    padding_NK = signal.head_ids_NK >= real
    if not padding_NK.any():
        return signal
    on_padding_N = (signal.head_logp_NK.exp() * padding_NK).sum(-1)
    logp_NK = signal.head_logp_NK - torch.log1p(-on_padding_N)[:, None]
    return Signal(
        signal.answer_N,
        signal.head_ids_NK,
        logp_NK.masked_fill(padding_NK, NO_PROBABILITY),
        signal.tail_N / (1 - on_padding_N),
    )


def to_device(batch: Batch, device: torch.device | str) -> Batch:
    s = batch.signal
    signal = Signal(s.answer_N.to(device), s.head_ids_NK.to(device), s.head_logp_NK.to(device), s.tail_N.to(device))
    return replace(
        batch,
        input_BL=batch.input_BL.to(device),
        row_N=batch.row_N.to(device),
        column_N=batch.column_N.to(device),
        signal=signal,
    )


def tags(rows: Rows, index: int) -> dict[str, Any]:
    return dict(json.loads(str(rows.data[index]["tags"])))
