"""Server-sent events of the admin port: one reading of the main loop per second, for all viewers together.

Runs in the thread of the admin port. While there is no viewer, nothing is read. A viewer that falls behind misses
readings, but no batch that is still kept.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Awaitable, Callable, MutableMapping
from itertools import islice
from typing import Any, TypeAlias

import structlog
import trio

log = structlog.get_logger()

MOST_BATCHES = 512
"""Batches that are kept for viewers: with 50 batches per second, those of ten seconds."""
MOST_VIEWERS = 16
"""Viewers at a time. Each takes a connection, a task, and up to 64 KB/s where batches are many."""
INTERVAL_S = 1.0
"""Seconds between two readings: often enough for an eye, and at about 1 ms each a thousandth of the main loop's time."""
UNREAD_S = 10.0
"""Seconds that an event may wait to be sent; then its viewer is given up."""

Message: TypeAlias = MutableMapping[str, Any]
"""One of ASGI."""


class Feed:
    """The readings, and the viewers of them. `serve` is an ASGI application."""

    def __init__(self, read: Callable[[int], Awaitable[dict[str, Any]]]) -> None:
        """`read` gives the state, with the batches after the first so many; raises TooSlowError."""
        self._read = read
        self._viewers = 0
        self._asked = trio.Event()
        """Set when there is a viewer."""
        self._published = trio.Event()
        """Set by the next reading."""
        self._readings = 0
        self._read_at: float | None = None
        """When the server was last read."""
        self._state = "{}"
        """The last reading but for the batches: a JSON object."""
        self._batches: deque[list[Any]] = deque(maxlen=MOST_BATCHES)
        self._batches_in_all = 0

    @property
    def full(self) -> bool:
        """Whether there is no room for one more viewer."""
        return self._viewers >= MOST_VIEWERS

    async def run(self) -> None:
        """Read while there are viewers, until cancelled."""
        while True:
            if not self._viewers:
                self._asked = trio.Event()
                await self._asked.wait()
                self._batches.clear()
                self._batches_in_all = 0
                self._read_at = None  # nothing is known of the time without viewers
            due = trio.current_time() + INTERVAL_S
            self._publish(await self._reading())
            await trio.sleep_until(due)

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
        """Return what is told instead of a reading; `for_s`: seconds without one, while there were viewers."""
        self._read_at = began if self._read_at is None else self._read_at
        return {"stalled": why, "for_s": trio.current_time() - self._read_at}

    def _publish(self, state: dict[str, Any]) -> None:
        self._batches.extend(state.pop("batches", ()))
        self._batches_in_all = state.pop("batches_in_all", self._batches_in_all)
        self._state = json.dumps(state)
        self._readings += 1
        self._published.set()
        self._published = trio.Event()

    async def serve(
        self,
        scope: Message,
        receive: Callable[[], Awaitable[Message]],
        send: Callable[[Message], Awaitable[None]],
    ) -> None:
        """Answer one viewer, until it leaves or does not read."""
        headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-store")]
        start = {"type": "http.response.start", "status": 200, "headers": headers}
        if scope["method"] == "HEAD":
            await send(start)
            await send({"type": "http.response.body"})
            return
        # The first viewer waits for a reading; another one begins with the last.
        seen = self._readings - (self._viewers > 0)
        self._viewers += 1
        self._asked.set()
        try:
            await send(start)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._tell, send, seen, nursery.cancel_scope)
                while (await receive())["type"] != "http.disconnect":
                    pass
                nursery.cancel_scope.cancel()
        finally:
            self._viewers -= 1

    async def _tell(
        self, send: Callable[[Message], Awaitable[None]], seen: int, viewer: trio.CancelScope
    ) -> None:
        batches = 0
        while True:
            if seen == self._readings:
                await self._published.wait()
            count = min(len(self._batches), self._batches_in_all - batches)
            new = json.dumps(list(islice(self._batches, len(self._batches) - count, None)))
            event = (
                f'data: {{"batches_in_all":{self._batches_in_all},"batches":{new},"state":{self._state}}}\n\n'
            )
            seen, batches = self._readings, self._batches_in_all
            with trio.move_on_after(UNREAD_S) as patience:
                await send({"type": "http.response.body", "body": event.encode(), "more_body": True})
            if patience.cancelled_caught:
                viewer.cancel()
