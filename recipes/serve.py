"""Serves a target with its drafter in vLLM on loopback; --dry-run prints the line that does.

draftsmith serve runs/demo/distill/drafter
draftsmith serve DRAFTER target=… num_speculative_tokens=4 port=8000
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

if __package__ in (None, ""):  # launched by path: sys.path[0] is recipes/, where `import distill` would find a script
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from eval import server
from eval.measure import Arm
from eval.schedule import extended
from pairing.alignment import check_pair
from pairing.engine import require_vllm
from pairing.errors import InputError, PartFailedError
from pairing.pair import read_pair
from pairing.parallel_drafting import trained_findings
from pairing.preflight import require_start
from pairing.source import ModelSource, digests, resolve
from recipes.config import Strict, guarded, parse
from recipes.measure_plan import preflight_of


class ServeConfig(Strict):
    drafter: str
    """folder of the drafter"""
    target: str | None = None
    """the target; by default the one that the drafter's pair.json names"""
    num_speculative_tokens: int | None = None
    """K; by default what the drafter's pair.json says, by batch size where a sweep measured that, else 4"""
    draft_sample_method: Literal["greedy", "probabilistic"] | None = None
    """how the drafter draws: argmax, or from its distribution; by default what the drafter's pair.json says, else argmax"""
    parallel_drafting: bool | None = None
    """all drafts from one pass; by default what the drafter's pair.json says, else true where it was trained for it"""
    port: int | None = None
    """on 127.0.0.1; by default a free one"""
    dtype: str = "auto"
    """weights and activations; auto: float32 on the CPU back end, the model's own elsewhere"""
    max_model_len: int = 2048
    """context of both models, in tokens"""
    max_num_seqs: int = 8
    """requests decoded at a time"""
    enforce_eager: bool = False
    """skip compilation: starts in seconds, serves slower"""
    prefix_caching: bool = True
    """reuse the cache of shared prompt beginnings"""


def main(argv: list[str]) -> int:
    config, args = parse(ServeConfig, argv, positional=("drafter",), about=__doc__ or "")
    engine = require_vllm("serve")
    source = resolve(config.drafter)
    drafter, pair = source.path, read_pair(source.path)
    asked_for = resolve(config.target or pair["target"]["name"])
    target = asked_for.path
    for line in require_fit(asked_for, source, pair):
        print(line, file=sys.stderr)
    own, trained = pair["serve"] or {}, pair.get("parallel_drafting")
    parallel = config.parallel_drafting
    if parallel is None:
        parallel = bool(own.get("parallel_drafting", trained is not None))
    k = config.num_speculative_tokens or own.get("num_speculative_tokens")
    k = k or (trained["num_speculative_tokens"] if parallel and trained else 4)
    method = config.draft_sample_method or own.get("draft_sample_method") or "greedy"
    arm = Arm("drafter", "draft_model", drafter, k, method, parallel_drafting=parallel)
    measured = own.get("num_speculative_tokens_per_batch_size")
    # it was measured with that way of drafting, and a K by hand goes before it
    if measured and config.num_speculative_tokens is None and parallel == bool(own.get("parallel_drafting")):
        entries = extended(measured, config.max_num_seqs)
        arm = replace(arm, schedule=tuple((low, high, k_) for low, high, k_ in entries))
    settings = server.Settings(
        dtype="float32" if config.dtype == "auto" and engine.backend == "cpu" else config.dtype,
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
        enforce_eager=config.enforce_eager,
        prefix_caching=config.prefix_caching,
    )
    asked = preflight_of(settings, arm, engine.backend)
    require_start(asked_for, source, asked)
    for f in trained_findings(drafter, asked):
        print(f"{f.what}: {f.fix}", file=sys.stderr)
    port = config.port or server.free_port()
    line = server.serve_line(server.serve_words(target, arm.speculation(), settings, port))
    if args.json:
        print(json.dumps({"command": line, "url": f"http://127.0.0.1:{port}"}))
    else:
        print(line)
    if args.dry_run:
        return 0
    log = Path(f"draftsmith-serve-{port}.log")
    started = server.start("drafter", target, arm.speculation(), settings, log, port, keep_key=True)
    with server.serving([started]) as (one,):
        print(f"ready on {one.url} (log: {log}); Ctrl-C stops it", file=sys.stderr)
        code = one.process.wait()
    raise PartFailedError(f"vLLM ended with code {code} (log: {log})")


def require_fit(target: ModelSource, drafter: ModelSource, pair: dict[str, Any]) -> list[str]:
    """What is worth a line: the target is not the one that the drafter's `pair` (pair.json) names. Raises InputError where the
    two models do not fit: vLLM compares the number of rows alone, and ids of another vocabulary are wrong drafts (fault D2).
    """
    report = check_pair(target, drafter)
    if not report["aligned"]:
        worst = next(f for f in report["findings"] if f["level"] in ("blocks", "repairable"))
        raise InputError(f"{drafter.name} does not fit {target.name}: {worst['what']} ({worst['fix']})")
    made_for, now = pair["target"]["digests"], digests(target.path)
    differ = ", ".join(part for part, digest in made_for.items() if now.get(part) != digest)
    if not differ:
        return []
    return [f"note: {target.name} is not the target that the drafter was made for ({pair['target']['name']}): it differs in its "
            f"{differ}. What was measured was measured with that one: measure again"]  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(guarded(main))
