"""What is said of a merge of adapters: on which base, how far the logits moved, and acceptance before and after (fault D17)."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from distill.adapters import drift
from distill.batches import Rows
from distill.evaluate import PromptScore, acceptance, score_prompts
from pairing.pair import describe_model
from pairing.source import resolve

PROMPTS = 8  # of each set


def merge_record(
    accelerator: Accelerator,
    trained: Any,
    merged: Any,
    base: Path,
    heldout: Mapping[str, Rows],
    data: Rows,
    num_speculative_tokens: int,
    **scoring: Any,
) -> dict[str, Any]:
    """How `merged` differs from `trained`, the base as it was trained on with the adapters beside it, on the first prompts of
    every held-out set, or of `data` where there is none. `base` is said as it was given, and by its weights' digest.

    Gives `drift`'s "kl", "top1" and "positions"; and with the target's answers "top1_before", "top1_after", and by replay at
    "num_speculative_tokens" "tau_before" and "tau_after" (None where it is not known). `scoring`: as `score_prompts` takes it.
    All ranks call it.
    """
    sets = {f"heldout.{name}": rows for name, rows in heldout.items()} or {"data": data}
    on = f"the first {PROMPTS} prompts of {', '.join(sets)}"
    if not heldout:
        on += ": trained on, as no held-out set was given"
    texts = [rows.data[i]["input_ids"] for rows in sets.values() for i in range(min(PROMPTS, len(rows)))]

    def scores(model: Any, when: str) -> list[PromptScore]:
        found = (
            score_prompts(accelerator, model, rows, most=PROMPTS, where=f"{name}, {when} the merge", **scoring)
            for name, rows in sets.items()
        )
        return list(chain.from_iterable(found))

    before, after = (
        acceptance(scores(model, when), num_speculative_tokens)
        for model, when in ((trained, "before"), (merged, "after"))
    )
    return {
        "base": str(base),
        "base_weights": describe_model(resolve(str(base)))["digests"]["weights"],
        "on": on,
        **drift(trained, merged, texts, data.real),
        "num_speculative_tokens": num_speculative_tokens,
        "top1_before": before["top1"],
        "top1_after": after["top1"],
        "tau_before": before["tau"],
        "tau_after": after["tau"],
    }
