"""A 4-bit copy of a drafter, NF4 or W4A16: checked before any work, saved, reloaded, compared, weighed.

Only the linear layers inside the blocks are quantized; embedding and head stay in 16 or 32 bit, because vLLM reads
them so and because a drafter's argmax is most sensitive there.
"""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import psutil
import torch

from distill import nf4, w4a16
from distill.drift import compare, random_texts, recorded_texts
from pairing.card import write_card
from pairing.engine import bitsandbytes_advice, engine
from pairing.engine_support import probe
from pairing.errors import InputError, PartFailedError
from pairing.files import new_folder, read_json, write_json
from pairing.four_bit import NF4_BLOCK, WAY_OUT, Stored, width_fault
from pairing.init import HEADER_DTYPES, copy_companions
from pairing.pair import read_pair
from pairing.source import empty_model, load_model
from pairing.weights import EMBEDDINGS, HEADS, TensorInfo, read_headers

PACKAGES = {"nf4": "bitsandbytes", "w4a16": "compressed_tensors"}  # what writes and reloads each format
SCORES = ("top1_before", "top1_after")  # against the target's own tokens: nothing to score in random ids


@dataclass(frozen=True)
class Choice:
    """What to make."""

    format: Literal["nf4", "w4a16"] = "nf4"
    compute_dtype: str | None = None  # nf4: the type of its products; None takes the drafter's own
    group_size: int = 64  # w4a16: values that share one scale
    serve_on: Literal["here", "cpu", "cuda"] = "here"  # whose kernels must take it; here: those of the installed vLLM

    def facts(self, stored: torch.dtype) -> dict[str, Any]:
        """What of it is true of the copy."""
        if self.format == "w4a16":
            return {"format": "w4a16", "group_size": self.group_size, "symmetric": True}
        dtype = self.compute_dtype or str(stored).removeprefix("torch.")
        return {"format": "nf4", "double_quantization": True, "block": NF4_BLOCK, "compute_dtype": dtype}


def plan_quantize(folder: Path, choice: Choice = Choice()) -> dict[str, Any]:
    """What `quantize_drafter` would do, from headers and config alone: {"format" and what belongs to it, "linear_layers",
    "kept_dtype", "bytes_before", "bytes_after" (estimated), "linear_bytes_before", "linear_bytes_after", "memory_bytes",
    "notes"}; "notes" are what the installed vLLM needs for it.

    Raises InputError for everything that would fail later (fault D19): no drafter, quantized already, a package that is
    missing, layers or widths that 4-bit kernels do not take, each with the 16-bit way out.
    """
    training = read_pair(folder)["training"] or {}
    config, tensors = read_json(folder / "config.json"), read_headers(folder)
    if "quantization_config" in config:
        method = config["quantization_config"].get("quant_method", "an unknown method")
        raise InputError(f"{folder}: quantized already ({method}): give the 16- or 32-bit drafter that it came from")
    if importlib.util.find_spec(PACKAGES[choice.format]) is None:
        package = PACKAGES[choice.format].replace("_", "-")
        raise InputError(f"format={choice.format} needs {package}: `pip install 'draftsmith[quant]'`, {WAY_OUT}")
    for name, info in tensors.items():
        if info.dtype not in HEADER_DTYPES:
            raise InputError(f"{folder}: {name} is {info.dtype}: 4-bit copies are made from 16- or 32-bit weights")
    linear = linear_layers(folder, tensors)
    notes = _require_kernels(folder, linear, choice) + _other_than_trained(training, choice)
    stored = HEADER_DTYPES[next(iter(linear.values())).dtype]
    if choice.format == "nf4":
        linear_after = sum(nf4.stored_bytes(info.shape) for info in linear.values())
    else:
        linear_after = sum(
            w4a16.stored_bytes(info.shape, choice.group_size, stored.itemsize) for info in linear.values()
        )
    before, linear_before = _bytes(tensors), _bytes(linear)
    return {
        **choice.facts(stored),
        "kept_dtype": str(stored).removeprefix("torch."),
        "linear_layers": len(linear),
        "bytes_before": before,
        "bytes_after": before - linear_before + linear_after,
        "linear_bytes_before": linear_before,
        "linear_bytes_after": linear_after,
        "memory_bytes": 2 * before + linear_after,  # the drafter, the copy as it is computed, the copy as it is stored
        "notes": notes,
    }


