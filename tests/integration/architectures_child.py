"""The child of test_architectures_in_vllm.py: engines of tiny pairs one after another in one process, a line of JSON each.

Arguments: a folder to work in. The answers by transformers come first, since vLLM changes classes of transformers in the
process that it runs in.
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from pairing.alignment import check_pair
from pairing.files import read_json
from pairing.init import Width, chosen_width, init_drafter, init_from_config
from pairing.preflight import Serving, require_start
from pairing.source import ModelSource, load_model, resolve
from pairing.transplant import transplant
from pairing.width import choose, importance, shape_of
from tests import architectures, tiny
from tests.integration.test_pair_in_vllm import PROMPTS, K, counters_of
from tests.unit.test_transplant import sentencepiece

LAYERS, TOKENS, SEEDS = 3, 24, 8
TEXTS = [list(range(3, 43)), list(range(100, 160)), [7, 9, 250, 33] * 6]
FOREIGN = ("transplant", "config")
CONFIG = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 128,
          "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32,
          "max_position_embeddings": 512, "tie_word_embeddings": True}  # fmt: skip


@torch.no_grad()
def greedy(model: Any) -> tuple[list[list[int]], float]:
    """The answers to PROMPTS, all of one length, and the smallest margin by which a token won."""
    ids, margin = torch.tensor(PROMPTS), 1e9
    for _ in range(TOKENS):
        best = model(ids).logits[:, -1].topk(2)
        margin = min(margin, float((best.values[:, 0] - best.values[:, 1]).min()))
        ids = torch.cat([ids, best.indices[:, :1]], dim=1)
    return ids[:, len(PROMPTS[0]) :].tolist(), margin


def written(folder: Path, kind: str, made: Callable[[int], Any]) -> list[list[int]]:
    """Writes a target of the first seed whose answers are decided, and returns these."""
    for seed in range(SEEDS):
        model = made(seed)
        answers, margin = greedy(model)
        if margin > 2e-3 and len({token for answer in answers for token in answer}) > len(PROMPTS):
            break
    else:
        raise AssertionError(f"{kind}: every seed ties or says the same again and again")
    model.save_pretrained(folder / kind)
    tiny.tokenizer().save_pretrained(folder / kind)
    return answers


def pair(folder: Path, kind: str) -> list[list[int]]:
    """Writes target and drafter and returns the target's answers. What `kill` silenced is what the drafter leaves out, so
    it computes the same as its target: every draft is accepted, if each tensor was cut, named and loaded right."""

    def made(seed: int) -> Any:
        return architectures.model(kind, seed, dead=True, layers=LAYERS, heads=4, kv_heads=2, head_dim=32)

    answers = written(folder, kind, made)
    target, drafter = resolve(str(folder / kind)), folder / f"{kind}-drafter"
    sizes = {"ffn": 128} if kind in architectures.COUPLED else {"ffn": 128, "heads": 2, "kv_heads": 1}
    asked, old = chosen_width(target, **sizes), shape_of(read_json(target.path / "config.json"))
    assert asked is not None
    kept = choose(importance(load_model(target.path), TEXTS, old), old, asked.shape)
    init_drafter(target, drafter, list(range(LAYERS)), width=Width(asked.shape, kept))
    require_pair(target, drafter)
    return answers


def foreign(folder: Path, how: str) -> list[list[int]]:
    """The same with a drafter that is not cut from its target: layers of another vocabulary's model, or random ones of a config.
    What it drafts is noise; that it loads, drafts and leaves the target's text as it is can be seen all the same."""
    answers = written(folder, how, lambda seed: tiny.model(layers=2, seed=seed))
    target, drafter = resolve(str(folder / how)), folder / f"{how}-drafter"
    if how == "transplant":
        transplant(target, resolve(str(sentencepiece(folder / "donor", ["ab"]))), drafter)
    else:
        init_from_config(target, drafter, CONFIG, 0, "float32")
    require_pair(target, drafter)
    return answers


def require_pair(target: ModelSource, drafter: Path) -> None:
    assert check_pair(target, resolve(str(drafter)))["aligned"]
    serving = Serving(num_speculative_tokens=K, max_model_len=64, max_num_seqs=8, kv_cache_gib=1)
    require_start(target, resolve(str(drafter)), serving)


def serve(folder: Path, kind: str, answers: list[list[int]]) -> dict[str, Any]:
    from vllm import LLM, SamplingParams

    speculation = {"method": "draft_model", "model": str(folder / f"{kind}-drafter"), "num_speculative_tokens": K}
    llm = LLM(
        str(folder / kind), dtype="float32", enforce_eager=True, max_model_len=64, max_num_seqs=8, seed=0,
        gpu_memory_utilization=0.2, speculative_config=speculation, disable_log_stats=False, enable_prefix_caching=False,
    )  # fmt: skip
    sampling = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
    done = llm.generate([{"prompt_token_ids": p} for p in PROMPTS], sampling, use_tqdm=False)
    counters = counters_of(llm)
    llm.llm_engine.engine_core.shutdown()
    del llm
    gc.collect()
    return {
        "equal": [list(request.outputs[0].token_ids) for request in done] == answers,
        "rounds": counters["vllm:spec_decode_num_drafts"],
        "drafted": counters["vllm:spec_decode_num_draft_tokens"],
        "accepted": counters["vllm:spec_decode_num_accepted_tokens"],
    }


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    answers = {kind: pair(folder, kind) for kind in architectures.CLASSES} | {
        how: foreign(folder, how) for how in FOREIGN
    }
    with open(folder / "results.jsonl", "w") as f:
        for kind in answers:
            try:
                result = serve(folder, kind, answers[kind])
            except Exception as e:  # the others are tried all the same
                result = {"error": f"{type(e).__name__}: {e}"}
            print(json.dumps({"kind": kind} | result), file=f, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
