"""Pre-flight: what vLLM would refuse, kill or do slowly with this pair and these flags, known before it starts.

Pure functions of configs, headers and numbers; what they need from the machine (version, memory, which runner is
forced) is handed in, so that every verdict can be tested. Rules read from vLLM 0.32 (config/speculative.py,
config/scheduler.py, config/vllm.py); what older versions do is cited where we know it.
"""

from __future__ import annotations

import difflib
import importlib.util
import json
import math
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
from packaging.version import Version

from pairing.engine import Engine, engine
from pairing.errors import InputError
from pairing.files import read_json
from pairing.finding import LEVELS, Finding
from pairing.serving import context, overridden, text_config
from pairing.source import ModelSource
from pairing.weights import TensorInfo, read_headers

OFFLINE = (
    "without serving only an offline estimate is left: the replayed acceptance length in `draftsmith distill`'s "
    "evaluation.json; it says nothing of speed"
)


@dataclass(frozen=True)
class Support:
    """What a vLLM does with `draft_model`, by runner, and with a multimodal target beside one."""

    v1: bool
    v2: bool
    multimodal: bool
    seen: str  # where we know it from


# By the oldest version that it holds for, and back end; an installed version takes the newest line at or below its own.
SUPPORT: dict[tuple[str, str], Support] = {
    ("0.0", "cuda"): Support(False, False, False, "vLLM issue 31883: 0.13.0 refuses draft_model"),
    ("0.0", "cpu"): Support(False, False, False, "vLLM issue 28384: the CPU runner asserts that nothing speculates"),
    ("0.14", "cuda"): Support(True, False, False, "vLLM PR 24322; issue 42005: 0.20.1 refuses multimodal targets"),
    ("0.32", "cuda"): Support(True, True, True, "read in 0.32.0; the V1 runner was run, V2 was not"),
    ("0.32", "cpu"): Support(True, False, True, "run with 0.32.0; V2 asks for a Triton with a CPU back end"),
}


def support(version: str, backend: str) -> Support:
    """The line of `SUPPORT` for this version."""
    own = Version(version)
    lines = {Version(since): line for (since, name), line in SUPPORT.items() if name == backend}
    return lines[max(since for since in lines if since <= own or since == Version("0.0"))]


def probe(backend: str, package: Path | None = None) -> Support | None:
    """The same, read in the installed package's source without importing it (milliseconds); None where there is none."""
    if package is None:
        spec = importlib.util.find_spec("vllm")
        if spec is None or not spec.submodule_search_locations:
            return None
        package = Path(spec.submodule_search_locations[0])

    def text(name: str) -> str:
        return (package / name).read_text(encoding="utf-8") if (package / name).is_file() else ""

    proposers = text("v1/spec_decode/llm_base_proposer.py") + text("v1/spec_decode/eagle.py")
    v1 = (package / "v1/spec_decode/draft_model.py").is_file()
    v2 = "uses_draft_model" in text("v1/worker/gpu/spec_decode/__init__.py")
    if backend == "cpu":
        v1 = v1 and "spec decode is not supported" not in text("v1/worker/cpu_model_runner.py")
        triton = importlib.util.find_spec("triton")
        folders = triton.submodule_search_locations if triton else None
        v2 = v2 and any((Path(f) / "backends" / "cpu").is_dir() for f in folders or [])
    return Support(v1, v2, bool(proposers) and "_raise_if_multimodal" not in proposers, f"read in {package}")


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


def device_memory(backend: str) -> Memory:
    if backend == "cuda" and torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        return Memory(total, free)
    machine = psutil.virtual_memory()
    return Memory(machine.total, machine.available)


