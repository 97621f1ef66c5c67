"""Run by torchrun in test_distill: the gradients of a few windows on two ranks, of every mode, saved and compared there.

torchrun --nproc_per_node 2 -m tests.integration.two_ranks PLACE
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from safetensors.torch import save_file

from tests.integration.test_distill import MODES, WINDOWS, gradients

if __name__ == "__main__":
    accelerator = Accelerator(cpu=True)
    place, found = Path(sys.argv[1]), {}
    for mode in MODES:
        for i, window in enumerate(WINDOWS):
            grads, stats = gradients(accelerator, place, np.array(window), batch_size=1, mode=mode)
            found |= {f"{mode} {i} {name}": g for name, g in grads.items()} | {f"{mode} {i} stats": stats}
    save_file(found, place / f"rank{accelerator.process_index}.safetensors")
    assert accelerator.num_processes == 2, accelerator.num_processes
    torch.distributed.destroy_process_group()
