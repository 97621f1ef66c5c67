"""Real vLLM: a sweep of two K at two concurrencies has the engine's own counts, and the engine honours a schedule."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

from eval import schedule
from eval.measure import AGAIN, Plan
from pairing.engine import require_vllm
from pairing.files import read_json, read_jsonl, write_json
from pairing.mask_token import with_mask
from recipes.config import parse
from recipes.measure import recorded
from recipes.sweep import Run, SweepConfig, measured, sweep_plan
from tests import tiny
from tests.stored_answers import answered, store


def prepared(config: SweepConfig) -> tuple[Plan, Run]:
    plan, _, held = sweep_plan(config, require_vllm("sweep"))
    return plan, partial(measured, versions={}, known=recorded(held))


def test_the_surface_and_a_schedule_in_vllm(tmp_path: Path) -> None:
    """D25: the target as its own drafter has all drafts accepted, so every count is known: K a round, τ = K + 1."""
    target = tiny.folder(tmp_path / "target")
    answers = store(tmp_path / "answers", answered(target, 6, seed=1, longest=24), target)
    config, _ = parse(
        SweepConfig,
        [f"target={target}", f"drafter={target}", f"workloads.w.answers={answers}", "workloads.w.max_tokens=24",
         f"out={tmp_path / 'out'}", "num_speculative_tokens=[1,3]", "concurrencies=[1,2]", "max_model_len=128",
         "repeats=1", "warmup=1", "enforce_eager=true"],
    )  # fmt: skip
    plan, run = prepared(config)
    cells, _ = run(plan, tmp_path / "out")
    assert len(cells) == 6
    for cell in cells:
        assert (cell["void"], cell["unexplained"]) == (None, 0)
        if k := cell["num_speculative_tokens"]:
            assert (cell["draft_acceptance_rate"], cell["acceptance_length"]) == (1.0, k + 1), cell
            assert cell["drafted_per_round"] == k  # the client's chunks are the engine's rounds
            assert cell["exact_match"] == 1.0
            assert cell["interval"][0] < cell["speedup"] < cell["interval"][1]

    again = [r for r in read_jsonl(tmp_path / "out" / "results.jsonl") if r["arm"] == AGAIN]
    assert [(r["void"], r["exact_match"], r["num_drafts"]) for r in again] == [(None, 1.0, None)] * 2

    made = ((1, 1, 3), (2, 2, 0))
    arm = replace(next(a for a in plan.arms if a.num_speculative_tokens == 3), name="schedule", schedule=made)
    cells, _ = run(replace(plan, arms=[arm]), tmp_path / "confirm")
    one, two = (cell["drafted_per_round"] for cell in cells)
    assert one == 3
    assert two < 1.5  # none with two in flight; 3 when a request of the last ones is left alone
    assert schedule.ignored(made, 2, two) is False


def test_one_k_and_none_with_all_drafts_in_one_pass(tmp_path: Path) -> None:
    """What `sweep` may choose there; several K end vLLM 0.32's engine, which the pre-flight refuses."""
    target = tiny.folder(tmp_path / "target")
    drafter = tiny.folder(tmp_path / "drafter", layers=1)
    config = drafter / "config.json"
    write_json(config, with_mask(read_json(config), tiny.REAL_TOKENS))
    answers = store(tmp_path / "answers", answered(target, 6, seed=1, longest=24), target)
    asked, _ = parse(
        SweepConfig,
        [f"target={target}", f"drafter={drafter}", f"workloads.w.answers={answers}", "workloads.w.max_tokens=24",
         f"out={tmp_path / 'out'}", "num_speculative_tokens=[3]", "concurrencies=[1,2]", "max_model_len=128",
         "parallel_drafting=only", "repeats=1", "warmup=1", "enforce_eager=true", "aa=false"],
    )  # fmt: skip
    plan, run = prepared(asked)
    arm = replace(plan.arms[-1], name="schedule", schedule=((1, 1, 3), (2, 2, 0)))
    cells, _ = run(replace(plan, arms=[plan.arms[0], arm]), tmp_path / "confirm")
    assert [(c["void"], c["unexplained"]) for c in cells] == [(None, 0)] * 4
    one, two = (c["drafted_per_round"] for c in cells if c["arm"] == "schedule")
    assert one == 3
    assert two < 1.5
