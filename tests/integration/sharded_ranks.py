"""Run by torchrun in test_parallel, on any number of ranks: a few updates on each kind of weights, with checkpoints.

torchrun --nproc_per_node 2 tests/integration/sharded_ranks.py ANSWERS OUT HOW [HOW …]
"""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from safetensors.torch import save_file

from distill.answers import open_answers
from distill.batches import Batch, Rows, check_rows, collate
from distill.checkpoint import load_checkpoint, save_checkpoint
from distill.head import Head, head_loss
from distill.parallel import (
    Kind,
    Named,
    Prepared,
    backward,
    deepspeed_config,
    equal_graphs,
    passes,
    prepare,
    sum_gradients,
    update,
    whole,
)
from distill.student import Trainable, freeze, supervised_hidden
from tests import tiny

# the third leaves a rank of two with one row only, and so without a shared prefix; the fourth leaves it with none
WINDOWS = [[0, 1, 2, 3, 4, 5, 6, 7], [5, 2, 7, 0], [1, 3, 5], [4], [6, 0, 3, 1, 2, 7, 4, 5]]
BATCH = 2
HOW: dict[str, tuple[Kind, dict[str, Any]]] = {
    "replicated": ("replicated", {}),
    "fsdp2": ("fsdp2", {}),
    "zero2": ("deepspeed", deepspeed_config(2, BATCH, 0.1)),
    "zero3": ("deepspeed", deepspeed_config(3, BATCH, 0.1)),
}
LOSSES = {"forward_kl": 1.0, "cross_entropy": 0.1}


def rows_of(answers: Path) -> Rows:
    return check_rows(open_answers(answers), "data", rows=tiny.ROWS, real=tiny.REAL_TOKENS, context=512)


def ready(how: str, trainable: Trainable, tied: bool) -> Prepared:
    def loss_of(model: Any, batch: Batch, tokens: int) -> torch.Tensor:
        hidden = supervised_hidden(model, batch)
        weight = model.get_output_embeddings().weight
        return head_loss(hidden, weight, batch.signal, LOSSES, Head(tiny.REAL_TOKENS, 32))[0] / tokens

    def optimizer_of(params: Named) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for _, p in params], lr=1.0, fused=True)

    model, (kind, config) = tiny.model(tied=tied), HOW[how]
    freeze(model, trainable)
    return prepare(kind, model, loss_of, optimizer_of, config)


def updates(accelerator: Accelerator, prepared: Prepared, rows: Rows, windows: list[list[int]]) -> list[list[float]]:
    """(loss, norm) of an update per window, the same on every rank."""
    rank, ranks, log = accelerator.process_index, accelerator.num_processes, []
    for indices in windows:
        window = np.array(indices)
        tokens = int(rows.supervised_P[window].sum())
        total = torch.zeros(())
        todo = passes(prepared.kind, window, BATCH, rank, ranks)
        for i, (part, weight) in enumerate(todo):
            batch = collate(rows, part)
            batch = replace(batch, shared=0) if equal_graphs(prepared.kind) else batch
            loss = prepared.root(batch, tokens) * weight
            backward(prepared, loss, i == len(todo) - 1, ranks)
            total += loss.detach()
        sum_gradients(prepared, accelerator)
        norm = update(prepared, 1e-2, 0.1, lambda norm: None if math.isfinite(norm) else sys.exit("not finite"))
        log.append([float(accelerator.reduce(total, "sum")), norm])
    return log


def main(accelerator: Accelerator, answers: Path, out: Path, how: str, trainable: Trainable, tied: bool) -> None:
    """Updates on WINDOWS, a checkpoint after the third; then the last two again from the checkpoint of one process."""
    rows, first = rows_of(answers), accelerator.is_main_process
    here = out / f"{how}-{trainable}-{tied}-{accelerator.num_processes}"
    prepared = ready(how, trainable, tied)
    log = updates(accelerator, prepared, rows, WINDOWS[:3])
    save_checkpoint(here, {"step": 3}, prepared.params, prepared.optimizer, keep=3, main=first)
    log += updates(accelerator, prepared, rows, WINDOWS[3:])
    save_checkpoint(here, {"step": 5}, prepared.params, prepared.optimizer, keep=3, main=first)
    with whole(prepared):  # as an evaluation does: parts of the model, outside the root's forward
        hidden = supervised_hidden(prepared.root.model, collate(rows, np.array([0, 1]))).detach()
    if first:
        save_file({"log": torch.tensor(log), "hidden": hidden}, here / "log.safetensors")
    one = out / f"replicated-{trainable}-{tied}-1"
    if one.is_dir() and accelerator.num_processes > 1:
        again = ready(how, trainable, tied)
        assert load_checkpoint(one, again.params, again.optimizer) == {"step": 3}
        updates(accelerator, again, rows, WINDOWS[3:])
        save_checkpoint(here, {"step": 6}, again.params, again.optimizer, keep=3, main=first)
    accelerator.wait_for_everyone()


if __name__ == "__main__":
    shared = Accelerator(cpu=True)
    for name in sys.argv[3:]:
        for part, ties in (("all", True), ("layers", False)):
            main(shared, Path(sys.argv[1]), Path(sys.argv[2]), name, part, ties)  # type: ignore[arg-type]
    torch.distributed.destroy_process_group()
