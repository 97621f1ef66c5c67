"""A drafter cut and narrowed out of each architecture that `init` knows runs in vLLM beside its target, and proposes what
the target says."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

from pairing.files import read_jsonl
from tests import architectures
from tests.conftest import ROOT
from tests.integration.architectures_child import FOREIGN
from tests.integration.test_pair_in_vllm import PROMPTS, K


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """One process for all: vLLM is imported once, and an engine within it starts in seconds."""
    folder = tmp_path_factory.mktemp("architectures")
    env = os.environ | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": str(min(os.sched_getaffinity(0))),  # models this small are slower on two
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }
    with open(folder / "log", "w") as log:
        child = [sys.executable, "-m", "tests.integration.architectures_child", str(folder)]
        done = subprocess.run(child, cwd=ROOT, env=env, stdout=log, stderr=subprocess.STDOUT, timeout=600)
    assert done.returncode == 0, (folder / "log").read_text()[-3000:]
    return {row["kind"]: row for row in read_jsonl(folder / "results.jsonl")}


@pytest.mark.parametrize("kind", architectures.CLASSES)
def test_it_drafts_the_targets_own_tokens(results: dict[str, dict[str, Any]], kind: str) -> None:
    result = results[kind]
    assert "error" not in result, result["error"]
    assert result["equal"]
    # every draft is accepted, but for those past an answer's end
    assert result["accepted"] >= K * (result["rounds"] - len(PROMPTS)) > 0


@pytest.mark.parametrize("how", FOREIGN)
def test_a_drafter_that_was_not_cut_from_its_target_loads_and_drafts(
    results: dict[str, dict[str, Any]], how: str
) -> None:
    """A transplanted one and one from a config."""
    result = results[how]
    assert "error" not in result, result["error"]
    assert result["equal"]
    assert result["drafted"] > 0