def preflight(
    target: Model,
    drafter: Model,
    serving: Serving,
    installed: Engine | None,
    memory: Memory,
    found: Support | None = None,
) -> list[Finding]:
    """Everything that can be known before a start; "blocks" means: do not start. `found` is what `probe` says."""
    findings = speculation_findings(serving)
    if installed is None:
        findings.append(
            Finding("info", "vLLM is not installed here: its version's limits are not checked", "engine", "")
        )
        return findings + length_findings(target, drafter, serving)
    return [
        *findings,
        *support_findings(
            installed, found, "vision_config" in target.config or "audio_config" in target.config, serving
        ),
        *length_findings(target, drafter, serving),
        *budget_findings(installed, memory, served_length(target, drafter, serving), serving),
        *memory_findings(target, drafter, installed, memory, serving),
    ]


def preflight_report(target: ModelSource, drafter: ModelSource, serving: Serving) -> dict[str, Any]:
    """`preflight` on this machine, JSON as it stands: {"starts", "findings", "numbers", "command"}.

    "numbers" are `memory_numbers` in bytes, None where no vLLM is installed; "command" is the whole line that serves.
    """
    t, d = (Model(read_json(s.path / "config.json"), read_headers(s.path)) for s in (target, drafter))
    installed = engine()
    memory = device_memory(installed.backend if installed else "cpu")
    findings = preflight(t, d, serving, installed, memory, probe(installed.backend) if installed else None)
    findings.sort(key=lambda f: LEVELS.index(f.level))
    return {
        "starts": not any(f.level == "blocks" for f in findings),
        "findings": [asdict(f) | {"stops": list(f.stops)} for f in findings],
        "numbers": memory_numbers(t, d, installed, memory, serving) if installed else None,
        "command": serve_line(target.name, drafter.name, serving),
    }


def require_start(target: ModelSource, drafter: ModelSource, serving: Serving) -> dict[str, Any]:
    """The report, for whoever is about to start the pair. Raises InputError, one line a finding that blocks."""
    report = preflight_report(target, drafter, serving)
    if not report["starts"]:
        lines = [f"{f['where']}: {f['what']}: {f['fix']}" for f in report["findings"] if f["level"] == "blocks"]
        raise InputError("this pair would not start in vLLM\n" + "\n".join(lines))
    return report


# Versions and runners (fault D8)


def support_findings(installed: Engine, found: Support | None, multimodal: bool, serving: Serving) -> list[Finding]:
    """Whether the installed vLLM drafts with a model at all. Where table and probe disagree the probe is believed."""
    listed = support(installed.version, installed.backend)
    actual = found or listed
    build = f"vLLM {installed.version} ({installed.backend})"
    findings = []
    parts = ("v1", "v2", "multimodal")
    if found and (differ := [p for p in parts if getattr(found, p) != getattr(listed, p)]):
        what = f"{build} is not as our table says ({', '.join(differ)}; {listed.seen}): its own source is believed"
        findings.append(Finding("info", what, "engine", ""))
    if not (actual.v1 or actual.v2):
        fix = f"update vLLM to 0.32 or later; {OFFLINE}"
        findings.append(_stop(f"{build} has no draft_model ({actual.seen})", "engine", fix))
    elif serving.force_v2 is True and not actual.v2:
        what = f"VLLM_USE_V2_MODEL_RUNNER=1 forces a runner that has no draft_model in {build} ({actual.seen})"
        findings.append(_stop(what, "engine", f"unset VLLM_USE_V2_MODEL_RUNNER; {OFFLINE}"))
    elif serving.force_v2 is False and not actual.v1:
        what = f"VLLM_USE_V2_MODEL_RUNNER=0 forces a runner that has no draft_model in {build} ({actual.seen})"
        findings.append(_stop(what, "engine", f"unset VLLM_USE_V2_MODEL_RUNNER; {OFFLINE}"))
    if multimodal and not actual.multimodal:
        what = f"{build} refuses draft models beside a multimodal target ({actual.seen})"
        findings.append(_stop(what, "engine", f"serve the target's text model alone, or update vLLM; {OFFLINE}"))
    if installed.backend == "cpu" and not any(f.level == "blocks" for f in findings):
        what = f"{build}: speedups measured on this CPU back end say nothing of a GPU"
        findings.append(Finding("info", what, "engine", ""))
    return findings


