"""The child process of `pairing.decode_time`: engines with random weights, whose steps are timed in turns."""

from __future__ import annotations

import itertools
import json
import os
import random
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from pairing.decode_time import BLOCK, BLOCKS, PROMPTS, WARM
from pairing.files import read_json
from pairing.serving import text_config
from pairing.source import load_config, load_model

KV_BYTES = 2**28  # per engine at least

# reads the prompts of so many requests; returns what does one step with K drafted tokens, and the seconds it took
Begin = Callable[[int], tuple[Callable[[int], Any], float]]


def child() -> None:
    """The child process: on each line of standard input a request of the timer, answered by the medians of all blocks."""
    reply = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM logs to standard output
    opened: dict[str, Begin] = {}
    for line in sys.stdin:
        request = json.loads(line)
        keys = [json.dumps(item["engine"]) for item in request["items"]]
        for key, item in zip(keys, request["items"], strict=True):
            if key not in opened:
                open_engine = _open_vllm if request["vllm"] else _open_transformers
                opened[key] = open_engine(item["engine"], request["seqs"], request["cpu"], request["dtype"])
        begun: dict[str, Callable[[int], Any]] = {}
        prompts: dict[str, list[float]] = {key: [] for key in keys}
        for _ in range(PROMPTS):
            for key in prompts:
                begun[key], seconds = opened[key](request["batch"])
                prompts[key].append(seconds)
        steps = [partial(begun[key], item["k"]) for key, item in zip(keys, request["items"], strict=True)]
        for step in steps:
            for _ in range(WARM):
                step()
        blocks: list[list[float]] = [[] for _ in steps]
        for _ in range(BLOCKS):
            for mine, step in zip(blocks, steps, strict=True):
                step()
                mine.append(median(_timed(step) for _ in range(BLOCK)))
        print(json.dumps({"blocks": blocks, "prompts": [prompts[key] for key in keys]}), file=reply, flush=True)


def _timed(step: Callable[[], Any]) -> float:
    started = time.perf_counter()
    step()
    return time.perf_counter() - started


def _prompts(folder: str, count: int, length: int) -> list[list[int]]:
    rows = text_config(read_json(Path(folder) / "config.json"))["vocab_size"]
    return [random.Random(i).choices(range(rows), k=length) for i in range(count)]


class RandomTokens:
    """vLLM's proposer of its method custom_class: any K tokens at no cost. Nearly all are rejected, which takes as long."""

    k = 0  # of the step to come, at most num_speculative_tokens

    def __init__(self, vllm_config: Any) -> None:
        self.rows = int(vllm_config.model_config.get_vocab_size())
        self.random = random.Random(1)

    def load_model(self, *_: Any) -> None:
        pass

    def propose(self, sampled_token_ids: list[list[int]], *_: Any, **__: Any) -> list[list[int]]:
        return [self.random.choices(range(self.rows), k=RandomTokens.k) for _ in sampled_token_ids]


def _has_weights(folder: str) -> bool:
    return any(Path(folder).glob("*.safetensors"))


def _open_vllm(words: Mapping[str, Any], seqs: int, cpu: bool, dtype: str) -> Begin:
    from vllm import LLM, SamplingParams

    folder, length = words["folder"], words["prompt"] + words["answer"]
    # a loader of its own reads bitsandbytes, as the method asks for
    quantization = read_json(Path(folder) / "config.json").get("quantization_config", {})
    nf4 = quantization.get("quant_method") == "bitsandbytes"
    proposer: dict[str, Any] = {"method": "custom_class", "model": f"{__name__}.{RandomTokens.__name__}"}
    if words["draft"]:
        proposer = {"method": "draft_model", "model": words["draft"]}
        proposer |= {"parallel_drafting": True} if words["parallel"] else {}
    llm = LLM(
        folder,
        load_format="bitsandbytes" if nf4 else "auto" if _has_weights(folder) else "dummy",
        quantization="bitsandbytes" if nf4 else None,
        dtype=dtype,
        skip_tokenizer_init=True,
        enforce_eager=cpu,  # compiling takes minutes there
        max_model_len=length,
        max_num_seqs=seqs,
        max_num_batched_tokens=length * seqs,
        speculative_config=proposer | {"num_speculative_tokens": words["most"]} if words["most"] else None,
        kv_cache_memory_bytes=max(KV_BYTES, words["kv"] * seqs),
        enable_prefix_caching=False,
        disable_log_stats=True,
    ).llm_engine
    sampling = SamplingParams(temperature=0, max_tokens=words["answer"], ignore_eos=True, detokenize=False)
    running: list[str] = []
    numbers = itertools.count()

    def step(k: int) -> Any:
        assert llm.has_unfinished_requests(), "the requests ended before the last step"  # else nothing would be timed
        RandomTokens.k = k
        return llm.step()

    def begin(batch: int) -> tuple[Callable[[int], Any], float]:
        llm.abort_request(running)
        running.clear()
        for prompt in _prompts(folder, batch, words["prompt"]):
            running.append(str(next(numbers)))
            llm.add_request(running[-1], {"prompt_token_ids": prompt}, sampling)
        answered: set[str] = set()
        started = time.perf_counter()
        while len(answered) < batch:
            answered |= {out.request_id for out in step(0)}
        return step, time.perf_counter() - started

    return begin


def _open_transformers(words: Mapping[str, Any], seqs: int, cpu: bool, dtype: str) -> Begin:
    import torch
    from transformers import AutoModelForCausalLM

    assert not words["draft"]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if _has_weights(words["folder"]):
        model = load_model(Path(words["folder"])).to(device).eval()
    else:
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(load_config(Path(words["folder"])), trust_remote_code=False).eval()

    def begin(batch: int) -> tuple[Callable[[int], Any], float]:
        prompts = torch.tensor(_prompts(words["folder"], batch, words["prompt"]), device=device)
        state: dict[str, Any] = {"own": prompts, "past": None}

        def step(k: int) -> None:
            drafted = torch.arange(k, device=device).expand(batch, k)
            with torch.inference_mode():
                ids = torch.cat([state["own"], drafted], dim=1)
                out = model(ids, past_key_values=state["past"], use_cache=True, logits_to_keep=k + 1)
            if k:
                out.past_key_values.crop(-k)  # all of them rejected
            state.update(own=out.logits[:, :1].argmax(-1), past=out.past_key_values)
            state["own"].tolist()  # waits for the device

        return step, _timed(lambda: step(0))

    return begin
