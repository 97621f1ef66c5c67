"""The target answers in vLLM: one engine for all sets, requests fed as others finish, heads taken from flat lists."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distill.requests import Answerer, Completion, Request, Sampling, dtype, ending_ids, request_seed, text_config
from pairing.engine import require_vllm
from pairing.engine_env import cpu_engine_env
from pairing.errors import PartFailedError
from pairing.source import ModelSource
from pairing.vllm_plugin import DIE_WITH_PARENT

NONE_NK = np.zeros((0, 0), dtype=np.float32)
KV_BLOCK = 128  # tokens in a block of vLLM's CPU KV cache


@contextmanager
def open_vllm(
    target: ModelSource, *, context: int, top_logprobs: int, max_num_seqs: int, log: Path
) -> Iterator[Answerer]:
    """Starts the engine and yields its Answerer. `context`: prompt and answer tokens of the longest request.

    Raises PartFailedError where the engine does not start, or dies; its output is in `log`.
    """
    cpu = require_vllm("generate with backend=vllm").backend == "cpu"
    # The one place where this package touches the environment: vLLM's processes read their settings there. The pid
    # tells the plugin which process is the parent; engine processes die with it.
    os.environ[DIE_WITH_PARENT] = str(os.getpid())
    if cpu:
        for key, value in cpu_engine_env().items():
            os.environ.setdefault(key, value)
    with _output_to(log, stdout=True):  # for as long as it lives: vLLM logs to standard output, which is the user's
        with _output_to(log, stderr=True):  # its processes keep this one
            llm = _start(target, context, top_logprobs, max_num_seqs, cpu, log)
        _raise_when_dead(llm.llm_engine.engine_core)
        try:
            yield _answerer(llm.llm_engine, ending_ids(target.path), max_num_seqs, log)
        finally:
            with _output_to(log, stderr=True):
                llm.llm_engine.engine_core.shutdown(timeout=1)


def head_of(token_ids: list[int], logprobs: list[float], n: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """The head [n, K] from vLLM's flat lists: at each of n positions the sampled token, then the K most likely.

    The sampled token stands there twice where it is among the K, so its column goes.
    """
    ids_NK = np.array(token_ids, dtype=np.int32).reshape(n, -1)[:, 1:]
    return ids_NK, np.array(logprobs, dtype=np.float32).reshape(n, -1)[:, 1:]


def _start(target: ModelSource, context: int, top_logprobs: int, max_num_seqs: int, cpu: bool, log: Path) -> Any:
    # compiling takes minutes on a CPU
    only_cpu = {"enforce_eager": True, "kv_cache_memory_bytes": _kv_bytes(target.path, context, max_num_seqs)}
    try:
        from vllm import LLM

        return LLM(
            str(target.path),
            dtype=dtype(),
            max_model_len=context,
            max_num_seqs=max_num_seqs,
            max_logprobs=top_logprobs,
            logprobs_mode="raw_logprobs",  # before temperature: the target's distribution at temperature 1
            generation_config="vllm",  # no sampling defaults from the model; its eos ids are passed by us
            enable_prefix_caching=True,  # the system message is shared
            disable_log_stats=True,
            **(only_cpu if cpu else {}),
        )
    except Exception as e:  # whatever vLLM stumbles over, it is in its log
        line = str(e).splitlines()[0] if str(e) else ""
        raise PartFailedError(f"vLLM did not start ({type(e).__name__}: {line}); its log: {log}") from e


def _raise_when_dead(client: Any) -> None:
    """Makes a step raise when the engine's process is killed (kill -9, out of memory).

    vLLM 0.32's client notices, closes its sockets, and leaves the step waiting for ever: nobody wakes its queue.
    """
    from vllm.v1.engine.exceptions import EngineDeadError

    def watch() -> None:
        while not client.resources.engine_dead:  # also set by our own shutdown, after which nobody steps
            time.sleep(0.5)
        client.outputs_queue.put_nowait(EngineDeadError())

    threading.Thread(target=watch, daemon=True, name="draftsmith-engine-watch").start()


def _kv_bytes(folder: Path, context: int, max_num_seqs: int) -> int:
    """KV cache for all sequences at full length, in float32, but at most a quarter of the memory."""
    c = text_config(folder)
    heads = getattr(c, "num_key_value_heads", None) or c.num_attention_heads
    width = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    sequence = -(-context // KV_BLOCK) * KV_BLOCK * c.num_hidden_layers * heads * width * 2 * 4
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    # one sequence more than asked for: the engine keeps a block for itself
    return max(min(sequence * (max_num_seqs + 1), memory // 4), 2 * sequence)


def _answerer(core: Any, endings: list[int], max_num_seqs: int, log: Path) -> Answerer:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.exceptions import EngineDeadError

    def answer(waiting: deque[Request], sampling: Sampling) -> Iterator[Completion]:
        running: dict[str, Request] = {}
        bad: dict[str, str] = {}
        try:
            while waiting or core.has_unfinished_requests():
                # twice as many as run keeps the batch full; all at once would hold every prompt in two processes
                while waiting and core.get_num_unfinished_requests() < 2 * max_num_seqs:
                    request = waiting.popleft()
                    running[request.key] = request
                    params = SamplingParams(
                        temperature=sampling.temperature,
                        seed=request_seed(sampling.seed, request.key) if sampling.temperature else None,
                        max_tokens=sampling.max_tokens,
                        stop_token_ids=endings,
                        logprobs=sampling.top_logprobs,
                        flat_logprobs=True,  # plain lists; an object per token and rank costs more than the step
                        detokenize=False,  # texts of 33 tokens a position would be made for nothing
                        output_kind=RequestOutputKind.FINAL_ONLY,
                    )
                    core.add_request(request.key, {"prompt_token_ids": request.prompt_ids}, params)
                for output in core.step():
                    done = output.outputs[0]
                    if done.finish_reason not in ("stop", "length"):
                        bad[output.request_id] = str(done.finish_reason)
                        continue
                    request, n = running.pop(output.request_id), len(done.token_ids)
                    flat = done.logprobs  # None where no log-probs were asked for: plain generation, as a bench does
                    head = head_of(flat.token_ids, flat.logprobs, n) if flat is not None else (NONE_NK, NONE_NK)
                    yield Completion(request, list(done.token_ids), done.finish_reason, *head)
        except EngineDeadError as e:
            raise PartFailedError(
                f"vLLM's engine died; finished prompts are kept, the same command goes on from there; its log: {log}"
            ) from e
        if bad:
            id_, reason = next(iter(bad.items()))
            raise PartFailedError(
                f"{len(bad)} prompts were not answered, the first is {id_} ({reason}); the others are kept; log: {log}"
            )

    return answer


@contextmanager
def _output_to(log: Path, stdout: bool = False, stderr: bool = False) -> Iterator[None]:
    """Sends this process's output, and that of processes started meanwhile, to the end of `log`."""
    log.parent.mkdir(parents=True, exist_ok=True)
    streams = [stream for stream, on in ((sys.stdout, stdout), (sys.stderr, stderr)) if on]
    numbers = [number for number, on in ((1, stdout), (2, stderr)) if on]
    for stream in streams:
        stream.flush()
    kept = [os.dup(number) for number in numbers]
    with open(log, "ab") as f:
        for number in numbers:
            os.dup2(f.fileno(), number)
    try:
        yield
    finally:
        for stream in streams:
            stream.flush()
        for number, old in zip(numbers, kept, strict=True):
            os.dup2(old, number)
            os.close(old)
