"""How long a decode step takes: models known by their config.json alone, or whole folders, in the installed engine.

One request at a time. A config's weights are random, since time does not go by their values; quantized ones are read from
their folder, since no engine makes up packed weights. No tokenizer is read. All models live in one child process and
take turns in blocks of steps, so that what else the machine does falls on all of them alike. In vLLM 0.32 the engine runs
within that process: the figures are the model's own step, scheduler and sampler included, without a server's messages.
A verify step, which a target makes of K + 1 tokens of a request at once, is measured with a proposer that costs nothing.
Without vLLM the same is measured in transformers, and says so: its steps are slower, and not in proportion.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any, Protocol

from pairing.engine import engine
from pairing.engine_env import cpu_engine_env
from pairing.errors import PartFailedError
from pairing.files import digest_json, read_json, write_json
from pairing.serving import context, text_config
from pairing.source import load_model
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
    """What is measured in here."""
    found = engine()
    if found is not None:
        return f"vLLM {found.version} ({found.backend})"
    import transformers

    return f"transformers {transformers.__version__} (no vLLM installed)"


class Timer(Protocol):
    def __call__(self, models: Sequence[Mapping[str, Any] | Path], verify: int = 0) -> list[StepTime]: ...


@contextmanager
def open_timer(env: Mapping[str, str], log: Path, dtype: str = "auto") -> Iterator[Timer]:
    """Starts the child process and yields what measures: configs (contents of config.json) or folders to times, taken side
    by side.

    Shares are of the first one's step. With `verify` = K one more comes last: the first one's step of K + 1 tokens. What was
    measured before is not started again. `env` is the environment for the child, `dtype` the type that vLLM computes in. The
    timer raises PartFailedError where the engine does not run; its output is in `log`, which is removed in all other cases.
    """
    found = engine()
    cpu = found is None or found.backend == "cpu"
    words = (cpu_engine_env() if cpu else {}) | dict(env)
    words |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    words.pop(DIE_WITH_PARENT, None)
    log.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temp, open(log, "wb") as f:
        process = subprocess.Popen(
            [sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=f, text=True,
            cwd=Path(__file__).resolve().parents[1], env=words, preexec_fn=die_with_parent,
        )  # fmt: skip
        folders: dict[str, str] = {}
        failed: list[str] = []

        def place(model: Mapping[str, Any] | Path) -> str:
            if isinstance(model, Path):
                return str(model.absolute())
            key = digest_json(model)
            if key not in folders:
                folders[key] = str(Path(temp) / str(len(folders)))
                write_json(Path(folders[key]) / "config.json", dict(model))
            return folders[key]

        def measure(models: Sequence[Mapping[str, Any] | Path], verify: int = 0) -> list[StepTime]:
            placed = [(place(model), 0) for model in models]
            placed += [(placed[0][0], verify)] if verify else []
            request = {"engine": "vllm" if found else "transformers", "cpu": cpu, "dtype": dtype, "models": placed}
            assert process.stdin is not None
            assert process.stdout is not None
            with suppress(BrokenPipeError):
                process.stdin.write(json.dumps(request) + "\n")
                process.stdin.flush()
            line = process.stdout.readline()
            if not line.strip():
                process.wait()
                failed.append(_last(log))
                raise PartFailedError(f"no decode step could be measured in {engine_name()}: {failed[0]} (log: {log})")
            blocks = json.loads(line)
            shares = [[a / b for a, b in zip(mine, blocks[0], strict=True)] for mine in blocks]
            return [
                StepTime(_deciles([1000 * x for x in mine]), _deciles(s))
                for mine, s in zip(blocks, shares, strict=True)
            ]

        try:
            yield measure
        finally:
            process.kill()
            process.communicate()
            if not failed:
                log.unlink(missing_ok=True)


def _deciles(values: Sequence[float]) -> tuple[float, float, float]:
    cuts = quantiles(values, n=10, method="inclusive")
    return round(median(values), 4), round(cuts[0], 4), round(cuts[-1], 4)


def _last(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return next((line for line in reversed(lines) if "Error" in line), lines[-1] if lines else "no output")[-300:]


def child() -> None:
    """The child process: on each line of standard input a request of the timer, answered by the medians of all blocks."""
    reply = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM logs to standard output
    opened: dict[tuple[str, int], Begin] = {}
    for line in sys.stdin:
        request = json.loads(line)
        models = [(str(folder), int(verify)) for folder, verify in request["models"]]
        for model in models:
            if model not in opened:
                vllm = request["engine"] == "vllm"
                opened[model] = (
                    _open_vllm(*model, request["cpu"], request["dtype"]) if vllm else _open_transformers(*model)
                )
        steps = [opened[model]() for model in models]
        for step in steps:
            for _ in range(WARM):
                step()
        blocks: list[list[float]] = [[] for _ in steps]
        for _ in range(BLOCKS):
            for mine, step in zip(blocks, steps, strict=True):
                mine.append(median(_timed(step) for _ in range(BLOCK)))
        print(json.dumps(blocks), file=reply, flush=True)


def _timed(step: Callable[[], Any]) -> float:
    started = time.perf_counter()
    step()
    return time.perf_counter() - started


def _has_weights(folder: str) -> bool:
    return any(Path(folder).glob("*.safetensors"))


Begin = Callable[[], Callable[[], Any]]  # reads the prompt, and returns what does one step


def _lengths(config: Mapping[str, Any], verify: int = 0) -> tuple[int, int]:
    """Tokens of the prompt, and all of them; a model of few positions gets a shorter prompt."""
    answer = WARM + BLOCKS * BLOCK + 2 + 8 * verify  # for the last round's, and the few that are accepted
    prompt = max(min(CONTEXT, (context(config) or CONTEXT + answer) - answer), 1)
    return prompt, prompt + answer


def _prompt(config: Mapping[str, Any], length: int) -> list[int]:
    return random.Random(0).choices(range(config["vocab_size"]), k=length)


class RandomTokens:
    """vLLM's proposer of its method custom_class: any K tokens at no cost. Nearly all are rejected, which takes as long."""

    def __init__(self, vllm_config: Any) -> None:
        self.k = int(vllm_config.speculative_config.num_speculative_tokens)
        self.rows = int(vllm_config.model_config.get_vocab_size())
        self.random = random.Random(1)

    def load_model(self, *_: Any) -> None:
        pass

    def propose(self, sampled_token_ids: list[list[int]], *_: Any, **__: Any) -> list[list[int]]:
        return [self.random.choices(range(self.rows), k=self.k) for _ in sampled_token_ids]


