"""Checkpoints of the loop: safetensors and JSON only, each folder whole or absent, the newest few kept."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from pairing.errors import PartFailedError
from pairing.files import new_folder, read_json, write_json

Named = Sequence[tuple[str, torch.nn.Parameter]]


def save_checkpoint(
    folder: Path, state: dict[str, Any], params: Named, optimizer: torch.optim.Optimizer, keep: int
) -> None:
    """Writes `folder`/step-…, then deletes all but the newest `keep`. Frozen weights are the draft's and not in it.

    Raises PartFailedError, and leaves every older checkpoint, where a weight is not finite.
    """
    broken = [name for name, p in params if not bool(torch.isfinite(p).all())]
    if broken:
        raise PartFailedError(
            f"step {state['step']}: {broken[0]} is not finite any more; nothing was saved, the last good checkpoint is "
            f"in {folder}: lower lr, or clip harder"
        )
    goal = folder / f"step-{state['step']:06d}"
    if goal.exists():  # the last step, saved by its interval already
        return
    with new_folder(goal) as temp:
        save_file({name: p.detach().contiguous() for name, p in params}, temp / "weights.safetensors")
        moments = {f"{key} {name}": t for name, p in params for key, t in optimizer.state.get(p, {}).items()}
        save_file({k: t.detach().contiguous() for k, t in moments.items()}, temp / "optimizer.safetensors")
        write_json(temp / "state.json", state)
    for old in _all(folder)[:-keep]:
        shutil.rmtree(old)


def load_checkpoint(folder: Path, params: Named, optimizer: torch.optim.Optimizer) -> dict[str, Any] | None:
    """Restores the newest checkpoint into `params` and `optimizer` and returns its state; None where there is none."""
    found = _all(folder)
    if not found:
        return None
    weights, moments = (load_file(found[-1] / f"{n}.safetensors") for n in ("weights", "optimizer"))
    with torch.no_grad():
        for name, p in params:
            p.copy_(weights[name])
    for key, tensor in moments.items():
        kind, name = key.split(" ", 1)
        p = dict(params)[name]
        # AdamW keeps its step counts in float32 on the parameter's device when fused, on the CPU otherwise
        optimizer.state[p][kind] = tensor.to(p.device) if tensor.ndim or optimizer.defaults.get("fused") else tensor
    return dict(read_json(found[-1] / "state.json"))


def _all(folder: Path) -> list[Path]:
    return sorted(p for p in folder.glob("step-*") if re.fullmatch(r"step-\d{6,}", p.name))
