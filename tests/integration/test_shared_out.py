"""Two ranks whose `out` is not one folder, as on nodes without a common disk: all end, before a step."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

from pairing.init import init_drafter
from pairing.source import resolve
from tests import tiny
from tests.conftest import ROOT
from tests.stored_answers import made_up, store


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def test_two_ranks_without_a_common_out_end_before_a_step(tmp_path: Path) -> None:
    """Started by hand, as each node's launcher would: over gloo, `out` of each on a disk of its own."""
    target = tiny.folder(tmp_path / "target", layers=2)
    init_drafter(resolve(str(target)), tmp_path / "draft", [0, 1])
    store(tmp_path / "data", made_up([5, 9, 7, 4]), target)
    words = [
        f"draft={tmp_path / 'draft'}",
        f"data={tmp_path / 'data'}",
        "max_steps=2",
        "losses.forward_kl=1",
        "threads=1",
    ]
    group = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    ranks = [
        subprocess.Popen(
            [sys.executable, ROOT / "recipes" / "distill.py", *words, f"out={tmp_path / f'node{rank}' / 'out'}"],
            env=os.environ | group | {"RANK": str(rank), "LOCAL_RANK": "0", "OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        told = [one.communicate(timeout=240)[1] for one in ranks]
    finally:
        for one in ranks:
            one.kill()
    assert [one.returncode for one in ranks] == [2, 2], told
    for said in told:
        assert "1 of 2 processes (rank 1) do not see it: name an out on a disk that all nodes share" in said
        assert "Traceback" not in said
    assert [one.name for one in sorted((tmp_path / "node0" / "out").iterdir())] == ["config.yaml", "provenance.json"]
    assert not (tmp_path / "node1").exists()
