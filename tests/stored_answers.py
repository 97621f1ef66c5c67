"""Folders of answers for tests: written by hand, or really answered (greedily) by a tiny target."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from distill.answers import Answer, begin, complete, write_shard
from distill.prompts import prompt
from pairing.pair import describe_model
from pairing.source import load_model, resolve
from tests.tiny import REAL_TOKENS, ROWS

K = 8
SYSTEM = [1, *range(40, 52), 2]  # a system prompt's tokens: every prompt begins with them


def store(
    folder: Path, answers: Sequence[Answer], target: Path, rows: int = ROWS, temperature: float | None = None
) -> Path:
    """Writes `answers`, said to be of the model in `target`, drawn at `temperature` where one is given; returns `folder`."""
    k, tail = answers[0].head_ids_NK.shape[1], answers[0].tail_ids_NM
    sizes = {"rows": rows, "top_logprobs": k, "tail_samples": 0 if tail is None else tail.shape[1]}
    sampling = {} if temperature is None else {"sampling": {"max_tokens": 64, "temperature": temperature}}
    begin(folder, {"target": describe_model(resolve(str(target))), **sizes, **sampling})
    write_shard(folder, answers)
    complete(folder, {})
    return folder


def made_up(
    lengths: Sequence[int], prompt_length: int = 20, seed: int = 0, tags: dict[str, Any] | None = None
) -> list[Answer]:
    """Random answers of these lengths with random distributions over the real ids."""
    rng = np.random.default_rng(seed)
    answers = []
    for i, n in enumerate(lengths):
        p = rng.dirichlet(np.full(REAL_TOKENS, 0.1), size=n).astype(np.float32)
        ids = np.argsort(-p, axis=-1, kind="stable")[:, :K].astype(np.int32).reshape(n, K)
        logp = np.log(np.maximum(np.take_along_axis(p, ids.astype(np.int64), -1), 1e-30)).astype(np.float32)
        prompt_ids = [*SYSTEM, *rng.integers(3, REAL_TOKENS, prompt_length - len(SYSTEM)).tolist()]
        chat = prompt([{"role": "user", "content": f"{seed} {i}"}], tags or {})
        spans = [(prompt_length, prompt_length + n)] if n else []
        answers.append(Answer(chat, prompt_ids + [int(t) for t in ids[:, 0]], spans, "stop", ids, logp))
    return answers


def two_turns(lengths: Sequence[tuple[int, int]], seed: int = 0, tail: int = 0) -> list[Answer]:
    """As `made_up`, each row a prompt of 20 tokens, an answer, a question of 5 and a second answer; `tail` drawn ids a
    position, from real ids outside the head."""
    rng = np.random.default_rng([seed, 2])
    answers = []
    for i, ((first, second), one) in enumerate(
        zip(lengths, made_up([a + b for a, b in lengths], seed=seed), strict=True)
    ):
        said = one.input_ids[20:]
        question = rng.integers(3, REAL_TOKENS, 5).tolist()
        ids = [*one.input_ids[: 20 + first], *question, *said[first:]]
        spans = [(20, 20 + first), (25 + first, 25 + first + second)]
        chat = prompt([{"role": "user", "content": f"two turns {seed} {i}"}], {"seen": i % 3 != 0})
        outside = [np.setdiff1d(np.arange(REAL_TOKENS), head) for head in one.head_ids_NK]
        tails = np.array([rng.choice(ids_, tail) for ids_ in outside], np.int32).reshape(len(said), tail)
        logp = rng.uniform(-12, -6, tails.shape).astype(np.float32)
        drawn = (tails, logp) if tail else (None, None)
        answers.append(Answer(chat, ids, spans, "stop", one.head_ids_NK, one.head_logprobs_NK, *drawn))
    return answers


def answered(target: Path, count: int, seed: int, longest: int = 14) -> list[Answer]:
    """What the tiny target really says, greedily, over its real ids; every third prompt is tagged unseen."""
    model, words = load_model(target), random.Random(seed)
    answers = []
    for i in range(count):
        prompt_ids = [*SYSTEM, *(words.randrange(60, 64) for _ in range(6 + i % 3))]
        ids, heads = list(prompt_ids), []
        with torch.inference_mode():
            while len(ids) - len(prompt_ids) < longest - i % 4 and ids[-1] != 2:
                logits = model(torch.tensor([ids])).logits[0, -1, :REAL_TOKENS]
                heads.append(logits.log_softmax(-1).topk(K))
                ids.append(int(heads[-1].indices[0]))
        chat = prompt([{"role": "user", "content": str(prompt_ids)}], {"seen": i % 3 != 0})
        head_ids = np.stack([h.indices.numpy() for h in heads]).astype(np.int32)
        logp = np.stack([h.values.numpy() for h in heads])
        answers.append(Answer(chat, ids, [(len(prompt_ids), len(ids))], "stop", head_ids, logp))
    return answers


def tossed(count: int, longest: int, p: dict[int, float], seed: int = 0) -> list[Answer]:
    """Answers whose tokens are draws from one and the same `p` over a few ids, recorded whole."""
    rng, ids = np.random.default_rng(seed), sorted(p, key=lambda i: -p[i])
    answers = []
    for i in range(count):
        prompt_ids = [*SYSTEM, *rng.integers(60, 64, 6).tolist()]
        said = rng.choice(ids, size=longest - i % 4, p=[p[j] for j in ids]).tolist()
        head_ids = np.tile(np.array(ids, np.int32), (len(said), 1))
        logp = np.log(np.tile([p[j] for j in ids], (len(said), 1))).astype(np.float32)
        chat = prompt([{"role": "user", "content": f"toss {seed} {i}"}])
        span = (len(prompt_ids), len(prompt_ids) + len(said))
        answers.append(Answer(chat, [*prompt_ids, *said], [span], "length", head_ids, logp))
    return answers
