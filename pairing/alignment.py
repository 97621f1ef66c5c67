"""Whether a target and a drafter fit: token by token, row by row, and what each misfit means and how to mend it.

Aligned means that nothing blocks and nothing needs repair. Weights are never read: rows come from the safetensors
headers. docs/check.md describes the report.
"""

from __future__ import annotations

import gc
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

from pairing.compare_chat import compare_special_ids, compare_templates
from pairing.compare_rows import compare_rows, head_findings, untrained_findings
from pairing.compare_tokens import compare_segmentation, compare_tokens, tokens_by_id
from pairing.files import read_json
from pairing.finding import LEVELS, USERS, Finding
from pairing.mask_token import mask_findings
from pairing.serving import compare_context, context, engine_findings, overridden, shard_findings, stateful
from pairing.side import read_side
from pairing.sound import require_config
from pairing.source import ModelSource

__all__ = ["check_pair", "needs", "read_side", "summary", "tokens_by_id", "without_gc"]


@contextmanager
def without_gc() -> Iterator[None]:
    """Modules and vocabularies are a million small objects that live to the end; the collector walks them again and again."""
    on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if on:
            gc.enable()


@without_gc()
def check_pair(
    target: ModelSource,
    drafter: ModelSource,
    *,
    hf_overrides: Mapping[str, Any] | None = None,
    tensor_parallel_size: int = 1,
) -> dict[str, Any]:
    """The alignment report, JSON as it stands: "aligned", "verdict", "target", "drafter", "facts", "needs", "repair",
    "findings".

    "findings" are `Finding` dicts, the gravest first. "facts" holds the counts that other parts use: "highest_id",
    "target_rows", "drafter_rows", "max_model_len" (what both can take; None where neither says). "needs" says for each
    of `USERS` whether the pair runs there, and what stops it. "repair" is the command that mends it, where one does.
    `hf_overrides` are those that the target is served with: vLLM does not hand them on to the drafter.
    """
    t = read_side(target)
    d = read_side(drafter, t, target)
    t = replace(t, config=overridden(t.config, hf_overrides))
    require_config(t.config, f"{t.name} with hf_overrides")
    t_tokens = tokens_by_id(t.tokenizer)
    d_tokens = t_tokens if d.tokenizer is t.tokenizer else tokens_by_id(d.tokenizer)
    token_findings = compare_tokens(t_tokens, d_tokens)
    same = not any(f.level == "blocks" for f in token_findings)
    said = drafter.path / "pair.json"
    findings = [
        *token_findings,
        *compare_rows(t, d, max(t_tokens), max(max(t_tokens), max(d_tokens)), same),
        *head_findings(t, "target"),
        *head_findings(d, "drafter"),
        *(untrained_findings(read_json(said), d_tokens) if said.is_file() else []),
        *compare_special_ids(t, d),
        *mask_findings(d, d_tokens),
        *(compare_segmentation(t.tokenizer, d.tokenizer, t_tokens) if same else []),
        *compare_templates(t.tokenizer, d.tokenizer),
        *compare_context(t.text, d.text, hf_overrides),
        *engine_findings(t.config, d.config),
        *shard_findings(t.config, "target", tensor_parallel_size),
        *shard_findings(d.config, "drafter", tensor_parallel_size),
    ]
    findings.sort(key=lambda f: LEVELS.index(f.level))
    aligned = not any(f.level in ("blocks", "repairable") for f in findings)
    command = None
    if any(f.repair for f in findings) and not any(f.level == "blocks" for f in findings):
        name = d.name.rstrip("/")
        out = f"{name if d.path_like else name.split('/')[-1]}-repaired"
        command = shlex.join(["draftsmith", "repair", t.name, d.name, f"out={out}"])
        findings = [replace(f, fix=f"`{command}`: {f.fix}") if f.repair else f for f in findings]
    lengths = [n for n in (context(t.text), context(d.text)) if n is not None]
    return {
        "aligned": aligned,
        "verdict": _verdict(findings, aligned),
        "target": t.name,
        "drafter": d.name,
        "facts": {
            "highest_id": max(t_tokens),
            "target_rows": t.text.get("vocab_size"),
            "drafter_rows": d.text.get("vocab_size"),
            "max_model_len": min(lengths) if lengths else None,
        },
        "needs": needs(findings, t.text.get("vocab_size") == d.text.get("vocab_size"), stateful(t.config)),
        "repair": command,
        "findings": [asdict(f) | {"stops": list(f.stops)} for f in findings],
    }


def needs(findings: Sequence[Finding], equal_rows: bool, stateful_target: bool) -> dict[str, dict[str, Any]]:
    """For each of `USERS`: {"runs", "because"}, the findings that stop it, or what it asks for where it runs.

    The two refusals beside the findings are transformers' own (`_validate_generation_mode`, 5.19).
    """
    asks = {
        "vllm": "equal vocab_size in both configs; ids are taken over as they are",
        "transformers": "generate(assistant_model=…) without tokenizers",
        "universal": "generate(assistant_model=…, tokenizer=…, assistant_tokenizer=…)",
        "training": "the target's tokenizer, template and rows",
    }
    result = {}
    for user in USERS:
        grave = [f.what for f in findings if f.level in ("blocks", "repairable") and user in f.stops]
        if user == "universal" and equal_rows:
            grave.append("transformers refuses two tokenizers where both configs have one vocab_size")
        if user in ("transformers", "universal") and stateful_target:
            grave.append(
                "transformers does not assist a target that keeps a state: it cannot be cut back to what was accepted"
            )
        result[user] = {"runs": not grave, "because": grave or [asks[user]]}
    return result


def summary(report: dict[str, Any]) -> dict[str, Any]:
    """What pair.json keeps of a report: verdict, facts, how many findings of each level, all but the "info" ones."""
    levels = [f["level"] for f in report["findings"]]
    return {
        "aligned": report["aligned"],
        "verdict": report["verdict"],
        "target": report["target"],
        **report["facts"],
        "levels": {level: levels.count(level) for level in LEVELS},
        "findings": [f for f in report["findings"] if f["level"] != "info"],
    }


def _verdict(findings: list[Finding], aligned: bool) -> str:
    if aligned:
        warnings = sum(f.level == "warns" for f in findings)
        return "aligned" + (f", with {warnings} warning{'s' * (warnings > 1)}" if warnings else "")
    return f"not aligned: {findings[0].what}"
