"""The verdict: one plain sentence from measured rows, deploy or not, with the number that explains it.

Arms are ranked by measured end-to-end speed, never by acceptance: a drafter that is accepted well and slows serving
down gets a no (fault D24). What can't be told is said so: a cell is void with its reason, or nothing was measurable.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from eval.open_loop import fell_behind

Row = Mapping[str, Any]

REPLAY_GAP = 0.02  # D15: served τ further than this from what replay leaves open raises an alarm
CACHE_HITS = 0.01  # D20: a cell with a higher prefix cache hit rate measured the cache
TIE = "a tie in rounding"  # what a mismatch's `why` says where both tokens were equally likely for the target
REFERENCE_ARMS = ("untrained",)  # measured to show what training brought, never recommended
TRAINED = ("draft_model", "speculator")  # kinds of arms that somebody had to make


def judge(results: Sequence[Row], evaluation: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The verdict on the rows of results.jsonl, and evaluation.json where there is one.

    The first workload of the run, at its lowest temperature and concurrency, gives the headline; the other cells are
    judged alike and named. Returns {"answer": "deploy"|"do not deploy"|"not measurable", "sentence", "best": arm|None,
    "alarms": [str], "void": [{"arm", "workload", "num_speculative_tokens", "reason"}],
    "cells": [{"workload", "temperature", "concurrency", "rate", "noise": the A/A arm's interval|None, "arms": [arm]}]},
    fastest arm first, where an arm is {"arm", "kind", "model", "method", "num_speculative_tokens", "draft_sample_method",
    "parallel_drafting", "speedup", "interval", "acceptance_length", "draft_acceptance_rate", "exact_match",
    "losslessness", "answer": "faster"|"slower"|"no measurable difference"|"differs from the target"|"void"|
    "not measurable", "reason"}.
    """
    rows = latest(results)
    cells = [_cell(key, members) for key, members in _grouped(rows)]
    alarms = [*_served_alarms(rows), *_training_alarms(evaluation)]
    voids = [
        {
            "arm": r["arm"],
            "workload": r["workload"],
            "num_speculative_tokens": r.get("num_speculative_tokens"),
            "reason": void_reason(r),
        }
        for r in rows
        if void_reason(r)
    ]
    if not cells:
        answer, sentence, best = "not measurable", _nothing_served(evaluation), None
    else:
        answer, sentence, best = _headline(cells)
    if _unchanged(evaluation):
        sentence = sentence.removesuffix(".") + "; training made no measurable change."
    return {
        "schema": 1,
        "answer": answer,
        "sentence": sentence,
        "best": best,
        "alarms": alarms,
        "void": voids,
        "cells": cells,
    }


def latest(results: Sequence[Row]) -> list[Row]:
    """One row per served cell: a cell measured again replaces its earlier row; other engines' arms are no rivals."""
    keys = ("arm", "workload", "group", "temperature", "concurrency", "rate", "num_speculative_tokens",
            "draft_sample_method")  # fmt: skip
    return list({tuple(r.get(k) for k in keys): r for r in results if r.get("engine", "vllm") == "vllm"}.values())


def answers(results: Sequence[Row]) -> list[tuple[Row, str, str | None]]:
    """Each whole-workload row of an arm but the target, with its "answer" and "reason" as `judge` gives them: for whoever else
    has to say whether a speedup stands (requirements, the model card)."""
    found = []
    for _, rows in _grouped(latest(results)):
        target, noise = _beside(rows)
        found += [(r, *_arm_answer(r, target, noise)) for r in rows if r["kind"] != "target"]
    return found


def void_reason(row: Row) -> str | None:
    """Why a row is no measurement, or None where it is one."""
    if row.get("void"):
        return str(row["void"])
    hits = row.get("prefix_cache_hit_rate")
    if hits is not None and hits > CACHE_HITS:
        return f"prefix cache hit rate {hits * 100:.1f} %: it replayed cached prompts"
    return None


def explained(mismatch: Row) -> bool:
    """Whether a differing output is still lossless: rounding chose between tokens equally likely for the target."""
    return TIE in (mismatch.get("why") or "")


