"""Output that is lively on a terminal and short in a log."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

_LOG_WIDTH = 100


def make_console() -> Console:
    """A console on stdout; in a log it is as wide as the tables need, and nothing wraps."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=_LOG_WIDTH)


@contextmanager
def progress_bars(console: Console) -> Iterator[Progress]:
    """Live bars on a terminal; nothing elsewhere, where each redraw would be another line."""
    columns = (
        TextColumn("  {task.description:<22}"),
        BarColumn(bar_width=40),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        yield progress
