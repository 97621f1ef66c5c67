"""Transformers' own speculation, offline: assisted generation and prompt lookup beside its plain greedy decoding.

No server and no batching: one prompt at a time in this process, the ways in turns on each prompt. Speedups are over
transformers' target alone, so these rows (engine "transformers") are never ranked against served arms. K drafts a round in
every round: transformers by itself lengthens and cuts drafts as it goes, which no served arm does.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig

from eval import statistics
from eval.measure import WARMUP_TOKENS, Request
from pairing.errors import InputError
from pairing.files import append_jsonl, read_jsonl, write_jsonl
from pairing.progress import bar
from pairing.source import load_model

ENGINE = "transformers"
FILE = "assisted.jsonl"


@dataclass(frozen=True)
class Way:
    name: str
    kind: str  # "transformers-target", "transformers-assisted" or "transformers-prompt-lookup"
    model: Path | None = None
    num_speculative_tokens: int = 0


def ways(drafters: Mapping[str, Path], K: int) -> list[Way]:
    assisted = [Way(f"{name}-{ENGINE}", f"{ENGINE}-assisted", path, K) for name, path in drafters.items()]
    lookup = Way(f"prompt-lookup-{ENGINE}", f"{ENGINE}-prompt-lookup", None, K)
    return [Way(f"target-{ENGINE}", f"{ENGINE}-target"), *assisted, lookup]


def measure_assisted(
    target: Path,
    measured: Sequence[Way],
    workloads: Mapping[str, Sequence[Request]],
    out: Path,
    repeats: int,
    dtype: str,
    device: torch.device | str = "cpu",
) -> dict[str, str]:
    """Runs the prompts that out/assisted.jsonl does not hold yet; a prompt is written when all ways have answered it.

    Returns the reasons of drafters that transformers does not load or run, by name of the way.
    """
    names, rows = {w.name for w in measured}, read_jsonl(out / FILE)
    held: dict[tuple[str, int, str], set[str]] = {}
    for r in rows:
        held.setdefault((r["workload"], r["repeat"], r["id"]), set()).add(r["arm"])
    whole = {prompt for prompt, arms in held.items() if names <= arms}
    kept = [r for r in rows if (r["workload"], r["repeat"], r["id"]) in whole]
    if len(kept) < len(rows):
        write_jsonl(out / FILE, kept)
    todo = [
        (workload, repeat, r)
        for repeat in range(repeats)
        for workload, requests in workloads.items()
        for r in requests
        if (workload, repeat, r.id) not in whole
    ]
    void: dict[str, str] = {}
    model, drafters = _load(target, dtype, device), {}
    for way in measured:
        try:
            drafters[way.name] = _load(way.model, dtype, device, way.num_speculative_tokens) if way.model else None
            for _, _, request in todo[-1:]:  # kernels of the first use belong to no figure
                answer(model, drafters[way.name], way, request, WARMUP_TOKENS)
        except (InputError, ValueError, RuntimeError, NotImplementedError) as e:
            if way.kind == f"{ENGINE}-target":
                raise
            void[way.name] = f"transformers does not draft with it ({' '.join(str(e).split())[:300]})"
    running = [w for w in measured if w.name not in void]
    with bar("measuring in transformers", len(todo) * len(running)) as advance:
        for number, (workload, repeat, request) in enumerate(todo):
            turn, found = number % len(running), []
            for way in [*running[turn:], *running[:turn]]:  # nobody is always first
                advance(1, f"{workload} {way.name}")
                head = {"arm": way.name, "workload": workload, "repeat": repeat, "group": request.group}
                found.append({**head, "id": request.id, **answer(model, drafters[way.name], way, request)})
            for row in found:
                append_jsonl(out / FILE, row)
    return void


def _load(folder: Path, dtype: str, device: torch.device | str, K: int = 0) -> Any:
    """What the folder's generation config says of sampling is left out: a penalty in it would change greedy answers."""
    model = load_model(folder, dtype=dtype)
    if not getattr(model, "is_quantized", False):  # quantized weights stay where they were loaded
        model = model.to(device)
    own = model.generation_config
    plain = GenerationConfig(
        eos_token_id=own.eos_token_id, pad_token_id=own.pad_token_id, bos_token_id=own.bos_token_id
    )
    if K:  # read from the drafter's own config, not from what `generate` is given
        plain.num_assistant_tokens, plain.num_assistant_tokens_schedule = K, "constant"
        plain.assistant_confidence_threshold = 0.0
    model.generation_config = plain
    return model.eval()


