"""Every shipped accelerate config: read by accelerate itself, by way of the very command that its first line shows."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import DistributedType
from accelerate.utils.launch import prepare_multi_gpu_env

from tests.conftest import ROOT

FOLDER = ROOT / "recipes" / "configs" / "accelerate"
# distributed type, machines, processes, mixed precision
EXPECTED: dict[str, tuple[str, int, int, str]] = {
    "one_process": ("NO", 1, 1, "no"),
    "two_cpu_processes": ("MULTI_CPU", 1, 2, "no"),
    "two_gpus": ("MULTI_GPU", 1, 2, "bf16"),
    "two_nodes": ("MULTI_GPU", 2, 16, "bf16"),
    "fsdp2": ("FSDP", 1, 4, "bf16"),
    "deepspeed_zero2": ("DEEPSPEED", 1, 4, "bf16"),
    "deepspeed_zero3": ("DEEPSPEED", 1, 4, "bf16"),
}


def command(file: Path) -> list[str]:
    return shlex.split(file.read_text().splitlines()[0].removeprefix("# ").replace("…", "config.yaml"))


def test_no_config_is_left_out() -> None:
    assert {f.stem for f in FOLDER.iterdir()} == set(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_accelerate_reads_the_file_as_it_is_meant(name: str) -> None:
    config = load_config_from_file(str(FOLDER / f"{name}.yaml"))
    kind, machines, processes, precision = EXPECTED[name]
    assert config.distributed_type == DistributedType(kind)
    assert (config.num_machines, config.num_processes, config.mixed_precision) == (machines, processes, precision)
    assert config.use_cpu == (name == "two_cpu_processes")
    if name == "fsdp2":
        assert config.fsdp_config["fsdp_version"] == 2
    if kind == "DEEPSPEED":
        assert config.deepspeed_config["zero_stage"] == int(name[-1])


@pytest.mark.parametrize("name", [n for n in EXPECTED if n != "two_cpu_processes"])
def test_the_command_in_its_header_starts_what_it_says(name: str) -> None:
    """Parsed and checked by `accelerate launch` itself, up to the environment that it gives the script."""
    words = command(FOLDER / f"{name}.yaml")
    assert words[:2] == ["accelerate", "launch"]
    args = launch_command_parser().parse_args(words[2:])
    assert args.config_file == f"recipes/configs/accelerate/{name}.yaml"
    args.config_file = str(ROOT / args.config_file)
    assert args.training_script == "recipes/distill.py"
    args, _, _ = _validate_launch_command(args)
    kind, machines, processes, precision = EXPECTED[name]
    assert (args.num_machines, args.num_processes, args.mixed_precision) == (machines, processes, precision)
    flags: dict[str, Any] = {"FSDP": args.use_fsdp, "DEEPSPEED": args.use_deepspeed, "MULTI_GPU": args.multi_gpu}
    assert [k for k, on in flags.items() if on] == ([kind] if kind != "NO" else [])
    if kind == "FSDP":
        environment = prepare_multi_gpu_env(args)
        assert environment["ACCELERATE_USE_FSDP"] == "true"
        assert environment["FSDP_VERSION"] == "2"
    if kind == "DEEPSPEED":
        assert args.zero_stage == int(name[-1])
        assert int(args.gradient_accumulation_steps) == 1
    if name == "two_nodes":
        assert (args.machine_rank, args.main_process_ip, args.main_process_port) == (0, "HOST", 29500)


def test_several_cpu_processes_are_for_torchrun() -> None:
    words = command(FOLDER / "two_cpu_processes.yaml")
    assert words[:4] == ["torchrun", "--nproc_per_node", "2", "recipes/distill.py"]
