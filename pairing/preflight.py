"""Pre-flight: what vLLM would refuse, kill or do slowly with this pair and these flags, known before it starts.

Pure functions of configs, headers and numbers; what they need from the machine (version, memory, which runner is
forced) is handed in, so that every verdict can be tested. Rules read from vLLM 0.32 (config/speculative.py,
config/scheduler.py, config/vllm.py); what older versions do is cited where we know it.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from pairing.budgets import budget_findings, device_memory, length_findings, memory_findings, memory_numbers
from pairing.engine import Engine, engine
from pairing.engine_support import Support, probe, support_findings
from pairing.errors import InputError
from pairing.files import read_json
from pairing.finding import LEVELS, Finding
from pairing.four_bit import four_bit_findings
from pairing.parallel_drafting import parallel_findings, trained_findings
from pairing.serving_plan import Memory, Model, Serving, serve_line, served_length
from pairing.source import ModelSource, servable
from pairing.speculative_config import speculation_findings
from pairing.weights import read_headers

__all__ = ["Serving", "preflight", "preflight_report", "require_start"]


def preflight(
    target: Model,
    drafter: Model,
    serving: Serving,
    installed: Engine | None,
    memory: Memory,
    found: Support | None = None,
) -> list[Finding]:
    """Everything that can be known before a start; "blocks" means: do not start. `found` is what `probe` says."""
    findings = [*speculation_findings(serving), *parallel_findings(drafter.config, serving)]
    if installed is None:
        findings.append(
            Finding("info", "vLLM is not installed here: its version's limits are not checked", "engine", "")
        )
        return findings + length_findings(target, drafter, serving)
    return [
        *findings,
        *support_findings(
            installed, found, "vision_config" in target.config or "audio_config" in target.config, serving
        ),
        *(
            finding
            for role, model in (("target", target), ("drafter", drafter))
            for finding in four_bit_findings(
                role, model.config, model.tensors, installed, found is None or found.w4a16, serving.dtype
            )
        ),
        *length_findings(target, drafter, serving),
        *budget_findings(installed, memory, served_length(target, drafter, serving), serving),
        *memory_findings(target, drafter, installed, memory, serving),
    ]


def preflight_report(target: ModelSource, drafter: ModelSource, serving: Serving) -> dict[str, Any]:
    """`preflight` on this machine, JSON as it stands: {"starts", "findings", "numbers", "command"}.

    "numbers" are `memory_numbers` in bytes, None where no vLLM is installed; "command" is the whole line that serves.
    """
    t, d = (Model(read_json(s.path / "config.json"), read_headers(s.path)) for s in (target, drafter))
    installed = engine()
    memory = device_memory(installed.backend if installed else "cpu")
    findings = preflight(t, d, serving, installed, memory, probe(installed.backend) if installed else None)
    findings += trained_findings(drafter.path, serving)
    findings.sort(key=lambda f: LEVELS.index(f.level))
    return {
        "starts": not any(f.level == "blocks" for f in findings),
        "findings": [asdict(f) | {"stops": list(f.stops)} for f in findings],
        "numbers": memory_numbers(t, d, installed, memory, serving) if installed else None,
        "command": serve_line(servable(target), servable(drafter), serving),
    }


def require_start(target: ModelSource, drafter: ModelSource, serving: Serving) -> dict[str, Any]:
    """The report, for whoever is about to start the pair. Raises InputError, one line a finding that blocks."""
    report = preflight_report(target, drafter, serving)
    if not report["starts"]:
        lines = [f"{f['where']}: {f['what']}: {f['fix']}" for f in report["findings"] if f["level"] == "blocks"]
        raise InputError("this pair would not start in vLLM\n" + "\n".join(lines))
    return report
