"""Rows of embedding and head against config and ids in use, and the tied flag against the file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pairing.finding import ONE_VOCABULARY, Finding
from pairing.side import Side
from pairing.weights import EMBEDDINGS, HEADS, PACKED, TensorInfo, find


def compare_rows(target: Side, drafter: Side, target_highest: int, drafter_highest: int, same: bool) -> list[Finding]:
    """Rows of config, embedding and head, against each other and the highest id in use (faults D1, D4, D16).

    `drafter_highest` counts the target's ids too: they are what the drafter is fed. `same`: no token differs.
    """
    findings = []
    for side, role, highest in ((target, "target", target_highest), (drafter, "drafter", drafter_highest)):
        rows = side.text.get("vocab_size")
        for part, info in (("embedding", find(side.tensors, EMBEDDINGS)), ("head", find(side.tensors, HEADS))):
            if info is not None and not _packed(info) and info.shape[0] != rows:
                findings.append(
                    Finding(
                        "blocks",
                        f"the {role}'s {part} has {info.shape[0]} rows, its config says vocab_size {rows}",
                        "rows",
                        "save the model again with vocab_size equal to its rows",
                    )
                )
        if rows is None or highest >= rows:
            mends = role == "drafter" and rows is not None and same and target_highest < int(target.text["vocab_size"])
            findings.append(
                Finding(
                    "repairable" if mends else "blocks",
                    f"id {highest} is in use and the {role} has {rows} rows only",
                    "rows",
                    "adds the rows; train those of real tokens"
                    if mends
                    else f"give the {role} at least {highest + 1} rows, trained ones",
                    repair=mends,
                )
            )
    if findings:
        return findings
    t, d = int(target.text["vocab_size"]), int(drafter.text["vocab_size"])
    if t == d:
        return [Finding("info", f"{t} rows on both sides, {t - target_highest - 1} above the ids in use", "rows", "")]
    if not same:
        what = f"the target has {t} rows, the drafter {d}"
        return [Finding("blocks", what, "rows", "see the tokens above", stops=ONE_VOCABULARY)]
    return [
        Finding(
            "repairable",
            f"same tokenizer, padding differs: the target has {t} rows, the drafter {d}; ids end at {target_highest}",
            "rows",
            f"{'pads' if d < t else 'cuts'} the drafter's embedding and head to {t} rows, the others as they are; "
            "or make a drafter by `draftsmith init`",
            repair=True,
            stops=ONE_VOCABULARY,
        )
    ]


def head_findings(side: Side, role: str) -> list[Finding]:
    """The tied flag against the tensors in the file, and a head that no engine reads."""
    from transformers import CONFIG_MAPPING

    head = find(side.tensors, HEADS)
    tied = side.config.get("tie_word_embeddings", side.text.get("tie_word_embeddings"))
    if tied is None and side.config.get("model_type") in CONFIG_MAPPING:
        tied = CONFIG_MAPPING[side.config["model_type"]].from_dict(side.config).get_text_config().tie_word_embeddings
    if head is not None and _packed(head):
        return [
            Finding(
                "blocks",
                f"the {role}'s head is quantized ({head.dtype}); vLLM reads heads in 16 or 32 bit",
                "head",
                "quantize it again without the head (`draftsmith quantize`)",
                stops=("vllm",),
            )
        ]
    if tied and head is not None:
        return [
            Finding(
                "warns",
                f"the {role}'s config says that the head is tied, and its file holds one: engines drop it",
                "head",
                "where it differs from the embedding set tie_word_embeddings to false, else delete it",
            )
        ]
    if tied is False and head is None:
        return [
            Finding(
                "blocks",
                f"the {role}'s config says that the head is not tied, and its file holds none",
                "head",
                "set tie_word_embeddings to true, or save the head",
            )
        ]
    return []


def untrained_findings(pair: Mapping[str, Any], tokens: Mapping[int, str]) -> list[Finding]:
    """Rows that `repair` or `init donor=` made and no training has reached since, as the drafter's pair.json marks them."""
    marked = pair.get("needs_training") or []
    if not marked:
        return []
    named = ", ".join(f"{i} {tokens.get(i)!r}" for i in marked[:4]) + (", …" if len(marked) > 4 else "")
    what = f"rows of the drafter that were made and never trained: {len(marked)} ({named})"
    fix = "distil it with trainable=all (or trainable=lora lora.vocabulary=true) on answers that hold these tokens"
    return [Finding("warns", what, "rows", fix)]


def _packed(info: TensorInfo) -> bool:
    return info.dtype in PACKED
