"""Which vLLM drafts with a model at all: a table by version and back end, confirmed in the installed source (fault D8)."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from packaging.version import Version

from pairing.engine import Engine
from pairing.finding import Finding
from pairing.serving_plan import Serving, stop

OFFLINE = (
    "without serving only an offline estimate is left: the replayed acceptance length in `draftsmith distill`'s "
    "evaluation.json; it says nothing of speed"
)
KERNELS = ("kernels/linear", "layers/quantization/kernels")  # where vLLM keeps them: 0.32, and before


@dataclass(frozen=True)
class Support:
    """What a vLLM does with `draft_model`, by runner, and with a multimodal target beside one."""

    v1: bool
    v2: bool
    multimodal: bool
    seen: str  # where we know it from
    w4a16: bool = True  # kernels for group-wise 4-bit integers
    parallel: bool = False  # drafts all tokens in one pass (on V1 alone)


# By the oldest version that it holds for, and back end; an installed version takes the newest line at or below its own.
SUPPORT: dict[tuple[str, str], Support] = {
    ("0.0", "cuda"): Support(False, False, False, "vLLM issue 31883: 0.13.0 refuses draft_model"),
    ("0.0", "cpu"): Support(False, False, False, "vLLM issue 28384: the CPU runner asserts that nothing speculates"),
    ("0.14", "cuda"): Support(True, False, False, "vLLM PR 24322; issue 42005: 0.20.1 refuses multimodal targets"),
    ("0.32", "cuda"): Support(True, True, True, "read in 0.32.0; the V1 runner was run, V2 was not", parallel=True),
    ("0.32", "cpu"): Support(
        True, False, True, "run with 0.32.0; V2 asks for a Triton with a CPU back end", parallel=True
    ),
}


def support(version: str, backend: str) -> Support:
    """The line of `SUPPORT` for this version."""
    own = Version(version)
    lines = {Version(since): line for (since, name), line in SUPPORT.items() if name == backend}
    return lines[max(since for since in lines if since <= own or since == Version("0.0"))]


def probe(backend: str, package: Path | None = None) -> Support | None:
    """The same, read in the installed package's source without importing it (milliseconds); None where there is none."""
    if package is None:
        spec = importlib.util.find_spec("vllm")
        if spec is None or not spec.submodule_search_locations:
            return None
        package = Path(spec.submodule_search_locations[0])

    def text(name: str) -> str:
        return (package / name).read_text(encoding="utf-8") if (package / name).is_file() else ""

    proposers = text("v1/spec_decode/llm_base_proposer.py") + text("v1/spec_decode/eagle.py")
    v1 = (package / "v1/spec_decode/draft_model.py").is_file()
    v2 = "uses_draft_model" in text("v1/worker/gpu/spec_decode/__init__.py")
    if backend == "cpu":
        v1 = v1 and "spec decode is not supported" not in text("v1/worker/cpu_model_runner.py")
        triton = importlib.util.find_spec("triton")
        folders = triton.submodule_search_locations if triton else None
        v2 = v2 and any((Path(f) / "backends" / "cpu").is_dir() for f in folders or [])
    kernels = {"cpu": ("cpu.py", "class CPUWNA16LinearKernel"), "cuda": ("marlin.py", "class MarlinLinearKernel")}
    file, name = kernels[backend]
    w4a16 = any(name in text(f"model_executor/{place}/mixed_precision/{file}") for place in KERNELS)
    multimodal = bool(proposers) and "_raise_if_multimodal" not in proposers
    return Support(v1, v2, multimodal, f"read in {package}", w4a16, v1 and "pard_token" in proposers)


def one_pass_fault(installed: Engine, found: Support | None, force_v2: bool | None) -> tuple[str, str] | None:
    """Why this vLLM can't take all drafts of a draft model from one pass, and what may be changed for that ("" where nothing is
    known); None where it can."""
    actual = found or support(installed.version, installed.backend)
    if not actual.parallel:
        return f"{_build(installed)} has no parallel_drafting for draft models ({actual.seen})", ""
    if force_v2 is True:
        what = "VLLM_USE_V2_MODEL_RUNNER=1 forces a runner that has no parallel_drafting for draft models"
        return what, "unset VLLM_USE_V2_MODEL_RUNNER"
    return None


def _build(installed: Engine) -> str:
    return f"vLLM {installed.version} ({installed.backend})"


def support_findings(installed: Engine, found: Support | None, multimodal: bool, serving: Serving) -> list[Finding]:
    """Whether the installed vLLM drafts with a model at all. Where table and probe disagree the probe is believed."""
    listed = support(installed.version, installed.backend)
    actual = found or listed
    build = _build(installed)
    findings = []
    parts = ("v1", "v2", "multimodal", "parallel")
    if found and (differ := [p for p in parts if getattr(found, p) != getattr(listed, p)]):
        what = f"{build} is not as our table says ({', '.join(differ)}; {listed.seen}): its own source is believed"
        findings.append(Finding("info", what, "engine", ""))
    if not (actual.v1 or actual.v2):
        fix = f"update vLLM to 0.32 or later; {OFFLINE}"
        findings.append(stop(f"{build} has no draft_model ({actual.seen})", "engine", fix))
    elif serving.force_v2 is True and not actual.v2:
        what = f"VLLM_USE_V2_MODEL_RUNNER=1 forces a runner that has no draft_model in {build} ({actual.seen})"
        findings.append(stop(what, "engine", f"unset VLLM_USE_V2_MODEL_RUNNER; {OFFLINE}"))
    elif serving.force_v2 is False and not actual.v1:
        what = f"VLLM_USE_V2_MODEL_RUNNER=0 forces a runner that has no draft_model in {build} ({actual.seen})"
        findings.append(stop(what, "engine", f"unset VLLM_USE_V2_MODEL_RUNNER; {OFFLINE}"))
    fault = one_pass_fault(installed, found, serving.force_v2)
    if fault and serving.speculation("").get("parallel_drafting") and not any(f.level == "blocks" for f in findings):
        what, change = fault
        ways = [change, f"{serving.one_by_one} (the same drafter drafts one by one too)"]
        findings.append(stop(what, "engine", ", or ".join(filter(None, ways))))
    if installed.backend == "cpu" and serving.speculation("").get("rejection_sample_method") == "synthetic":
        what = f"{build} ignores rejection_sample_method=synthetic: its kernels for the CPU verify the drafts as ever"
        findings.append(stop(what, "engine", "leave synthetic acceptance out here: it is for GPUs"))
    if multimodal and not actual.multimodal:
        what = f"{build} refuses draft models beside a multimodal target ({actual.seen})"
        findings.append(stop(what, "engine", f"serve the target's text model alone, or update vLLM; {OFFLINE}"))
    if installed.backend == "cpu" and not any(f.level == "blocks" for f in findings):
        what = f"{build}: speedups measured on this CPU back end say nothing of a GPU"
        findings.append(Finding("info", what, "engine", ""))
    return findings