def _grouped(rows: Sequence[Row]) -> list[tuple[tuple[Any, ...], list[Row]]]:
    """Whole-workload rows by (workload, temperature, concurrency, rate): in the run's order, each from its lowest, those at a
    rate after those with requests in flight."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    order: dict[str, int] = {}
    for r in rows:
        if r.get("group") is None:
            order.setdefault(r["workload"], len(order))
            groups.setdefault((r["workload"], r["temperature"], r["concurrency"], r.get("rate")), []).append(r)
    return sorted(groups.items(), key=lambda g: (order[g[0][0]], g[0][1], g[0][2] is None, g[0][2] or g[0][3]))


def _cell(key: tuple[Any, ...], rows: Sequence[Row]) -> dict[str, Any]:
    target, noise = _beside(rows)
    arms = [_arm(r, target, noise) for r in rows if r["kind"] != "target"]
    arms.sort(key=lambda a: -(a["speedup"] or 0.0))
    where = dict(zip(("workload", "temperature", "concurrency", "rate"), key, strict=True))
    return {**where, "noise": noise, "arms": arms}


def _beside(rows: Sequence[Row]) -> tuple[Row | None, Sequence[float] | None]:
    """What the arms of a cell are held against: the target's row, and the interval of its A/A arm, which is noise."""
    target, again = ([r for r in rows if r["kind"] == "target"] + [None, None])[:2]
    return target, again.get("speedup_interval") if again and not void_reason(again) else None


def _arm(row: Row, target: Row | None, noise: Sequence[float] | None) -> dict[str, Any]:
    answer, reason = _arm_answer(row, target, noise)
    keys = ("arm", "kind", "model", "method", "num_speculative_tokens", "draft_sample_method", "parallel_drafting",
            "acceptance_length", "draft_acceptance_rate", "exact_match", "losslessness")  # fmt: skip
    measured = answer not in ("void", "not measurable")
    return {k: row.get(k) for k in keys} | {
        "speedup": row.get("speedup") if measured else None,
        "interval": row.get("speedup_interval") if measured else None,
        "answer": answer,
        "reason": reason,
    }


def _arm_answer(row: Row, target: Row | None, noise: Sequence[float] | None) -> tuple[str, str | None]:
    if void_reason(row):
        return "void", void_reason(row)
    if target is None:
        return "not measurable", "the target alone was not measured beside it"
    if void_reason(target):
        return "not measurable", f"the target alone is void: {void_reason(target)}"
    if late := fell_behind(row):
        return "not measurable", late
    if late := fell_behind(target):
        return "not measurable", f"of the target alone: {late}"
    if row.get("speedup") is None or not row.get("speedup_interval"):
        return "not measurable", "no speedup with an interval: it needs at least two prompts answered by both arms"
    unexplained = [m for m in row.get("mismatches") or [] if not explained(m)]
    if unexplained:
        first = unexplained[0]
        return "differs from the target", (
            f"{len(unexplained)} output{'s differ' if len(unexplained) > 1 else ' differs'} from the target's and not by "
            f"{TIE}, first {first['id']} at token {first['position']}"
        )
    low, high = row["speedup_interval"]
    if noise and (low > 1.0 or high < 1.0) and noise[0] <= row["speedup"] <= noise[1]:
        return "no measurable difference", (
            f"it lies within the machine's noise, where the target alone measured twice differs from itself by "
            f"{noise[0]:.2f} to {noise[1]:.2f}"
        )
    if low > 1.0:
        return "faster", None
    return ("slower", _cost(row)) if high < 1.0 else ("no measurable difference", _cost(row))


def _cost(row: Row) -> str | None:
    """Why there is no gain. S = τ / (cost of a round in target steps), so the cost is τ / S (design.md, Words).

    Only for models and heads: they draft in every round, while τ of n-gram leaves out the rounds in which it found nothing.
    """
    length = row.get("acceptance_length")
    if row["kind"] not in TRAINED or not length:
        return None
    return f"a round emits τ = {length:.2f} tokens and costs about {length / row['speedup']:.2f} target steps"


def _headline(cells: Sequence[dict[str, Any]]) -> tuple[str, str, dict[str, Any] | None]:
    cell = cells[0]
    ranked = [a for a in cell["arms"] if a["speedup"] is not None and a["arm"] not in REFERENCE_ARMS]
    faster = [a for a in ranked if a["answer"] == "faster"]
    drafters = [a for a in cell["arms"] if a["kind"] in TRAINED and a["arm"] not in REFERENCE_ARMS]
    if not ranked:
        void = next((a for a in cell["arms"] if a["arm"] not in REFERENCE_ARMS), None)
        why = f"{void['arm']}: {void['reason']}" if void else "no arm but the target was measured"
        return "not measurable", f"Not measurable: on {_where(cell)} {why}.", None
    if faster and (faster[0]["kind"] in TRAINED or not drafters):
        best = faster[0]
        parts = [
            f"Deploy {_named(best)}: it serves {_where(cell)} at {_times(best)}",
            f"{_accepted(best)}, and {_same(best)}",
            *elsewhere(best, cells[1:]),
        ]
        return "deploy", "; ".join(parts) + ".", best
    drafter = next((a for a in ranked if a["kind"] == "draft_model"), None)
    if faster:  # vLLM's own n-gram wins, which costs nothing to make
        best = faster[0]
        against = f"; the drafter ({_named(drafter)}) at {_times(drafter, short=True)}" if drafter else ""
        return (
            "do not deploy",
            f"Do not deploy the drafter: {_named(best)}, which needs none, serves {_where(cell)} at {_times(best)}"
            f"{against}.",
            best,
        )
    best = ranked[0]
    low, high = best["interval"]
    within = best["answer"] == "no measurable difference"
    gain = "no measurable gain" if within or low <= 1 <= high else "slower" if high < 1 else "faster"
    why = f": {best['reason']}" if best["reason"] else ""
    parts = [
        f"Do not deploy: {'outputs change' if gain == 'faster' else 'no gain'}; the fastest arm, {_named(best)}, serves "
        f"{_where(cell)} at {_times(best)}, {gain}{why}"
    ]
    if drafter and drafter is not best:
        why = f": {drafter['reason']}" if drafter["reason"] else ""
        parts.append(f"the drafter ({_named(drafter)}) at {_times(drafter, short=True)}{why}")
    return "do not deploy", "; ".join(parts) + ".", best