def _stop(what: str, where: str, fix: str) -> Finding:
    return Finding("blocks", what, where, fix, stops=("vllm",))


# The keys of --speculative-config, and K

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
                _stop(f"--speculative-config has no key {key}", "speculative config", f"write {near} in its place")
            )
    k = words["num_speculative_tokens"]
    if not isinstance(k, int) or k < 1:
        findings.append(_stop(f"num_speculative_tokens is {k!r}", "speculative config", "give a number from 1 on"))
        return findings
    shards = words.get("draft_tensor_parallel_size", serving.tensor_parallel_size)
    if shards != serving.tensor_parallel_size:
        what = f"draft_tensor_parallel_size is {shards}, --tensor-parallel-size {serving.tensor_parallel_size}"
        findings.append(
            _stop(what, "speculative config", "vLLM's draft_model takes equal ones only: leave the key out")
        )
    schedule = words.get("num_speculative_tokens_per_batch_size")
    if schedule is not None and (fault := schedule_fault(schedule, k)):
        fix = "give a list of [from, to, K], from 1 on, without overlap, such as [[1, 8, 4], [9, 64, 0]]"
        findings.append(_stop(f"num_speculative_tokens_per_batch_size: {fault}", "speculative config", fix))
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


# Lengths (fault D6)


def served_length(target: Model, drafter: Model, serving: Serving) -> int | None:
    """`--max-model-len` as vLLM resolves it; None where neither flag nor config says."""
    return serving.max_model_len or context(overridden(text_config(target.config), serving.hf_overrides))


def length_findings(target: Model, drafter: Model, serving: Serving) -> list[Finding]:
    """Stops where requests could pass the drafter's last position: vLLM reads past its rotary table there."""
    t = context(overridden(text_config(target.config), serving.hf_overrides))
    d = context(text_config(drafter.config))
    length = served_length(target, drafter, serving)
    findings = []
    own = serving.speculative_config.get("max_model_len")
    limits = [n for n in (d, length) if n is not None]
    if isinstance(own, int) and limits and own > min(limits):
        what = f"max_model_len {own} in --speculative-config is more than the {min(limits)} that both models take"
        findings.append(_stop(what, "context", f"leave it out, or set it to {min(limits)}"))
    if t is not None and serving.max_model_len is not None and serving.max_model_len > t:
        what = f"--max-model-len {serving.max_model_len} is more than the target's {t} positions"
        findings.append(_stop(what, "context", f"serve with `--max-model-len {min(t, d or t)}`"))
    elif d is not None and length is not None and length > d:
        named = (
            f"--max-model-len {length}" if serving.max_model_len else f"without --max-model-len the target's {length}"
        )
        cost = f"requests of more than {d} tokens, prompt and answer together, are then refused or end there"
        findings.append(
            _stop(
                f"{named} is more than the drafter's {d} positions",
                "context",
                f"serve with `--max-model-len {d}`: {cost}",
            )
        )
    return findings


# Token budgets (fault D9)


def batch_defaults(installed: Engine, memory: Memory, devices: int) -> tuple[int, int]:
    """vLLM's own (max_num_batched_tokens, max_num_seqs) for its server where no flag is given."""
    if installed.backend == "cpu":
        return 2048 * devices, 128 * devices
    if memory.total >= 160 * 2**30:
        return 16384, 1024
    return (8192, 1024) if memory.total >= 70 * 2**30 else (2048, 256)


