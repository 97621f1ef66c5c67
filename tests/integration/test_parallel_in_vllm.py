"""A drafter trained with masks in real vLLM: the target's own tokens, its drafts' logits as they are offline, and the counters
that the offline count foretells, at temperature 0 and 1. A mask that is a spare token of the vocabulary is never said."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from tokenizers import AddedToken

from distill.answers import Answer, open_answers
from distill.batches import Rows, check_rows, collate, ids_in
from distill.evaluate import score_prompts
from distill.evaluate_parallel import rounds_summary, score_rounds
from distill.mask_blocks import Parallel, with_blocks
from distill.objective import DraftSampling
from distill.prompts import prompt
from distill.student import supervised_hidden
from distill.train import Settings, fit
from pairing.acceptance import replay, replay_rounds
from pairing.files import read_json, write_json
from pairing.init import init_drafter
from pairing.mask_token import Mask, free_mask, with_mask
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
SPARE = tiny.REAL_TOKENS  # the id of one special token more
OFTEN = slice(70, 78)  # what `pair_of_spare`'s target says most of the time
ASKED = [[1, 3 + i, 230 - i, 64] for i in range(192)]


@torch.no_grad()
def answer(model: torch.nn.Module, prompt_ids: list[int], real: int = tiny.REAL_TOKENS) -> Answer | None:
    """The target's own greedy answer with its distribution, past the K tokens that a last round may look at; None where
    rounding may overturn a token of it."""
    ids, heads = list(prompt_ids), []
    for _ in range(TOKENS + K + 1):
        best = model(torch.tensor([ids])).logits[0, -1, :real].log_softmax(-1).topk(HEAD)
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


def rows_of(folder: Path, **limits: int) -> Rows:
    return check_rows(open_answers(folder), "data", **LIMITS | limits)


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


@torch.no_grad()
def made_to_say(model: Any) -> None:
    """Of a tied model: the tokens of `OFTEN` mostly, the spare one and padding never. Channel 0 of every hidden state is
    positive, as it is in all embeddings and no layer reads or writes it; so by its own channel 0 a row is liked whatever came
    before."""
    embedding_VH = model.get_input_embeddings().weight
    for layer in model.model.layers:
        layer.input_layernorm.weight.fill_(2.5)
        layer.input_layernorm.weight[0] = layer.post_attention_layernorm.weight[0] = 0
        layer.self_attn.o_proj.weight[0] = 0
        layer.mlp.down_proj.weight[0] = 0
    model.model.norm.weight[0] = 12
    embedding_VH[:, 0] = 2
    embedding_VH[OFTEN, 0] = 3.5
    embedding_VH[SPARE:] = 0
    embedding_VH[SPARE:, 0] = -100


@torch.no_grad()
def said_by(model: Any, prompts: list[list[int]]) -> list[list[int]]:
    """TOKENS tokens after each prompt, drawn at temperature 1."""
    ids_BL, coin = torch.tensor(prompts), torch.Generator().manual_seed(0)
    for _ in range(TOKENS):
        p_BV = model(ids_BL).logits[:, -1].softmax(-1)
        ids_BL = torch.cat([ids_BL, torch.multinomial(p_BV, 1, generator=coin)], 1)
    return ids_BL[:, len(prompts[0]) :].tolist()


@torch.no_grad()
def with_distribution(model: Any, prompts: list[list[int]], said: list[list[int]]) -> list[Answer]:
    """What was said at temperature 1, with the target's whole distribution along it: what `generate` records of its head."""
    texts = [[*p, *s] for p, s in zip(prompts, said, strict=True)]
    start = len(prompts[0])
    logp_BNV = model(torch.tensor(texts)).logits[:, start - 1 : -1, : SPARE + 1].log_softmax(-1)
    best = logp_BNV.topk(SPARE + 1)
    return [
        Answer(
            prompt([{"role": "user", "content": str(p)}]),
            text,
            [(start, len(text))],
            "length",
            ids.int().numpy(),
            logp.numpy(),
        )
        for p, text, ids, logp in zip(prompts, texts, best.indices, best.values, strict=True)
    ]


