"""Memory of this process against its limit: measured here, judged without a clock or a system call.

A process that passes its limit cannot give back what an engine has allocated for the shapes that it met, so it is
replaced (a worker) or says so (a server with models in its own process). docs/memory.md is the page for users.
"""

from __future__ import annotations

import enum
import os
from collections.abc import Callable
from pathlib import Path

import trio

from shapestream.serving.allocator import give_back_freed_memory

__all__ = ["Verdict", "Watermark", "resident_bytes", "spell_bytes", "watch_memory"]

MEASURE_EVERY_S = 1.0
# So many measurements in a row: a batch that is large for a moment replaces nobody.
PATIENCE = 3
_STATM = Path("/proc/self/statm")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def resident_bytes(statm: Path = _STATM) -> int:
    """The memory of this process that is in RAM. Raises OSError where there is no /proc: the limit needs Linux."""
    return int(statm.read_text().split()[1]) * _PAGE_BYTES


class Verdict(enum.Enum):
    """Meaning of a measurement."""

    BELOW = "below"
    ABOVE = "above"
    """First measurement above in a row: giving freed memory back to the system may be enough."""
    STILL_ABOVE = "still above"
    PASSED = "passed"
    """Above for so long that it will not get better."""


class Watermark:
    """Judge of one measurement after the other against a limit."""

    def __init__(self, limit_bytes: int, patience: int = PATIENCE) -> None:
        self.limit_bytes = limit_bytes
        self._patience = patience
        self._above = 0

    def judge(self, measured_bytes: int) -> Verdict:
        """Judge the next measurement."""
        if measured_bytes <= self.limit_bytes:
            self._above = 0
            return Verdict.BELOW
        self._above += 1
        if self._above >= self._patience:
            return Verdict.PASSED
        return Verdict.ABOVE if self._above == 1 else Verdict.STILL_ABOVE


async def watch_memory(
    limit_bytes: int,
    passed: Callable[[int], None],
    *,
    measure: Callable[[], int] = resident_bytes,
    give_back: Callable[[], object] = give_back_freed_memory,
) -> None:
    """Measure once a second; call `passed` with the measured bytes when the limit is passed, and return then."""
    watermark = Watermark(limit_bytes)
    while True:
        await trio.sleep(MEASURE_EVERY_S)
        measured = measure()
        match watermark.judge(measured):
            case Verdict.ABOVE:
                # It takes the locks of the heaps, a while if they are large: beside the event loop.
                await trio.to_thread.run_sync(give_back)
            case Verdict.PASSED:
                passed(measured)
                return
            case _:
                pass


def spell_bytes(count: int) -> str:
    """Bytes for people, `312 MiB` or `2.5 GiB`; rounded up, so that a setting can hold them."""
    mebibytes = -(-count // (1 << 20))
    return f"{mebibytes} MiB" if mebibytes < 10_240 else f"{mebibytes / 1024:.1f} GiB"
