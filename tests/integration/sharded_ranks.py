"""Run by torchrun in test_parallel, on any number of ranks: a few steps on each kind of weights, with checkpoints.

torchrun --nproc_per_node 2 -m tests.integration.sharded_ranks ANSWERS OUT HOW [HOW …]
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from accelerate import Accelerator
from safetensors.torch import save_file

from distill.answers import open_answers
from distill.batches import Rows, check_rows, collate
from distill.checkpoint import load_checkpoint, save_checkpoint
from distill.parallel import Kind, whole
from distill.settings import Settings
from distill.signals import get_signal, online
from distill.step import Run, optimizer_step
from distill.step import ready as ready_for_steps
from distill.student import Trainable, freeze, supervised_hidden
from tests import tiny

# the third leaves a rank of two with one row only, and so without a shared prefix; the fourth leaves it with none
WINDOWS = [[0, 1, 2, 3, 4, 5, 6, 7], [5, 2, 7, 0], [1, 3, 5], [4], [6, 0, 3, 1, 2, 7, 4, 5]]
HOW: dict[str, tuple[Kind, Literal[2, 3]]] = {
    "replicated": ("replicated", 2),
    "fsdp2": ("fsdp2", 2),
    "zero2": ("deepspeed", 2),
    "zero3": ("deepspeed", 3),
}
SETTINGS = Settings(
    seed=0, batch_size=2, accumulation=1, lr=1e-2, warmup=0.0, weight_decay=0.0, beta2=0.98, clip=0.1, trainable="all",
    losses={"forward_kl": 1.0, "cross_entropy": 0.1}, chunk=32, epochs=None, max_steps=1, minutes=None, eval_every=1,
    eval_prompts=1, checkpoint_every=1, keep=1,
)  # fmt: skip
# What is drawn or kept turns on a hair where two tokens or positions are nearly alike, so there the weights, and with them the
# rounding that Adam makes larger, move in small steps.
CASES: dict[str, tuple[Trainable, bool, dict[str, Any]]] = {  # what learns, whether the head is tied, and of what a step is made
    "cached": ("all", True, {}),
    "cached, layers": ("layers", False, {}),
    "online, on-policy": ("all", True, {"on_policy": 1.0, "losses": {"jsd": 1.0}, "lr": 1e-4}),
    "filter": ("layers", False, {"keep_share": 0.4, "lr": 1e-4}),
}  # fmt: skip


def rows_of(answers: Path) -> Rows:
    return check_rows(open_answers(answers), "data", rows=tiny.ROWS, real=tiny.REAL_TOKENS, context=512)


def rate(case: str) -> float:
    return float(CASES[case][2].get("lr", SETTINGS.lr))


def ready(accelerator: Accelerator, rows: Rows, how: str, case: str) -> Run:
    trainable, tied, more = CASES[case]
    settings = Settings(**{**vars(SETTINGS), "trainable": trainable, **more})
    model = tiny.model(tied=tied)
    freeze(model, trainable)
    target = online(tiny.model(layers=3, seed=5), "target", "cpu", "cpu") if "online" in case else None
    reference = tiny.model(layers=1, seed=7) if case == "filter" else None
    return ready_for_steps(accelerator, model, rows, settings, get_signal(rows, target), reference, HOW[how])


def updates(run: Run, windows: list[list[int]], first: int = 0) -> list[list[float]]:
    """(loss, norm, positions) of a step per window, the first of them step `first`; the same on every rank."""
    rows = [optimizer_step(run, np.array(window), first + i, 0.0) for i, window in enumerate(windows)]
    return [[row["loss"], row["grad_norm"], row["supervised"]] for row in rows]


def main(accelerator: Accelerator, answers: Path, out: Path, how: str, case: str) -> None:
    """Steps on WINDOWS, a checkpoint after the third; then the last two again from the checkpoint of one process."""
    rows, first = rows_of(answers), accelerator.is_main_process
    here = out / f"{how}, {case}, {accelerator.num_processes}"
    run = ready(accelerator, rows, how, case)
    params, optimizer = run.prepared.params, run.prepared.optimizer
    log = updates(run, WINDOWS[:3])
    save_checkpoint(here, {"step": 3}, params, optimizer, keep=3, main=first)
    log += updates(run, WINDOWS[3:], 3)
    save_checkpoint(here, {"step": 5}, params, optimizer, keep=3, main=first)
    with whole(run.prepared):  # as an evaluation does: parts of the model, outside the root's forward
        hidden = supervised_hidden(run.model, collate(rows, np.array([0, 1]))).detach()
    if first:
        save_file({"log": torch.tensor(log), "hidden": hidden}, here / "log.safetensors")
    one = out / f"replicated, {case}, 1"
    if one.is_dir() and accelerator.num_processes > 1:
        again = ready(accelerator, rows, how, case)
        assert load_checkpoint(one, again.prepared.params, again.prepared.optimizer) == {"step": 3}
        updates(again, WINDOWS[3:], 3)
        save_checkpoint(here, {"step": 6}, again.prepared.params, again.prepared.optimizer, keep=3, main=first)
    accelerator.wait_for_everyone()


if __name__ == "__main__":
    shared = Accelerator(cpu=True)
    for name in sys.argv[3:]:
        for each in CASES:
            main(shared, Path(sys.argv[1]), Path(sys.argv[2]), name, each)
    torch.distributed.destroy_process_group()
