"""A 4-bit (NF4) copy of a drafter by bitsandbytes: checked before any work, saved, reloaded, compared, weighed.

Only the linear layers inside the blocks are quantized; embedding and head stay in 16 or 32 bit, because vLLM reads
them so and because a drafter's argmax is most sensitive there. Shapes: T tokens of a text, V vocabulary.
"""

from __future__ import annotations

import importlib.util
import logging
import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from distill.answers import open_answers, spans_of
from pairing.alignment import tokens_by_id
from pairing.card import write_card
from pairing.errors import InputError, PartFailedError
from pairing.files import new_folder, read_json, write_json
from pairing.init import DTYPES, HEADER_DTYPES, copy_companions
from pairing.pair import read_pair
from pairing.progress import bar
from pairing.source import load_model, load_tokenizer
from pairing.weights import EMBEDDINGS, HEADS, TensorInfo, read_headers

BLOCK = 64  # values that share one scale; NF4 as in Dettmers et al. 2023 (arXiv 2305.14314), section 3
SCALES = 256  # scales that share one of the second level (double quantization)
PACKED = "quant_state.bitsandbytes__nf4"
STATE = ("absmax", "quant_map", "nested_absmax", "nested_quant_map", PACKED)
SCORES = ("top1_before", "top1_after")  # against the target's own tokens: nothing to score in random ids
WAY_OUT = "or serve the drafter as it is, in 16 bit (`--dtype bfloat16`)"


@dataclass(frozen=True)
class Text:
    """Token ids, and the first position whose logits count."""

    ids: list[int]
    start: int


def plan_quantize(folder: Path, compute_dtype: str | None = None) -> dict[str, Any]:
    """What `quantize_drafter` would do, from headers and config alone: {"linear_layers", "compute_dtype",
    "bytes_before", "bytes_after" (estimated), "linear_bytes_before", "linear_bytes_after"}.

    Raises InputError for everything that would fail later (fault D19): no drafter, quantized already, bitsandbytes
    missing, widths that 4-bit kernels do not take, each with the 16-bit way out.
    """
    read_pair(folder)
    config, tensors = read_json(folder / "config.json"), read_headers(folder)
    if "quantization_config" in config:
        method = config["quantization_config"].get("quant_method", "an unknown method")
        raise InputError(f"{folder}: quantized already ({method}): give the 16- or 32-bit drafter that it came from")
    if importlib.util.find_spec("bitsandbytes") is None:
        raise InputError(f"quantize needs bitsandbytes: `pip install 'draftsmith[quant]'`, {WAY_OUT}")
    linear = linear_layers(tensors)
    if not linear:
        raise InputError(f"{folder}: no linear layers found in its weights, so there is nothing to quantize")
    for name, info in tensors.items():
        if info.dtype not in HEADER_DTYPES:
            raise InputError(f"{folder}: {name} is {info.dtype}: NF4 is made from 16- or 32-bit weights")
    for name, info in linear.items():
        if info.shape[1] % BLOCK:
            raise InputError(
                f"{folder}: {name} is {info.shape[1]} wide, no multiple of {BLOCK}: its 4-bit blocks would cross rows, "
                f"which no fast kernel takes; choose a width that is one, {WAY_OUT}"
            )
    stored = HEADER_DTYPES[next(iter(linear.values())).dtype]
    before, linear_before = _bytes(tensors), _bytes(linear)
    values = sum(math.prod(info.shape) for info in linear.values())
    scales = values // BLOCK
    linear_after = values // 2 + scales + 4 * (scales // SCALES + 1) + 1300 * len(linear)  # code books, state
    return {
        "linear_layers": len(linear),
        "compute_dtype": compute_dtype or str(stored).removeprefix("torch."),
        "bytes_before": before,
        "bytes_after": before - linear_before + linear_after,
        "linear_bytes_before": linear_before,
        "linear_bytes_after": linear_after,
    }


