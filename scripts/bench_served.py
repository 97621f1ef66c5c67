"""Serves the drafters that bench_objectives kept, each beside their target in vLLM: τ as served, arm against arm, and by replay.

python -m scripts.bench_objectives … --arms "fkl, K=32; auto, K=32" --keep runs/bench/kept --out runs/bench/objectives.jsonl
python -m scripts.bench_served --results runs/bench/objectives.jsonl --out runs/bench/served

Temperature 0, argmax drafting. One server after the other, several requests in flight: τ depends on neither, speed would, and is
not measured here. Blocks that --out holds already are not served again.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

from distill.answers import open_answers
from eval import server
from eval.measure import Arm, Plan, Request, measure
from pairing.bootstrap import interval
from pairing.files import read_jsonl
from pairing.source import resolve
from scripts import bench_common as common
from scripts.bench_common import K, Row, Statistic, table
from scripts.bench_objectives import REFERENCE, kept_at


def main(argv: Sequence[str]) -> int:
    made = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    made.add_argument("--results", type=Path, required=True, help="bench_objectives' --out")
    made.add_argument("--out", type=Path, required=True, help="a folder: requests, counters and logs of the servers")
    made.add_argument("--max-tokens", type=int, default=64)
    made.add_argument("--concurrency", type=int, default=8)
    args = made.parse_args(argv)
    trained = [row for row in read_jsonl(args.results) if "keep" in row and "error" not in row]
    if not trained:
        print(
            f"bench_served: {args.results} has no run with a kept drafter: give bench_objectives --keep",
            file=sys.stderr,
        )
        return 2
    arms = {kept_at(row).name: row for row in trained}
    heldout = open_answers(Path(trained[0]["heldout"])).data
    prompts = [Request(r["id"], r["input_ids"][: r["spans"][-2]], args.max_tokens, None) for r in heldout if r["spans"]]
    longest = max(len(p.prompt_ids) for p in prompts) + args.max_tokens
    plan = Plan(
        resolve(trained[0]["target"]).path,
        [Arm(name, "draft_model", kept_at(row), K) for name, row in arms.items()],
        {"heldout": prompts},
        server.Settings(dtype="float32", max_model_len=longest, max_num_seqs=args.concurrency, enforce_eager=True),
        concurrencies=(args.concurrency,),
        resident=False,
    )
    args.out.mkdir(parents=True, exist_ok=True)
    measure(plan, args.out)
    print(report(arms, read_jsonl(args.out / "requests.jsonl"), read_jsonl(args.out / "blocks.jsonl")))
    return 0


def report(arms: dict[str, Row], requests: Sequence[Row], blocks: Sequence[Row]) -> str:
    """Markdown. `arms`: a run of bench_objectives by the name under which its drafter was served."""
    by_objective: dict[str, list[str]] = {}
    for name, row in arms.items():
        by_objective.setdefault(row["arm"], []).append(name)
    rounds = {name: rounds_of([r for r in requests if r["arm"] == name]) for name in arms}
    counts = {block["arm"]: block["counts"] for block in blocks}
    lines = []
    for objective, names in by_objective.items():
        served = [1 + counts[n]["num_accepted_tokens"] / counts[n]["num_drafts"] for n in names]
        replayed = [common.tau(arms[n]["scores"]) for n in names]
        gap = max(abs(s / r - 1) for s, r in zip(served, replayed, strict=True))
        less = "–"
        if objective != REFERENCE and REFERENCE in by_objective:
            less = "{:+.3f} ({:+.3f} to {:+.3f})".format(
                *difference([rounds[n] for n in names], [rounds[n] for n in by_objective[REFERENCE]])
            )
        lines.append([objective, _spread(served), _spread(replayed), f"{gap:.1%}", less])
    header = ("arm", f"τ served, K = {K} (seeds)", "τ by replay", "largest gap", f"served less {REFERENCE}'s (95 %)")
    return table(header, lines)


def rounds_of(requests: Sequence[Row]) -> np.ndarray[Any, Any]:
    """[2, prompts]: tokens after the first, which the prefill brings, and the rounds that brought them; prompts by id."""
    ordered = sorted(requests, key=lambda r: str(r["id"]))
    return np.array([[r["output_tokens"] - 1 for r in ordered], [r["chunks"] - 1 for r in ordered]], dtype=np.float64)


def difference(ours: Sequence[Any], theirs: Sequence[Any]) -> tuple[float, float, float]:
    """Mean τ over the seeds of one objective less that of another, with its 95 % interval over paired prompts."""
    prompts = ours[0].shape[1]
    assert all(one.shape[1] == prompts for one in (*ours, *theirs)), "arms must answer the same prompts"
    a, b = tau_of(ours), tau_of(theirs)
    one = np.ones((1, prompts))
    low, high = interval(lambda w: a(w) - b(w), prompts)
    return float(a(one)[0] - b(one)[0]), low, high


def tau_of(seeds: Sequence[Any]) -> Statistic:
    return lambda w: np.mean([(w @ tokens) / (w @ rounds) for tokens, rounds in seeds], axis=0)


def _spread(values: Sequence[float]) -> str:
    return f"{mean(values):.3f} ({min(values):.3f}–{max(values):.3f})"


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
