"""From stored answers to batches: checked once, ordered by (seed, epoch), grouped by length, split over ranks.

Shapes: B rows, L columns, N supervised positions, K ids of the target's head, M drawn from its tail, P rows in all.
Supervised are the answers' tokens, their ending tokens among them; prompts are not. Hidden column t predicts token t + 1, so
the last token is no input.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from distill.answers import NO_PROBABILITY, Answers, good_spans, spans_of, supervised_index
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
    blocks: Blocks | None = None


@dataclass(frozen=True)
class Blocks:
    """Mask tokens that stand behind a batch's own columns, M a row at most (see `mask_blocks`). The masks' positions come
    after the plain ones in `row_N`, row by row, block by block.
    """

    plain: Batch  # the batch without them
    start_BM: torch.Tensor  # the column that a mask's block follows
    offset_BM: torch.Tensor  # its place in the block, from 1 on; 0 is padding
    source_N: torch.Tensor  # the plain position that has the signal of a position's token
    before_N: torch.Tensor  # the position one offset earlier in the same block; -1 for the plain ones
    offset_N: torch.Tensor


@dataclass(frozen=True)
class Rows:
    """Answers that fit a drafter, with what ordering needs in memory and the rest memory-mapped."""

    data: Any  # datasets.Dataset
    head: int  # K
    tail: int  # M
    real: int  # ids from here on are padding rows
    tokens_P: Ints  # all tokens of a row
    supervised_P: Ints  # those in its answers
    temperature: float  # at which they were drawn; 0 where they were not

    def __len__(self) -> int:
        return len(self.tokens_P)

    @property
    def share(self) -> float:
        """Supervised tokens / all tokens."""
        return float(self.supervised_P.sum() / self.tokens_P.sum())


def check_rows(answers: Answers, name: str, *, rows: int, real: int, context: int) -> Rows:
    """Raises InputError where these answers cannot train or test a drafter of `rows` rows (fault D10), of which those
    below `real` are real ids, with `context` positions: other rows, ids past the vocabulary, too long, nothing to learn.
    """
    if answers.meta["rows"] != rows:
        raise InputError(
            f"{name}: the target that wrote them has {answers.meta['rows']} vocabulary rows, the draft {rows}: "
            "vLLM refuses such a pair; `draftsmith repair` gives a draft of the same tokenizer the target's rows, else make the "
            "draft from that target with `draftsmith init`"
        )
    head, tail = int(answers.meta["top_logprobs"]), int(answers.meta.get("tail_samples", 0))
    lengths: list[tuple[int, int]] = []
    too_long: list[str] = []
    for start in range(0, len(answers.data), SLICE):
        for row in _slice(answers.data, start):
            ids, supervised = row["input_ids"], len(supervised_index(row["spans"]))
            lengths.append((len(ids), supervised))
            if len(ids) > context:
                too_long.append(f"{row['id']} ({len(ids)} tokens)")
            if not good_spans(row["spans"], len(ids)):
                raise InputError(
                    f"{name}: prompt {row['id']} has answers at {row['spans'].tolist()} of {len(ids)} tokens, one of them empty "
                    "or out of place: generate it again"
                )
            if len(ids) and not 0 <= ids.min() <= ids.max() < real:
                raise InputError(
                    f"{name}: prompt {row['id']} holds id {ids.max()}, the draft's vocabulary ends at {real - 1}: "
                    "this draft is not of the target's vocabulary (see `draftsmith check`)"
                )
            whole = len(row["head_ids"]) == supervised * head and len(row["tail_ids"]) == supervised * tail
            # the head may hold padding rows, which vLLM does not leave out; what is drawn never does
            if not whole or row["head_ids"].max(initial=0) >= rows or row["tail_ids"].max(initial=0) >= real:
                raise InputError(
                    f"{name}: prompt {row['id']} lacks part of its recorded distribution: generate it again"
                )
    if too_long:
        raise InputError(
            f"{name}: prompt {too_long[0]} is longer than the draft's context of {context} ({len(too_long)} such rows): "
            "leave it out, or make a draft with a longer context"
        )
    tokens_P, supervised_P = np.array(lengths, dtype=np.int64).reshape(-1, 2).T
    if supervised_P.sum() == 0:
        raise InputError(
            f"{name}: no answer token in {len(lengths)} rows, so there is nothing to learn: generate again"
        )
    temperature = answers.temperature or 0.0
    return Rows(answers.data.with_format("numpy"), head, tail, real, tokens_P, supervised_P, temperature)


def ids_in(rows: Rows) -> set[int]:
    """Every id that some row holds, prompts too."""
    found: set[int] = set()
    for start in range(0, len(rows), SLICE):
        found |= set(np.unique(np.concatenate(rows.data[start : start + SLICE]["input_ids"])).tolist())
    return found


def supervised_ids(rows: Rows) -> set[int]:
    """Every id that some answer holds."""
    found: set[int] = set()
    for start in range(0, len(rows), SLICE):
        for row in _slice(rows.data, start):
            found |= set(row["input_ids"][supervised_index(row["spans"])].tolist())
    return found


def _slice(data: Any, start: int) -> list[dict[str, Any]]:
    columns = data.with_format("numpy")[start : start + SLICE]
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def windows(rows: Rows, seed: int, epoch: int, size: int) -> list[Ints]:
    """The row indices of each optimizer step of an epoch, every row once; the last window may be short.

    A pure function of (rows, seed, epoch, size): how a window is split over ranks and accumulation steps changes
    nothing (faults D11, D14). Windows hold rows of similar length, in random order of windows.
    """
    rng = np.random.default_rng([seed, epoch])
    order = rng.permutation(np.flatnonzero(rows.supervised_P > 0))
    full: list[Ints] = []
    short: list[Ints] = []
    for start in range(0, len(order), POOL * size):
        pool = order[start : start + POOL * size]
        pool = pool[np.argsort(rows.tokens_P[pool], kind="stable")]
        for i in range(0, len(pool), size):
            (full if len(pool[i : i + size]) == size else short).append(pool[i : i + size])
    return [full[i] for i in rng.permutation(len(full))] + short


def micro_batches(window: Ints, batch_size: int, rank: int, ranks: int) -> list[Ints]:
    """This rank's part of a window, in pieces of at most `batch_size` rows. May be empty on a short last window."""
    return [window[i : i + batch_size] for i in range(0, len(window), batch_size)][rank::ranks]