def linear_layers(tensors: dict[str, TensorInfo]) -> dict[str, TensorInfo]:
    """The weights that get quantized: every matrix but embedding and head."""
    return {n: t for n, t in tensors.items() if len(t.shape) == 2 and not n.endswith((*EMBEDDINGS, *HEADS))}


def quantize_drafter(
    folder: Path,
    out: Path,
    compute_dtype: str | None = None,
    answers: Path | None = None,
    rows: int = 32,
    before_done: Callable[[dict[str, Any]], None] = lambda _: None,
) -> dict[str, Any]:
    """Writes the NF4 copy of the drafter in `folder` to `out` (atomically) and returns its figures.

    The copy is loaded again from disk and must give the logits of the one in memory, bit for bit, under the same
    tensor names as the drafter; else PartFailedError, and nothing is written. The drift from the unquantized drafter
    is measured on the first `rows` recorded answers in the folder `answers` (and the agreement with the target's
    tokens there, before and after), or on fixed random ids where none is given. `before_done` is called with the
    figures while `out` does not exist yet. Raises InputError as `plan_quantize` does, and where there is no room.
    """
    plan = plan_quantize(folder, compute_dtype)
    # read before the work, so that a wrong folder costs nothing
    texts, on = recorded_texts(answers, rows) if answers else random_texts(folder)
    _require_room(out, plan["bytes_after"])
    from transformers import BitsAndBytesConfig

    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it warns of optional kernels that it does without
    stored = HEADER_DTYPES[next(iter(linear_layers(read_headers(folder)).values())).dtype]
    nf4 = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=DTYPES[plan["compute_dtype"]],
        llm_int8_skip_modules=["lm_head"],
    )
    with new_folder(out) as temp:
        memory = load_model(folder, dtype=stored, quantization_config=nf4).eval()
        memory.save_pretrained(temp)  # before any forward: on some CPUs that repacks the weights in place
        _require_names(read_headers(folder), read_headers(temp))
        drift = compare(load_model(folder, dtype=stored).eval(), memory, texts)
        reload = compare(memory, load_model(temp, dtype=stored).eval(), texts[:4])["max_abs"]
        if reload != 0:
            raise PartFailedError(f"the saved 4-bit drafter differs from the one in memory by {reload:g}; not written")
        after = read_headers(temp)
        linear = {n: t for n, t in after.items() if _packed_of(n, after) in linear_layers(read_headers(folder))}
        result = {
            "format": "nf4",
            "drafter": str(folder),
            "out": str(out),
            "double_quantization": True,
            "block": BLOCK,
            "compute_dtype": plan["compute_dtype"],
            "kept_dtype": str(stored).removeprefix("torch."),
            "linear_layers": plan["linear_layers"],
            **_sizes(plan["bytes_before"], _bytes(after), ""),
            **_sizes(plan["linear_bytes_before"], _bytes(linear), "linear_"),
            "reload_max_difference": reload,
            "logit_drift": {"on": on, **{k: v for k, v in drift.items() if answers or k not in SCORES}},
        }
        copy_companions(folder, temp)
        made = {"step": "quantize", "from": str(folder), "format": "nf4", "compute_dtype": plan["compute_dtype"]}
        pair = read_pair(folder)
        # what was measured with the drafter was not measured with this copy of it
        pair |= {"made": [*pair["made"], made], "quantization": result, "measurements": [], "serve": None}
        write_json(temp / "pair.json", pair)
        write_card(temp, name=out.name)
        before_done(result)
    return result


def recorded_texts(folder: Path, rows: int) -> tuple[list[Text], str]:
    """The first rows of an answers folder: a text per answer, from the conversation's beginning to the answer's end.
    Positions that predict the answer count."""
    data = open_answers(folder).data
    texts = []
    for row in data.select(range(min(rows, len(data)))):
        texts += [Text(row["input_ids"][:end], start) for start, end in spans_of(row["spans"])]
    if not texts:
        raise InputError(f"{folder}: it holds no answers to compare on")
    return texts, f"{len(texts)} answers of {folder}"