def budgets(installed: Engine, memory: Memory, length: int | None, serving: Serving) -> tuple[int, int]:
    """(max_num_batched_tokens, max_num_seqs) that the server will run with."""
    tokens, seqs = batch_defaults(installed, memory, serving.tensor_parallel_size)
    if serving.max_num_seqs is not None:
        seqs = serving.max_num_seqs
    if serving.max_num_batched_tokens is not None:
        tokens = serving.max_num_batched_tokens
    elif length is not None:
        tokens = min(tokens, seqs * length)
    return tokens, seqs if serving.max_num_seqs is not None else min(seqs, tokens)


def budget_findings(installed: Engine, memory: Memory, length: int | None, serving: Serving) -> list[Finding]:
    """What is left to schedule once every running request has its slots for drafting."""
    tokens, seqs = budgets(installed, memory, length, serving)
    k = serving.speculation("").get("num_speculative_tokens")
    if not isinstance(k, int) or k < 1:
        return []
    slots = k if serving.speculation("").get("parallel_drafting") else 1  # per request, beside its own token
    if tokens <= seqs * slots:
        return [
            _stop(
                f"a step takes {tokens} tokens (--max-num-batched-tokens) and {seqs} requests (--max-num-seqs) take "
                f"{seqs * slots} slots for drafting: {tokens - seqs * slots} are left to schedule",
                "token budget",
                f"raise --max-num-batched-tokens to {seqs * (k + 1 + slots)}, "
                f"or lower --max-num-seqs to {max(tokens // (k + 1 + slots), 1)}",
            )
        ]
    if tokens < seqs * (k + 1):
        return [
            Finding(
                "warns",
                f"{seqs} requests verify {seqs * (k + 1)} tokens a step, --max-num-batched-tokens is {tokens}: "
                f"only {tokens // (k + 1)} of them are served at a time",
                "token budget",
                f"raise --max-num-batched-tokens to {seqs * (k + 1)}, or lower --max-num-seqs to {tokens // (k + 1)}",
            )
        ]
    return []


# Memory (fault D9)

ITEM = {"F32": 4, "F16": 2, "BF16": 2, "F64": 8}
SERVED = {"float32": 4, "float16": 2, "bfloat16": 2, "half": 2, "float": 4}


def itemsize(model: Model, serving: Serving, backend: str) -> int:
    """Bytes per value of activations and KV cache. auto: what the weights are, float32 lowered to 16 bit on CUDA."""
    if serving.dtype in SERVED:
        return SERVED[serving.dtype]
    config = text_config(model.config)
    named = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    return 2 if backend == "cuda" else SERVED.get(named, 4)


def weight_bytes(model: Model, size: int) -> int:
    """Values in the served type; packed ones as they are stored."""
    return sum(math.prod(t.shape) * size if t.dtype in ITEM else t.bytes for t in model.tensors.values())


