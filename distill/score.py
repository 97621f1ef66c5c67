"""The target's distribution along texts that exist: teacher-forced in transformers, in chunks, with draws from the tail.

Shapes: B texts in a batch, C columns in a chunk, V vocabulary rows, K ids of the head, M drawn from the tail, n supervised
positions of a text, S of them in a chunk. A chunk goes through the model's own forward with the keys and values of those before
it, so no [B, length, V] is ever made, and whatever the model does to its logits (a cap, a scale) is in them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from distill.answers import Answer
from distill.generate import Given
from distill.requests import dtype, ending_ids, request_seed
from distill.turns import Text
from pairing.errors import InputError
from pairing.source import ModelSource, load_model

BATCH = 8
WINDOW = 16  # batches that are sorted by length together
LOGITS = 2**26  # logits of a chunk, at most (256 MiB in float32), however many texts are in the batch


def score(
    target: ModelSource, given: Sequence[Given], *, top_logprobs: int, tail_samples: int, real: int, seed: int
) -> Iterator[list[Answer]]:
    """The rows of each chat, as the target sees them: head of K = `top_logprobs`, and M = `tail_samples` ids drawn from the
    rest of the distribution, independently and with replacement, each with its own log p (not given that it is outside the
    head). The target is cut to its `real` ids: its padding rows have no probability here (fault D1).

    What is drawn depends on the seed and the text alone. Raises InputError where the head is larger than the vocabulary, or
    there is nothing outside it to draw from.
    """
    if top_logprobs > real:
        raise InputError(f"top_logprobs={top_logprobs} is more than the target's {real} ids")
    if tail_samples and top_logprobs >= real:
        raise InputError(
            f"tail_samples={tail_samples}: top_logprobs={top_logprobs} holds the whole vocabulary of {real} ids, so nothing "
            "is outside it: leave tail_samples out"
        )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, endings = load_model(target.path, getattr(torch, dtype())).to(device).eval(), ending_ids(target.path)
    for start in range(0, len(given), BATCH * WINDOW):
        window = given[start : start + BATCH * WINDOW]
        texts = sorted((text for one in window for text in one.texts), key=lambda text: len(text.input_ids))
        rows: dict[str, Answer] = {}
        for at in range(0, len(texts), BATCH):
            with torch.inference_mode():
                for row in _score_batch(model, texts[at : at + BATCH], top_logprobs, tail_samples, real, seed, endings):
                    rows[row.prompt.id] = row
        yield from ([rows[text.prompt.id] for text in one.texts] for one in window)


def _score_batch(
    model: Any, texts: Sequence[Text], top: int, samples: int, real: int, seed: int, endings: Sequence[int]
) -> list[Answer]:
    device, longest = model.device, max(len(text.input_ids) for text in texts) - 1
    input_BL = torch.zeros(len(texts), longest, dtype=torch.long)  # right padding: causal attention never looks at it
    wanted_BL = torch.zeros(len(texts), longest, dtype=torch.bool)  # columns whose logits predict a supervised token
    for b, text in enumerate(texts):
        input_BL[b, : len(text.input_ids) - 1] = torch.tensor(text.input_ids[:-1])
        for start, end in text.spans:
            wanted_BL[b, start - 1 : end - 1] = True
    input_BL = input_BL.to(device)
    uniform = [
        np.random.default_rng(request_seed(seed, text.prompt.id)).random((text.supervised, samples)) for text in texts
    ]
    heads: list[list[tuple[NDArray[Any], ...]]] = [[] for _ in texts]
    done = [0] * len(texts)  # supervised positions so far
    width = max(1, LOGITS // (model.config.get_text_config().vocab_size * len(texts)))
    cache = None
    for first in range(0, longest, width):
        part_BC = wanted_BL[:, first : first + width]
        columns = part_BC.any(0).nonzero().squeeze(1)
        keep: Any = columns.to(device) if len(columns) else 1
        out = model(input_BL[:, first : first + width], past_key_values=cache, use_cache=True, logits_to_keep=keep)
        cache = out.past_key_values
        for b in range(len(texts)):
            mine = part_BC[b, columns]
            if mine.any():
                logits_SV = out.logits[b, mine.to(device), :real].float()
                u_SM = uniform[b][done[b] : done[b] + len(logits_SV)]
                done[b] += len(logits_SV)
                heads[b].append(head_and_tail(logits_SV, top, u_SM))
    return [_row(text, parts, samples, endings) for text, parts in zip(texts, heads, strict=True)]


def head_and_tail(logits_SV: torch.Tensor, top: int, u_SM: NDArray[np.float64]) -> tuple[NDArray[Any], ...]:
    """(ids, log p) [S, K] of the head, and [S, M] of the ids that the uniform numbers `u_SM` draw from what is outside it, by
    inverting the tail's distribution function in the order of ids."""
    logp_SV = logits_SV.log_softmax(-1)
    head = logp_SV.topk(top)
    if not u_SM.shape[1]:
        none = np.zeros(u_SM.shape)
        return head.indices.cpu().numpy(), head.values.cpu().numpy(), none, none
    outside_SV = logits_SV.scatter(-1, head.indices, -torch.inf).double()
    # over its own largest, so that a tail of 1e-30 is drawn from as well as one of 0.3
    steps_SV = (outside_SV - outside_SV.amax(-1, keepdim=True)).exp().cumsum(-1)
    goal_SM = torch.from_numpy(u_SM * (1 - 2**-50)).to(logits_SV.device) * steps_SV[:, -1:]
    # right: the first id whose step goes past the goal, so an id without probability is never drawn
    drawn_SM = torch.searchsorted(steps_SV, goal_SM, right=True).clamp_(max=logits_SV.shape[1] - 1)
    logp_SM = logp_SV.gather(-1, drawn_SM)
    return tuple(t.cpu().numpy() for t in (head.indices, head.values, drawn_SM, logp_SM))


def _row(text: Text, parts: Sequence[tuple[NDArray[Any], ...]], samples: int, endings: Sequence[int]) -> Answer:
    head_ids, head_logp, tail_ids, tail_logp = (np.concatenate(column) for column in zip(*parts, strict=True))
    return Answer(
        text.prompt,
        text.input_ids,
        text.spans,
        "stop" if text.input_ids[-1] in endings else "length",
        head_ids.astype(np.int32),
        head_logp.astype(np.float32),
        tail_ids.astype(np.int32) if samples else None,
        tail_logp.astype(np.float32) if samples else None,
    )
