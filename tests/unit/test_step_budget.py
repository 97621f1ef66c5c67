"""Choosing layers and width by decode steps, on given times."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from pairing.errors import InputError
from pairing.step_budget import Limit, Measure, choose_steps, parse_limit
from pairing.width import Shape

WIDE, MIDDLE, SLIM = (Shape(hidden, 2 * hidden, hidden // 64, hidden // 64, 64) for hidden in (512, 256, 128))
SIZES = [1000 * shape.hidden for shape in (WIDE, MIDDLE, SLIM)]


def timed(seconds: Callable[[int, Shape], float]) -> tuple[Measure, list[tuple[int, Shape]]]:
    """A `measure` by a formula, and the list of what it was asked."""
    asked: list[tuple[int, Shape]] = []

    def measure(wanted: Sequence[tuple[int, Shape]]) -> list[float]:
        asked.extend(wanted)
        return [seconds(*w) for w in wanted]

    return measure, asked


def line(layers: int, shape: Shape) -> float:
    """The head and the rest 2, a layer 1, at the full width; both shrink with it, but for 0.5 that nothing shrinks."""
    return 0.5 + (1.5 + layers) * shape.hidden / 512


@pytest.mark.parametrize(("limit", "layers"), [(4.0, 2), (4.9, 2), (5.0, 3), (8.01, 6), (30.0, 28)])
def test_the_line_names_the_layers(limit: float, layers: int) -> None:
    measure, asked = timed(line)
    chosen, tried = choose_steps([WIDE], SIZES[:1], 30, Limit(limit, "ms"), line(30, WIDE), measure)
    assert (chosen.layers, chosen.shape) == (layers, WIDE)
    assert chosen.cost == line(layers, WIDE)
    assert len(tried) == len(asked) == (1 if layers == 2 else 2), "two layers, then the one that the line names"
    if layers > 2:
        assert chosen.predicted == pytest.approx(chosen.cost)


def test_a_miss_takes_a_smaller_one() -> None:
    """Layers get dearer beyond the sixth, so the line through both ends is too hopeful below and is drawn again."""

    def bent(layers: int, shape: Shape) -> float:
        return 1.0 + layers * 0.1 + (20.0 if layers > 6 else 0.0)

    measure, _ = timed(bent)
    chosen, tried = choose_steps([WIDE], SIZES[:1], 24, Limit(10.0, "ms"), bent(24, WIDE), measure)
    missed = [t for t in tried if t.cost > 10.0]
    assert missed, "the first guess was to miss"
    assert all(t.predicted is not None and t.predicted <= 10.0 for t in missed)
    assert chosen.layers == 5, "from the line through 2 and the miss, 10"
    assert chosen.cost <= 10.0
    assert len(tried) <= 8


def test_a_narrower_width_where_two_layers_are_too_slow() -> None:
    measure, asked = timed(line)
    limit = Limit(2.6, "ms")  # 4.0 at the full width, 2.25 at the middle one, which has room for one layer more
    chosen, _ = choose_steps([WIDE, MIDDLE, SLIM], SIZES, 30, limit, line(30, WIDE), measure)
    assert (chosen.layers, chosen.shape) == (2, MIDDLE)
    assert asked == [(2, WIDE), (2, MIDDLE), (6, MIDDLE)]
    limit = Limit(2.8, "ms")
    chosen, _ = choose_steps([WIDE, MIDDLE, SLIM], SIZES, 30, limit, line(30, WIDE), timed(line)[0])
    assert (chosen.layers, chosen.shape, chosen.cost) == (3, MIDDLE, 2.75)


def test_layers_beyond_those_measured() -> None:
    chosen, _ = choose_steps([WIDE, SLIM], SIZES[::2], 30, Limit(3.0, "ms"), line(30, WIDE), timed(line)[0])
    assert (chosen.layers, chosen.shape) == (8, SLIM)


def test_too_slow_is_one_line_with_the_figures() -> None:
    measure, _ = timed(line)
    with pytest.raises(
        InputError, match=r"0.1 of the target's step is less than 2 layers of hidden size 512 take: 0.1231"
    ) as e:
        choose_steps([WIDE], SIZES[:1], 30, Limit(0.1, "share"), 1.0, lambda w: [x / 32.5 for x in measure(w)])
    assert "with answers=… narrower ones are tried" in str(e.value)
    with pytest.raises(InputError, match=r"hidden size 128 take: 1\.375 ms"):
        choose_steps([WIDE, MIDDLE, SLIM], SIZES, 30, Limit(1.0, "ms"), line(30, WIDE), measure)


def test_a_target_within_the_limit_is_no_goal() -> None:
    with pytest.raises(InputError, match="the target itself takes 32 ms a step: give less"):
        choose_steps([WIDE], SIZES[:1], 30, Limit(40, "ms"), 32.0, timed(line)[0])


def test_limits() -> None:
    assert parse_limit(0.15) == parse_limit("0.15") == Limit(0.15, "share")
    assert parse_limit("12ms") == parse_limit("12 ms") == Limit(12.0, "ms")
    for wrong in ("12", "1.0", "0", "-3ms", "fast", "ms", "nan", ""):
        with pytest.raises(InputError, match=r"such as 0\.15, or a time, such as 12ms"):
            parse_limit(wrong)


def test_a_target_of_few_layers() -> None:
    """All its layers are the two that are measured; noise must not make two answers of that."""
    chosen, tried = choose_steps([WIDE], SIZES[:1], 2, Limit(3.4, "ms"), 3.5, lambda w: [3.3 for _ in w])
    assert (chosen.layers, len(tried)) == (2, 1)
