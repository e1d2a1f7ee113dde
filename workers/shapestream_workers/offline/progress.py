"""What a run tells while it goes on: rows, rate and time left, on one line of a terminal, or a line now and then."""

from __future__ import annotations

import sys
from time import monotonic
from typing import TextIO

EVERY_S = 10.0
"""Seconds between two lines where stderr is no terminal."""
REDRAW_S = 0.2
"""Seconds between two pictures of the line of a terminal."""
_BAR = 24


def spell_seconds(seconds: float) -> str:
    """Return `4 s`, `3 min 20 s` or `2 h 5 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def progress_line(done: int, total: int, *, now: int, seconds: float) -> str:
    """Return the line: rows done of all, and what `now` rows in so many seconds say about the rest."""
    rate = now / seconds if seconds > 0 else 0.0
    share = done / total if total else 1.0
    bar = "#" * int(share * _BAR)
    left = f", {spell_seconds((total - done) / rate)} left" if rate and done < total else ""
    return f"[{bar:<{_BAR}}] {done:,} of {total:,} rows, {rate:,.0f}/s{left}"


class Progress:
    """Writes the line to stderr."""

    def __init__(self, total: int, done: int, stream: TextIO | None = None) -> None:
        """`done`: rows of earlier attempts, which do not count for the rate."""
        self._stream = sys.stderr if stream is None else stream
        self._live = self._stream.isatty()
        self._total, self._first, self._done = total, done, done
        self._began = self._told = monotonic()

    def row(self) -> None:
        """Count a row, and write the line if it is time."""
        self._done += 1
        now = monotonic()
        if now - self._told >= (REDRAW_S if self._live else EVERY_S):
            self._told = now
            self._write()

    def end(self) -> None:
        """Write the last line."""
        self._write()
        if self._live:
            self._stream.write("\n")

    def _write(self) -> None:
        line = progress_line(
            self._done, self._total, now=self._done - self._first, seconds=monotonic() - self._began
        )
        self._stream.write(f"\r{line}\x1b[K" if self._live else f"{line}\n")
        self._stream.flush()
