"""Costs that were learned from traffic, kept on disk for the next server: written once a minute, and at the end.

They are stored beside the measured tables (docs/scheduling.md). Each writing replaces the last one as a whole. It runs in
a thread, since the event loop must not wait for a slow disk.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import structlog
import trio

from shapestream_engine.calibration import CostCache
from shapestream_engine.cost_table import LearnedCosts

log = structlog.get_logger()

KEEP_EVERY_S = 60.0
"""Seconds between two writings. A killed server loses what it learned since the last one."""
CLOSE_GRACE_S = 2.0
"""Seconds to wait for the last writing, for a disk that does not answer."""


class CostKeeper:
    """The learned costs of one server. Only `run` writes, so that no older state can replace a newer one."""

    def __init__(self, cache: CostCache) -> None:
        self._cache = cache
        self._kept: dict[str, int] = {}
        """Batches that the last written costs were learned from, by table."""
        self._closing = trio.Event()
        self._closed = trio.Event()

    def read(self) -> Mapping[str, LearnedCosts]:
        """Read the costs that earlier servers have written, by table."""
        found = self._cache.all_learned()
        log.debug("learned costs read", tables=len(found))
        return found

    async def run(self, learned: Callable[[float], Sequence[LearnedCosts]]) -> None:
        """Write the costs that `learned` returns, until closed or cancelled. It gets the time in seconds since the epoch."""
        last = False
        while not last:
            with trio.move_on_after(KEEP_EVERY_S):
                await self._closing.wait()
            last = self._closing.is_set()
            known = learned(time.time())
            news = [one for one in known if self._kept.get(one.table) != one.batches]
            if news:
                await trio.to_thread.run_sync(self._write, news, abandon_on_cancel=True)
            self._kept = {one.table: one.batches for one in known}
        self._closed.set()

    async def aclose(self) -> None:
        """End `run` after a last writing, or after `CLOSE_GRACE_S` seconds."""
        self._closing.set()
        with trio.move_on_after(CLOSE_GRACE_S) as scope:
            await self._closed.wait()
        if scope.cancelled_caught:
            log.warning("learned costs not kept", why=f"not written within {CLOSE_GRACE_S:g} s")

    def _write(self, news: Sequence[LearnedCosts]) -> None:
        for one in news:
            self._cache.keep_learned(one)
