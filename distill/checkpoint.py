"""Checkpoints of the loop: whole plain tensors in safetensors, and JSON; each folder whole or absent; newest n and best.

A checkpoint knows nothing of the processes that made it: made on two ranks, sharded or not, it goes on on one, and back.
state.json holds the loop's state, the held-out figure (τ) where one was measured, and digests of what the run trains on.
"""

from __future__ import annotations

import math
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from distill.parallel import Named, gather_full, scatter_full, whole_shape
from pairing.errors import InputError, PartFailedError
from pairing.files import new_folder, read_json, write_json

Which = Literal["newest", "best"]


def save_checkpoint(
    folder: Path,
    state: dict[str, Any],
    params: Named,
    optimizer: Any,
    keep: int,
    *,
    figure: float | None = None,
    digests: Mapping[str, str] | None = None,
    main: bool = True,
) -> None:
    """Writes `folder`/step-…, then deletes all but the newest `keep` and the one of the highest `figure` (of equals the
    newest). Frozen weights are the draft's and not in it. Where weights are sharded all ranks call it; one is `main`.

    Raises PartFailedError, and leaves every older checkpoint, where a weight is not finite or the disk takes no more.
    """
    assert figure is None or math.isfinite(figure), figure
    weights, moments = gather_full(params, optimizer)
    broken = [name for name, t in weights.items() if not bool(torch.isfinite(t).all())]
    if broken:
        raise PartFailedError(
            f"step {state['step']}: {broken[0]} is not finite any more; nothing was saved, the last good checkpoint is "
            f"in {folder}: lower lr, or clip harder"
        )
    if not main:
        return
    goal = folder / f"step-{state['step']:06d}"
    if goal.exists():  # the last step, saved by its interval already
        return
    for torn in folder.glob(".step-*"):  # left by a kill in the middle of a save or a deletion
        shutil.rmtree(torn, ignore_errors=True)
    try:
        with new_folder(goal) as temp:
            save_file(weights, temp / "weights.safetensors")
            save_file(moments, temp / "optimizer.safetensors")
            write_json(temp / "state.json", {"state": state, "figure": figure, "digests": dict(digests or {})})
    except (OSError, SafetensorError) as e:
        held = _all(folder)
        last = f"the last good one is {held[-1]}" if held else "there is none yet"
        raise PartFailedError(
            f"step {state['step']}: the checkpoint could not be written to {folder} ({_reason(e)}); {last}: make room and "
            "start the same command again"
        ) from e
    kept = {*_all(folder)[-keep:], _best(folder)}
    for old in _all(folder):
        if old not in kept:
            gone = old.with_name(f".{old.name}.old")  # a kill in the middle of the deletion leaves no half checkpoint
            os.replace(old, gone)
            shutil.rmtree(gone)


def load_checkpoint(
    folder: Path, params: Named, optimizer: Any, *, which: Which = "newest", digests: Mapping[str, str] | None = None
) -> dict[str, Any] | None:
    """Restores a checkpoint into `params` and `optimizer` and returns its state; None where there is none.

    Raises InputError where it was made from something else than `digests` says (None: not compared), or holds other
    weights than `params`; PartFailedError where its files are damaged. Every rank calls it.
    """
    path = _path(folder, which)
    if path is None:
        return None
    held = _read_state(path)
    was = held["digests"]
    differ = [name for name in {**was, **(digests or {})} if digests is not None and was.get(name) != digests.get(name)]
    if differ:
        raise InputError(
            f"{path}: that run trains on another {', '.join(differ)} than this start: go on with what it began with, or "
            "name another output folder"
        )
    weights, moments = _tensors(path, "weights", params), _tensors(path, "optimizer", None)
    scatter_full(weights, moments, params, optimizer)
    return dict(held["state"])


def load_weights(folder: Path, which: Which, params: Named) -> dict[str, Any]:
    """Restores the weights alone, of the newest or the best, into a plain model; returns {"step", "figure"} of that one.

    "best" is the newest where no checkpoint has a figure. Raises InputError where there is none.
    """
    path = _path(folder, which)
    if path is None:
        raise InputError(f"{folder}: no checkpoint there: train first")
    held = _read_state(path)
    scatter_full(_tensors(path, "weights", params), {}, params, None)
    return {"step": held["state"]["step"], "figure": held["figure"]}


def _path(folder: Path, which: Which) -> Path | None:
    return (_best(folder) if which == "best" else None) or next(reversed(_all(folder)), None)


def _all(folder: Path) -> list[Path]:
    found = [p for p in folder.glob("step-*") if re.fullmatch(r"step-\d{6,}", p.name)]
    return sorted(found, key=lambda p: int(p.name.removeprefix("step-")))


def _best(folder: Path) -> Path | None:
    figures = [(f, i, p) for i, p in enumerate(_all(folder)) if (f := _read_state(p)["figure"]) is not None]
    return max(figures)[2] if figures else None


def _read_state(path: Path) -> dict[str, Any]:
    held = read_json(path / "state.json")
    if set(held) != {"state", "figure", "digests"}:
        raise InputError(f"{path}: a checkpoint of another version of draftsmith: name another output folder")
    return dict(held)


def _tensors(path: Path, what: str, params: Named | None) -> dict[str, torch.Tensor]:
    try:
        tensors = load_file(path / f"{what}.safetensors")
    except (OSError, SafetensorError) as e:
        raise PartFailedError(
            f"{path}: {what}.safetensors is damaged ({_reason(e)}): delete that folder to go on from the one before"
        ) from e
    other = [name for name, p in params or [] if name not in tensors or tensors[name].shape != whole_shape(p)]
    if other or (params is not None and len(tensors) != len(params)):
        name = other[0] if other else next(n for n in tensors if n not in dict(params or []))
        raise InputError(f"{path}: that run trains other weights than this start ({name}): name another output folder")
    return tensors


def _reason(e: Exception) -> str:
    return str(e.strerror if isinstance(e, OSError) and e.strerror else e).splitlines()[0]
