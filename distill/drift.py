"""How far the logits of a drafter's copy are from the drafter's own, on recorded answers or on random ids.

Shapes: T tokens of a text, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from distill.answers import open_answers, spans_of
from pairing.alignment import tokens_by_id
from pairing.errors import InputError
from pairing.progress import bar
from pairing.source import load_tokenizer


@dataclass(frozen=True)
class Text:
    """Token ids, and the first position whose logits count."""

    ids: list[int]
    start: int


def recorded_texts(folder: Path, rows: int) -> tuple[list[Text], str]:
    """The first rows of an answers folder: a text per answer, from the conversation's beginning to the answer's end.
    Positions that predict the answer count."""
    data = open_answers(folder).data
    texts = []
    for row in data.select(range(min(rows, len(data)))):
        texts += [Text(row["input_ids"][:end], start) for start, end in spans_of(row["spans"])]
    if not texts:
        raise InputError(f"{folder}: it holds no answers to compare on")
    return texts, f"{len(texts)} answers of {folder}"


def random_texts(folder: Path, count: int = 8, length: int = 32) -> tuple[list[Text], str]:
    """Fixed random ids among those in use. Far from real text, so a drift on them is a bound of sorts, no forecast."""
    ids = torch.tensor(sorted(tokens_by_id(load_tokenizer(folder))))
    drawn = torch.randint(len(ids), (count, length), generator=torch.Generator().manual_seed(0))
    return [Text(row.tolist(), 1) for row in ids[drawn]], f"{count} texts of {length} random ids"


def compare(a: Any, b: Any, texts: list[Text]) -> dict[str, Any]:
    """How far the logits of model `b` are from those of `a`, over the positions that count.

    Gives "positions", "max_abs" and "mean_abs" (over positions and vocabulary), "kl" (nats a position, b's distribution from
    a's), "top1_agreement" (share of positions with the same argmax), "top1_before" and "top1_after" (share where a's
    and b's argmax is the text's next token).
    """
    positions, largest, total, kl, same, right_a, right_b, width = 0, 0.0, 0.0, 0.0, 0, 0, 0, 1
    with bar("comparing logits", total=len(texts)) as advance, torch.no_grad():
        for text in texts:
            # the last logits predict what comes after the text, so one more is kept than there are tokens to predict
            keep = len(text.ids) - text.start + 1
            a_TV, b_TV = (
                model(torch.tensor([text.ids], device=model.device), logits_to_keep=keep).logits[0, :-1].float().cpu()
                for model in (a, b)
            )
            gap_TV = (a_TV - b_TV).abs()
            next_T = torch.tensor(text.ids[text.start :])
            largest, total = max(largest, float(gap_TV.max())), total + float(gap_TV.sum(dtype=torch.float64))
            p_TV, q_TV = a_TV.log_softmax(-1), b_TV.log_softmax(-1)
            kl += float((p_TV.exp() * (p_TV - q_TV)).sum(dtype=torch.float64))
            positions, width = positions + len(next_T), a_TV.shape[1]
            top_a_T, top_b_T = a_TV.argmax(-1), b_TV.argmax(-1)
            same += int((top_a_T == top_b_T).sum())
            right_a, right_b = right_a + int((top_a_T == next_T).sum()), right_b + int((top_b_T == next_T).sum())
            advance(1, "")
    return {
        "positions": positions,
        "max_abs": largest,
        "mean_abs": total / (positions * width),
        "kl": kl / positions,
        "top1_agreement": same / positions,
        "top1_before": right_a / positions,
        "top1_after": right_b / positions,
    }
