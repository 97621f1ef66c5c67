"""A drafter from a donor with another vocabulary: the donor's layers under the target's tokenizer and rows.

Each row's source is one of those in pairing/rows.py and is reported; a donor of the target's own family has them all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from pairing.alignment import check_pair, summary
from pairing.card import write_card
from pairing.compare_tokens import tokens_by_id
from pairing.engine import draftable
from pairing.errors import InputError
from pairing.files import new_folder, write_json, write_jsonl
from pairing.init import SPECIAL, copy_companions, with_vocabulary
from pairing.pair import new_pair
from pairing.rows import make_rows, row_sources, special_ids
from pairing.side import read_side
from pairing.source import ModelSource
from pairing.weights import parameters, read_headers, rewrite, vocabulary_tensors

SOURCES = "row_sources.jsonl"


def plan_transplant(
    target: ModelSource, donor: ModelSource, mapping: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """What `transplant` would do, from headers and tokenizers: {"rows", "tokens", "copied", …, "special", "sources"}.

    "special" names the source of each special token; the counts are of tokens by source ("user", "copied", "role",
    "pieces", "mean"). Raises InputError: a donor that vLLM would not run, quantized rows, a target whose ids pass
    its rows, a mapping of tokens that are not there.
    """
    t, d = read_side(target), read_side(donor)
    if reasons := draftable(d.config):
        raise InputError(f"{donor.name}: no drafter for vLLM: {'; '.join(reasons)}")
    tensors = vocabulary_tensors(d.tensors, donor.name)
    donor_rows = min(info.shape[0] for info in tensors.values())
    rows, ours, theirs = int(t.text["vocab_size"]), tokens_by_id(t.tokenizer), tokens_by_id(d.tokenizer)
    if max(ours) >= rows:
        raise InputError(f"{target.name}: id {max(ours)} is in use and its config says vocab_size {rows}")
    sources = row_sources(t.tokenizer, d.tokenizer, donor_rows, mapping)
    listed: list[dict[str, Any]] = [
        {"id": i, "token": ours[i], "how": row.how, "of": [theirs[j] for j in row.of]} for i, row in sources.items()
    ]
    special = special_ids(t.tokenizer)
    return {
        "rows": [donor_rows, rows],
        "tokens": len(ours),
        **dict(sorted(Counter(str(row["how"]) for row in listed).items())),
        "special": [row for row in listed if row["id"] in special],
        "tensors": list(tensors),
        "real": sorted(i for i in theirs if i < donor_rows),
        "sources": sources,
        "listed": listed,
    }


def transplant(
    target: ModelSource, donor: ModelSource, out: Path, mapping: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Writes the drafter folder `out` (atomically; never over another one) and returns its figures.

    `row_sources.jsonl` in it says of every token where its rows came from. Rows that no token uses, and tokens of
    which the donor knows nothing, are the mean of the donor's real rows. Raises InputError as `plan_transplant` does.
    """
    plan = plan_transplant(target, donor, mapping)
    sources, real, listed = plan.pop("sources"), plan.pop("real"), plan.pop("listed")
    tensors, rows = plan.pop("tensors"), plan["rows"][1]
    t, d = read_side(target), read_side(donor)

    def grafted(name: str, weight: torch.Tensor) -> torch.Tensor:
        return make_rows(weight, sources, real, rows)

    with new_folder(out) as temp:
        rewrite(donor.path, temp, tensors, grafted)
        config = with_vocabulary(d.config, t.text)
        write_json(temp / "config.json", config)
        copy_companions(target.path, temp)
        if not (temp / "generation_config.json").is_file():
            write_json(temp / "generation_config.json", {k: config[k] for k in SPECIAL if k in config})
        write_jsonl(temp / SOURCES, listed)
        made = {"step": "transplant", "donor": donor.name, **plan, "mapping": dict(mapping or {})}
        pair = new_pair(target, made)
        pair["needs_training"] = [row["id"] for row in listed if row["how"] != "copied"]
        write_json(temp / "pair.json", pair)
        report = check_pair(target, ModelSource(str(out), temp, None, None))
        assert report["aligned"], report["verdict"]
        write_json(temp / "pair.json", pair | {"alignment": summary(report)})
        write_card(temp, name=out.name)
        count = parameters(read_headers(temp))  # the rows are the target's
    return {
        "drafter": str(out),
        "target": target.name,
        "donor": donor.name,
        "parameters": count,
        **plan,
    }