@pytest.fixture(scope="module")
def pair_of_spare(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """target/ and drafter/, all of its layers, trained with masks for a while on what it said at temperature 1. The mask is a
    spare special token of a tied head, as the demo's: a row of the softmax, which a drafter that was trained so shortly
    drafts at times."""
    place = tmp_path_factory.mktemp("spare")
    target = tiny.folder(place / "target", layers=2)
    tokenizer = tiny.tokenizer()
    tokenizer.add_tokens([AddedToken("<|reserved_0|>", special=True, normalized=False)], special_tokens=True)
    tokenizer.save_pretrained(target)
    model = load_model(target)
    made_to_say(model)
    model.save_pretrained(target)
    init_drafter(resolve(str(target)), place / "drafter", [0, 1])
    asked = [[1, 3 + i, 120, 64] for i in range(32)]
    store(place / "answers", with_distribution(model, asked, said_by(model, asked)), target, temperature=1.0)
    rows = rows_of(place / "answers", real=SPARE + 1)
    assert free_mask(place / "drafter", used=ids_in(rows), padding=False) == Mask(SPARE, "<|reserved_0|>")
    drafter = load_model(place / "drafter")
    with torch.no_grad():  # as other rows are: the target's own is one that is never said
        row = 0.2 * torch.randn(64, generator=torch.Generator().manual_seed(0))
        drafter.get_input_embeddings().weight[SPARE] = row.index_fill(0, torch.tensor([0]), 3.5)
    more = {"parallel": Parallel(K, SPARE, keep=0.9), "max_steps": 8, "batch_size": 8, "survival": None}
    fit(Accelerator(cpu=True), drafter, rows, {}, Settings(**{**BASE, **more}), place / "run")
    drafter.save_pretrained(place / "drafter")
    config = place / "drafter" / "config.json"
    write_json(config, with_mask(read_json(config), SPARE))
    return {name: place / name for name in ("target", "drafter")}


@pytest.mark.parametrize("method", ["greedy", "probabilistic"])
def test_at_temperature_1_the_served_tau_is_the_replayed_one_and_no_mask_is_said(
    pair_of_spare: dict[str, Path], tmp_path: Path, method: DraftSampling
) -> None:
    """The rounds that made a text are replayed on that text, whose tokens are draws of the target whatever was drafted. Argmax
    drafts are then accepted where they are the text's; drawn ones with chance min(1, q/p) there, and 2 % is more than four
    standard errors of that. Drafts are the mask at times; no text holds it, and at temperature 0 it is the target's own."""
    from vllm import SamplingParams

    model, drafter = load_model(pair_of_spare["target"]), load_model(pair_of_spare["drafter"])
    greedy = list(islice((a for p in PROMPTS if (a := answer(model, p, SPARE + 1)) is not None), 8))
    assert len(greedy) == 8
    common: dict[str, Any] = {"max_tokens": TOKENS, "ignore_eos": True, "detokenize": False}
    drawn = [SamplingParams(temperature=1.0, seed=i, **common) for i in range(len(ASKED))]
    how = {"num_speculative_tokens": K, "parallel_drafting": True, "draft_sample_method": method}
    with served(pair_of_spare["target"], pair_of_spare["drafter"], **how) as llm:
        cold = llm.generate(
            [{"prompt_token_ids": a.input_ids[:4]} for a in greedy],
            SamplingParams(temperature=0, **common),
            use_tqdm=False,
        )
        before = drafts_and_accepted(counters_of(llm))
        warm = llm.generate([{"prompt_token_ids": p} for p in ASKED], drawn, use_tqdm=False)
        n, accepted = (after - b for after, b in zip(drafts_and_accepted(counters_of(llm)), before, strict=True))
    assert [list(d.outputs[0].token_ids) for d in cold] == [a.input_ids[4 : 4 + TOKENS] for a in greedy]
    said = [list(d.outputs[0].token_ids) for d in warm]
    assert max(max(s) for s in said) < SPARE
    store(tmp_path / "said", with_distribution(model, ASKED, said), pair_of_spare["target"], temperature=1.0)
    rows, sizes = rows_of(tmp_path / "said", real=SPARE + 1), {"batch_size": 8, "chunk": 64}
    scores = score_rounds(Accelerator(cpu=True), drafter, rows, SPARE, K, **sizes, draft_sample_method=method)
    assert 0.001 < rounds_summary(scores)["mask_share"] < 0.5
    rounds, tau = [s.w[0] for s in scores], 1 + accepted / n
    foretold = replay_rounds(rounds, K, past_end="alike")
    assert foretold.survival_per_pos[1] > 0.05  # more than the first draft counts
    assert 1.3 < tau < K + 0.9
    assert tau == pytest.approx(foretold.acceptance_length, rel=0.02)
    if method == "greedy":
        assert n == pytest.approx(foretold.rounds_P.sum(), rel=0.002)  # all but where rounding overturns an argmax
    else:
        assert 4 * standard_error(rounds) < 0.02 * tau


def standard_error(rounds: list[Any]) -> float:
    """Of τ, from what is drafted alone, the texts being as they are."""
    coin, taus = np.random.default_rng(0), []
    for _ in range(32):
        n = accepted = 0
        for w_TK in rounds:
            at = 1
            while at < len(w_TK):
                run = int(np.cumprod(coin.random(K) < w_TK[at]).sum())
                n, accepted, at = n + 1, accepted + run, at + run + 1
        taus.append(1 + accepted / n)
    return float(np.std(taus))
