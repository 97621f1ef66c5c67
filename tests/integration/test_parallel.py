"""Replicated and FSDP2 weights over two gloo processes are one process (D11), checkpoints go both ways between them.

The steps are `distill.step`'s own: on stored answers, on the drafter's with the target online, and with a reference's filter.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file

from distill.batches import collate
from distill.checkpoint import load_checkpoint, load_weights
from distill.student import freeze, supervised_hidden
from tests import tiny
from tests.conftest import ROOT
from tests.integration.sharded_ranks import CASES, WINDOWS, main, rate, ready, rows_of, updates
from tests.stored_answers import made_up, store

KINDS = ["replicated", "fsdp2"]
if importlib.util.find_spec("deepspeed"):  # no part of our environment: docs/scale.md says how to add it
    KINDS += ["zero2", "zero3"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """answers/, and per kind, case and number of processes a folder of checkpoints and a log."""
    place = tmp_path_factory.mktemp("place")
    store(place / "answers", made_up([3, 50, 7, 120, 9, 11, 30, 2]), tiny.folder(place / "target"))
    alone = Accelerator(cpu=True)
    for case in CASES:
        main(alone, place / "answers", place, "replicated", case)
        shutil.move(place / f"replicated, {case}, 1" / "step-000005", place / f"one, {case}")
    words = ["-m", "torch.distributed.run", "--nproc_per_node", "2", "--rdzv_backend", "c10d"]
    words += ["--rdzv_endpoint", "localhost:0", "-m", "tests.integration.sharded_ranks"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    subprocess.run(
        [sys.executable, *words, str(place / "answers"), str(place), *KINDS],
        check=True, cwd=ROOT, env=environment, timeout=480,
    )  # fmt: skip
    return place


@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_have_the_losses_norms_weights_and_moments_of_one(place: Path, kind: str, case: str) -> None:
    """Short windows too, where a rank has one row or none. Whole plain tensors, under the model's own names."""
    one, two = place / f"one, {case}", place / f"{kind}, {case}, 2"
    logs = [load_file(d / "log.safetensors") for d in (place / f"replicated, {case}, 1", two)]
    assert logs[0]["log"].shape == (len(WINDOWS), 3)
    torch.testing.assert_close(logs[1]["log"], logs[0]["log"], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(logs[1]["hidden"], logs[0]["hidden"], rtol=1e-3, atol=1e-4)
    # Adam divides by the gradient's own size, so where it is next to nothing its rounding shows: 1 % of a step
    for step in ("step-000005", "step-000006"):  # trained through; and begun on one process, ended on two
        for file, atol in (("weights", rate(case) / 100), ("optimizer", 1e-6)):
            ours, theirs = load_file(two / step / f"{file}.safetensors"), load_file(one / f"{file}.safetensors")
            assert ours.keys() == theirs.keys()
            for name, tensor in theirs.items():
                torch.testing.assert_close(ours[name], tensor, rtol=1e-4, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.parametrize("kind", KINDS)
def test_what_two_ranks_saved_one_process_goes_on_with(place: Path, tmp_path: Path, kind: str, case: str) -> None:
    two, alone = tmp_path / "checkpoints", Accelerator(cpu=True)
    shutil.copytree(place / f"{kind}, {case}, 2" / "step-000003", two / "step-000003")
    rows = rows_of(place / "answers")
    again = ready(alone, rows, "replicated", case)
    assert load_checkpoint(two, again.prepared.params, again.prepared.optimizer) == {"step": 3}
    log = updates(again, WINDOWS[3:], 3)
    reference = load_file(place / f"replicated, {case}, 1" / "log.safetensors")
    np.testing.assert_allclose(log, reference["log"][3:].numpy(), rtol=1e-4)
    trainable, tied, _ = CASES[case]
    model = tiny.model(tied=tied)
    params = freeze(model, trainable)
    shutil.copytree(place / f"{kind}, {case}, 2" / "step-000005", two / "step-000005")
    assert load_weights(two, "newest", params)["step"] == 5
    hidden = supervised_hidden(model, collate(rows, np.array([0, 1])))
    torch.testing.assert_close(hidden.detach(), reference["hidden"], rtol=1e-3, atol=1e-4)
