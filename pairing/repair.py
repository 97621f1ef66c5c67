"""Mends a drafter that nearly fits: the target's rows, tokenizer, template and special ids, into a new folder.

Every row of an id that the drafter's tokenizer has stays bit by bit as it was. What is added cannot be drafted
(pairing/rows.py says why); real tokens that the drafter lacked are initialised, listed and marked as untrained.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from pairing.alignment import check_pair, summary
from pairing.card import write_card
from pairing.compare_tokens import tokens_by_id
from pairing.files import new_folder, write_json
from pairing.init import SPECIAL, copy_companions, with_vocabulary
from pairing.mask_token import mask_id_of
from pairing.pair import new_pair, read_pair
from pairing.rows import make_rows, row_sources, settle_padding
from pairing.side import Side, read_side
from pairing.source import ModelSource
from pairing.weights import EMBEDDINGS, rewrite, vocabulary_tensors


def plan_repair(target: ModelSource, drafter: ModelSource, quiet_padding: bool = False) -> dict[str, Any]:
    """What `repair` would do, from headers and tokenizers.

    {"needed", "blocks", "mends", "rows": [from, to], "tensors", "initialised": [{"id", "token", "how", "of"}],
    "sources"}. "blocks" are findings that no repair reaches; with any of them nothing is needed. "mends" says in words
    what changes. `quiet_padding`: the drafter's own rows that no token uses are settled too (they stay otherwise).
    """
    report = check_pair(target, drafter)
    blocks = [f["what"] for f in report["findings"] if f["level"] == "blocks"]
    mends = [f["what"] for f in report["findings"] if f["repair"]]
    t, d = read_side(target), read_side(drafter)
    blocks += _mask_blocks(t, d)
    tensors = vocabulary_tensors(d.tensors, d.name) if not blocks else {}
    rows = [min((info.shape[0] for info in tensors.values()), default=0), int(t.text.get("vocab_size") or 0)]
    ours, theirs = tokens_by_id(t.tokenizer), tokens_by_id(d.tokenizer)
    missing = sorted(i for i in ours if i not in theirs or i >= rows[0])
    sources = {}
    if missing and not blocks:
        every = row_sources(t.tokenizer, d.tokenizer, rows[0])
        sources = {i: every[i] for i in missing}
    if quiet_padding and not blocks and _unsettled(d, set(ours)):
        mends.append("rows of the drafter that no token uses could still be drafted")
    return {
        "needed": bool(mends) and not blocks,
        "blocks": blocks,
        "mends": mends,
        "rows": rows,
        "tensors": list(tensors),
        "initialised": [
            {"id": i, "token": ours[i], "how": row.how, "of": [theirs[j] for j in row.of]} for i, row in sources.items()
        ],
        "sources": sources,
    }


def repair(target: ModelSource, drafter: ModelSource, out: Path, quiet_padding: bool = False) -> dict[str, Any]:
    """Writes the mended drafter to `out` (atomically, never over another folder) and returns the plan's figures.

    Nothing is written where nothing is needed or something blocks. The new folder is checked against the target
    before it gets its name. Raises InputError where `out` holds something.
    """
    plan = plan_repair(target, drafter, quiet_padding)
    sources = plan.pop("sources")
    result = {"drafter": drafter.name, "target": target.name, "out": str(out), **plan}
    if not plan["needed"]:
        return result
    t, d = read_side(target), read_side(drafter)
    ours, theirs = set(tokens_by_id(t.tokenizer)), set(tokens_by_id(d.tokenizer))
    old, rows = plan["rows"]
    real = {i for i in ours & theirs if i < min(old, rows)}

    def mended(name: str, weight: torch.Tensor) -> torch.Tensor:
        made = make_rows(weight, sources, real, rows)
        kept = [i for i in range(min(old, rows)) if i not in sources]
        made[kept] = weight[kept]
        return settle_padding(made, _kept(name, ours, d)) if quiet_padding else made

    with new_folder(out) as temp:
        rewrite(drafter.path, temp, plan["tensors"], mended)
        config = with_vocabulary(d.config, t.text)
        write_json(temp / "config.json", config)
        copy_companions(target.path, temp)
        if not (temp / "generation_config.json").is_file():
            write_json(temp / "generation_config.json", {k: config[k] for k in SPECIAL if k in config})
        untrained = [row["id"] for row in plan["initialised"]]
        made = {"step": "repair", "of": drafter.name, "rows": plan["rows"], "mends": plan["mends"],
                "initialised": plan["initialised"]}  # fmt: skip
        before = read_pair(drafter.path) if (drafter.path / "pair.json").is_file() else {}
        pair = new_pair(target, made) | {k: before.get(k) for k in ("training", "quantization", "parallel_drafting")}
        pair["made"] = [*before.get("made", []), made]
        pair["needs_training"] = sorted({*before.get("needs_training", []), *untrained})
        write_json(temp / "pair.json", pair)
        report = check_pair(target, ModelSource(str(out), temp, None, None))
        assert report["aligned"], report["verdict"]
        write_json(temp / "pair.json", pair | {"alignment": summary(report)})
        write_card(temp, name=out.name)
    return result


def _mask_blocks(target: Side, drafter: Side) -> list[str]:
    """Why the drafter's mask id, where it has one, would be lost: its row is trained and no other will do."""
    mask, rows = mask_id_of(drafter.config), int(target.text.get("vocab_size") or 0)
    ours, theirs = tokens_by_id(target.tokenizer), tokens_by_id(drafter.tokenizer)
    if mask is None:
        return []
    if mask >= rows:
        return [
            f"the drafter's mask id {mask} lies past the target's {rows} rows: distil it anew with a mask that both have"
        ]
    if mask in ours and mask not in theirs:
        return [f"the drafter's mask id {mask} is the target's token {ours[mask]!r}: distil it anew with another mask"]
    return []


def _kept(name: str, used: Collection[int], drafter: Side) -> set[int]:
    """The ids whose rows of the tensor `name` are no padding: those in use, and of the embedding the mask, which learnt there
    what to say; in a head of its own the mask is never to be drafted."""
    mask = mask_id_of(drafter.config)
    return {*used} | ({mask} if mask is not None and name.endswith(EMBEDDINGS) else set())


def _unsettled(drafter: Side, used: set[int]) -> bool:
    """Whether some row outside `used` could still win: reads the vocabulary's tensors."""
    for name, info in vocabulary_tensors(drafter.tensors, drafter.name).items():
        with safe_open(info.file, framework="pt") as f:
            weight = f.get_tensor(name)
        if not torch.equal(weight, settle_padding(weight, {i for i in _kept(name, used, drafter) if i < len(weight)})):
            return True
    return False
