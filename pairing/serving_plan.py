"""How a pair is to be served, the two models and the machine as numbers, and the line that serves."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pairing.finding import Finding
from pairing.serving import overridden, served_positions, text_config
from pairing.weights import TensorInfo


@dataclass(frozen=True)
class Serving:
    """How the pair is to be served; None leaves a choice to vLLM."""

    num_speculative_tokens: int = 4
    max_model_len: int | None = None
    tensor_parallel_size: int = 1
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    dtype: str = "auto"
    gpu_memory_utilization: float = 0.9
    kv_cache_gib: int | None = None  # CPU back end: VLLM_CPU_KVCACHE_SPACE
    hf_overrides: Mapping[str, Any] = field(default_factory=dict)
    speculative_config: Mapping[str, Any] = field(default_factory=dict)  # more keys of --speculative-config
    force_v2: bool | None = None  # VLLM_USE_V2_MODEL_RUNNER
    one_by_one: str = "leave parallel_drafting out"  # how the user, here, asks for drafts one by one instead

    def speculation(self, drafter: str) -> dict[str, Any]:
        words = {"method": "draft_model", "model": drafter, "num_speculative_tokens": self.num_speculative_tokens}
        if self.tensor_parallel_size > 1:
            words["draft_tensor_parallel_size"] = self.tensor_parallel_size
        return words | dict(self.speculative_config)


@dataclass(frozen=True)
class Model:
    """One side of the pair: config.json and the tensors' headers."""

    config: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]


@dataclass(frozen=True)
class Memory:
    """Bytes of the device that the engine runs on."""

    total: int
    free: int


def stop(what: str, where: str, fix: str) -> Finding:
    """What keeps vLLM from starting this pair."""
    return Finding("blocks", what, where, fix, stops=("vllm",))


def served_length(target: Model, drafter: Model, serving: Serving) -> int | None:
    """`--max-model-len` as vLLM resolves it; None where neither flag nor config says."""
    return serving.max_model_len or served_positions(overridden(text_config(target.config), serving.hf_overrides))


def serve_line(target: str, drafter: str, serving: Serving) -> str:
    """The whole `vllm serve` line; flags that were left to vLLM are left out."""
    words = ["vllm", "serve", target]
    flags = {
        "--max-model-len": serving.max_model_len,
        "--tensor-parallel-size": serving.tensor_parallel_size if serving.tensor_parallel_size > 1 else None,
        "--max-num-seqs": serving.max_num_seqs,
        "--max-num-batched-tokens": serving.max_num_batched_tokens,
        "--dtype": serving.dtype if serving.dtype != "auto" else None,
        "--gpu-memory-utilization": serving.gpu_memory_utilization if serving.gpu_memory_utilization != 0.9 else None,
        "--hf-overrides": json.dumps(dict(serving.hf_overrides)) if serving.hf_overrides else None,
        "--speculative-config": json.dumps(serving.speculation(drafter)),
    }
    words += [word for flag, value in flags.items() if value is not None for word in (flag, str(value))]
    return shlex.join(words)
