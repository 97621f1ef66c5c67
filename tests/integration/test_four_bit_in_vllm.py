"""4-bit drafters and 4-bit targets in real vLLM, by the project's plugin: each output token is the target's, and as many
drafts are accepted as the drafter's own logits say."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from distill.quantize import Choice, quantize_drafter
from pairing.init import init_drafter
from pairing.source import load_model, load_tokenizer, resolve
from tests import tiny
from tests.integration.test_pair_in_vllm import PROMPTS, TOKENS, K, generate, served
from tests.integration.test_real_pair import NAME


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One random model as it is and in both formats; each may be target or drafter of another."""
    folder = tmp_path_factory.mktemp("models")
    target = tiny.folder(folder / "plain", layers=4)
    init_drafter(resolve(str(target)), folder / "whole", [0, 1, 2, 3])
    quantize_drafter(folder / "whole", folder / "nf4")
    quantize_drafter(folder / "whole", folder / "w4a16", Choice("w4a16", group_size=32))
    return folder


@torch.no_grad()
def hits(folder: Path, prompt: list[int], answer: list[int]) -> tuple[list[bool], float]:
    """By transformers: at which places of `answer` the model's argmax is the token there, and the largest amount by
    which a token's logit is below the best."""
    logits_TV = load_model(folder)(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1]
    own_T = logits_TV.gather(1, torch.tensor(answer)[:, None])[:, 0]
    return (logits_TV.argmax(-1) == torch.tensor(answer)).tolist(), float((logits_TV.max(-1).values - own_T).max())


def expected_length(hit: list[list[bool]]) -> float:
    """τ by walking the rounds; those that the end of an answer cuts are left out."""
    rounds, tokens = 0, 0
    for answer in hit:
        at = 1  # the prompt's own step gives the first token
        while at + K < len(answer):
            run = next((i for i in range(K) if not answer[at + i]), K)
            rounds, tokens, at = rounds + 1, tokens + run + 1, at + run + 1
    return tokens / rounds


@pytest.mark.parametrize(
    ("target", "drafter", "dtype", "rounding"),
    [
        # each format beside a target of each kind, in each type; nf4 beside plain in float32 is in test_pair_in_vllm
        ("plain", "w4a16", "float32", 0.0),
        ("nf4", "nf4", "float32", 0.5),
        ("w4a16", "w4a16", "float32", 0.5),
        ("nf4", "w4a16", "bfloat16", 0.6),
        ("w4a16", "nf4", "bfloat16", 0.6),
    ],
)
def test_each_format_serves(models: Path, target: str, drafter: str, dtype: str, rounding: float) -> None:
    """`rounding`: by how much 16-bit products may have put another token before the float32 argmax; these random logits
    spread over 14, and a target that was read wrong is off by several."""
    with served(models / target, models / drafter, dtype) as llm:
        outputs, counters = generate(llm)
    drafted = []
    for prompt, answer in zip(PROMPTS, outputs, strict=True):
        assert len(answer) == TOKENS
        assert hits(models / target, prompt, answer)[1] <= rounding
        drafted.append(hits(models / drafter, prompt, answer)[0])
    length = 1 + counters["vllm:spec_decode_num_accepted_tokens"] / counters["vllm:spec_decode_num_drafts"]
    expected = K + 1.0 if target == drafter else expected_length(drafted)
    assert expected > 1.1  # so that the next line says something
    assert length == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("choice", [Choice("nf4"), Choice("w4a16")], ids=["nf4", "w4a16"])
def test_on_the_real_pair(tmp_path: Path, choice: Choice) -> None:
    """SmolLM2-135M with a 4-bit copy of itself as its drafter: all 30 layers must have been read right to be accepted.
    Every token is the target's own, by transformers."""
    target = resolve(NAME)
    init_drafter(target, tmp_path / "whole", list(range(30)))
    quantize_drafter(tmp_path / "whole", tmp_path / "copy", choice)
    tokenizer = load_tokenizer(target.path)
    prompts = [tokenizer(text)["input_ids"] for text in ("The capital of France is", "def add(a, b):", "1, 2, 3, 4,")]
    with served(target.path, tmp_path / "copy") as llm:
        outputs, counters = generate(llm, prompts, 24)
    for prompt, answer in zip(prompts, outputs, strict=True):
        assert hits(target.path, prompt, answer)[1] == 0
    length = 1 + counters["vllm:spec_decode_num_accepted_tokens"] / counters["vllm:spec_decode_num_drafts"]
    assert length > 2  # 1 is what a drafter gives whose weights were read wrong