def kv_bytes_per_token(model: Model, size: int, devices: int) -> int:
    """Keys and values of one token in all layers, on one device (a head is never split)."""
    text = text_config(model.config)
    heads = int(text.get("num_attention_heads") or 1)
    width = int(text.get("head_dim") or int(text.get("hidden_size") or 0) // heads)
    kv = int(text.get("num_key_value_heads") or heads)
    return 2 * int(text.get("num_hidden_layers") or 0) * max(kv // devices, 1) * width * size


def memory_numbers(
    target: Model, drafter: Model, installed: Engine, memory: Memory, serving: Serving
) -> dict[str, int | None]:
    """Bytes per device, both models counted: "target_weights", "drafter_weights", "kv_per_token", "length", "kv_one_request",
    "work" (logits of a full step, float32, twice), "budget" (what the engine may take), "kv_space" (left for the KV
    caches), "kv_tokens" (how many tokens both caches then hold)."""
    n = serving.tensor_parallel_size
    size = itemsize(target, serving, installed.backend)
    weights = [-(-weight_bytes(m, size) // n) for m in (target, drafter)]
    per_token = sum(kv_bytes_per_token(m, size, n) for m in (target, drafter))
    length = served_length(target, drafter, serving)
    tokens, seqs = budgets(installed, memory, length, serving)
    k = serving.num_speculative_tokens
    rows = int(text_config(target.config).get("vocab_size") or 0)
    work = 2 * 4 * rows * min(tokens, seqs * (k + 1))
    fixed = installed.backend == "cpu" and serving.kv_cache_gib is not None
    budget = memory.free if fixed else int(memory.total * serving.gpu_memory_utilization)
    space = budget - sum(weights) - work
    if fixed:
        space = min(space, (serving.kv_cache_gib or 0) * 2**30)
    return {
        "target_weights": weights[0],
        "drafter_weights": weights[1],
        "kv_per_token": per_token,
        "length": length,
        "kv_one_request": per_token * (length + k) if length else None,
        "work": work,
        "budget": budget,
        "kv_space": space,
        "kv_tokens": max(space, 0) // per_token if per_token else None,
    }


def memory_findings(
    target: Model, drafter: Model, installed: Engine, memory: Memory, serving: Serving
) -> list[Finding]:
    """Weights of both, KV caches of both for one request of full length, and the logits, against what there is."""
    n = memory_numbers(target, drafter, installed, memory, serving)
    fixed = installed.backend == "cpu" and serving.kv_cache_gib is not None
    share = serving.gpu_memory_utilization
    budget, space, per_token, one = n["budget"] or 0, n["kv_space"] or 0, n["kv_per_token"] or 0, n["kv_one_request"]
    models = (n["target_weights"] or 0) + (n["drafter_weights"] or 0) + (n["work"] or 0)
    has = f"{_gib(budget)} free" if fixed else f"{_gib(budget)} ({share:g} of {_gib(memory.total)})"
    parts = f"weights {_gib(n['target_weights'])} + {_gib(n['drafter_weights'])}, logits {_gib(n['work'])}"
    findings = []
    if not fixed and budget > memory.free:  # on the CPU back end too, whose flag has the same name
        what = f"--gpu-memory-utilization {share:g} asks for {_gib(budget)}, and {_gib(memory.free)} are free"
        lower = math.floor(memory.free / memory.total * 100) / 100
        findings.append(_stop(what, "memory", f"free memory, or set --gpu-memory-utilization {lower:g}"))
    if models > budget:
        flag = "free memory" if fixed else "raise --gpu-memory-utilization"
        fix = f"{flag}, serve in 16 bit (--dtype bfloat16), or split over more devices (--tensor-parallel-size)"
        findings.append(_stop(f"the models do not fit: {parts} of {has}", "memory", fix))
    elif one is not None and one > space:
        fits = max(space // per_token - serving.num_speculative_tokens, 0)
        over = (models + one) / budget - 1
        limit = f"{over:.1%} over {has}" if over > 0 else f"VLLM_CPU_KVCACHE_SPACE gives them {_gib(space)}"
        what = f"{parts}, both KV caches {_gib(one)} for one request of {n['length']} tokens: {limit}"
        more = "VLLM_CPU_KVCACHE_SPACE" if fixed else "--gpu-memory-utilization"
        findings.append(_stop(what, "memory", f"serve with `--max-model-len {fits}`, or raise {more}"))
    elif fixed and (serving.kv_cache_gib or 0) * 2**30 > budget - models:
        what = f"VLLM_CPU_KVCACHE_SPACE={serving.kv_cache_gib} GiB beside {parts} is more than {has}"
        fix = f"set VLLM_CPU_KVCACHE_SPACE to {(budget - models) // 2**30} or less"
        findings.append(_stop(what, "memory", fix))
    if not findings:
        holds = f"; the KV caches hold {n['kv_tokens']} tokens" if n["kv_tokens"] else ""
        findings.append(Finding("info", f"{parts} of {has}{holds}", "memory", ""))
    return findings


def _gib(value: int | None) -> str:
    return f"{(value or 0) / 2**30:.2f} GiB"


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
