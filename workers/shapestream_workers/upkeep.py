"""What a process that lives long does beside its work: it watches its memory, and tells systemd that it lives.

Memory is compared with its limit once a second.

A process cannot give back the memory that an engine has allocated for the shapes so far. So a worker that passes its limit
is replaced. A server with models in its own process logs a warning. docs/reliability.md is the page for users.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable

import structlog
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


log = structlog.get_logger()


def notify(state: str) -> None:
    """Send an assignment such as `READY=1`."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.setblocking(False)
        try:
            # "@" stands for the zero byte of an abstract socket.
            sender.sendto(state.encode(), address.replace("@", "\0", 1) if address[0] == "@" else address)
        except OSError as error:
            log.warning("systemd was not told", state=state, why=str(error))


def watchdog_s() -> float | None:
    """Return the seconds within which systemd expects a sign of life; None where it expects none of this process."""
    if os.environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return None
    given = os.environ.get("WATCHDOG_USEC", "")
    return int(given) * 1e-6 if given.isascii() and given.isdigit() and int(given) else None


async def tend_watchdog(standstill: Callable[[], str | None]) -> None:
    """Send signs of life from the event loop until cancelled, except while `standstill` returns a reason."""
    expected_s = watchdog_s()
    while expected_s is not None:
        if standstill() is None:
            notify("WATCHDOG=1")
        await trio.sleep(expected_s / 3)
