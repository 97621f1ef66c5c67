"""What a vLLM server really ran with, by its own log, and how an arm's differs from the target alone's.

Asking alike is not serving alike: vLLM turns things off by itself beside some proposers (asynchronous scheduling) and picks
others by what it finds. Lines as vLLM 0.32 writes them; what no line says is "unknown", never taken for equal.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

UNKNOWN = "unknown"
# of the line "Initializing a V1 LLM engine (v…) with config: …, dtype=torch.float32, max_seq_len=386, …"
CONFIG = {
    "dtype": "dtype",
    "quantization": "quantization",
    "kv_cache_dtype": "kv_cache_dtype",
    "prefix_caching": "enable_prefix_caching",
    "max_model_len": "max_seq_len",
    "tensor_parallel_size": "tensor_parallel_size",
    "device": "device_config",
    "eager": "enforce_eager",
    "chunked_prefill": "enable_chunked_prefill",
}
LINES = {
    "compilation": r"'mode': <CompilationMode\.(\w+)",
    "graphs": r"'cudagraph_mode': <CUDAGraphMode\.(\w+)",
    "attention": r"Using (\w+) (?:attention )?backend(?: out of|\.|\s*$)",
    "kv_cache_tokens": r"KV cache size: ([\d,]+) tokens",
    "runner": r"using the (V\d) model runner",
}
SYNCHRONOUS = r"[Aa]sync(?:hronous)? scheduling [^\n]*disabled"
# Where these differ the arms did other work, and their ratio says nothing of speculation
VOIDS = ("dtype", "quantization", "kv_cache_dtype", "prefix_caching", "max_model_len", "tensor_parallel_size", "device")
# a drafter's layers take their share of the same memory: fewer tokens in the cache belong to speculation
OF_SPECULATION = ("kv_cache_tokens",)


def read(log: Path) -> dict[str, str]:
    """The settings of the last server that wrote this log."""
    text = log.read_text(errors="replace") if log.is_file() else ""
    starts = [m.start() for m in re.finditer("non-default args:", text)]
    text = text[starts[-1] :] if starts else text
    config = re.search(r"Initializing a V1 LLM engine[^\n]*", text)
    # after the models' names and the speculative config, which may hold any word
    words = config[0].partition("skip_tokenizer_init=")[2] if config else ""
    found = {ours: _first(rf"\b{theirs}=([^,\s]+)", words) for ours, theirs in CONFIG.items()}
    found |= {name: _first(pattern, text) for name, pattern in LINES.items()}
    found["dtype"] = found["dtype"].removeprefix("torch.")
    # vLLM 0.32's CPU platform turns it off for every engine and says nothing; beside n-gram it is said all the same
    silent = found["device"] == "cpu"
    found["scheduling"] = "synchronous" if silent or re.search(SYNCHRONOUS, text) else UNKNOWN
    return found


def _first(pattern: str, text: str) -> str:
    found = re.search(pattern, text, re.MULTILINE)
    return found[1] if found else UNKNOWN


def differences(arm: Mapping[str, str], target: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """(those that void the comparison, those to know of), each as "dtype bfloat16, the target's float32".

    Unknown on one side is to know of; on both sides there is nothing to say.
    """
    voids: list[str] = []
    alarms: list[str] = []
    for name in arm.keys() & target.keys() - set(OF_SPECULATION):
        a, b = arm[name], target[name]
        if a != b:
            known = UNKNOWN not in (a, b)
            (voids if known and name in VOIDS else alarms).append(f"{name} {a}, the target's {b}")
    return sorted(voids), sorted(alarms)
