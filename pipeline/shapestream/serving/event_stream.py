"""Server-sent events of the admin port: one reading of the main loop per second, for all viewers together.

Runs in the thread of the admin port. While there is no viewer, nothing is read. A viewer that falls behind misses
readings, but no batch that is still kept.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from itertools import islice
from typing import Any

import structlog
import trio

from shapestream.web.messages import Buffer

log = structlog.get_logger()

MOST_BATCHES = 512
"""Batches that are kept for viewers: with 50 batches per second, those of ten seconds."""
MOST_VIEWERS = 16
"""Viewers at a time. Each takes a connection, a task, and up to 64 KB/s where batches are many."""
INTERVAL_S = 1.0
"""Seconds between two readings: often enough for an eye, and at about 1 ms each a thousandth of the main loop's time."""


class Feed:
    """The readings, and the viewers of them."""

    def __init__(self, read: Callable[[int], Awaitable[dict[str, Any]]]) -> None:
        """`read`: returns the state with the batches after a number of them; raises TooSlowError."""
        self._read = read
        self._viewers = 0
        self._asked = trio.Event()
        """Set when there is a viewer."""
        self._published = trio.Event()
        """Set by the next reading."""
        self._readings = 0
        self._read_at: float | None = None
        """When the server was last read."""
        self._state: str | None = None
        """The last reading but for the batches: a JSON object. None: no reading since somebody looks."""
        self._batches: deque[list[Any]] = deque(maxlen=MOST_BATCHES)
        self._batches_in_all = 0

    @property
    def full(self) -> bool:
        """Tell whether there is no room for one more viewer."""
        return self._viewers >= MOST_VIEWERS

    async def run(self) -> None:
        """Read while there are viewers, until cancelled."""
        while True:
            if not self._viewers:
                self._forget()
                self._asked = trio.Event()
                await self._asked.wait()
            due = trio.current_time() + INTERVAL_S
            self._publish(await self._reading())
            await trio.sleep_until(due)

    def _forget(self) -> None:
        """Drop the readings: without viewers there are no later ones, so the last one is old to the next viewer."""
        self._state = None
        self._batches.clear()
        self._batches_in_all = 0
        self._read_at = None

    async def _reading(self) -> dict[str, Any]:
        began = trio.current_time()
        try:
            state = await self._read(self._batches_in_all)
        except trio.TooSlowError:
            return self._stalled("the server's event loop does not answer", began)
        except Exception:  # a defect of what is read must not end the health checks
            log.exception("page not read")
            return self._stalled("the server could not be read; its log says why", began)
        self._read_at = trio.current_time()
        return state

    def _stalled(self, why: str, began: float) -> dict[str, Any]:
        """Return what viewers are told instead of a reading. `for_s`: seconds without one."""
        self._read_at = began if self._read_at is None else self._read_at
        return {"stalled": why, "for_s": trio.current_time() - self._read_at}

    def _publish(self, state: dict[str, Any]) -> None:
        self._batches.extend(state.pop("batches", ()))
        self._batches_in_all = state.pop("batches_in_all", self._batches_in_all)
        self._state = json.dumps(state)
        self._readings += 1
        self._published.set()
        self._published = trio.Event()

    async def events(self) -> AsyncGenerator[Buffer, None]:
        """Yield the events of one viewer, as long as it wants more."""
        # A viewer begins with the last reading; where there is none yet, it waits for the first.
        seen, batches = self._readings - (self._state is not None), 0
        self._viewers += 1
        self._asked.set()
        try:
            while True:
                if seen == self._readings:
                    await self._published.wait()
                count = min(len(self._batches), self._batches_in_all - batches)
                new = json.dumps(list(islice(self._batches, len(self._batches) - count, None)))
                seen, batches = self._readings, self._batches_in_all
                yield f'data: {{"batches_in_all":{batches},"batches":{new},"state":{self._state}}}\n\n'.encode()
        finally:
            self._viewers -= 1
