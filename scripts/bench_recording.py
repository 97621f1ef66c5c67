"""What recording the target's distribution costs: tokens/s of `generate` beside the same engine without log-probs.

python -m scripts.bench_recording [--prompts 96] [--rounds 5] [--top-logprobs 32] [--batch 64]

One engine, the same prompts, plain and recorded in turns that change their order, so that the machine's moods fall on both. The
goal is at most 20 % of plain generation's tokens/s.
"""

from __future__ import annotations

import argparse
import time
from collections import deque
from pathlib import Path
from statistics import median

import numpy as np
import psutil

from distill.in_vllm import open_vllm
from distill.orders import make_orders
from distill.requests import Answerer, Completion, Request, Sampling, tokenize
from pairing.bootstrap import interval
from pairing.source import load_tokenizer, resolve

GOAL = 0.8


def main() -> int:
    made = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    made.add_argument("--target", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    made.add_argument("--prompts", type=int, default=96)
    made.add_argument("--rounds", type=int, default=5)
    made.add_argument("--top-logprobs", type=int, default=32)
    made.add_argument("--batch", type=int, default=64)
    made.add_argument("--log", type=Path, default=Path("runs/bench/recording.log"))
    args = made.parse_args()
    target = resolve(args.target)
    requests = tokenize(make_orders("train", args.prompts, 0), load_tokenizer(target.path), target.name)
    context = max(len(r.prompt_ids) for r in requests) + 64
    rates: dict[bool, list[float]] = {False: [], True: []}
    with open_vllm(
        target, context=context, top_logprobs=args.top_logprobs, max_num_seqs=args.batch, log=args.log
    ) as answerer:
        for recorded in (False, True):
            run(answerer, requests[: args.batch], args.top_logprobs if recorded else None)  # warm-up
        for i in range(args.rounds):
            for recorded in (False, True) if i % 2 == 0 else (True, False):
                rates[recorded].append(run(answerer, requests, args.top_logprobs if recorded else None))
    ratios = np.array(rates[True]) / np.array(rates[False])
    low, high = interval(lambda w_RP: (w_RP @ ratios) / w_RP.sum(1), len(ratios))
    for recorded, name in ((False, "plain"), (True, f"K = {args.top_logprobs} recorded")):
        some = rates[recorded]
        print(f"{name}: {median(some):.0f} tokens/s ({min(some):.0f} to {max(some):.0f})")
    print(
        f"recorded / plain: {ratios.mean():.3f} (95 % over {args.rounds} pairs {low:.3f} to {high:.3f}); goal {GOAL}; "
        f"batch {args.batch}, {args.prompts} prompts a round, load {psutil.getloadavg()[0]:.1f}"
    )
    return 0 if ratios.mean() >= GOAL else 1


def run(answerer: Answerer, requests: list[Request], top_logprobs: int | None) -> float:
    """Tokens/s over all requests. `top_logprobs` None: vLLM makes no log-prob at all."""
    tokens, started = 0, time.monotonic()
    for one in answerer(deque(requests), Sampling(64, 0.0, top_logprobs, 0)):  # type: ignore[arg-type]
        assert isinstance(one, Completion)
        tokens += len(one.ids)
    return tokens / (time.monotonic() - started)


if __name__ == "__main__":
    raise SystemExit(main())
