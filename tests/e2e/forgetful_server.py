"""`shapestream serve` that remembers a few hundred stories and few replies, so that both are full before a soak is warm.

With `LEAK` in the environment its event loop keeps 1.5 KiB of each turn for good, which the soak must find.
"""

from __future__ import annotations

import os
from functools import partial

import trio
from tests.e2e.changed_server import change

from shapestream.serving import stories
from shapestream_workers.__main__ import main

LEAK = "SOAK_LEAKS"
REMEMBERED = 256
"""Requests, instead of 16,384: they take 0.2 MB at most, instead of 14."""


class Leak(trio.abc.Instrument):
    """Keeps something of each turn."""

    def __init__(self) -> None:
        self._kept: list[bytes] = []

    def before_io_wait(self, timeout: float) -> None:
        """Keep it; written, so that it is resident."""
        self._kept.append(bytes(bytearray(1536)))


if __name__ == "__main__":
    if not stories.MOST_ANSWERED > REMEMBERED:
        raise AssertionError("there are fewer stories than the soak expects")
    stories.MOST_ANSWERED = REMEMBERED
    change(kept_bytes=8 << 20, kept_s=5.0)
    if LEAK in os.environ:
        trio.run = partial(trio.run, instruments=[Leak()])  # what the command calls
    main()