def random_texts(folder: Path, count: int = 8, length: int = 32) -> tuple[list[Text], str]:
    """Fixed random ids among those in use. Far from real text, so a drift on them is a bound of sorts, no forecast."""
    ids = torch.tensor(sorted(tokens_by_id(load_tokenizer(folder))))
    drawn = torch.randint(len(ids), (count, length), generator=torch.Generator().manual_seed(0))
    return [Text(row.tolist(), 1) for row in ids[drawn]], f"{count} texts of {length} random ids"


def compare(a: Any, b: Any, texts: list[Text]) -> dict[str, Any]:
    """How far the logits of model `b` are from those of `a`, over the positions that count.

    Gives "positions", "max_abs" and "mean_abs" (over positions and vocabulary), "top1_agreement" (share of positions
    with the same argmax), "top1_before" and "top1_after" (share where a's and b's argmax is the text's next token).
    """
    positions, largest, total, same, right_a, right_b, width = 0, 0.0, 0.0, 0, 0, 0, 1
    with bar("comparing logits", total=len(texts)) as advance, torch.no_grad():
        for text in texts:
            # the last logits predict what comes after the text, so one more is kept than there are tokens to predict
            keep = len(text.ids) - text.start + 1
            a_TV, b_TV = (
                model(torch.tensor([text.ids], device=model.device), logits_to_keep=keep).logits[0, :-1].float().cpu()
                for model in (a, b)
            )
            gap_TV = (a_TV - b_TV).abs()
            next_T = torch.tensor(text.ids[text.start :])
            largest, total = max(largest, float(gap_TV.max())), total + float(gap_TV.sum(dtype=torch.float64))
            positions, width = positions + len(next_T), a_TV.shape[1]
            top_a_T, top_b_T = a_TV.argmax(-1), b_TV.argmax(-1)
            same += int((top_a_T == top_b_T).sum())
            right_a, right_b = right_a + int((top_a_T == next_T).sum()), right_b + int((top_b_T == next_T).sum())
            advance(1, "")
    return {
        "positions": positions,
        "max_abs": largest,
        "mean_abs": total / (positions * width),
        "top1_agreement": same / positions,
        "top1_before": right_a / positions,
        "top1_after": right_b / positions,
    }


def _require_names(before: dict[str, TensorInfo], after: dict[str, TensorInfo]) -> None:
    """The same names as the drafter's, each linear layer packed with its whole state, nothing else packed."""
    linear = linear_layers(before)
    expected = {*before, *(f"{name}.{part}" for name in linear for part in STATE)}
    wrong = sorted(expected ^ set(after)) or [n for n in before if (after[n].dtype == "U8") != (n in linear)]
    if wrong:
        raise PartFailedError(f"the saved 4-bit drafter has other tensors than expected, first {wrong[0]}; not written")


def _packed_of(name: str, tensors: dict[str, TensorInfo]) -> str:
    """The weight that a tensor of a quantized file belongs to: itself, or the one whose state it is."""
    owner = next((name[: -len(part) - 1] for part in STATE if name.endswith(f".{part}")), name)
    return owner if owner in tensors else name


def _require_room(out: Path, needed: int) -> None:
    parent = next(p for p in (out.absolute(), *out.absolute().parents) if p.exists())
    free = shutil.disk_usage(parent).free
    if free < needed * 1.1:
        raise InputError(f"{out}: about {needed / 2**20:.0f} MiB are needed and {free / 2**20:.0f} MiB are free there")


def _bytes(tensors: dict[str, TensorInfo]) -> int:
    return sum(t.bytes for t in tensors.values())


def _sizes(before: int, after: int, prefix: str) -> dict[str, float]:
    return {
        f"{prefix}bytes_before": before,
        f"{prefix}bytes_after": after,
        f"{prefix}mib_before": round(before / 2**20, 2),
        f"{prefix}mib_after": round(after / 2**20, 2),
    }
