"""A drafter trained with masks in real vLLM: the target's own tokens, its drafts' logits as they are offline, and the counters
that the offline count foretells."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator

from distill.answers import Answer, open_answers
from distill.batches import Rows, check_rows, collate
from distill.evaluate import score_prompts
from distill.evaluate_parallel import score_rounds
from distill.mask_blocks import Parallel, with_blocks
from distill.prompts import prompt
from distill.student import supervised_hidden
from distill.train import Settings, fit
from pairing.acceptance import replay, replay_rounds
from pairing.files import read_json, write_json
from pairing.init import init_drafter
from pairing.mask_token import with_mask
from pairing.rows import settle_padding
from pairing.source import load_model, resolve
from tests import tiny
from tests.integration.draft_spy import SPY
from tests.integration.test_distill import BASE
from tests.integration.test_pair_in_vllm import counters_of, served
from tests.stored_answers import K as HEAD
from tests.stored_answers import store

K, TOKENS = 4, 96
MASK = tiny.REAL_TOKENS + 1
LIMITS = {"rows": tiny.ROWS, "real": tiny.REAL_TOKENS, "context": 512}
PROMPTS = [[1, 30 + 7 * i, 100 - 3 * i, 64] for i in range(24)]


@torch.no_grad()
def answer(model: torch.nn.Module, prompt_ids: list[int]) -> Answer | None:
    """The target's own greedy answer with its distribution, past the K tokens that a last round may look at; None where
    rounding may overturn a token of it."""
    ids, heads = list(prompt_ids), []
    for _ in range(TOKENS + K + 1):
        best = model(torch.tensor([ids])).logits[0, -1, : tiny.REAL_TOKENS].log_softmax(-1).topk(HEAD)
        if best.values[0] - best.values[1] < 1e-3:
            return None
        heads.append(best)
        ids.append(int(best.indices[0]))
    return recorded(prompt_ids, ids, heads)


def recorded(prompt_ids: list[int], ids: list[int], heads: list[Any]) -> Answer:
    head_ids = np.stack([h.indices.numpy() for h in heads]).astype(np.int32)
    logp = np.stack([h.values.numpy() for h in heads])
    chat = prompt([{"role": "user", "content": str(prompt_ids)}])
    return Answer(chat, ids, [(len(prompt_ids), len(ids))], "length", head_ids, logp)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """target/, answers/ and drafter/: two of its four layers, trained on its greedy answers with masks."""
    place = tmp_path_factory.mktemp("pair")
    target = tiny.folder(place / "target", layers=4)
    model = load_model(target)
    with torch.no_grad():  # vLLM masks no padding row, so none may be the likeliest
        head_VH = model.get_output_embeddings().weight
        head_VH.copy_(settle_padding(head_VH, range(tiny.REAL_TOKENS)))
    model.save_pretrained(target)
    init_drafter(resolve(str(target)), place / "drafter", [0, 3])
    answers = list(islice((a for p in PROMPTS if (a := answer(model, p)) is not None), 8))
    assert len(answers) == 8
    store(place / "answers", answers, target)
    drafter = load_model(place / "drafter")
    more = {"parallel": Parallel(K, MASK, keep=0.9), "max_steps": 80, "lr": 3e-3, "batch_size": 8, "survival": None}
    fit(Accelerator(cpu=True), drafter, rows_of(place / "answers"), {}, Settings(**{**BASE, **more}), place / "run")
    drafter.save_pretrained(place / "drafter")
    config = place / "drafter" / "config.json"
    write_json(config, with_mask(read_json(config), MASK))
    return {name: place / name for name in ("target", "drafter", "answers")}


def rows_of(folder: Path) -> Rows:
    return check_rows(open_answers(folder), "data", **LIMITS)


def test_served_is_what_was_counted_offline(pair: dict[str, Path]) -> None:
    """Every round of every answer: the same drafts are accepted by vLLM as by walking over the target's own text (so the masks'
    places, positions and what they see are vLLM's), in parallel and one by one with the same folder. The logits that drafts
    are taken from are those that training sees, at every offset."""
    from vllm import SamplingParams

    rows, drafter = rows_of(pair["answers"]), load_model(pair["drafter"])
    accelerator, sizes = Accelerator(cpu=True), {"batch_size": 8, "chunk": 64}
    texts = [rows.data[i]["input_ids"].tolist() for i in range(len(rows))]
    common: dict[str, Any] = {"max_tokens": TOKENS, "ignore_eos": True, "detokenize": False}
    greedy = SamplingParams(temperature=0, **common)
    rounds = [s.accepted[0] for s in score_rounds(accelerator, drafter, rows, MASK, K, **sizes)]
    for parallel in (True, False):
        with served(
            pair["target"], pair["drafter"], extension=SPY, num_speculative_tokens=K, parallel_drafting=parallel
        ) as llm:
            done = llm.generate([{"prompt_token_ids": t[:4]} for t in texts], greedy, use_tqdm=False)
            cold = counters_of(llm)
            if parallel:
                llm.collective_rpc("watch_drafts")
                for i, text in enumerate(texts[:3]):
                    llm.generate([{"prompt_token_ids": text[:4]}], greedy, use_tqdm=False)
                    (seen,) = llm.collective_rpc("watched_drafts")
                    require_same_logits(drafter, rows, i, walk(rounds[i]), seen)
        assert [list(d.outputs[0].token_ids) for d in done] == [t[4 : 4 + TOKENS] for t in texts]
        n, accepted = drafts_and_accepted(cold)
        single = [s.accepted[0] for s in score_prompts(accelerator, drafter, rows, **sizes)]
        if parallel:
            walks = [walk(w) for w in rounds]
            assert (n, accepted) == (sum(map(len, walks)), sum(run for w in walks for _, run in w))
        expected = replay_rounds(rounds, K) if parallel else replay(single, K)
        tau = 1 + accepted / n
        assert 1.3 < tau < K + 0.9  # neither useless nor perfect, so that the next line says something
        assert tau == pytest.approx(expected.acceptance_length, rel=0.02)


def drafts_and_accepted(counters: dict[str, int]) -> tuple[int, int]:
    return counters["vllm:spec_decode_num_drafts"], counters["vllm:spec_decode_num_accepted_tokens"]


def walk(w: np.ndarray) -> list[tuple[int, int]]:  # type: ignore[type-arg]
    """(answer tokens known when it starts, drafts accepted) of every round until the answer has TOKENS tokens; a last one may
    look past them."""
    found, at = [], 1  # the prompt's own step gives the first token
    while at < TOKENS:
        run = int(np.cumprod(w[at]).sum())
        found.append((at, run))
        at += run + 1
    return found


@torch.no_grad()
def require_same_logits(
    drafter: Any, rows: Rows, index: int, walked: list[tuple[int, int]], seen: list[list[list[float]]]
) -> None:
    """Of row `index`, the K rows of logits of each round in vLLM against the mask blocks that training runs all at once."""
    batch = collate(rows, np.array([index]))
    masked = with_blocks(batch, torch.full_like(batch.row_N, K - 1), MASK)
    assert masked.blocks is not None
    logits_NV = supervised_hidden(drafter, masked) @ drafter.get_output_embeddings().weight.T
    offset_N, start_N = masked.blocks.offset_N, masked.blocks.source_N - masked.blocks.offset_N
    assert len(seen) >= len(walked) > TOKENS // (K + 1)
    for (start, _), served_KV in zip(walked, seen, strict=False):
        of = start_N == start
        assert offset_N[of].tolist() == list(range(K))
        torch.testing.assert_close(torch.tensor(served_KV), logits_NV[of], rtol=0, atol=1e-3)


def test_the_mask_is_never_the_likeliest_token(pair: dict[str, Path]) -> None:
    """Among all rows, padding too, at every offset: a padding row of a tied head stays the mean of the real ones."""
    rows, drafter = rows_of(pair["answers"]), load_model(pair["drafter"])
    batch = collate(rows, np.arange(len(rows)))
    with torch.no_grad():
        hidden = supervised_hidden(drafter, with_blocks(batch, torch.full_like(batch.row_N, K - 1), MASK))
        likeliest = (hidden @ drafter.get_output_embeddings().weight.T).argmax(-1)
    assert len(likeliest) > 3 * len(batch.row_N)
    assert not bool((likeliest >= tiny.REAL_TOKENS).any())
