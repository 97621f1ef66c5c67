"""The model card (README.md) of a drafter folder, filled from its pair.json and from nothing else."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

from pairing import source
from pairing.files import write_text
from pairing.pair import read_pair


def write_card(folder: Path, name: str | None = None) -> None:
    """(Re)writes README.md; call it after every change of pair.json. `name`: where the folder is still temporary."""
    write_text(folder / "README.md", render_card(read_pair(folder), name or folder.name))


def render_card(pair: dict[str, Any], name: str) -> str:
    """Markdown with the front matter that model hubs read. Absent parts of pair.json are left out, never guessed."""
    target = pair["target"]
    hub = target["name"] if target["name"].count("/") == 1 and not target["name"].startswith((".", "/", "~")) else None
    lines = ["---", "library_name: transformers", "pipeline_tag: text-generation"]
    if hub and not Path(target["name"]).exists():
        lines += [f"base_model: {hub}"]
    lines += ["tags:", "- speculative-decoding", "- draft-model", "- draftsmith", "---", "", f"# {name}", ""]
    lines += [f"A draft model for speculative decoding with `{target['name']}`, made by draftsmith.",
              "It shares the target's vocabulary id by id. Alone it is no assistant.", ""]  # fmt: skip
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
    if pair.get("measurements"):
        lines += ["## Measured", *_rows(pair["measurements"]), ""]
    lines += ["## Serve", "```", _serve_line(pair, name), "```", "", "Target digests:", ""]
    lines += [f"- {part}: `{digest}`" for part, digest in target["digests"].items()]
    return "\n".join(lines) + "\n"


def _step(step: dict[str, Any]) -> str:
    rest = ", ".join(f"{k} {v}" for k, v in step.items() if k != "step" and isinstance(v, (str, int, float, list)))
    return f"{step['step']}: {rest}"


def _table(values: dict[str, Any]) -> list[str]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= {f"{key}.{k}": v for k, v in value.items()} if isinstance(value, dict) else {key: value}
    plain = {k: v for k, v in flat.items() if isinstance(v, (str, int, float, bool)) and v != ""}
    return ["", "| | |", "|---|---|", *(f"| {k} | {_figure(v)} |" for k, v in plain.items())]


def _rows(rows: list[dict[str, Any]]) -> list[str]:
    keys = [k for k, v in rows[0].items() if isinstance(v, (str, int, float))]
    body = ["| " + " | ".join(_figure(row.get(k, "")) for k in keys) + " |" for row in rows]
    return ["", "| " + " | ".join(keys) + " |", "|" + "---|" * len(keys), *body]


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
