"""What init and quantize write is what vLLM runs as a draft model: the target's own tokens come out, and as many drafts
are accepted as the drafter's own logits say."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from distill.quantize import quantize_drafter
from pairing.alignment import check_pair
from pairing.engine import require_vllm
from pairing.init import init_drafter
from pairing.source import load_model, resolve
from pairing.vllm_plugin import DIE_WITH_PARENT
from tests import tiny

K = 3
TOKENS = 40
PROMPTS = [[1, 30 + 7 * i, 100 - 3 * i, 64] for i in range(6)]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pair")
    target = tiny.folder(folder / "target", layers=4)
    init_drafter(resolve(str(target)), folder / "whole", [0, 1, 2, 3])
    quantize_drafter(folder / "whole", folder / "nf4")
    return {name: folder / name for name in ("target", "whole", "nf4")}


@contextmanager
def served(
    target: Path, drafter: Path, dtype: str = "float32", extension: str = "", **speculation: Any
) -> Iterator[Any]:
    from vllm import LLM

    require_vllm("this test")
    with pytest.MonkeyPatch.context() as env:
        core = str(min(os.sched_getaffinity(0)))  # a model this small is slower on two
        for key, value in {
            "VLLM_CPU_OMP_THREADS_BIND": core,
            "VLLM_CPU_KVCACHE_SPACE": "1",
            DIE_WITH_PARENT: str(os.getpid()),
        }.items():
            env.setenv(key, value)
        speculation = {"method": "draft_model", "model": str(drafter), "num_speculative_tokens": K} | speculation
        llm = LLM(
            str(target), dtype=dtype, enforce_eager=True, max_model_len=128, max_num_seqs=8, seed=0,
            gpu_memory_utilization=0.2, speculative_config=speculation, disable_log_stats=False,
            enable_prefix_caching=False, worker_extension_cls=extension,
        )  # fmt: skip
        try:
            yield llm
        finally:
            llm.llm_engine.engine_core.shutdown()
            del llm
            gc.collect()


def generate(
    llm: Any, prompts: list[list[int]] = PROMPTS, tokens: int = TOKENS
) -> tuple[list[list[int]], dict[str, int]]:
    """The tokens of each prompt, and the counters of speculation."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    done = llm.generate([{"prompt_token_ids": p} for p in prompts], sampling, use_tqdm=False)
    return [list(request.outputs[0].token_ids) for request in done], counters_of(llm)


def counters_of(llm: Any) -> dict[str, int]:
    return {m.name: m.value for m in llm.get_metrics() if hasattr(m, "value") and "spec_decode" in m.name}


@torch.no_grad()
def greedy(folder: Path) -> list[list[int]]:
    """The target's own answers by transformers, with a margin that no rounding overturns."""
    model, answers = load_model(folder), []
    for prompt in PROMPTS:
        ids = list(prompt)
        for _ in range(TOKENS):
            best = model(torch.tensor([ids])).logits[0, -1].topk(2)
            assert best.values[0] - best.values[1] > 1e-3, "a tie: choose other prompts"
            ids.append(int(best.indices[0]))
        answers.append(ids[len(prompt) :])
    return answers


@torch.no_grad()
def expected_length(drafter: Path, answers: list[list[int]]) -> float:
    """τ by walking the rounds over the target's answers with the drafter's argmax at each position (all greedy, so the
    drafts of a round agree with these up to and including the first that differs)."""
    model, rounds, tokens = load_model(drafter), 0, 0
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        logits = model(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1]
        hit = (logits.argmax(-1) == torch.tensor(answer)).tolist()
        at = 1  # the prompt's own step gives the first token
        while at + K < len(answer):  # rounds that the end cuts are left out on both sides, being few
            run = next((i for i in range(K) if not hit[at + i]), K)
            rounds, tokens, at = rounds + 1, tokens + run + 1, at + run + 1
    return tokens / rounds


def test_init_drafter_of_all_layers_is_accepted_always(pair: dict[str, Path]) -> None:
    """Only weights that were loaded right, layer by layer, propose what the target says, each time."""
    assert check_pair(resolve(str(pair["target"])), resolve(str(pair["whole"])))["aligned"]
    with served(pair["target"], pair["whole"]) as llm:
        outputs, counters = generate(llm)
    assert outputs == greedy(pair["target"])
    rounds = counters["vllm:spec_decode_num_drafts"]
    # the last round of an answer may propose beyond its end
    assert counters["vllm:spec_decode_num_accepted_tokens"] >= K * (rounds - len(PROMPTS))
    assert rounds <= len(PROMPTS) * (TOKENS / (K + 1) + 1)


def test_nf4_drafter_in_float32(pair: dict[str, Path]) -> None:
    """The 4-bit copy beside an unquantized float32 target, by the project's plugin: the same text, and τ as its own
    logits in transformers say (5 %: rounds that the end of an answer cuts)."""
    assert check_pair(resolve(str(pair["target"])), resolve(str(pair["nf4"])))["aligned"]
    answers = greedy(pair["target"])
    with served(pair["target"], pair["nf4"]) as llm:
        outputs, counters = generate(llm)
    assert outputs == answers
    length = 1 + counters["vllm:spec_decode_num_accepted_tokens"] / counters["vllm:spec_decode_num_drafts"]
    expected = expected_length(pair["nf4"], answers)
    assert 1.2 < expected < K + 0.9  # neither useless nor perfect, so that the next line says something
    assert length == pytest.approx(expected, rel=0.05)
