"""Checkpoints: the newest and the best kept, digests, a full disk, and kill -9 at random moments while saving."""

from __future__ import annotations

import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from distill.checkpoint import load_checkpoint, load_weights, save_checkpoint
from pairing.errors import InputError, PartFailedError
from pairing.files import read_json
from tests.conftest import ROOT

Params = list[tuple[str, torch.nn.Parameter]]


def made(value: float = 0.0, sizes: tuple[int, ...] = (3, 5)) -> tuple[Params, torch.optim.Optimizer]:
    params = [(f"w{i}", torch.nn.Parameter(torch.full((n, 2), value))) for i, n in enumerate(sizes)]
    return params, torch.optim.AdamW([p for _, p in params], lr=0.1, fused=True)


def stepped(params: Params, optimizer: torch.optim.Optimizer, gradient: float) -> None:
    for _, p in params:
        p.grad = torch.full_like(p, gradient)
    optimizer.step()


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def test_the_best_outlives_the_newest_ones_and_loads(tmp_path: Path) -> None:
    params, optimizer = made()
    weights = {}
    for step, tau in enumerate([None, 2.0, 3.0, None, 2.9, 2.5], start=1):
        stepped(params, optimizer, 1.0)
        weights[step] = {name: p.detach().clone() for name, p in params}
        save_checkpoint(tmp_path, {"step": step}, params, optimizer, keep=2, figure=tau)
    assert names(tmp_path) == ["step-000003", "step-000005", "step-000006"]
    assert read_json(tmp_path / "step-000003" / "state.json")["figure"] == 3.0
    for which, step, figure in (("best", 3, 3.0), ("newest", 6, 2.5)):
        others, _ = made()
        assert load_weights(tmp_path, which, others) == {"step": step, "figure": figure}  # type: ignore[arg-type]
        assert all(torch.equal(p, weights[step][name]) for name, p in others)
    stepped(params, optimizer, 1.0)
    save_checkpoint(tmp_path, {"step": 7}, params, optimizer, keep=1, figure=3.0)  # as good: the newer one stays
    assert names(tmp_path) == ["step-000007"]


def test_without_a_figure_the_newest_is_the_best_and_steps_sort_as_numbers(tmp_path: Path) -> None:
    params, optimizer = made()
    with pytest.raises(InputError, match="no checkpoint there"):
        load_weights(tmp_path, "best", params)
    assert load_checkpoint(tmp_path, params, optimizer) is None
    for step in (999_999, 1_000_000):
        save_checkpoint(tmp_path, {"step": step}, params, optimizer, keep=2)
    assert load_weights(tmp_path, "best", params) == {"step": 1_000_000, "figure": None}


def test_weights_moments_and_state_come_back(tmp_path: Path) -> None:
    params, optimizer = made()
    for gradient in (1.0, -0.3):
        stepped(params, optimizer, gradient)
    state = {"step": 2, "rows_per_step": 8, "seconds": 1.5}
    save_checkpoint(tmp_path, state, params, optimizer, keep=1)
    others, again = made(7.0)
    assert load_checkpoint(tmp_path, others, again) == state
    for (name, p), (_, q) in zip(params, others, strict=True):
        assert torch.equal(p, q), name
        assert set(optimizer.state[p]) == {"step", "exp_avg", "exp_avg_sq"}
        assert all(torch.equal(value, again.state[q][key]) for key, value in optimizer.state[p].items())
    for o, ps in ((optimizer, params), (again, others)):
        stepped(ps, o, 0.5)
    assert all(torch.equal(p, q) for (_, p), (_, q) in zip(params, others, strict=True))


def test_another_target_or_other_data_or_other_weights_are_refused(tmp_path: Path) -> None:
    params, optimizer = made()
    digests = {"target": "sha256:a", "tokenizer": "sha256:b", "data": "sha256:c"}
    save_checkpoint(tmp_path, {"step": 1}, params, optimizer, keep=1, digests=digests)
    assert load_checkpoint(tmp_path, params, optimizer, digests=digests) == {"step": 1}
    cases = [
        ({**digests, "data": "sha256:d"}, "another data than"),
        ({**digests, "target": "x", "tokenizer": "y"}, "another target, tokenizer than"),
        ({"target": "sha256:a", "tokenizer": "sha256:b"}, "another data than"),
        ({**digests, "reference": "sha256:e"}, "another reference than"),
    ]
    for other, message in cases:
        with pytest.raises(InputError, match=message) as e:
            load_checkpoint(tmp_path, made()[0], optimizer, digests=other)
        assert "\n" not in str(e.value)
    for sizes in ((3, 6), (3,), (3, 5, 1)):
        others, again = made(1.0, sizes)
        with pytest.raises(InputError, match="trains other weights"):
            load_checkpoint(tmp_path, others, again, digests=digests)
        assert all(bool((p == 1).all()) for _, p in others)