def _named(arm: Mapping[str, Any]) -> str:
    return f"{arm['arm']} at K = {arm['num_speculative_tokens']}"


def _where(cell: Mapping[str, Any]) -> str:
    """The workload, and what of its cell is out of the ordinary (temperature 0, one request at a time)."""
    text = str(cell["workload"])
    if cell["temperature"]:
        text += f" at temperature {cell['temperature']:g}"
    if cell.get("rate"):  # rows of older runs have none
        return text + f" at {cell['rate']:g} requests/s"
    return text + (f" with {cell['concurrency']} requests in flight" if cell["concurrency"] != 1 else "")


def _times(arm: Mapping[str, Any], short: bool = False) -> str:
    low, high = arm["interval"]
    if short:
        return f"{arm['speedup']:.2f}x ({low:.2f} to {high:.2f})"
    return f"{arm['speedup']:.2f}x the target's own speed (95 % interval {low:.2f} to {high:.2f})"


def _accepted(arm: Mapping[str, Any]) -> str:
    if arm["acceptance_length"] is None:
        return "the engine counted no drafted token"
    rate = (
        f", {arm['draft_acceptance_rate'] * 100:.0f} % of drafted tokens are accepted"
        if arm["draft_acceptance_rate"]
        else ""
    )
    return f"a round emits τ = {arm['acceptance_length']:.2f} tokens{rate}"


def _same(arm: Mapping[str, Any]) -> str:
    if check := arm["losslessness"]:
        return f"{check['tokens']} sampled tokens agree with the target's own distribution (p = {check['p']:.2g})"
    if arm["exact_match"] is None:
        return "whether the outputs are the target's own was not checked"
    if arm["exact_match"] == 1:
        return "every output is the target's own, token for token"
    return f"{arm['exact_match'] * 100:.1f} % of outputs are the target's own token for token, the rest {TIE}"


def elsewhere(best: Mapping[str, Any], cells: Sequence[Mapping[str, Any]]) -> list[str]:
    """Where the recommended arm loses or gains nothing: whoever deploys it must know."""
    found = []
    for cell in cells:
        for arm in cell["arms"]:
            same = all(arm[k] == best[k] for k in ("arm", "num_speculative_tokens", "draft_sample_method"))
            if same and arm["answer"] != "faster":
                figure = f" ({arm['speedup']:.2f}x)" if arm["speedup"] else ""
                found.append(f"{arm['answer']} on {_where(cell)}{figure}")
    return ["but " + ", ".join(found)] if found else []


def _served_alarms(rows: Sequence[Row]) -> list[str]:
    alarms = _settings_alarms(rows)
    for r in rows:
        if r.get("group") is not None or void_reason(r):
            continue  # a group is a part of a cell already looked at
        replay, served = r.get("replay_acceptance_length"), r.get("acceptance_length")
        low, high = r.get("replay_interval") or (replay or 0.0, replay or 0.0)
        if replay and served and not low * (1 - REPLAY_GAP) <= served <= high * (1 + REPLAY_GAP):
            beyond = f" outside {low:.2f} to {high:.2f}" if low < high else ""
            alarms.append(
                f"Offline and served disagree: {r['arm']} on {r['workload']} at K = {r['num_speculative_tokens']} has "
                f"τ {replay:.2f} by replay and {served:.2f} served ({(replay / served - 1) * 100:+.1f} %; "
                f"limit {REPLAY_GAP * 100:.0f} %{beyond}): find out why before trusting either."
            )
        if r.get("precision_reached") is False:
            alarms.append(
                f"Precision not reached: the speedup of {r['arm']} on {_where(r)} is known to ± {_width(r)}, asked "
                f"± {r['precision'] * 100:g} %, after {r['repeats']} repeat{'s' if r['repeats'] != 1 else ''} of "
                f"{r['prompts']} prompts: give more repeats, or more prompts (limit) where those differ."
            )
        if seen := (r.get("emitted_check") or {}).get("alarm"):
            alarms.append(f"Emitted and counted disagree: {r['arm']} on {r['workload']}: {seen}.")
        if r["kind"] == "target" and (r.get("settings") or {}).get("ignore_eos"):
            alarms.append(
                f"Not representative: {r['workload']} was measured with ignore_eos: answers ran past their end."
            )
    return alarms


