"""The keys of --speculative-config as vLLM reads them: names, K, the draft's shards, the batch-size schedule (faults D9, D25)."""

from __future__ import annotations

import difflib
from typing import Any

from pairing.finding import Finding
from pairing.serving_plan import Serving, stop

KEYS = (
    "attention_backend",
    "code_revision",
    "disable_padded_drafter_batch",
    "draft_load_config",
    "draft_sample_method",
    "draft_tensor_parallel_size",
    "enforce_eager",
    "kv_cache_dtype",
    "max_model_len",
    "method",
    "model",
    "moe_backend",
    "num_speculative_tokens",
    "num_speculative_tokens_per_batch_size",
    "parallel_drafting",
    "quantization",
    "rejection_sample_method",
    "revision",
    "synthetic_acceptance_length",
    "synthetic_acceptance_rates",
    "use_heterogeneous_vocab",
    "use_local_argmax_reduction",
)
RENAMED = {  # what people write, and what it is called
    "tensor_parallel_size": "draft_tensor_parallel_size",
    "speculative_model": "model",
    "draft_model": "model",
    "num_spec_tokens": "num_speculative_tokens",
}


def speculation_findings(serving: Serving) -> list[Finding]:
    """D9: misnamed keys, K, the draft's shards and the schedule, as vLLM will read them."""
    words = serving.speculation("DRAFTER")
    findings = []
    for key in words:
        if key not in KEYS:
            near = RENAMED.get(key) or next(iter(difflib.get_close_matches(key, KEYS, 1, 0.0)))
            findings.append(
                stop(f"--speculative-config has no key {key}", "speculative config", f"write {near} in its place")
            )
    k = words["num_speculative_tokens"]
    if not isinstance(k, int) or k < 1:
        findings.append(stop(f"num_speculative_tokens is {k!r}", "speculative config", "give a number from 1 on"))
        return findings
    shards = words.get("draft_tensor_parallel_size", serving.tensor_parallel_size)
    if shards != serving.tensor_parallel_size:
        what = f"draft_tensor_parallel_size is {shards}, --tensor-parallel-size {serving.tensor_parallel_size}"
        findings.append(stop(what, "speculative config", "vLLM's draft_model takes equal ones only: leave the key out"))
    schedule = words.get("num_speculative_tokens_per_batch_size")
    if schedule is not None and (fault := schedule_fault(schedule, k)):
        fix = "give a list of [from, to, K], from 1 on, without overlap, such as [[1, 8, 4], [9, 64, 0]]"
        findings.append(stop(f"num_speculative_tokens_per_batch_size: {fault}", "speculative config", fix))
    return findings


def schedule_fault(schedule: Any, most: int) -> str | None:
    """What is wrong with a batch-size schedule, in words; None where nothing is (fault D25)."""
    if not isinstance(schedule, list) or not schedule:
        return "no list of triples"
    end = 0
    for entry in schedule:
        if not (isinstance(entry, (list, tuple)) and len(entry) == 3 and all(isinstance(n, int) for n in entry)):
            return f"{entry!r} is no triple of numbers"
        low, high, k = entry
        if low > high:
            return f"{entry!r} ends before it starts"
        if not end and low != 1:
            return f"it starts at {low}, not at 1"
        if low <= end:
            return f"{entry!r} overlaps the one before it"
        if not 0 <= k <= most:
            return f"K is {k} in {entry!r}, num_speculative_tokens {most}"
        end = high
    return None