def test_a_damaged_or_foreign_checkpoint_says_which_folder(tmp_path: Path) -> None:
    params, optimizer = made()
    stepped(params, optimizer, 1.0)
    save_checkpoint(tmp_path, {"step": 1}, params, optimizer, keep=1)
    file = tmp_path / "step-000001" / "optimizer.safetensors"
    file.write_bytes(file.read_bytes()[:-7])
    with pytest.raises(PartFailedError, match=r"step-000001: optimizer.safetensors is damaged .*delete that folder"):
        load_checkpoint(tmp_path, params, optimizer)
    (tmp_path / "step-000001" / "state.json").write_text('{"step": 1}')
    with pytest.raises(InputError, match="another version"):
        load_checkpoint(tmp_path, params, optimizer)


def test_weights_that_are_not_finite_are_never_saved(tmp_path: Path) -> None:
    params, optimizer = made()
    save_checkpoint(tmp_path, {"step": 1}, params, optimizer, keep=1)
    with torch.no_grad():
        params[1][1][0] = torch.nan
    with pytest.raises(PartFailedError, match=r"step 2: w1 is not finite .*last good checkpoint"):
        save_checkpoint(tmp_path, {"step": 2}, params, optimizer, keep=1)
    assert names(tmp_path) == ["step-000001"]


@pytest.mark.parametrize("limit", [2_000, 30_000], ids=["weights", "moments"])
def test_a_full_disk_is_one_line_and_the_last_good_checkpoint_stays(tmp_path: Path, limit: int) -> None:
    """A real limit on the size of files (RLIMIT_FSIZE: the kernel refuses the write), in the first file and in the second."""
    params, optimizer = made(1.0, (2500,))  # weights 20 kB, moments 40 kB
    stepped(params, optimizer, 1.0)
    save_checkpoint(tmp_path, {"step": 1}, params, optimizer, keep=1)
    before = {p: p.read_bytes() for p in (tmp_path / "step-000001").iterdir()}
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, old[1]))
        with pytest.raises(PartFailedError) as e:
            save_checkpoint(tmp_path, {"step": 2}, params, optimizer, keep=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    message = str(e.value)
    assert "step 2: the checkpoint could not be written" in message
    assert "File too large" in message
    assert f"the last good one is {tmp_path / 'step-000001'}" in message
    assert "\n" not in message
    assert names(tmp_path) == ["step-000001"]
    assert {p: p.read_bytes() for p in (tmp_path / "step-000001").iterdir()} == before
    save_checkpoint(tmp_path, {"step": 2}, params, optimizer, keep=1)
    assert names(tmp_path) == ["step-000002"]


def saves_for_ever(folder: Path, first: int) -> None:
    """Step n's weights and moments are all n, so that a mixture would show."""
    params, optimizer = made(0.0, (50, 300))
    stepped(params, optimizer, 1.0)
    step = first
    while True:
        for _, p in params:
            p.data.fill_(step)
            for moment in optimizer.state[p].values():
                moment.fill_(step)
        save_checkpoint(folder, {"step": step}, params, optimizer, keep=2, figure=-float(step % 5))
        step += 1


FORKS = """
import os, signal, sys
from pathlib import Path
import torch._dynamo  # what an optimizer's first step imports, seconds long
from tests.unit.test_checkpoint import saves_for_ever
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
for line in sys.stdin:
    if not (pid := os.fork()):
        saves_for_ever(Path(sys.argv[1]), int(line))
    print(pid, flush=True)
"""


@pytest.fixture
def start_saving(tmp_path: Path) -> Iterator[Callable[[int], int]]:
    """Starts a process that saves from this step on and gives its pid. A process that has run no tensor operation is forked:
    this one would hand on torch's locks without the threads that hold them.
    """
    words = [sys.executable, "-c", FORKS, str(tmp_path)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        stdin, stdout = parent.stdin, parent.stdout

        def start(step: int) -> int:
            stdin.write(f"{step}\n")
            stdin.flush()
            return int(stdout.readline())

        yield start
        stdin.close()


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_killed_at_any_moment_of_a_save_the_newest_whole_one_loads(
    tmp_path: Path, start_saving: Callable[[int], int]
) -> None:
    """Real processes, kill -9 at random moments; what is left is always whole, and goes forwards."""
    moments, torn, last = random.Random(0), 0, 0
    for _ in range(12):
        child = start_saving(last + 1)
        begun = time.monotonic()
        while not any(p.name > f"step-{last:06d}" for p in tmp_path.glob("step-*")):
            assert alive(child)
            assert time.monotonic() - begun < 30
            time.sleep(0.001)
        time.sleep(moments.uniform(0, 0.03))
        os.kill(child, signal.SIGKILL)
        while alive(child):
            time.sleep(0.001)
        torn += any(p.name.startswith(".") for p in tmp_path.iterdir())
        params, optimizer = made(0.0, (50, 300))
        state: dict[str, Any] | None = load_checkpoint(tmp_path, params, optimizer)
        assert state is not None
        assert state["step"] > last
        last = state["step"]
        for _, p in params:
            assert bool((p == last).all())
            assert all(bool((moment == last).all()) for moment in optimizer.state[p].values())
        assert load_weights(tmp_path, "best", params)["figure"] is not None
    assert torn, "no kill fell into a save: the test shows nothing"
    params, optimizer = made(1.0, (50, 300))
    save_checkpoint(tmp_path, {"step": last + 1}, params, optimizer, keep=2)
    assert all(name.startswith("step-") for name in names(tmp_path))
