"""One progress bar for everything that takes over a few seconds; silent where standard error is no terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

Advance = Callable[[int, str], None]


@contextmanager
def bar(what: str, total: int, done: int = 0) -> Iterator[Advance]:
    """Yields `advance(steps, note)`: moves the bar and sets the short text behind it (a loss, a rate)."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=total, completed=done, note="")

        def advance(steps: int = 1, note: str = "") -> None:
            progress.update(task, advance=steps, note=note)

        yield advance
