"""The run's watches: what stops it, what must not, and trackers that fail in every way."""

from __future__ import annotations

import itertools
import math
import time
from typing import Any

import numpy as np
import pytest

from distill.guards import ENOUGH, PATIENCE, finite_or_stop, spike, spike_or_stop, supervised_or_stop, tracker
from pairing.errors import InputError, PartFailedError


def curve(steps: int, seed: int = 0, noise: float = 0.15) -> list[float]:
    """What runs here look like: a steep beginning, a slow end, noise of 15 % from batch to batch."""
    rng = np.random.default_rng(seed)
    at = np.arange(steps)
    return [float(x) for x in (0.4 + 6 * np.exp(-at / 20)) * np.exp(noise * rng.standard_normal(steps))]


def first_stop(losses: list[float], warmup: int = 10) -> int | None:
    for step in range(1, len(losses) + 1):
        try:
            spike_or_stop(step, losses[:step], warmup)
        except PartFailedError:
            return step
    return None


def test_ordinary_noise_never_stops_a_run() -> None:
    for seed in range(20):
        assert first_stop(curve(400, seed)) is None
        assert first_stop(curve(400, seed, noise=0.4)) is None


def test_one_batch_of_odd_rows_stops_nothing_and_a_spike_that_stays_does() -> None:
    losses = curve(300)
    losses[150] *= 100
    losses[200 : 200 + PATIENCE - 1] = [50.0] * (PATIENCE - 1)
    assert first_stop(losses) is None
    losses[250:] = [x * 8 for x in losses[250:]]
    assert first_stop(losses) == 250 + PATIENCE


def test_a_flat_run_may_twitch_and_its_jump_is_seen() -> None:
    assert first_stop([0.5] * 100 + [0.6] * 100) is None  # 20 %, though the spread is 0
    assert first_stop([0.5] * 100 + [0.7] * 100) == 100 + PATIENCE
    assert first_stop([0.5, 1.5] * 50 + [1.6] * 100) is None  # so noisy that 1.6 is nothing, for however long
    assert first_stop([-0.5] * 100 + [-0.3] * 100) == 100 + PATIENCE  # a loss may be negative: tau, TVD++


def test_warm_up_and_short_runs_are_not_judged() -> None:
    jump = [1.0] * ENOUGH + [9.0] * PATIENCE
    assert spike(jump)
    assert not spike(jump[1:])
    assert not spike([])
    assert first_stop(jump, warmup=len(jump)) is None
    assert first_stop([0.1] * 40 + [5.0] * 30, warmup=40 + PATIENCE) == 40 + 2 * PATIENCE + 1


def test_the_reason_says_step_and_both_losses() -> None:
    with pytest.raises(PartFailedError, match=r"step 108: the loss has been above 2 for 8 steps, where 0.5 was usual"):
        spike_or_stop(108, [0.5] * 100 + [2.0] * 8, 0)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_named(value: float) -> None:
    finite_or_stop(1, {"the loss": 1.0, "the gradient's norm": 0.0}, ["a"])
    with pytest.raises(
        PartFailedError, match=rf"^step 7: the gradient's norm is {value} \(prompts a, b, c, d …\)"
    ) as e:
        finite_or_stop(7, {"the loss": 1.0, "the gradient's norm": value}, ["a", "b", "c", "d", "e"])
    assert "\n" not in str(e.value)


def test_a_supervised_share_of_nothing_or_everything_is_refused() -> None:
    assert supervised_or_stop("data", 1, 4) == 0.25
    for supervised, message in ((0, "data: 0 % of its 7 tokens"), (7, "data: 100 % of its 7 tokens")):
        with pytest.raises(InputError, match=message):
            supervised_or_stop("data", supervised, 7)
    with pytest.raises(InputError, match="0 %"):
        supervised_or_stop("data", 0, 0)


# ---------------------------------------------------------------- trackers


def test_a_tracker_gets_every_row_in_order_and_is_finished() -> None:
    got: list[Any] = []
    notes: list[str] = []
    send, close = tracker(
        lambda: got.append("start"), lambda row, step: got.append((row, step)), notes.append, lambda: got.append("end")
    )
    for step in range(50):
        send({"loss": step}, step)
    close()
    assert got == ["start", *(({"loss": step}, step) for step in range(50)), "end"]
    assert notes == []


def raises(*_: Any) -> None:
    raise ConnectionError("no route to host\nand a long trace")


def exits(*_: Any) -> None:
    raise SystemExit(1)


def hangs(*_: Any) -> None:
    time.sleep(60)


def nothing(*_: Any) -> None:
    return None


@pytest.mark.parametrize(
    ("bad", "reason"),
    [(raises, "ConnectionError: no route to host"), (exits, "SystemExit: 1"), (hangs, "no answer for 0.2 s")],
)
@pytest.mark.parametrize("where", ["start", "log", "finish"])
def test_a_tracker_that_fails_is_noted_once_and_slows_nothing(where: str, bad: Any, reason: str) -> None:
    parts = {"start": nothing, "log": nothing, "finish": nothing, where: bad}
    note = f"the tracker is dead ({reason}); training and metrics.jsonl go on without it"
    notes: list[str] = []
    begun = time.monotonic()
    send, close = tracker(parts["start"], parts["log"], notes.append, parts["finish"], patience=0.2)
    for step in range(5):
        send({"loss": 1.0}, step)
    assert time.monotonic() - begun < 0.15
    if where != "finish":
        time.sleep(0.25)
        for step in range(5):
            send({"loss": 1.0}, step)
        assert notes == [note]  # while the run goes on, not at its end
    close()
    close()
    assert time.monotonic() - begun < 1.0
    assert notes == [note]


def test_a_slow_tracker_is_not_a_dead_one_and_gets_no_more_than_its_queue() -> None:
    notes: list[str] = []
    steps = itertools.count()
    send, close = tracker(nothing, lambda *_: time.sleep(0.02), notes.append, patience=0.5)
    for _ in range(10):
        send({}, next(steps))
    close()
    assert notes == []
    send, close = tracker(hangs, nothing, notes.append, patience=0.5)
    for step in range(1002):
        send({}, step)
    close()
    assert notes == ["the tracker is dead (1000 rows behind); training and metrics.jsonl go on without it"]
