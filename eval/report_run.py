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
    in_one_pass = [m | {"tau": m["parallel"]["tau"]} for m in evals if m.get("parallel")]
    drawn = [
        plots.curve("Training loss", {"loss": plots.smoothed(loss, max(1, len(loss) // 120))}),
        plots.curve(
            "Top-1 agreement on held-out text",
            {n: [(m["step"], m["top1"]) for m in evals if m["set"] == n] for n in names},
            unit=True,
        ),
        _tau_by_step("τ at K = {} on held-out text, by replay", evals),
        _tau_by_step("τ at K = {} in one pass, by replay", in_one_pass),
    ]
    for name, s in sets.items():
        for title, figures, parallel in (("τ offline and served", s, False),
                                         ("τ offline and served in one pass", s.get("parallel") or {}, True)):  # fmt: skip
            before, after = ((figures.get(when) or {}).get("tau") for when in ("before", "after"))
            served = _served_tau(rows, name, parallel)
            drawn.append(plots.offline_against_served(f"{title}, {name}", before, after, served))
    last = train[-1] if train else {}
    return {
        "plots": [p for p in drawn if p],
        "sets": {name: s | {"one_pass": _one_pass(s.get("parallel"))} for name, s in sets.items()},
        "verdict": (run.evaluation or {}).get("verdict"),
        "steps": last.get("step"),
        "tokens": last.get("tokens"),
        "mask_tokens": last.get("mask_tokens"),
        "seconds": last.get("seconds"),
    }


def _tau_by_step(title: str, evals: Sequence[Row]) -> str | None:
    """τ of each held-out set while training, at K = 4, or the longest round where all are shorter; that K is put into `title`."""
    K = str(min(4, max((int(k) for m in evals for k in m["tau"]), default=4)))
    lines: dict[str, list[tuple[float, float]]] = {}
    for m in evals:
        if m["tau"].get(K) is not None:
            lines.setdefault(m["set"], []).append((m["step"], m["tau"][K]))
    return plots.curve(title.format(K), lines)


def _served_tau(rows: Sequence[Row], workload: str, parallel: bool) -> dict[str, list[tuple[int, float]]]:
    """arm -> [(K, τ)] as the engine counted it, of the arms that drafted in one pass or of those that drafted one by one: each
    way has a replay of its own, and stands beside no other's."""
    served: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        mine = row["workload"] == workload and row["kind"] == "draft_model" and row.get("group") is None
        same = bool(row.get("parallel_drafting")) == parallel
        if mine and same and row.get("acceptance_length") and not void_reason(row):
            served.setdefault(row["arm"], []).append((row["num_speculative_tokens"], row["acceptance_length"]))
    return served


def _one_pass(parallel: Row | None) -> dict[str, Any] | None:
    """The table of drafts from one pass: a line for each place in a round with τ of rounds up to it, the agreement there and the
    rounds that get past it, each [untrained, trained]. Places are lines, as there may be 64 of them."""
    if not parallel or not parallel.get("after"):
        return None
    both = [parallel.get(when) or {} for when in ("before", "after")]

    def at(key: str, k: int) -> list[float | None]:
        return [held[k - 1] if k <= len(held := one.get(key) or []) else None for one in both]

    longest = max(map(int, parallel["after"]["tau"]))
    return {
        "num_speculative_tokens": parallel.get("num_speculative_tokens"),
        "change": parallel.get("change") or [None],
        "rows": [
            {"k": k, "tau": [(one.get("tau") or {}).get(str(k)) for one in both], "top1": at("top1_by_offset", k),
             "survival": at("survival", k)}
            for k in range(1, longest + 1)
        ],
    }  # fmt: skip


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
