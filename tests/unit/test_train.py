"""What a run's losses are judged against: by the kind of step, and the same after a resume."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator

from distill import train
from distill.answers import open_answers
from distill.batches import check_rows
from distill.guards import PATIENCE, spike_or_stop
from distill.settings import Settings, on_policy
from distill.step import Run
from distill.train import History, fit
from pairing.errors import PartFailedError
from pairing.files import read_jsonl
from tests import tiny
from tests.stored_answers import made_up, store

PLAIN = Settings(
    seed=0, batch_size=4, accumulation=1, lr=1e-3, warmup=0.1, weight_decay=0.0, beta2=0.98, clip=1.0, trainable="layers",
    losses={"forward_kl": 1.0}, chunk=None, epochs=None, max_steps=60, minutes=None, eval_every=1000, eval_prompts=8,
    checkpoint_every=1000, keep=2,
)  # fmt: skip
MIXED = replace(PLAIN, on_policy=0.4)
LEVELS = {False: 0.5, True: 1.0}  # the drafter's own answers are another text, with a loss of its own


def losses_of(settings: Settings, steps: int, jump: bool | None = None, at: int = 2000) -> list[float]:
    """Each kind of step at its level, with noise of 2 %; from step `at` on the steps of kind `jump` at twice their level."""
    noise = np.exp(0.02 * np.random.default_rng(settings.seed).standard_normal(steps))
    kinds = [on_policy(settings, step) for step in range(steps)]
    return [
        LEVELS[kind] * float(noise[step]) * (2 if kind is jump and step >= at else 1) for step, kind in enumerate(kinds)
    ]


def stop_of(settings: Settings, losses: list[float]) -> tuple[int, str] | None:
    """The step that stops the run, and what it says."""
    history = History(settings)
    for step, loss in enumerate(losses, 1):
        history.add(step, loss, progress=0.5)
        try:
            history.judge(step)
        except PartFailedError as e:
            return step, str(e)
    return None


def test_two_kinds_of_steps_at_two_levels_are_no_spike() -> None:
    """λ = 0.4: eight on-policy steps in a row come every few thousand steps; held against all steps together they would stop the
    run, which is what the last lines show."""
    stopped = 0
    for seed in range(4):
        at = replace(MIXED, seed=seed)
        losses = losses_of(at, 5000)
        assert stop_of(at, losses) is None
        try:
            for step in range(1, len(losses) + 1):
                spike_or_stop(step, losses[max(0, step - 200) : step], 0)
        except PartFailedError:
            stopped += 1
    assert stopped > 0


@pytest.mark.parametrize(("jump", "name"), [(False, "plain"), (True, "on-policy")])
def test_a_jump_of_either_kind_stops_at_its_eighth_step(jump: bool, name: str) -> None:
    losses = losses_of(MIXED, 2200, jump)
    own = [step for step in range(2000, 2200) if on_policy(MIXED, step) is jump]
    found = stop_of(MIXED, losses)
    assert found is not None
    assert found[0] == own[PATIENCE - 1] + 1
    said = re.search(rf" for {PATIENCE} {name} steps, where (\S+) was usual", found[1])
    assert said is not None
    assert float(said[1]) == pytest.approx(LEVELS[jump], rel=0.02)


def test_a_run_of_one_kind_is_judged_as_one() -> None:
    found = stop_of(PLAIN, [0.5] * 100 + [1.0] * 20)
    assert found is not None
    assert found[0] == 100 + PATIENCE
    assert f"for {PATIENCE} steps, where 0.5 was usual" in found[1]
    assert stop_of(PLAIN, [0.5] * 100 + [math.nextafter(0.65, 0)] * 20) is None


def test_a_run_that_goes_on_knows_the_losses_from_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calm for 40 steps, then high, and killed three steps later: started again it stops where it would have, not 24 steps after
    its start at best. (A stand-in says each step's loss; the loop, its log and its checkpoints are real.)"""
    dies = {43}

    def step(run: Run, window: Any, at: int, progress: float) -> dict[str, Any]:
        if at in dies:
            dies.clear()
            raise KeyboardInterrupt
        for _, p in run.prepared.params:
            p.grad = torch.zeros_like(p)
        run.prepared.optimizer.step()
        return {"loss": 0.5 if at < 40 else 1.0, "supervised": 1, "top1": 0.0}

    monkeypatch.setattr(train, "optimizer_step", step)
    answers = store(tmp_path / "a", made_up([3, 5, 4, 6]), tiny.folder(tmp_path / "target"))
    rows = check_rows(open_answers(answers), "data", rows=tiny.ROWS, real=tiny.REAL_TOKENS, context=512)
    settings = replace(PLAIN, checkpoint_every=20)
    accelerator, out = Accelerator(cpu=True), tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        fit(accelerator, tiny.model(), rows, {}, settings, out)
    assert [row["step"] for row in read_jsonl(out / "metrics.jsonl")] == list(range(1, 44))
    with pytest.raises(PartFailedError, match=r"^step 48: the loss has been above 1 for 8 steps, where 0\.5 was usual"):
        fit(accelerator, tiny.model(), rows, {}, settings, out)
    assert [row["step"] for row in read_jsonl(out / "metrics.jsonl")] == list(range(1, 48))
