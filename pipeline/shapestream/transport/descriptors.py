"""How near this process is to its limit of open files, and what is done about it before it is reached.

libzmq 4.3.5 ends the whole process when an ipc listener cannot accept a connection for want of a descriptor
(`ipc_listener_t::accept` takes ENFILE, and asserts on EMFILE; `tcp_listener_t::accept` takes both, and the connection
waits). So the server takes no more clients than fit, and a socket hides its ipc path while only a few descriptors are
left: connections go on, new ones find no file, and try again by themselves.
"""

from __future__ import annotations

import contextlib
import os
import resource
import time
from collections.abc import Callable

import structlog
import trio

__all__ = ["Doorkeeper", "connections_that_fit", "free_descriptors", "raise_descriptor_limit"]

log = structlog.get_logger()

# Descriptors that are not left to connections: what may come between two looks, and files that the process itself opens.
RESERVE = 64
# Of a small limit no more than this part is kept back.
SMALL_PART = 4
# What the server itself opens after its start: listeners, libzmq's own descriptors, the loop's.
OWN = 32
# Of each worker process: its connection, its process and its pipe; one more while it is replaced.
PER_WORKER = 4
# Between two looks, at least, and how many times as long as the last look took: it costs 20 us with 50 descriptors open,
# and 3 ms with 10,000.
LOOK_S = 0.02
LOOK_REST = 100


def raise_descriptor_limit() -> None:
    """As many as the system allows this process: each connection takes one, and a shell's usual limit is 1024."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Some systems report a hard limit that they then refuse: it stays as it is there.
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def free_descriptors() -> tuple[int, int] | None:
    """How many files may still be opened, and the limit; None where that cannot be told, or there is none."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return None
    try:
        return limit - len(os.listdir("/proc/self/fd")), limit
    except OSError:
        return None  # not Linux, or not even one is left to look with


def connections_that_fit(workers: int) -> int | None:
    """How many clients fit beside so many worker processes, the reserve included; None where that cannot be told."""
    found = free_descriptors()
    if found is None:
        return None
    free, limit = found
    return free - OWN - PER_WORKER * workers - _reserve(limit)


def _reserve(limit: int) -> int:
    return min(RESERVE, limit // SMALL_PART)


class Doorkeeper:
    """Closes a door while few descriptors are left; `close` and `open_again` move it."""

    def __init__(self, close: Callable[[], None], open_again: Callable[[], None]) -> None:
        self._close = close
        self._open_again = open_again
        self.closed = False

    def look(self, free: int, limit: int) -> None:
        """Decides, and acts. It opens again when half as many more are free, so that it does not flap."""
        reserve = _reserve(limit)
        if not self.closed and free < reserve:
            self.closed = True
            self._close()
            log.warning(
                "no new connections over ipc",
                free_descriptors=free,
                limit=limit,
                advice="raise the limit of open files (ulimit -n), or have fewer clients",
            )
        elif self.closed and free >= reserve + reserve // 2:
            self.closed = False
            self._open_again()
            log.info("new connections over ipc again", free_descriptors=free)

    async def run(self) -> None:
        """Looks now and then, until cancelled."""
        took = 0.0
        while True:
            await trio.sleep(max(LOOK_S, LOOK_REST * took))
            began = time.perf_counter()
            found = free_descriptors()
            took = time.perf_counter() - began
            if found is not None:
                self.look(*found)