def answer(target: Any, drafter: Any, way: Way, request: Request, max_tokens: int | None = None) -> dict[str, Any]:
    """One greedy answer: its ids, seconds, and how often the target ran. Each pass of the target is a round, the first one,
    which reads the prompt too, included."""
    passes = 0

    def count(*_: Any) -> None:
        nonlocal passes
        passes += 1

    prompt_1T = torch.tensor([request.prompt_ids], device=target.device)
    words: dict[str, Any] = {
        "do_sample": False,
        "max_new_tokens": min(max_tokens or request.max_tokens, request.max_tokens),
    }
    if drafter is not None:
        words["assistant_model"] = drafter
    elif way.num_speculative_tokens:
        words["prompt_lookup_num_tokens"] = way.num_speculative_tokens
    hook = target.register_forward_hook(count)
    try:
        started = time.perf_counter()
        ids = target.generate(prompt_1T, attention_mask=torch.ones_like(prompt_1T), **words)[0].tolist()
        took = time.perf_counter() - started
    finally:
        hook.remove()
    ids = ids[len(request.prompt_ids) :]
    return {"output_ids": ids, "output_tokens": len(ids), "e2e_s": took, "target_passes": passes}


def assisted_results(
    out: Path,
    measured: Sequence[Way],
    workloads: Mapping[str, Sequence[Request]],
    void: Mapping[str, str],
    versions: Mapping[str, Any],
) -> list[dict[str, Any]]:
    """One row per workload and way; "acceptance_length" is output tokens per pass of the target."""
    requests, rows = read_jsonl(out / FILE), []
    for workload in workloads:
        base = [r for r in requests if r["workload"] == workload and r["arm"] == measured[0].name]
        for way in measured:
            mine = [r for r in requests if r["workload"] == workload and r["arm"] == way.name]
            alone = way.kind == f"{ENGINE}-target"
            gain = None if alone else statistics.speedup(mine, base)
            exact = None if alone else statistics.exact_match(mine, base)
            tokens, passes = sum(r["output_tokens"] for r in mine), sum(r["target_passes"] for r in mine)
            rows.append(
                {
                    "arm": way.name,
                    "kind": way.kind,
                    "engine": ENGINE,
                    "model": str(way.model) if way.model else None,
                    "workload": workload,
                    "group": None,
                    "temperature": 0.0,
                    "concurrency": 1,
                    "rate": None,
                    "num_speculative_tokens": way.num_speculative_tokens,
                    "void": void.get(way.name),
                    "prompts": len({r["id"] for r in mine}),
                    "repeats": len({r["repeat"] for r in mine}),
                    "target_passes": passes,
                    "acceptance_length": tokens / passes if passes and not alone else None,
                    "output_tokens": tokens,
                    "output_tokens_per_s": statistics.tokens_per_s(mine),
                    "e2e_ms": statistics.percentiles([r["e2e_s"] for r in mine], 1000),
                    "speedup": gain.ratio if gain else None,
                    "speedup_interval": list(gain.interval) if gain and gain.interval else None,
                    "exact_match": exact.fraction if exact else None,
                    "mismatches": exact.mismatches if exact else None,
                    "versions": dict(versions),
                }
            )
    return rows


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """A table of its own, which says what its speeds are relative to."""
    lines = [
        "In transformers, offline, one prompt at a time; speed over transformers' own target, not comparable with the above:",
        "",
        "| workload | arm | K | speed | tokens/s | τ | identical |",
        "|---|---|--:|--:|--:|--:|--:|",
    ]
    for r in rows:
        low_high = r["speedup_interval"]
        speed = f"{r['speedup']:.2f}x" if r["speedup"] else "–"
        speed += f" ({low_high[0]:.2f}–{low_high[1]:.2f})" if low_high else ""
        figures = (
            f"{r['output_tokens_per_s']:.1f}" if r["output_tokens_per_s"] else r["void"] or "–",
            f"{r['acceptance_length']:.2f}" if r["acceptance_length"] else "–",
            "–" if r["exact_match"] is None else f"{r['exact_match']:.0%}",
        )
        lines.append(
            f"| {r['workload']} | {r['arm']} | {r['num_speculative_tokens'] or '–'} | {speed} | {' | '.join(figures)} |"
        )
    return "\n".join(lines) + "\n"
