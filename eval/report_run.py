"""The report's sections on the run around what was measured: training, samples of outputs, settings, how to get it again."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from eval import plots
from eval.run_results import Run, prompts
from eval.verdict import void_reason

SAMPLES = 3
SAMPLE_CHARACTERS = 3000  # of each output: a page is read, not searched
Row = Mapping[str, Any]


def training(run: Run, rows: Sequence[Row]) -> dict[str, Any] | None:
    if not run.metrics and not run.evaluation:
        return None
    train = [m for m in run.metrics if m["kind"] == "train"]
    evals = [m for m in run.metrics if m["kind"] == "eval"]
    names = list(dict.fromkeys(m["set"] for m in evals))
    sets = (run.evaluation or {}).get("sets", {})
    loss = [(m["step"], m["loss"]) for m in train if m.get("loss") is not None]
    drawn = [
        plots.curve("Training loss", {"loss": plots.smoothed(loss, max(1, len(loss) // 120))}),
        plots.curve(
            "Top-1 agreement on held-out text",
            {n: [(m["step"], m["top1"]) for m in evals if m["set"] == n] for n in names},
            unit=True,
        ),
        plots.curve(
            "τ at K = 4 on held-out text, by replay",
            {
                n: [(m["step"], m["tau"]["4"]) for m in evals if m["set"] == n and m["tau"].get("4") is not None]
                for n in names
            },
        ),
    ]
    for name, s in sets.items():
        served: dict[str, list[tuple[int, float]]] = {}
        for row in rows:
            mine = row["workload"] == name and row["kind"] == "draft_model" and row.get("group") is None
            if mine and row.get("acceptance_length") and not void_reason(row):
                served.setdefault(row["arm"], []).append((row["num_speculative_tokens"], row["acceptance_length"]))
        before, after = (s.get("before") or {}).get("tau"), (s.get("after") or {}).get("tau")
        drawn.append(plots.offline_against_served(f"τ offline and served, {name}", before, after, served))
    last = train[-1] if train else {}
    return {
        "plots": [p for p in drawn if p],
        "sets": sets,
        "verdict": (run.evaluation or {}).get("verdict"),
        "steps": last.get("step"),
        "tokens": last.get("tokens"),
        "seconds": last.get("seconds"),
    }


def samples(run: Run, found: Mapping[str, Any]) -> dict[str, Any] | None:
    """The first prompts of the headline's workload with the target's and the best arm's outputs side by side."""
    if not found["cells"] or not run.requests:
        return None
    best, workload = found["best"] or {}, found["cells"][0]["workload"]
    outputs: dict[str, dict[str, list[int]]] = {}
    for r in run.requests:
        ours = r["workload"] == workload and r["repeat"] == 0
        if ours and (r["arm"] == "target" or (r["arm"], r.get("num_speculative_tokens"))
                     == (best.get("arm"), best.get("num_speculative_tokens"))):  # fmt: skip
            outputs.setdefault(r["id"], {})[r["arm"]] = r["output_ids"]
    chosen = list(outputs.items())[:SAMPLES]
    asked = prompts(run.answers, [id for id, _ in chosen])
    return {
        "workload": workload,
        "decoded": run.tokenizer is not None,
        "items": [
            {
                "id": id,
                "messages": asked.get(id),
                "same": len(arms) > 1 and len({tuple(ids) for ids in arms.values()}) == 1,
                "outputs": {arm: _decode(run.tokenizer, ids) for arm, ids in arms.items()},
            }
            for id, arms in chosen
        ],
    }


def _decode(tokenizer: Tokenizer | None, ids: Sequence[int]) -> str:
    """Special tokens are shown: an answer that never ended must look like one."""
    text = tokenizer.decode(list(ids), skip_special_tokens=False) if tokenizer else " ".join(map(str, ids))
    more = len(text) - SAMPLE_CHARACTERS
    return text if more <= 0 else f"{text[:SAMPLE_CHARACTERS]}… ({more} more characters)"


def settings(rows: Sequence[Row]) -> dict[str, Any] | None:
    """The arms' settings: what they share and what differs, so that "alike but for speculation" can be seen."""
    by_arm = {r["arm"]: r.get("settings") or {} for r in rows}
    if not any(by_arm.values()):
        return None
    keys = list(dict.fromkeys(k for s in by_arm.values() for k in s))
    shared, differing = {}, []
    for key in keys:
        values = {arm: s.get(key) for arm, s in by_arm.items()}
        if all(v == next(iter(values.values())) for v in values.values()):
            shared[key] = next(iter(values.values()))
        else:
            differing.append((key, values))
    return {
        "shared": shared,
        "differing": differing,
        "versions": next((r["versions"] for r in rows if r.get("versions")), None),
    }


def commands(run: Run) -> list[str]:
    """What to type to get this run again."""
    first = run.provenance or next(iter(run.jobs.values()), None)
    if not first:
        return []
    jobs = [run.provenance] if run.provenance else list(run.jobs.values())
    lines = [f"git checkout {first['git']}"] if first.get("git") else []
    return lines + [command(job["argv"]) for job in jobs if job and job.get("argv")]


def command(argv: Sequence[str]) -> str:
    """argv as a person types it: `draftsmith run …`, or `python recipes/run.py …` without this machine's folders."""
    program = argv[0]
    if program.endswith(".py"):
        program = "python " + "/".join(Path(program).parts[-2:])
    return " ".join([program, *(shlex.quote(a) for a in argv[1:])])
