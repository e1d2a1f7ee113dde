"""Compare the memory of this process with its limit, once a second.

A process cannot give back the memory that an engine has allocated for the shapes so far. So a worker that passes its limit
is replaced. A server with models in its own process logs a warning. docs/reliability.md is the page for users.
"""

from __future__ import annotations

from collections.abc import Callable

import trio

from shapestream.serving.allocator import give_back_freed_memory
from shapestream_engine.machine import resident_bytes

MEASURE_EVERY_S = 1.0
PATIENCE = 3
"""Measurements in a row above the limit before it counts as passed: a single large batch must not count."""


async def watch_memory(
    limit_bytes: int,
    passed: Callable[[int], None],
    *,
    measure: Callable[[], int] = resident_bytes,
    give_back: Callable[[], object] = give_back_freed_memory,
) -> None:
    """Measure once a second; call `passed` with the measured bytes when the limit is passed, and return then."""
    above = 0
    while True:
        await trio.sleep(MEASURE_EVERY_S)
        measured = measure()
        above = above + 1 if measured > limit_bytes else 0
        if above == 1:
            # This may be enough. It locks the heaps, so it runs in a thread beside the event loop.
            await trio.to_thread.run_sync(give_back)
        elif above >= PATIENCE:
            passed(measured)
            return


def spell_bytes(count: int) -> str:
    """Return the bytes for people, `312 MiB` or `2.5 GiB`; rounded up, so that a setting can hold them."""
    mebibytes = -(-count // (1 << 20))
    return f"{mebibytes} MiB" if mebibytes < 10_240 else f"{mebibytes / 1024:.1f} GiB"
