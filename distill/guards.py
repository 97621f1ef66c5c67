"""Watches of a training run: a loss that is not finite or jumps, nothing (or everything) supervised, a dead tracker.

The first three stop a run with the reason; checkpoints stay as they are. The last never stops or slows one.
"""

from __future__ import annotations

import math
import queue
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from pairing.errors import InputError, PartFailedError

RECENT = 64  # losses that the median and its spread are taken over
ENOUGH = 16  # before that many there is no judging
SPREADS = 10.0  # how far above the median a loss must lie to be a spike
LEAST = 0.3  # ... and at least this part of the median, so that a very calm run may still twitch
PATIENCE = 8  # spikes in a row, so that one batch of odd rows stops nothing
NORMAL = 1.4826  # median absolute deviation to standard deviation, of normal noise
PENDING = 1000  # rows that wait for a tracker; more are dropped


def finite_or_stop(step: int, values: dict[str, float], ids: Sequence[str]) -> None:
    """Raises PartFailedError naming what is not finite, the step and the first prompts of its window."""
    broken = [f"{name} is {value}" for name, value in values.items() if not math.isfinite(value)]
    if broken:
        raise PartFailedError(
            f"step {step}: {' and '.join(broken)} (prompts {', '.join(ids[:4])} …); checkpoints are as they were: lower lr "
            "or look at these prompts, and start the same command again"
        )


def spike(losses: Sequence[float]) -> bool:
    """Whether the last PATIENCE losses all lie far above what came before them.

    Far: over median + max(SPREADS · 1.4826 · MAD, LEAST · |median|) of the RECENT losses before those. Median and MAD
    (Hampel 1974) are not moved by the spike itself, and one odd batch is not enough. No judging before ENOUGH losses are
    there to compare with: the beginning of a run is steep and noisy. A falling loss is never a spike.
    """
    before, last = losses[:-PATIENCE][-RECENT:], losses[-PATIENCE:]
    if len(before) < ENOUGH:
        return False
    middle = statistics.median(before)
    spread = NORMAL * statistics.median(abs(x - middle) for x in before)
    return min(last) > middle + max(SPREADS * spread, LEAST * abs(middle))


def spike_or_stop(step: int, losses: Sequence[float], warmup_steps: int, of: str = "") -> None:
    """Raises PartFailedError on a spike after the learning rate's warm-up. `losses` are those of steps 1 to `step`, or of those
    steps among them that are `of` one kind."""
    if step > warmup_steps + PATIENCE and spike(losses[-(RECENT + PATIENCE) :]):
        usual = statistics.median(losses[-(RECENT + PATIENCE) : -PATIENCE])
        raise PartFailedError(
            f"step {step}: the loss has been above {min(losses[-PATIENCE:]):.3g} for {PATIENCE} {of}steps, where {usual:.3g} was "
            "usual before; checkpoints are as they were: lower lr or clip harder, and start again from the last checkpoint"
        )


def supervised_or_stop(name: str, supervised: int, tokens: int) -> float:
    """The supervised share of all tokens. Raises InputError at 0 % and at 100 % (fault D13): the mask is broken."""
    if 0 < supervised < tokens:
        return supervised / tokens
    if supervised <= 0:
        raise InputError(
            f"{name}: 0 % of its {tokens:,} tokens are supervised, so there is nothing to learn: no answer was found in it"
        )
    raise InputError(
        f"{name}: 100 % of its {tokens:,} tokens are supervised, prompts too: the answers' spans were not found; every "
        "conversation must begin with a prompt"
    )


def tracker(
    start: Callable[[], Any],
    log: Callable[[dict[str, Any], int], None],
    note: Callable[[str], None],
    finish: Callable[[], None] = lambda: None,
    patience: float = 10.0,
) -> tuple[Callable[[dict[str, Any], int], None], Callable[[], None]]:
    """(send, close) around a tracker that may fail in any way: raise at its start or later, or hang for ever.

    It lives in a thread of its own, so nothing of it can end or slow the run. The first failure is noted once, in one
    line; then it gets no more rows. Busy for longer than `patience` seconds counts as dead. `send` returns at once;
    `close` gives what is waiting, and `finish`, at most `patience` seconds.
    """
    rows: queue.Queue[tuple[dict[str, Any], int] | None] = queue.Queue(PENDING)
    busy_since: list[float | None] = [time.monotonic()]  # the start is its first piece of work
    dead = threading.Event()

    def fail(reason: str) -> None:
        if not dead.is_set():
            dead.set()
            note(f"the tracker is dead ({reason}); training and metrics.jsonl go on without it")

    def work() -> None:
        try:
            start()
            busy_since[0] = None
            while (row := rows.get()) is not None:
                busy_since[0] = time.monotonic()
                if not dead.is_set():
                    log(*row)
                busy_since[0] = None
            busy_since[0] = time.monotonic()
            finish()
        except BaseException as e:  # also a SystemExit of a tracker that thinks the program is its own
            fail(f"{type(e).__name__}: {str(e).splitlines()[0] if str(e) else 'no reason given'}")

    thread = threading.Thread(target=work, name="tracker", daemon=True)
    thread.start()

    def hangs() -> bool:
        since = busy_since[0]
        return since is not None and time.monotonic() - since > patience

    def send(row: dict[str, Any], step: int) -> None:
        if not dead.is_set() and hangs():
            fail(f"no answer for {patience:g} s")
        if dead.is_set():
            return
        try:
            rows.put_nowait((row, step))
        except queue.Full:
            fail(f"{PENDING} rows behind")

    def close() -> None:
        if not dead.is_set():
            try:
                rows.put_nowait(None)
                thread.join(patience)
            except queue.Full:
                pass
            if thread.is_alive():
                fail(f"no answer for {patience:g} s")

    return send, close
