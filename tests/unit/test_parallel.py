"""Which kind of weights a launch means, and how a window is shared out; the kinds themselves run in integration tests."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from accelerate.utils import DistributedType

from distill.parallel import equal_graphs, kind_of, passes
from pairing.errors import InputError


def launched(name: str, version: int = 2) -> Any:
    """Stands in for an Accelerator: FSDP and DeepSpeed ones are made on GPUs only."""
    return SimpleNamespace(
        distributed_type=DistributedType(name), state=SimpleNamespace(fsdp_plugin=SimpleNamespace(fsdp_version=version))
    )


def test_each_launch_has_its_kind_and_others_are_refused() -> None:
    for name in ("NO", "MULTI_CPU", "MULTI_GPU"):
        assert kind_of(launched(name)) == "replicated"
    assert kind_of(launched("FSDP")) == "fsdp2"
    assert kind_of(launched("DEEPSPEED")) == "deepspeed"
    for bad, message in ((launched("FSDP", 1), "FSDP version 1:"), (launched("MEGATRON_LM"), "set to MEGATRON_LM:")):
        with pytest.raises(InputError, match=message):
            kind_of(bad)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 8, 9, 16])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_row_counts_once_and_sharded_ranks_make_as_many_passes(size: int, ranks: int) -> None:
    window = np.arange(10, 10 + size)
    for kind in ("replicated", "fsdp2", "deepspeed"):
        shares = [passes(kind, window, 2, rank, ranks) for rank in range(ranks)]  # type: ignore[arg-type]
        counted = [int(row) for share in shares for rows, weight in share if weight for row in rows]
        assert sorted(counted) == window.tolist()
        assert all(len(rows) > 0 for share in shares for rows, _ in share)
        assert kind == "replicated" or len({len(share) for share in shares}) == 1
    assert not equal_graphs("fsdp2")
