"""Which form of a drafter is served, from figures made by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from distill.quantize import quantize_drafter
from eval.compare_formats import choose, markdown, room, served
from pairing.engine import Engine
from pairing.init import init_drafter
from pairing.serving_plan import Serving
from pairing.source import resolve
from tests import tiny
from tests.sample_run import result


def row(form: str, against: list[float] | None = None, **fields: Any) -> dict[str, Any]:
    """A form as fast as the target's 1.5x, or by `against` of that; a 4-bit copy saves 58 MiB, here little KV cache."""
    copy = form != "drafter"
    figures: dict[str, Any] = {
        "form": form, "bits": 32, "folder": form, "top1": 0.887 if copy else 0.897, "alpha": [0.85, 0.86], "tau": 3.6,
        "top1_change": [-0.01, -0.014, -0.006] if copy else None, "tau_change": [-0.05, -0.1, 0.0] if copy else None,
        "step_ms": 19.0 if copy else 10.0, "step_of_target": 0.38 if copy else 0.2, "weights_mib": 117.0 if copy else 175.0,
        "kv_blocks": 101_000 if copy else 100_000, "speedup": [1.5 * (against or [1.0])[0], 1.2, 1.8],
        "against_drafter": against, "why_not": None, "drafts": "4 one by one", "tau_served": 3.5,
    }  # fmt: skip
    return figures | fields


SLOWER, ALIKE, FASTER = [0.81, 0.78, 0.84], [0.99, 0.95, 1.02], [1.08, 1.04, 1.12]


def test_a_slower_copy_is_not_served_and_the_sentence_says_what_it_would_have_saved() -> None:
    found = choose([row("drafter"), row("nf4", SLOWER)])
    assert found["serve"] == "drafter"
    assert found["sentence"] == (
        "Serve the 32-bit drafter, 1.50x (1.20 to 1.80) the target's own speed; nf4 saves 58 MiB (+1.0% KV blocks), changes "
        "top-1 agreement by -0.0100 (-0.0140 to -0.0060) and takes 1.90x the time of a draft step: slower than the 32-bit "
        "drafter, 0.81x (0.78 to 0.84) its speed."
    )


@pytest.mark.parametrize(
    ("copies", "serve"),
    [
        ([row("nf4", SLOWER), row("w4a16", FASTER)], "w4a16"),
        ([row("nf4", [1.2, 1.1, 1.3]), row("w4a16", FASTER)], "nf4"),  # of two that are faster the faster one
        ([row("nf4", ALIKE)], "drafter"),  # 1 % more KV cache is no reason
        ([row("nf4", ALIKE, kv_blocks=103_000)], "nf4"),
        ([row("nf4", ALIKE, kv_blocks=103_000), row("w4a16", ALIKE, kv_blocks=104_000)], "w4a16"),
        ([row("nf4", SLOWER, kv_blocks=200_000)], "drafter"),  # speed first
        ([row("nf4", ALIKE, kv_blocks=103_000), row("w4a16", FASTER)], "w4a16"),
        ([row("nf4", None, speedup=None, why_not="the server ended at start")], "drafter"),
    ],
)
def test_speed_decides_then_memory(copies: list[dict[str, Any]], serve: str) -> None:
    assert choose([row("drafter"), *copies])["serve"] == serve


def test_what_is_not_faster_than_the_target_is_not_served() -> None:
    slow = [0.9, 0.8, 1.01]
    found = choose([row("drafter", speedup=slow), row("nf4", SLOWER, speedup=[0.7, 0.6, 0.8])])
    assert found["serve"] == "target"
    assert found["sentence"].startswith(
        "Serve the target alone: the 32-bit drafter, the best form, is at 0.90x (0.80 to 1.01) its speed; nf4 saves"
    )


def test_a_drafter_that_was_not_served_leaves_nothing_to_compare_with() -> None:
    found = choose([row("drafter", bits=16, speedup=None, why_not="out of memory"), row("nf4", FASTER)])
    assert (found["serve"], found["sentence"]) == (None, "Not measurable: the 16-bit drafter: out of memory.")
    reasons = choose([row("drafter"), row("nf4", None, speedup=None, why_not="out of memory")])["reasons"]
    assert reasons == {"nf4": "was not measured (out of memory)"}


def test_the_table_has_a_line_a_form() -> None:
    lines = markdown([row("drafter"), row("nf4", SLOWER)], 4).splitlines()
    assert lines[2].startswith(
        "| the 32-bit drafter | 0.8970 | – | 0.8500–0.8600 | 3.600 | – | 10.00 | 0.200 | 175.0 | 100,000 |"
    )
    assert lines[3].endswith("| 4 one by one | 3.50 | 1.22x (1.20 to 1.80) | 0.81x (0.78 to 0.84) |")