def _other_than_trained(training: dict[str, Any], choice: Choice) -> list[str]:
    """A drafter that learnt with one format's rounding in its forward pass (`distill.fake_quantize`) is good in that one."""
    trained = training.get("quantizer"), training.get("quantizer_group_size", choice.group_size)
    if trained[0] is None or trained == (choice.format, choice.group_size):
        return []
    group = f" group_size={trained[1]}" if trained[0] == "w4a16" else ""
    return [f"this drafter was trained for another copy than this one: format={trained[0]}{group}, without calibration"]


def linear_layers(folder: Path, tensors: dict[str, TensorInfo]) -> dict[str, TensorInfo]:
    """The weights that get quantized: of every linear layer but the head.

    Raises InputError where there are none, and for a matrix that is no linear layer, embedding or head (experts in one
    tensor, layers stored transposed): it would stay as it is without a word.
    """
    modules = {f"{name}.weight": module for name, module in empty_model(folder).named_modules()}
    linear = {}
    for name, info in tensors.items():
        module = modules.get(name)
        if len(info.shape) < 2 or isinstance(module, torch.nn.Embedding) or name.endswith((*EMBEDDINGS, *HEADS)):
            continue
        if not isinstance(module, torch.nn.Linear):
            raise InputError(f"{folder}: {name} is no linear layer's, so no 4-bit format holds it; {WAY_OUT[3:]}")
        linear[name] = info
    if not linear:
        raise InputError(f"{folder}: no linear layers found in its weights, so there is nothing to quantize")
    return linear


def _require_kernels(folder: Path, linear: dict[str, TensorInfo], choice: Choice) -> list[str]:
    """Raises InputError where no kernel of the engine that is meant takes a layer; gives what else the engine needs."""
    installed = engine()
    backend: str | None = choice.serve_on
    if choice.serve_on == "here":
        backend = installed.backend if installed else None
    how = Stored(choice.format, choice.group_size)
    for name, info in linear.items():
        if fault := width_fault(how, info.shape, backend):
            elsewhere = width_fault(how, info.shape, "cuda") is None and backend == "cpu"
            fix = "give serve_on=cuda where you will serve it there" if elsewhere else "choose a width that is one"
            raise InputError(f"{folder}: {name} {fault}: {fix}, {WAY_OUT}")
    if installed is None or installed.backend != backend:
        return []
    if choice.format == "nf4":
        advice = bitsandbytes_advice(installed.version, installed.bitsandbytes_plugin)
        return [advice] if advice else []
    found = probe(installed.backend)
    if found is not None and not found.w4a16:
        build = f"vLLM {installed.version} ({installed.backend})"
        raise InputError(f"{build} has no W4A16 kernel: take format=nf4 or update it, {WAY_OUT}")
    return []


