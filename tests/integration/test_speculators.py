"""Real vLLM with heads that draft from the target's hidden states, random ones: what the CPU back end does with them."""

from __future__ import annotations

from pathlib import Path

import pytest

from eval import measure, results, server
from eval.measure import Arm, Plan, Request
from tests import heads, tiny

K = 3


def test_heads_draft_and_the_target_alone_decides(tmp_path: Path) -> None:
    """EAGLE-3, EAGLE and Medusa run (vLLM 0.32, CPU): K drafts in each round, hardly any of them right, outputs the target's
    own; and at a rate of arrivals as with one request at a time. Chunks and counters agree on the tokens, and on the rounds
    where the client was in time: rounds of a tiny model last milliseconds, and a busy machine delays a client for longer."""
    target = tiny.folder(tmp_path / "target", layers=4)
    arms = [
        Arm("target", "target"),
        Arm("eagle3", "speculator", heads.eagle(tmp_path / "e3", target, third=True), K, method="eagle3"),
        Arm("eagle", "speculator", heads.eagle(tmp_path / "e1", target, third=False), K, method="eagle"),
        Arm("medusa", "speculator", heads.medusa(tmp_path / "m", target, K), K, method="medusa"),
    ]
    words = tiny.tokenizer()
    requests = [
        Request(text, words(text * 3).input_ids, 24, None) for text in ("red and green again ", "blue ", "pink ")
    ]
    settings = server.Settings(dtype="float32", max_model_len=256, enforce_eager=True)
    plan = Plan(target, arms, {"words": requests}, settings, resident=False, rates=(2.0,))
    measure.measure(plan, tmp_path / "out")
    rows = results.write_results(plan, tmp_path / "out", {}, {}, {}, {})
    assert {(r["arm"], r["rate"]): r["void"] for r in rows} == {(a.name, at): None for a in arms for at in (None, 2.0)}
    for row in (r for r in rows if r["arm"] != "target"):
        assert row["exact_match"] == 1.0, row
        assert row["num_drafts"] > 0
        assert row["num_draft_tokens"] == K * row["num_drafts"]
        assert 1.0 <= row["acceptance_length"] < 2.0
        seen = row["emitted_check"]
        counted = row["num_drafts"] + row["num_accepted_tokens"]
        assert (
            counted - seen["cut_at_most"] - seen["merged"] * (K + 1)
            <= seen["rounds"] + seen["accepted_tokens"]
            <= counted
        )
        assert seen["merged"] < row["num_drafts"] / 4
        if seen["merged"] == 0:
            assert seen["rounds"] == row["num_drafts"]
            assert seen["alarm"] is None
            assert sum(band["rounds"] for band in row["acceptance_length_by_context"]) == row["num_drafts"]
    timed = [r for r in rows if r["rate"]]
    offered = [r["offered_requests_per_s"] for r in timed]
    assert max(offered) == pytest.approx(min(offered), rel=0.01)  # all arms get the same arrivals
    assert all(r["completed_requests_per_s"] > 0 and r["ttft_ms"]["p50"] > 0 for r in timed)