def collate(rows: Rows, indices: Ints, device: torch.device | str = "cpu") -> Batch:
    """The batch of these rows, with the target's signal at exactly the supervised positions."""
    picked = [rows.data[int(i)] for i in indices]
    texts = [np.asarray(r["input_ids"], dtype=np.int64) for r in picked]
    answers = [supervised_index(r["spans"]) for r in picked]
    input_BL = np.zeros(
        (len(picked), max(map(len, texts)) - 1), dtype=np.int64
    )  # causal attention never sees the padding
    for b, text in enumerate(texts):
        input_BL[b, : len(text) - 1] = text[:-1]
    shortest = min(int(a[0]) for a in answers) - 1  # the first supervised column of any row
    equal_L = (input_BL[:, :shortest] == input_BL[:1, :shortest]).all(axis=0)
    shared = int(equal_L.argmin()) if not equal_L.all() else shortest

    def flat(column: str, dtype: type[Any]) -> NDArray[Any]:
        return np.concatenate([np.asarray(r[column], dtype=dtype) for r in picked])

    signal = _real_only(
        Signal(
            torch.from_numpy(np.concatenate([text[a] for text, a in zip(texts, answers, strict=True)])),
            torch.from_numpy(flat("head_ids", np.int64).reshape(-1, rows.head)),
            torch.from_numpy(flat("head_logprobs", np.float32).reshape(-1, rows.head)),
            torch.from_numpy(flat("tail_mass", np.float32)),
            torch.from_numpy(flat("tail_ids", np.int64).reshape(-1, rows.tail)) if rows.tail else None,
            torch.from_numpy(flat("tail_logprobs", np.float32).reshape(-1, rows.tail)) if rows.tail else None,
        ),
        rows.real,
    )
    row_N = np.repeat(np.arange(len(picked)), [len(a) for a in answers])
    column_N = np.concatenate(answers) - 1
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
    rest_N1 = torch.log1p(-on_padding_N)[:, None]
    return replace(
        signal,
        head_logp_NK=(signal.head_logp_NK - rest_N1).masked_fill(padding_NK, NO_PROBABILITY),
        tail_N=signal.tail_N / (1 - on_padding_N),
        tail_logp_NM=None if signal.tail_logp_NM is None else signal.tail_logp_NM - rest_N1,
    )


def to_device(batch: Batch, device: torch.device | str) -> Batch:
    signal = Signal(*(None if part is None else part.to(device) for part in vars(batch.signal).values()))
    return replace(
        batch,
        input_BL=batch.input_BL.to(device),
        row_N=batch.row_N.to(device),
        column_N=batch.column_N.to(device),
        signal=signal,
    )


def tags(rows: Rows, index: int) -> dict[str, Any]:
    return dict(json.loads(str(rows.data[index]["tags"])))


def answer_lengths(rows: Rows, index: int) -> list[int]:
    """Tokens of each answer of a row, in order."""
    return [end - start for start, end in spans_of(rows.data[index]["spans"])]