def quantize_drafter(
    folder: Path,
    out: Path,
    choice: Choice = Choice(),
    answers: Path | None = None,
    rows: int = 32,
    calibration: Path | None = None,
    calibration_rows: int = 64,
    before_done: Callable[[dict[str, Any]], None] = lambda _: None,
) -> dict[str, Any]:
    """Writes the 4-bit copy of the drafter in `folder` to `out` (atomically) and returns its figures.

    The copy is loaded again from disk and must give the logits of the one in memory, bit for bit, under the tensor
    names that the format says; else PartFailedError, and nothing is written. The drift from the unquantized drafter
    is measured on the first `rows` recorded answers in the folder `answers` (and the agreement with the target's
    tokens there, before and after), or on fixed random ids where none is given. W4A16 is calibrated on the first
    `calibration_rows` of the folder `calibration`, or rounded to nearest. `before_done` is called with the figures while
    `out` does not exist yet. Raises InputError as `plan_quantize` does, where there is no room, and for broken weights.
    """
    plan = plan_quantize(folder, choice)
    # read before the work, so that a wrong folder costs nothing
    texts, on = recorded_texts(answers, rows) if answers else random_texts(folder)
    calibrated, calibrated_on = recorded_texts(calibration, calibration_rows) if calibration else ([], None)
    if calibrated and choice.format == "nf4":
        raise InputError("calibration is for format=w4a16: NF4's codes are fixed")
    _require_room(out, plan)
    headers = read_headers(folder)
    linear = linear_layers(folder, headers)
    stored = HEADER_DTYPES[next(iter(linear.values())).dtype]
    names_of: Callable[[str], list[str]]
    write: Callable[[Path, Path, dict[str, TensorInfo], torch.dtype], Any]
    if choice.format == "nf4":
        names_of, write = nf4.names_of, partial(nf4.write, compute_dtype=plan["compute_dtype"])
    else:
        names_of, write = w4a16.names_of, partial(w4a16.write, group_size=choice.group_size, texts=calibrated)
    with new_folder(out) as temp:
        before = load_model(folder, dtype=stored).eval()
        _require_finite(before, folder)
        memory = write(folder, temp, linear, stored)
        after = read_headers(temp)
        parts = [part for name in linear for part in names_of(name)]
        _require_names({*parts, *(headers.keys() - linear.keys())}, after)
        drift = compare(before, memory, texts)
        reload = compare(memory, load_model(temp, dtype=stored).eval(), texts[:4])["max_abs"]
        if reload != 0:
            raise PartFailedError(f"the saved 4-bit drafter differs from the one in memory by {reload:g}; not written")
        result = {
            "drafter": str(folder),
            "out": str(out),
            **choice.facts(stored),
            "calibrated_on": calibrated_on,
            "kept_dtype": plan["kept_dtype"],
            "linear_layers": plan["linear_layers"],
            **_sizes(plan["bytes_before"], _bytes(after), ""),
            **_sizes(plan["linear_bytes_before"], _bytes({name: after[name] for name in parts}), "linear_"),
            "reload_max_difference": reload,
            "logit_drift": {"on": on, **{k: v for k, v in drift.items() if answers or k not in SCORES}},
            "notes": plan["notes"],
        }
        copy_companions(folder, temp)
        made = {"step": "quantize", "from": str(folder), **choice.facts(stored), "calibrated_on": calibrated_on}
        pair = read_pair(folder)
        # what was measured with the drafter was not measured with this copy of it
        pair |= {
            "made": [*pair["made"], made],
            "quantization": result,
            "measurements": [],
            "serve": None,
            "formats": None,
        }
        write_json(temp / "pair.json", pair)
        write_card(temp, name=out.name)
        before_done(result)
    return result


def _require_finite(model: Any, folder: Path) -> None:
    """A shard can be whole by its header and hold rubbish."""
    for name, weight in model.named_parameters():
        if not weight.isfinite().all():
            raise InputError(f"{folder}: {name} holds values that are no numbers: fetch or train the drafter again")


def _require_names(expected: set[str], after: dict[str, TensorInfo]) -> None:
    if wrong := sorted(expected ^ set(after)):
        raise PartFailedError(f"the saved 4-bit drafter has other tensors than expected, first {wrong[0]}; not written")


def _require_room(out: Path, plan: dict[str, Any]) -> None:
    parent = next(p for p in (out.absolute(), *out.absolute().parents) if p.exists())
    needed, free = plan["bytes_after"] * 1.1, shutil.disk_usage(parent).free
    if free < needed:
        raise InputError(f"{out}: about {needed / 2**20:.0f} MiB are needed and {free / 2**20:.0f} MiB are free there")
    needed, free = plan["memory_bytes"] * 1.1, psutil.virtual_memory().available
    if free < needed:
        raise InputError(
            f"quantizing takes about {needed / 2**20:.0f} MiB of memory and {free / 2**20:.0f} MiB are free: "
            "quantize it on a larger machine"
        )


def _bytes(tensors: dict[str, TensorInfo]) -> int:
    return sum(t.bytes for t in tensors.values())


def _sizes(before: int, after: int, prefix: str) -> dict[str, float]:
    return {
        f"{prefix}bytes_before": before,
        f"{prefix}bytes_after": after,
        f"{prefix}mib_before": round(before / 2**20, 2),
        f"{prefix}mib_after": round(after / 2**20, 2),
    }
