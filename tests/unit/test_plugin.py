"""The vLLM plugin's mends against the installed version: what they change, and that they change nothing twice or unasked."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from pairing import vllm_plugin
from tests.conftest import ROOT


def test_temperatures_are_expanded_as_the_kernel_documents() -> None:
    """vllm issue 55005. The example of vLLM's own docstring, with floats, and its replace_from/replace_to."""
    vllm_plugin.expand_sampling_on_cpu()
    vllm_plugin.expand_sampling_on_cpu()  # once is enough, twice is harmless
    from vllm.v1.sample.rejection_sampler import expand_batch_to_tokens

    ends = torch.tensor([2, 5, 6], dtype=torch.int32)
    values = torch.tensor([0.7, 0.0, 1.5])
    assert expand_batch_to_tokens(values, ends, 6).tolist() == pytest.approx([0.7, 0.7, 0, 0, 0, 1.5])
    assert expand_batch_to_tokens(values, ends, 6, replace_from=0, replace_to=1).tolist() == pytest.approx(
        [0.7, 0.7, 1, 1, 1, 1.5]
    )
    none_drafted = torch.tensor([0, 3, 3], dtype=torch.int32)
    assert expand_batch_to_tokens(values, none_drafted, 3).tolist() == [0, 0, 0]


def test_nf4_is_two_values_a_byte_for_every_type() -> None:
    vllm_plugin.size_nf4_for_float32()
    vllm_plugin.size_nf4_for_float32()
    from vllm_bnb_plugin.quantization import linear

    assert [linear.calculate_quant_ratio(t) for t in (torch.float32, torch.bfloat16, torch.float16)] == [2, 2, 2]


def test_a_version_whose_internals_moved_gets_one_line_and_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A stand-in for another vLLM version: one where the proposer is gone."""
    from vllm.v1.spec_decode import draft_model

    monkeypatch.delattr(draft_model, "DraftModelProposer")
    monkeypatch.delenv(vllm_plugin.DIE_WITH_PARENT, raising=False)
    vllm_plugin.register()
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert "load_quantized_drafter does not fit this vLLM" in lines[0]


def test_processes_die_with_their_parent() -> None:
    """kill -9 of the parent: the child that asked for it is gone too."""
    child = "from pairing.vllm_plugin import die_with_parent as d; d(); print('up', flush=True); import time; time.sleep(60)"
    parent = (
        "import subprocess, sys, time\n"
        f"p = subprocess.Popen([sys.executable, '-c', {child!r}], stdout=subprocess.PIPE, text=True)\n"
        "p.stdout.readline(); print(p.pid, flush=True); time.sleep(60)"
    )
    outer = subprocess.Popen([sys.executable, "-c", parent], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert outer.stdout is not None
    pid = int(outer.stdout.readline())
    outer.kill()
    outer.wait()
    deadline = time.monotonic() + 10
    while Path(f"/proc/{pid}/status").exists() and "State:\tZ" not in Path(f"/proc/{pid}/status").read_text():
        assert time.monotonic() < deadline, os.kill(pid, 9)
        time.sleep(0.05)