def _width(row: Row) -> str:
    width = row["speedup_half_width"]
    return "nothing" if width is None else f"{width * 100:.1f} %"


def _settings_alarms(rows: Sequence[Row]) -> list[str]:
    """A line an arm, whatever its cells: what its server ran with besides speculation and the target alone's did not."""
    differs = {r["arm"]: (r.get("settings") or {}).get("differs") for r in rows}
    return [f"Served otherwise than the target alone: {arm}: {'; '.join(d)}." for arm, d in differs.items() if d]


def _changes(evaluation: Mapping[str, Any] | None) -> list[tuple[str, str, list[float]]]:
    """Those that are known, with an interval; of a drafter that learnt to draft in one pass too, that of either way."""
    sets = (evaluation or {}).get("sets", {})
    found = [(name, figure, change) for name, s in sets.items() for figure, change in (s.get("change") or {}).items()]
    rounds = {name: s["parallel"] for name, s in sets.items() if s.get("parallel")}
    found += [(name, f"tau_{p['num_speculative_tokens']} in one pass", p["change"]) for name, p in rounds.items()]
    return [(name, figure, change) for name, figure, change in found if None not in change]


def _unchanged(evaluation: Mapping[str, Any] | None) -> bool:
    """Whether every figure's interval of change holds 0 (D15)."""
    changes = _changes(evaluation)
    return bool(changes) and all(low <= 0 <= high for _, _, (_, low, high) in changes)


def _training_alarms(evaluation: Mapping[str, Any] | None) -> list[str]:
    if not _unchanged(evaluation):
        return []
    name, figure, (point, low, high) = _changes(evaluation)[0]
    return [
        f"Training made no measurable change: on {name}, {figure} changed by {point:+.3f} "
        f"(95 % interval {low:+.3f} to {high:+.3f}), and no other figure's interval leaves out 0 either."
    ]


def _nothing_served(evaluation: Mapping[str, Any] | None) -> str:
    sets = (evaluation or {}).get("sets", {})
    for name, s in sets.items():
        after = s.get("after") or {}
        if (after.get("tau") or {}).get("4") is not None:
            return (
                f"Not measurable: nothing was served; offline on {name}, replay gives τ = {after['tau']['4']:.2f} "
                f"at K = 4{_in_one_pass(s)} (an estimate of acceptance, no claim about speed)."
            )
    return "Not measurable: nothing was served."


def _in_one_pass(evaluated: Mapping[str, Any]) -> str:
    """The same of a drafter that learnt to write all its drafts in one pass too."""
    rounds = evaluated.get("parallel") or {}
    K = rounds.get("num_speculative_tokens")
    tau = rounds["after"]["tau"][str(K)] if rounds else None
    return "" if tau is None else f", and {tau:.2f} at K = {K} with all drafts in one pass"


def serve_with(verdict: Row, target: str | None, pair: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """What to serve with, by `verdict` (of `judge`): {"arm", "model", "num_speculative_tokens", "draft_sample_method",
    "command"}; the target alone where nothing gains; None where nothing is known.

    `pair` is the pair.json of the best arm's own drafter: its line is taken where it is for this K and way of drafting.
    """
    best = verdict["best"]
    if target is None or verdict["answer"] == "not measurable":
        return None
    if best is None or best["answer"] != "faster":
        keys = ("arm", "model", "num_speculative_tokens", "draft_sample_method")
        return dict.fromkeys(keys) | {"arm": "target", "command": f"vllm serve {shlex.quote(target)}"}
    own = (pair or {}).get("serve") or {}
    parallel = bool(best.get("parallel_drafting"))
    same = own.get("num_speculative_tokens") == best["num_speculative_tokens"]
    command = own.get("command") if same and bool(own.get("parallel_drafting")) == parallel else None
    if best["kind"] != "draft_model" or not command:
        method = best.get("method") or best["kind"]
        config = {"method": method, "num_speculative_tokens": best["num_speculative_tokens"]}
        if best["kind"] in TRAINED:
            config["model"] = best["model"]
        if best["draft_sample_method"] not in (None, "greedy"):
            config["draft_sample_method"] = best["draft_sample_method"]
        if parallel:
            config["parallel_drafting"] = True
        command = f"vllm serve {shlex.quote(target)} --speculative-config {shlex.quote(json.dumps(config))}"
    return {k: best[k] for k in ("arm", "model", "num_speculative_tokens", "draft_sample_method")} | {
        "command": command
    }
