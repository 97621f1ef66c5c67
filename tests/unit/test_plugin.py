"""The vLLM plugin's mends against the installed version: what they change, and that they change nothing twice or unasked."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from distill.w4a16 import codes_of, scales_of, values_of
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_w4a16_multiplies_in_every_type(dtype: torch.dtype) -> None:
    """The back end's own kernel on one layer; without the mend its float32 ends in NotImplementedError."""
    vllm_plugin.w4a16_on_cpu()
    vllm_plugin.w4a16_on_cpu()
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
    from vllm.model_executor.kernels.linear import MPLinearLayerConfig
    from vllm.model_executor.kernels.linear.mixed_precision.cpu import CPUWNA16LinearKernel
    from vllm.scalar_type import scalar_types

    torch.manual_seed(0)
    weight_OI, bias_O = torch.randn(64, 128), torch.randn(64)
    scales_OG = scales_of(weight_OI, 32)
    codes_OI = codes_of(weight_OI, scales_OG)
    layer = torch.nn.Module()
    layer.bias = None
    layer.packed = torch.nn.Parameter(pack_to_int32(codes_OI, 4), requires_grad=False)
    layer.packed.input_dim, layer.packed.packed_dim = 1, 1
    layer.scale = torch.nn.Parameter(scales_OG.to(dtype), requires_grad=False)
    layer.scale.output_dim = 0
    config = MPLinearLayerConfig((128, 64), (128, 64), scalar_types.uint4b8, dtype, 32, False)
    kernel = CPUWNA16LinearKernel(config, "packed", "scale")
    kernel.process_weights_after_loading(layer)
    x_TI = torch.randn(3, 128)
    out_TO = kernel.apply_weights(layer, x_TI.to(dtype), bias_O.to(dtype))
    expected_TO = x_TI @ values_of(codes_OI, scales_OG, torch.float32).T + bias_O
    assert out_TO.dtype == dtype
    # what bfloat16 can tell apart: vLLM's own product in bfloat16 is off by 0.0044 to 0.0052 on a CPU without AMX
    assert float((out_TO.float() - expected_TO).norm() / expected_TO.norm()) < torch.finfo(torch.bfloat16).eps


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


def test_a_parent_that_died_first_is_noticed(tmp_path: Path) -> None:
    """An engine's process that was still importing vLLM when its parent was killed asks too late to be told."""
    (tmp_path / "late.py").write_text(
        "import multiprocessing as mp, sys, time\n"
        "from pathlib import Path\n"
        "from pairing.vllm_plugin import die_with_parent\n"
        "def late(place):\n"
        "    (place / 'up').touch()\n"
        "    while mp.parent_process().is_alive():\n"
        "        time.sleep(0.02)\n"
        "    die_with_parent()\n"
        "    (place / 'lives').touch()\n"
        "if __name__ == '__main__':\n"
        "    child = mp.get_context('spawn').Process(target=late, args=(Path(sys.argv[1]),))\n"
        "    child.start(); print(child.pid, flush=True); time.sleep(60)\n"
    )
    words = [sys.executable, str(tmp_path / "late.py"), str(tmp_path)]
    parent = subprocess.Popen(words, env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid, deadline = int(parent.stdout.readline()), time.monotonic() + 30
    while not (tmp_path / "up").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    parent.kill()
    parent.wait()
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, os.kill(pid, 9)
        time.sleep(0.05)
    assert not (tmp_path / "lives").exists()
