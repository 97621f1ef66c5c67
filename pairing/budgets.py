"""Lengths, tokens a step and bytes: what both models ask for against what the flags and the machine give (faults D6, D9)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import psutil

from pairing.engine import Engine
from pairing.finding import Finding
from pairing.serving import context, overridden, served_positions, text_config
from pairing.serving_plan import Memory, Model, Serving, served_length, stop

ITEM = {"F32": 4, "F16": 2, "BF16": 2, "F64": 8}
PROCESSES = 2 * 2**30
SERVED = {"float32": 4, "float16": 2, "bfloat16": 2, "half": 2, "float": 4}


def device_memory(backend: str) -> Memory:
    if backend == "cuda":
        import torch

        if torch.cuda.is_available():
            free, total = torch.cuda.mem_get_info()
            return Memory(total, free)
    machine = psutil.virtual_memory()
    return Memory(machine.total, machine.available)


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
        findings.append(stop(what, "context", f"leave it out, or set it to {min(limits)}"))
    if t is not None and serving.max_model_len is not None and serving.max_model_len > t:
        what = f"--max-model-len {serving.max_model_len} is more than the target's {t} positions"
        findings.append(stop(what, "context", f"serve with `--max-model-len {min(t, d or t)}`"))
    elif d is not None and length is not None and length > d:
        named = (
            f"--max-model-len {length}" if serving.max_model_len else f"without --max-model-len the target's {length}"
        )
        cost = f"requests of more than {d} tokens, prompt and answer together, are then refused or end there"
        findings.append(
            stop(
                f"{named} is more than the drafter's {d} positions",
                "context",
                f"serve with `--max-model-len {d}`: {cost}",
            )
        )
    drafted = served_positions(text_config(drafter.config))
    if own is None and drafted is not None and length is not None and drafted < min(length, d or length):
        what = f"vLLM drafts up to {drafted} tokens of prompt and answer only: the drafter's original_max_position_embeddings"
        fix = f"set max_model_len to {length} in --speculative-config, then measure there"
        findings.append(Finding("warns", what, "context", fix))
    return findings


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
            stop(
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


def itemsize(serving: Serving) -> int:
    """Bytes per value of activations and KV cache. auto: 16 bit, since vLLM lowers float32 by itself."""
    return SERVED.get(serving.dtype, 2)


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
    size = itemsize(serving)
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
        findings.append(stop(what, "memory", f"free memory, or set --gpu-memory-utilization {lower:g}"))
    if models > budget:
        flag = "free memory" if fixed else "raise --gpu-memory-utilization"
        fix = f"{flag}, serve in 16 bit (--dtype bfloat16), or split over more devices (--tensor-parallel-size)"
        findings.append(stop(f"the models do not fit: {parts} of {has}", "memory", fix))
    elif one is not None and one > space:
        fits = max(space // per_token - serving.num_speculative_tokens, 0)
        over = (models + one) / budget - 1
        limit = f"{over:.1%} over {has}" if over > 0 else f"VLLM_CPU_KVCACHE_SPACE gives them {_gib(space)}"
        what = f"{parts}, both KV caches {_gib(one)} for one request of {n['length']} tokens: {limit}"
        more = "VLLM_CPU_KVCACHE_SPACE" if fixed else "--gpu-memory-utilization"
        shorter = f"serve with `--max-model-len {fits}`, or raise {more}" if fits else f"no length fits: raise {more}"
        findings.append(stop(what, "memory", shorter))
    elif fixed and (serving.kv_cache_gib or 0) * 2**30 > budget - models:
        what = f"VLLM_CPU_KVCACHE_SPACE={serving.kv_cache_gib} GiB beside {parts} is more than {has}"
        fix = f"set VLLM_CPU_KVCACHE_SPACE to {(budget - models) // 2**30} or less"
        findings.append(stop(what, "memory", fix))
    if not findings:
        holds = f"; the KV caches hold {n['kv_tokens']} tokens" if n["kv_tokens"] else ""
        findings.append(Finding("info", f"{parts} of {has}{holds}", "memory", ""))
    return findings


def servers_findings(models: Sequence[Sequence[Model]], memory: Memory, serving: Serving) -> list[Finding]:
    """Whether servers of these models (a target, with or without a drafter, each) fit beside each other on the CPU back end.

    A server's three processes hold PROCESSES beside weights and KV cache: seen with vLLM 0.32 were 3.2 GiB for a target of
    0.5 GiB and 3.8 with a drafter of 0.2, each with 1 GiB of KV cache.
    """
    kv = (serving.kv_cache_gib or 0) * 2**30
    needs = [PROCESSES + kv + sum(weight_bytes(m, itemsize(serving)) for m in pair) for pair in models]
    if sum(needs) <= memory.free:
        return []
    what = f"{len(needs)} servers side by side take about {_gib(sum(needs))}, and {_gib(memory.free)} are free"
    return [stop(what, "memory", "one at a time, or fewer of them")]


def _gib(value: int | None) -> str:
    return f"{(value or 0) / 2**30:.2f} GiB"
