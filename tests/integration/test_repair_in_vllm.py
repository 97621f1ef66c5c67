"""What repair and a narrower init write is what vLLM loads as a draft model; repaired, it drafts as before the loss."""

from __future__ import annotations

from pathlib import Path

import pytest

from pairing.alignment import check_pair
from pairing.files import read_json
from pairing.init import Width, chosen_width, init_drafter
from pairing.preflight import Serving, require_start
from pairing.repair import repair
from pairing.source import load_model, resolve
from pairing.width import choose, importance, shape_of
from tests import tiny
from tests.integration.test_pair_in_vllm import PROMPTS, TOKENS, K, generate, greedy, served


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights like padding rows as well as any; padded by repair, a target writes real tokens only."""
    base = tmp_path_factory.mktemp("pair")
    small = tiny.folder(base / "small", layers=4, rows=tiny.REAL_TOKENS, seed=4)  # a seed without ties on PROMPTS
    wide = tiny.folder(base / "wide", layers=4)
    repair(resolve(str(wide)), resolve(str(small)), base / "target")
    return base / "target"


def test_a_repaired_drafter_is_accepted_as_always(target: Path) -> None:
    """D1: all layers of the target, cut to other rows and padded again: every draft is the target's own token."""
    folder = target.parent
    other = tiny.folder(folder / "other", layers=4, rows=260)
    init_drafter(resolve(str(target)), folder / "whole", [0, 1, 2, 3])
    assert repair(resolve(str(other)), resolve(str(folder / "whole")), folder / "cut")["rows"] == [272, 260]
    assert repair(resolve(str(target)), resolve(str(folder / "cut")), folder / "drafter")["rows"] == [260, 272]
    require_start(resolve(str(target)), resolve(str(folder / "drafter")),
                  Serving(num_speculative_tokens=K, max_model_len=128, max_num_seqs=8, kv_cache_gib=1))  # fmt: skip
    with served(target, folder / "drafter") as llm:
        outputs, counters = generate(llm)
    assert outputs == greedy(target)
    rounds = counters["vllm:spec_decode_num_drafts"]
    assert counters["vllm:spec_decode_num_accepted_tokens"] >= K * (rounds - len(PROMPTS))
    assert rounds <= len(PROMPTS) * (TOKENS / (K + 1) + 1)


def test_a_narrower_drafter_loads_and_loses_nothing(target: Path) -> None:
    source, out = resolve(str(target)), target.parent / "narrow"
    old = shape_of(read_json(target / "config.json"))
    asked = chosen_width(source, ffn=64, heads=1)
    assert asked is not None
    width = Width(asked.shape, choose(importance(load_model(target), PROMPTS, old), old, asked.shape))
    init_drafter(source, out, [0, 1, 3], width=width)
    assert check_pair(source, resolve(str(out)))["aligned"]
    with served(target, out) as llm:
        outputs, counters = generate(llm)
    assert outputs == greedy(target)
    assert counters["vllm:spec_decode_num_draft_tokens"] > 0
