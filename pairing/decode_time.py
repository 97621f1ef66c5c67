"""How long a decode step takes: models known by their config.json alone, or whole folders, in the installed engine.

A config's weights are random, since time does not go by their values; quantized ones are read from
their folder, since no engine makes up packed weights. No tokenizer is read. All models live in one child process and
take turns in blocks of steps, so that what else the machine does falls on all of them alike. In vLLM 0.32 the engine runs
within that process: the figures are the model's own step, scheduler and sampler included, without a server's messages.
A verify step, which a target makes of K + 1 tokens of a request at once, is measured with a proposer that costs nothing; a
round, K draft steps (or, in parallel, one) and the verify step, with a target and a drafter as vLLM runs them.
Without vLLM the same is measured in transformers, and says so: its steps are slower, and not in proportion.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any, Protocol

from pairing.budgets import kv_bytes_per_token
from pairing.engine import engine
from pairing.engine_env import cpu_engine_env
from pairing.errors import InputError, PartFailedError
from pairing.files import digest_json, read_json, write_json
from pairing.mask_token import mask_id_of, with_mask
from pairing.serving import context, text_config
from pairing.serving_plan import Model
from pairing.vllm_plugin import DIE_WITH_PARENT, die_with_parent

CONTEXT = 256  # tokens before the first step that counts
BLOCK, BLOCKS = 8, 8  # before each block a step that does not count: the last one of another model, or of another K
WARM = 4  # steps that do not count, after the prompt
STEPS = WARM + BLOCKS * (BLOCK + 1) + 2  # and two for what an engine schedules ahead
PROMPTS = 3  # times that the prompt is read
CHILD = "from pairing.decode_engines import child; child()"


@dataclass(frozen=True)
class StepTime:
    """Of one model: a step's time in ms, and in steps of the first model; median, first and ninth decile of the blocks."""

    ms: tuple[float, float, float]
    share: tuple[float, float, float]
    prompt_ms: float = math.nan  # from the requests to their first tokens; median
    prompt_tokens: int = 0  # of each request


def engine_name() -> str:
    """What is measured in here."""
    found = engine()
    if found is not None:
        return f"vLLM {found.version} ({found.backend})"
    import transformers

    return f"transformers {transformers.__version__} (no vLLM installed)"


class Timer(Protocol):
    def __call__(
        self,
        models: Sequence[Mapping[str, Any] | Path],
        *,
        verify: Sequence[int] = (),
        rounds: Sequence[int] = (),
        parallel: Sequence[int] = (),
        batch: int = 1,
    ) -> list[StepTime]: ...


@contextmanager
def open_timer(env: Mapping[str, str], log: Path, dtype: str = "auto", batch: int = 1) -> Iterator[Timer]:
    """Starts the child process and yields what measures: configs (contents of config.json) or folders to times, taken side
    by side.

    Shares are of the first one's step. For each K in `verify` one more follows, the first one's step of K + 1 tokens; then
    for each K in `rounds` a round of the first one with the last as its drafter (vLLM only), and for each K in `parallel` one
    whose drafts come from one pass (a config that names no mask token is given one). Each step is of a batch of
    `batch` requests, at most the `batch` of opening. What was measured before is not started again. `env` is the environment
    for the child, `dtype` the type that vLLM computes in; auto is float32 on its CPU back end. The timer raises PartFailedError
    where the engine does not run; its output is in `log`, which is removed in all other cases; InputError where a model has too
    few positions.
    """
    most = batch
    found = engine()
    cpu = found is None or found.backend == "cpu"
    if dtype == "auto" and found is not None and cpu:
        # as we serve there; vLLM's own auto makes bfloat16 of float32, in which a step of several tokens is far slower
        dtype = "float32"
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

        def measure(
            models: Sequence[Mapping[str, Any] | Path],
            *,
            verify: Sequence[int] = (),
            rounds: Sequence[int] = (),
            parallel: Sequence[int] = (),
            batch: int = 1,
        ) -> list[StepTime]:
            assert batch <= most
            first, last = models[0], models[-1]
            placed = [place(model) for model in models]
            # models alike are one engine and one request, which must last for the steps of all of them
            items = [_item(place, m, answer=STEPS * placed.count(at)) for m, at in zip(models, placed, strict=True)]
            # one engine for all K; a few tokens are accepted by chance
            answer = STEPS * len(verify) + 8 * max(verify, default=0)
            items += [_item(place, first, k=k, most=max(verify), answer=answer) for k in verify]
            # random weights may agree: all that is drafted may be accepted
            items += [_item(place, first, last, k=k, most=k, answer=STEPS * (k + 1)) for k in rounds]
            masked = _masked(last) if parallel else last
            items += [_item(place, first, masked, k=k, most=k, answer=STEPS * (k + 1), parallel=True) for k in parallel]
            request = {
                "vllm": found is not None,
                "cpu": cpu,
                "dtype": dtype,
                "seqs": most,
                "batch": batch,
                "items": items,
            }
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
            reply = json.loads(line)
            shares = [[a / b for a, b in zip(mine, reply["blocks"][0], strict=True)] for mine in reply["blocks"]]
            return [
                StepTime(
                    _deciles([1000 * x for x in mine]), _deciles(s), 1000 * median(prompts), item["engine"]["prompt"]
                )
                for mine, s, prompts, item in zip(reply["blocks"], shares, reply["prompts"], items, strict=True)
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


def _masked(model: Mapping[str, Any] | Path) -> Mapping[str, Any] | Path:
    if isinstance(model, Path) or mask_id_of(model) is not None:
        return model
    return with_mask(dict(model), int(text_config(model)["vocab_size"]) - 1)  # any row: time does not go by it


def _item(
    place: Callable[[Mapping[str, Any] | Path], str],
    model: Mapping[str, Any] | Path,
    draft: Mapping[str, Any] | Path | None = None,
    *,
    k: int = 0,
    most: int = 0,
    answer: int = STEPS,
    parallel: bool = False,
) -> dict[str, Any]:
    """What is timed: K, and the engine that it needs; engines of the same words are one."""
    folders = [place(m) for m in (model, draft) if m is not None]
    configs = [text_config(read_json(Path(folder) / "config.json")) for folder in folders]
    limit = min((n for c in configs if (n := context(c))), default=CONTEXT + answer)
    if limit <= answer:
        raise InputError(f"a model of {limit} positions is too short to measure K = {most}: {answer + 1} are needed")
    prompt = min(CONTEXT, limit - answer)
    kv = 2 * (prompt + answer) * sum(kv_bytes_per_token(Model(c, {}), 4, 1) for c in configs)
    engine = {
        "folder": folders[0],
        "draft": folders[1] if draft is not None else None,
        "most": most,
        "parallel": parallel,
    }
    return {"k": k, "engine": engine | {"prompt": prompt, "answer": answer, "kv": kv}}
