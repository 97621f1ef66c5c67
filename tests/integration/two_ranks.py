"""Run by torchrun in test_distill: the gradients of a few windows on two ranks, saved and compared there.

torchrun --nproc_per_node 2 tests/integration/two_ranks.py ANSWERS DRAFT OUT
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from safetensors.torch import save_file

from tests.integration.test_distill import WINDOWS, gradients

if __name__ == "__main__":
    accelerator = Accelerator(cpu=True)
    answers, draft, out = map(Path, sys.argv[1:])
    found = {}
    for i, window in enumerate(WINDOWS):
        grads, stats = gradients(accelerator, answers, draft, np.array(window), batch_size=1)
        found |= {f"{i} {name}": g for name, g in grads.items()} | {f"{i} stats": stats}
    save_file(found, out / f"rank{accelerator.process_index}.safetensors")
    assert accelerator.num_processes == 2, accelerator.num_processes
    torch.distributed.destroy_process_group()
