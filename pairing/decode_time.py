"""How long a decode step takes: models known by their config.json alone, one request at a time, in the installed engine.

Weights are random, since time does not go by their values; no tokenizer is read. All models live in one child process and
take turns in blocks of steps, so that what else the machine does falls on all of them alike. In vLLM 0.32 the engine runs
within that process: the figures are the model's own step, scheduler and sampler included, without a server's messages.
Without vLLM the same is measured in transformers, and says so: its steps are slower, and not in proportion.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from pairing.engine import engine
from pairing.engine_env import cpu_engine_env
from pairing.errors import PartFailedError
from pairing.files import read_json, write_json
from pairing.serving import context, text_config
from pairing.vllm_plugin import DIE_WITH_PARENT, die_with_parent

CONTEXT = 256  # tokens before the first step that counts
BLOCK, BLOCKS = 8, 8
WARM = 4  # steps that do not count, after the prompt
KV_BYTES = 2**28  # per engine; one request of a few hundred tokens
CHILD = "from pairing.decode_time import child; child()"


@dataclass(frozen=True)
class StepTime:
    """Of one model: a step's time in ms, and in steps of the first model; median, first and ninth decile of the blocks."""

    ms: tuple[float, float, float]
    share: tuple[float, float, float]


def engine_name() -> str:
    """What `measure_steps` measures in here."""
    found = engine()
    if found is not None:
        return f"vLLM {found.version} ({found.backend})"
    import transformers

    return f"transformers {transformers.__version__} (no vLLM installed)"


def measure_steps(configs: Sequence[Mapping[str, Any]], env: Mapping[str, str], log: Path) -> list[StepTime]:
    """Times for each config.json, taken side by side; shares are of the first one's step.

    `env` is the environment for the child process. Raises PartFailedError where the engine does not run; its output is
    in `log`, which is removed otherwise.
    """
    found = engine()
    with tempfile.TemporaryDirectory() as temp:
        out, folders = Path(temp) / "out.json", []
        for i, config in enumerate(configs):
            write_json(Path(temp) / str(i) / "config.json", dict(config))
            folders.append(str(Path(temp) / str(i)))
        longest = min((context(text_config(c)) or CONTEXT * 4 for c in configs), default=CONTEXT * 4)
        prompt = min(CONTEXT, longest // 4)
        request = {
            "engine": "vllm" if found else "transformers",
            "cpu": found is None or found.backend == "cpu",
            "folders": folders,
            "prompt": prompt,
            "block": BLOCK if longest - prompt > BLOCK * BLOCKS + WARM + 2 else 1,
            "out": str(out),
        }
        words = cpu_engine_env() if request["cpu"] else {}
        words |= {**env, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
        words.pop(DIE_WITH_PARENT, None)
        log.parent.mkdir(parents=True, exist_ok=True)
        with open(log, "wb") as f:
            done = subprocess.run(
                [sys.executable, "-c", CHILD], input=json.dumps(request).encode(), stdout=f, stderr=subprocess.STDOUT,
                cwd=Path(__file__).resolve().parents[1], env=words, preexec_fn=die_with_parent,
            )  # fmt: skip
        if done.returncode or not out.is_file():
            raise PartFailedError(f"no decode step could be measured in {engine_name()}: {_last(log)} (log: {log})")
        blocks = read_json(out)
    log.unlink()
    return [
        StepTime(_deciles([1000 * s for s in mine]), _deciles([a / b for a, b in zip(mine, blocks[0], strict=True)]))
        for mine in blocks
    ]


def _deciles(values: Sequence[float]) -> tuple[float, float, float]:
    cuts = quantiles(values, n=10, method="inclusive")
    return round(median(values), 4), round(cuts[0], 4), round(cuts[-1], 4)


def _last(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return next((line for line in reversed(lines) if "Error" in line), lines[-1] if lines else "no output")[-300:]


def child() -> None:
    """The child process: a request of `measure_steps` on standard input, the medians of all blocks into its file."""
    request = json.loads(sys.stdin.read())
    open_model = _open_vllm if request["engine"] == "vllm" else _open_transformers
    steps = [open_model(Path(folder), request) for folder in request["folders"]]
    for step in steps:
        for _ in range(WARM):
            step()
    blocks: list[list[float]] = [[] for _ in steps]
    for _ in range(BLOCKS):
        for mine, step in zip(blocks, steps, strict=True):
            times = []
            for _ in range(request["block"]):
                started = time.perf_counter()
                step()
                times.append(time.perf_counter() - started)
            mine.append(median(times))
    write_json(Path(request["out"]), blocks)


def _prompt(request: Mapping[str, Any], rows: int) -> list[int]:
    return random.Random(0).choices(range(rows), k=request["prompt"])


def _open_vllm(folder: Path, request: Mapping[str, Any]) -> Callable[[], Any]:
    from vllm import LLM, SamplingParams

    config = text_config(read_json(folder / "config.json"))
    length = request["prompt"] + BLOCK * BLOCKS + WARM + 2
    llm = LLM(
        str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        enforce_eager=request["cpu"],  # compiling takes minutes on a CPU
        max_model_len=length,
        max_num_seqs=1,
        max_num_batched_tokens=max(length, 64),
        kv_cache_memory_bytes=KV_BYTES,
        enable_prefix_caching=False,
        disable_log_stats=True,
    )
    sampling = SamplingParams(temperature=0, max_tokens=length - request["prompt"], ignore_eos=True, detokenize=False)
    llm.llm_engine.add_request("0", {"prompt_token_ids": _prompt(request, config["vocab_size"])}, sampling)
    llm.llm_engine.step()  # the prompt
    return llm.llm_engine.step


def _open_transformers(folder: Path, request: Mapping[str, Any]) -> Callable[[], Any]:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = AutoConfig.from_pretrained(folder)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config).eval()
    ids = torch.tensor([_prompt(request, config.get_text_config().vocab_size)], device=device)
    with torch.inference_mode():
        first = model(ids, use_cache=True, logits_to_keep=1)
    state = {"ids": first.logits.argmax(-1), "past": first.past_key_values}

    def step() -> None:
        with torch.inference_mode():
            out = model(state["ids"], past_key_values=state["past"], use_cache=True)
            state["ids"] = out.logits.argmax(-1)
            state["ids"].tolist()  # waits for the device

    return step
