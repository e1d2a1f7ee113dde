"""Memory of this process against its limit, measured once a second.

A process that passes its limit cannot give back what an engine has allocated for the shapes that it met, so it is
replaced (a worker) or says so (a server with models in its own process). docs/reliability.md is the page for users.
"""

from __future__ import annotations

from collections.abc import Callable

import trio

from shapestream.serving.allocator import give_back_freed_memory
from shapestream_engine.machine import resident_bytes

MEASURE_EVERY_S = 1.0
# Measurements in a row above the limit: a batch that is large for a moment is no reason.
PATIENCE = 3


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
            # Giving freed memory back may be enough. It takes the locks of the heaps: beside the event loop.
            await trio.to_thread.run_sync(give_back)
        elif above >= PATIENCE:
            passed(measured)
            return


def spell_bytes(count: int) -> str:
    """Return the bytes for people, `312 MiB` or `2.5 GiB`; rounded up, so that a setting can hold them."""
    mebibytes = -(-count // (1 << 20))
    return f"{mebibytes} MiB" if mebibytes < 10_240 else f"{mebibytes / 1024:.1f} GiB"