def _open_vllm(folder: str, verify: int, cpu: bool, dtype: str) -> Begin:
    from vllm import LLM, SamplingParams

    whole = read_json(Path(folder) / "config.json")
    config = text_config(whole)
    # a loader of its own reads bitsandbytes, as the method asks for
    nf4 = whole.get("quantization_config", {}).get("quant_method") == "bitsandbytes"
    prompt, length = _lengths(config, verify)
    proposer = {
        "method": "custom_class",
        "model": f"{__name__}.{RandomTokens.__name__}",
        "num_speculative_tokens": verify,
    }
    llm = LLM(
        folder,
        load_format="bitsandbytes" if nf4 else "auto" if _has_weights(folder) else "dummy",
        quantization="bitsandbytes" if nf4 else None,
        dtype=dtype,
        skip_tokenizer_init=True,
        enforce_eager=cpu,  # compiling takes minutes there
        max_model_len=length,
        max_num_seqs=1,
        max_num_batched_tokens=length,
        speculative_config=proposer if verify else None,
        kv_cache_memory_bytes=KV_BYTES,
        enable_prefix_caching=False,
        disable_log_stats=True,
    ).llm_engine
    sampling = SamplingParams(temperature=0, max_tokens=length - prompt, ignore_eos=True, detokenize=False)
    numbers = itertools.count()

    def begin() -> Callable[[], Any]:
        while llm.has_unfinished_requests():
            llm.step()  # what is left of the request before this one
        llm.add_request(str(next(numbers)), {"prompt_token_ids": _prompt(config, prompt)}, sampling)
        llm.step()
        return llm.step

    return begin


def _open_transformers(folder: str, verify: int) -> Begin:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if _has_weights(folder):
        model = load_model(Path(folder)).to(device).eval()
    else:
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).eval()
    drafted = torch.arange(verify, device=device)[None]
    text = text_config(read_json(Path(folder) / "config.json"))
    prompt = torch.tensor([_prompt(text, _lengths(text, verify)[0])], device=device)

    def begin() -> Callable[[], Any]:
        state: dict[str, Any] = {"ids": prompt, "past": None}

        def step() -> None:
            with torch.inference_mode():
                out = model(state["ids"], past_key_values=state["past"], use_cache=True, logits_to_keep=verify + 1)
            if verify and state["past"] is not None:
                out.past_key_values.crop(-verify)  # all of them rejected
            own = out.logits[:, -verify - 1 :].argmax(-1)[:, :1]
            state.update(ids=torch.cat([own, drafted], dim=1), past=out.past_key_values)
            state["ids"].tolist()  # waits for the device

        step()
        return step

    return begin
