"""Writes a trained drafter as one ordinary folder: the draft's, with the trained weights and what training said of itself."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from distill.adapters import check_reload
from pairing.card import write_card
from pairing.errors import PartFailedError
from pairing.files import new_folder, read_json, write_json
from pairing.mask_token import with_mask
from pairing.pair import read_pair, update_pair
from pairing.rows import mean_row, settle_padding
from pairing.source import load_tokenizer


def write_drafter(
    goal: Path,
    draft: Path,
    model: Any,
    evaluation: Mapping[str, Any],
    how: Mapping[str, Any],
    data: Path,
    parallel: Mapping[str, Any] | None = None,
    learnt: Collection[int] = (),
) -> None:
    """`goal`: `draft`'s folder with `model`'s weights in the draft's own dtype; all else but pair.json and card is copied.

    `how`: the settings that the card names, beside `evaluation`'s summary of the training. `parallel`: what pair.json says of
    parallel drafting, where that was trained; its "mask_id" goes into config.json too. `learnt`: ids whose rows learnt from
    answers that hold them, which are marked as untrained no longer. Changes `model`'s type and padding rows. Raises
    PartFailedError where weights are no numbers, or the folder does not load as it was written (fault D16).
    """
    broken = [name for name, p in model.named_parameters() if not bool(torch.isfinite(p).all())]
    if broken:  # no checkpoint is written of broken weights, so these are some that were not trained
        raise PartFailedError(
            f"{broken[0]} holds NaN or infinite numbers, as it did in {draft}: no drafter is written of it; make the draft "
            "again: the checkpoints are as they were"
        )
    head_VH = model.to(getattr(torch, stored_dtype(draft))).get_output_embeddings().weight
    with torch.no_grad():  # training leaves padding rows as they were, whatever they were: none may ever be the argmax
        head_VH.copy_(settle_padding(head_VH, set(load_tokenizer(draft).get_vocab().values())))
    step = {"step": "distill", "data": str(data), **evaluation["training"], "verdict": evaluation["verdict"]}
    with new_folder(goal) as temp:
        model.save_pretrained(temp)
        for source in draft.iterdir():
            if source.is_file() and not source.name.endswith((".safetensors", ".safetensors.index.json")):
                shutil.copyfile(source, temp / source.name)
            elif source.is_dir():
                shutil.copytree(source, temp / source.name)
        training = {**evaluation["training"], **how}
        for name, result in evaluation["sets"].items():
            training |= {f"top1 on {name}": result["after"]["top1"], f"tau K=4 on {name}": result["after"]["tau"]["4"]}
            if rounds := result.get("parallel"):
                K = str(rounds["num_speculative_tokens"])
                training |= {f"tau K={K} in one pass on {name}": rounds["after"]["tau"][K]}
        if parallel is not None:
            write_json(temp / "config.json", with_mask(read_json(temp / "config.json"), parallel["mask_id"]))
        # what was measured with the draft was not measured with these weights
        stale: dict[str, Any] = {"measurements": [], "serve": None, "formats": None}
        pair = read_pair(temp)
        if marked := pair.get("needs_training"):
            stale["needs_training"] = [i for i in marked if i not in learnt]
        update_pair(temp, made=[*pair["made"], step], training=training, parallel_drafting=parallel, **stale)
        write_card(temp, name="drafter")
        check_reload(temp, model)


def settle_mask(model: Any, draft: Path, mask_id: int | None) -> Any:
    """`model`, which was loaded from `draft`, with the mask's row as `write_drafter` leaves it: a padding row of a tied head is
    the mean of the real ones, in the draft's type. It is also what the model reads at a mask, so training and evaluation must see
    the row that is served. Call it before anything learns and before anything is scored."""
    embedding_VH, real = model.get_input_embeddings().weight, set(load_tokenizer(draft).get_vocab().values())
    if mask_id is not None and mask_id not in real and model.get_output_embeddings().weight is embedding_VH:
        with torch.no_grad():
            embedding_VH[mask_id] = mean_row(embedding_VH, real).to(getattr(torch, stored_dtype(draft)))
    return model


def stored_dtype(folder: Path) -> str:
    """The type that a folder's weights are stored in, as its config says; the second key is older transformers'."""
    config = read_json(folder / "config.json")
    return str(config.get("dtype") or config.get("torch_dtype") or "float32")