def test_a_copy_is_held_against_the_drafter_on_the_same_prompts() -> None:
    """By hand: 10 tokens a prompt; the drafter takes 1 s for each, the copy 2 s on one and 1 s on the other: 20/3 : 10."""
    results = [result("target", "target")]
    results += [result(a, "draft_model", speedup=1.5, speedup_interval=[1.4, 1.6]) for a in ("drafter", "nf4", "w4a16")]
    results[3] |= {"mismatches": [{"id": "a", "repeat": 0, "position": 3, "why": "no tie"}]}
    cell = {"workload": "orders", "group": None, "temperature": 0.0, "concurrency": 1, "repeat": 0, "output_tokens": 10}
    seconds = {"target": (2, 2), "drafter": (1, 1), "nf4": (2, 1), "w4a16": (1, 1)}
    requests = [
        {"arm": arm, "id": i, "e2e_s": s} | cell
        for arm, both in seconds.items()
        for i, s in zip("ab", both, strict=True)
    ]
    requests += [{**r, "concurrency": 8, "e2e_s": 100} for r in requests]  # another cell
    assert served("drafter", results, requests, "drafter") == {
        "speedup": [1.5, 1.4, 1.6], "against_drafter": None, "why_not": None, "drafts": "4 one by one", "tau_served": None,
    }  # fmt: skip
    ratio, low, high = served("nf4", results, requests, "drafter")["against_drafter"]
    assert ratio == pytest.approx(2 / 3)
    assert (low, high) == (pytest.approx(0.5), pytest.approx(1.0))
    differs = served("w4a16", results, requests, "drafter")
    assert (differs["speedup"], differs["against_drafter"]) == (None, None)
    assert differs["why_not"] == "1 of its outputs is not the target's"


def test_a_form_that_drafts_both_ways_stands_for_the_faster_one() -> None:
    """By hand: in one pass the drafter takes 1 s a prompt and the copy 2; one by one the copy is faster than that."""
    arms = {"drafter": (1.2, 4), "drafter-parallel": (2.0, 1), "nf4": (1.5, 3), "nf4-parallel": (1.0, 2)}
    results = [result("target", "target")]
    for arm, (speed, _) in arms.items():
        more = {"parallel_drafting": arm.endswith("-parallel"), "num_speculative_tokens": 6 if "parallel" in arm else 4}
        results.append(
            result(arm, "draft_model", speedup=speed, speedup_interval=[speed, speed], acceptance_length=speed, **more)
        )
    cell = {"workload": "orders", "group": None, "temperature": 0.0, "concurrency": 1, "repeat": 0, "output_tokens": 10}
    requests = [{"arm": arm, "id": i, "e2e_s": s} | cell for arm, (_, s) in arms.items() for i in "ab"]
    own, copy = (served(form, results, requests, "drafter") for form in ("drafter", "nf4"))
    assert (own["drafts"], own["speedup"], own["tau_served"]) == ("6 in one pass", [2.0, 2.0, 2.0], 2.0)
    assert (copy["drafts"], copy["against_drafter"]) == ("4 one by one", pytest.approx([1 / 3] * 3))


def test_saved_weights_become_kv_blocks(tmp_path: Path) -> None:
    """By hand: 2 layers of 1 key-value head of 32 in each model, float32: 2 · 2 · 32 · 4 bytes a token and model."""
    target, drafter = tiny.folder(tmp_path / "target"), tiny.folder(tmp_path / "drafter", layers=2, rows=tiny.ROWS)
    init = tmp_path / "made"
    init_drafter(resolve(str(target)), init, [0, 1])
    quantize_drafter(init, tmp_path / "nf4")
    serving, cpu = (
        Serving(dtype="float32", max_model_len=128, max_num_seqs=4, kv_cache_gib=1),
        Engine("0.32.0", "cpu", None),
    )
    full, nf4 = (room(target, d, cpu, 2**26, serving) for d in (drafter, tmp_path / "nf4"))
    weights = 4 * sum(p.numel() for p in tiny.model().parameters())
    assert full == {
        "bits": 32,
        "weights_mib": round(weights / 2**20, 2),
        "kv_blocks": (2**26 - 2 * weights - 2 * 4 * tiny.ROWS * 4 * 5) // 1024 // 16,
    }
    saved = 2**20 * (full["weights_mib"] - nf4["weights_mib"])
    assert nf4["weights_mib"] < 0.5 * full["weights_mib"]
    assert nf4["kv_blocks"] - full["kv_blocks"] == pytest.approx(saved / 1024 / 16, abs=2)
