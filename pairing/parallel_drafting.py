"""Serving a drafter that writes all its drafts in one pass: what vLLM needs of it, and what it was trained for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pairing.files import read_json
from pairing.finding import Finding
from pairing.mask_token import CONFIG_KEYS, named_masks
from pairing.serving_plan import Serving, stop

WHERE = "parallel drafting"


def parallel_findings(config: Mapping[str, Any], serving: Serving) -> list[Finding]:
    """Without a mask id in the drafter's config vLLM fails at start, after it has loaded both models. With a schedule of
    several K it fails (0.32) at the first step for which that asks less than the largest, as one pass makes as many drafts
    in any case; K = 0 goes."""
    words = serving.speculation("")
    if not words.get("parallel_drafting"):
        return []
    schedule = words.get("num_speculative_tokens_per_batch_size") or []
    well_formed = isinstance(schedule, list) and all(isinstance(e, list | tuple) and len(e) == 3 for e in schedule)
    if well_formed and len({str(k) for _, _, k in schedule} - {"0"}) > 1:
        what = f"num_speculative_tokens_per_batch_size asks for several K ({schedule}), and one pass makes the largest always"
        fix = f"give one K (and 0 where nothing is to be drafted), or {serving.one_by_one}"
        return [stop(what, WHERE, fix)]
    if next(iter(named_masks(config).values()), None) is not None:  # what is no id, `check_pair` has stopped
        return []
    what = f"the drafter's config.json names no mask token ({', '.join(CONFIG_KEYS)}), which parallel_drafting needs"
    fix = f"train it with `draftsmith distill parallel_drafting=K`, or {serving.one_by_one}"
    return [stop(what, WHERE, fix)]


def trained_one_by_one(folder: Path) -> bool:
    """Whether the pair.json of the drafter in `folder` says that it was distilled, and not to draft in parallel: a mask that its
    config names never learnt what to say."""
    path = folder / "pair.json"
    pair = read_json(path) if path.is_file() else {}
    return pair.get("training") is not None and pair.get("parallel_drafting") is None


def trained_findings(folder: Path, serving: Serving) -> list[Finding]:
    """Drafts past what the drafter in `folder` was trained for, as its pair.json says."""
    words = serving.speculation("")
    if not words.get("parallel_drafting") or not (folder / "pair.json").is_file():
        return []
    trained = (read_json(folder / "pair.json").get("parallel_drafting") or {}).get("num_speculative_tokens")
    if trained is None:
        what = "the drafter's pair.json does not say that it was trained to draft in parallel"
        return [Finding("warns", what, WHERE, "measure it before you trust it, or distil it with parallel_drafting=K")]
    if words["num_speculative_tokens"] <= trained:
        return []
    what = f"num_speculative_tokens is {words['num_speculative_tokens']}, the drafter was trained to draft {trained} in one pass"
    return [
        Finding(
            "warns", what, WHERE, f"expect nothing of the drafts past {trained}: measure, or give {trained} at most"
        )
    ]
