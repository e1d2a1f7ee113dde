"""A client's clock stands still, as in a suspended laptop or virtual machine, and goes on: deadlines hold again soon."""

from __future__ import annotations

import time
from pathlib import Path

import trio
import trio.abc
from tests.pipeline.client.real_server import real_server

import shapestream
from shapestream.errors import DeadlineExceeded

ROW = {"x": [[1.0, 2.0]]}
TRIES = 20
"""Of which the first few may fail, while the server finds out."""


class PausingClock(trio.abc.Clock):
    """The clock of a client's whole event loop."""

    def __init__(self) -> None:
        self.stood_still_s = 0.0

    def start_clock(self) -> None:
        """It runs already."""

    def current_time(self) -> float:
        """Behind real time by all that it stood still."""
        return time.perf_counter() + 1000.0 - self.stood_still_s

    def deadline_to_sleep_time(self, deadline: float) -> float:
        """As long as it does not stand still meanwhile."""
        return deadline - self.current_time()


def tries_until_answered(address: str) -> int:
    """How many requests with a deadline of 2 s it takes to get an answer, after the clock stood still for 5 s."""
    clock = PausingClock()

    async def main() -> int:
        async with shapestream.connect(address) as client:
            await client.infer("double", ROW, deadline=60)
            clock.stood_still_s += 5
            for tries in range(1, TRIES):
                try:
                    await client.infer("double", ROW, deadline=2)
                except DeadlineExceeded:
                    continue
                return tries
        return TRIES

    return trio.run(main, clock=clock)


def test_short_deadlines_hold_again_after_a_clock_stood_still(tmp_path: Path) -> None:
    """The server cannot tell it from a slow way at first; it asks, and the next answer tells."""
    address = f"ipc://{tmp_path}/s"
    with real_server(address):
        assert tries_until_answered(address) < TRIES
