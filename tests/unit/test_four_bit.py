"""Which 4-bit widths, groups and types an engine takes: our rules against the installed vLLM's own answers."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from distill.w4a16 import describe
from pairing.engine import Engine
from pairing.finding import Finding
from pairing.four_bit import GROUPS, Stored, four_bit_findings, four_bit_shards, stored, width_fault
from pairing.weights import TensorInfo

CPU, CUDA = Engine("0.32.0", "cpu", "0.0.3"), Engine("0.32.0", "cuda", "0.0.3")


def test_the_cpu_rule_is_the_installed_kernels() -> None:
    """What we refuse is refused by vLLM, and what we let pass is taken."""
    from vllm.distributed.utils import verify_group_size_divides_partition
    from vllm.model_executor.kernels.linear import MPLinearLayerConfig
    from vllm.model_executor.kernels.linear.mixed_precision.cpu import CPUWNA16LinearKernel
    from vllm.scalar_type import scalar_types

    def taken(outputs: int, inputs: int, group: int) -> bool:
        try:
            verify_group_size_divides_partition(inputs, group)
        except ValueError:
            return False
        shape = (inputs, outputs)
        config = MPLinearLayerConfig(shape, shape, scalar_types.uint4b8, torch.bfloat16, group, False)
        return bool(CPUWNA16LinearKernel.can_implement(config)[0])

    for outputs, inputs, group in product((16, 32, 48, 576, 896), (48, 64, 96, 576, 896, 1024), GROUPS):
        ours = width_fault(Stored("w4a16", group), (outputs, inputs), "cpu")
        assert (ours is None) == taken(outputs, inputs, group), (outputs, inputs, group, ours)


def test_the_cuda_rule_is_marlins() -> None:
    """Not run here: read in the installed source. Marlin fills up tiles itself, so groups are all that it asks for."""
    from vllm.model_executor.layers.quantization.utils.marlin_utils import MARLIN_SUPPORTED_GROUP_SIZES

    assert set(GROUPS) == set(MARLIN_SUPPORTED_GROUP_SIZES) - {-1}
    assert width_fault(Stored("w4a16", 64), (48, 576), "cuda") is None
    assert "no multiple of its group size" in (width_fault(Stored("w4a16", 128), (48, 576), "cuda") or "")
    assert "groups of 16" in (width_fault(Stored("w4a16", 16), (64, 64), "cuda") or "")


@pytest.mark.parametrize(
    ("quantization", "how"),
    [
        (None, None),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, Stored("nf4")),
        ({"quant_method": "bitsandbytes", "load_in_4bit": False, "load_in_8bit": True}, None),
        (describe(128), Stored("w4a16", 128)),
        ({"quant_method": "fp8"}, None),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {"num_bits": 8, "type": "int"}}}},
            None,
        ),
    ],
)
def test_how_a_model_is_stored(quantization: dict[str, Any] | None, how: Stored | None) -> None:
    assert stored({"quantization_config": quantization}) == how


def findings(
    config: dict[str, Any], engine: Engine, outputs: int = 64, dtype: str = "auto", w4a16: bool = True
) -> list[Finding]:
    tensors = {"model.layers.0.mlp.up_proj.weight_packed": TensorInfo("I32", (outputs, 8), Path("w"), outputs * 32)}
    return four_bit_findings("drafter", config, tensors, engine, w4a16, dtype)


def test_what_keeps_a_4_bit_model_from_starting() -> None:
    """D18, D19: each before a start, with what to do."""
    nf4, w4a16 = ({"quantization_config": {"quant_method": "bitsandbytes"}}, {"quantization_config": describe(64)})
    assert (
        findings({}, CPU) == findings(nf4, CPU) == findings(w4a16, CPU, dtype="float32") == findings(w4a16, CUDA) == []
    )
    (one,) = findings(nf4, Engine("0.32.0", "cpu", None))
    assert (one.level, one.stops) == ("blocks", ("vllm",))
    assert "pip install --no-deps vllm-bnb-plugin" in one.fix
    (one,) = findings(nf4, Engine("0.27.0", "cuda", "0.0.3"))
    assert "pip uninstall vllm-bnb-plugin" in one.fix
    (one,) = findings(w4a16, CPU, w4a16=False)
    assert "has no kernel" in one.what
    (one,) = findings(w4a16, CUDA, dtype="float32")
    assert "--dtype bfloat16" in one.fix
    (one,) = findings(w4a16, CPU, outputs=48)
    assert "layers.0.mlp.up_proj has 48 outputs" in one.what
    assert findings(w4a16, CUDA, outputs=48) == []


@pytest.mark.parametrize(("devices", "group", "odd"), [(3, 64, None), (9, 64, "1536"), (3, 128, "576"), (2, 64, "576")])
def test_groups_over_devices(devices: int, group: int, odd: str | None) -> None:
    """vLLM splits two kinds of layers by their inputs, and each part must be whole groups: 576/3 = 192 and 1536/3 = 512."""
    config = {"hidden_size": 576, "num_attention_heads": 9, "intermediate_size": 1536}
    found = four_bit_shards("drafter", config | {"quantization_config": describe(group)}, devices)
    assert four_bit_shards("drafter", config, devices) == []
    assert [odd in f.what for f in found if odd] == ([True] if odd else [])
    assert bool(found) is bool(odd)
