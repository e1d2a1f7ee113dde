"""Guards against two aborts of libzmq 4.3.5, which ends the process at an assertion.

An ipc listener that cannot accept a connection for want of a descriptor aborts (`ipc_listener_t::accept` takes ENFILE,
and asserts on EMFILE; `tcp_listener_t::accept` takes both, and the connection waits). So the server admits no more
clients than fit, and a socket hides its ipc path while few descriptors are left. Existing connections go on; new ones
find no file, and libzmq tries again.

A peer that guesses the next routing id, and connects under it, makes the next ordinary connection abort.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import time
from collections.abc import Callable

import trio

from shapestream.telemetry.logging import get_logger

log = get_logger()

# Descriptors withheld from connections: those in the listener's queue when its path is hidden, those that arrive
# between two looks and while the event loop is late, and files that the process opens. 64 were too few for three
# processes that did nothing but connect: they ended the server in 3 of 4 tries.
RESERVE = 256
# The reserve is at most this part of a small limit.
SMALL_PART = 4
# Connections that libzmq lets wait to be accepted, unless told otherwise.
BACKLOG = 100
# Descriptors that the server opens after its start: listeners, libzmq's own, the loop's.
OWN = 32
# Descriptors per worker process: its connection, its process, its pipe, and one while it is replaced.
PER_WORKER = 4
# Descriptors per slot of a worker: its connection, and another while its process is replaced.
PER_SLOT = 2
# Connections of the admin port, at most: 16 viewers of the page, and as many scrapes, checks and callers that are silent.
MOST_ADMIN = 32
# The same as a part of a small limit.
ADMIN_PART = 8
# Shortest pause between two looks: in it, a flood takes a third of the reserve. A look takes 20 us with 50 open
# descriptors, and 3 ms with 10,000.
LOOK_S = 0.005
# While paths are hidden, the pause is at least so many times the duration of the last look.
LOOK_REST = 100
# Far from the limit the pause is longer: in it, as many connections cannot arrive as are left beyond the reserve. libzmq
# accepted 13,000 to 18,000 per second from a process that did nothing but connect; twice that allows for a late look.
ARRIVALS_PER_S = 40_000
# The longest pause: the limit itself may be lowered from outside, and the process opens files of its own.
MAX_LOOK_S = 0.2


def raise_descriptor_limit() -> None:
    """Raise the limit of open files to the hard limit: each connection takes one, and a shell's usual limit is 1024."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Some systems report a hard limit that they then refuse: it stays as it is there.
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def free_descriptors() -> tuple[int, int] | None:
    """Return the number of free descriptors, and the limit; None without a limit, or where the number is unknown."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return None
    try:
        return limit - len(os.listdir("/proc/self/fd")), limit
    except OSError:
        return None  # not Linux, or not even one is left to look with


def admin_connections() -> int:
    """Return the number of connections that the admin port holds at most."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST_ADMIN if limit == resource.RLIM_INFINITY else min(MOST_ADMIN, limit // ADMIN_PART)


def connections_that_fit(workers: int, slots: int, *, admin: bool) -> int | None:
    """Return the number of clients that fit beside these processes, their slots, the reserve, and an `admin` port.

    None where it is unknown.
    """
    found = free_descriptors()
    if found is None:
        return None
    free, limit = found
    used = OWN + PER_WORKER * workers + PER_SLOT * slots + (admin_connections() if admin else 0)
    return free - used - _reserve(limit)


def _reserve(limit: int) -> int:
    return min(RESERVE, limit // SMALL_PART)


def backlog() -> int:
    """Return the number of connections that may wait to be accepted; they come in after the path is hidden.

    It makes an end rarer, and prevents none: 150 callers at once ended a server with 128 descriptors in 3 of 12 tries with
    libzmq's own 100, in none of 8 with 16; but one with 100 descriptors in 4 of 6 with 12.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return BACKLOG if limit == resource.RLIM_INFINITY else max(1, min(BACKLOG, _reserve(limit) // 2))


def until_reserve_s(free: int, limit: int) -> float:
    """Return the seconds in which no flood of connections can reach the reserve: 0 to `MAX_LOOK_S`."""
    return min(MAX_LOOK_S, max(0, free - _reserve(limit)) / ARRIVALS_PER_S)


class Doorkeeper:
    """Hide listeners while few descriptors are left, by `close` and `open_again`."""

    def __init__(self, close: Callable[[], None], open_again: Callable[[], None]) -> None:
        self._close = close
        self._open_again = open_again
        self.closed = False

    def look(self, free: int, limit: int) -> None:
        """Close or open for this number of free descriptors; opening takes 1.5 times the reserve, against flapping."""
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

    def pause_s(self, free: int, limit: int, took_s: float) -> float:
        """Return the seconds until the next look, after one that took `took_s`. A costly look must not hide a flood."""
        return max(LOOK_S, LOOK_REST * took_s if self.closed else until_reserve_s(free, limit))

    async def run(self) -> None:
        """Look in intervals, until cancelled."""
        pause_s = LOOK_S
        while True:
            await trio.sleep(pause_s)
            began = time.perf_counter()
            found = free_descriptors()
            took_s = time.perf_counter() - began
            if found is None:
                pause_s = MAX_LOOK_S
            else:
                self.look(*found)
                pause_s = self.pause_s(*found, took_s)


_LIBC = ctypes.CDLL(None)


def seed_routing_ids() -> None:
    """Seed C's rand(), from which libzmq takes the first routing id and which it never seeds.

    Unseeded, the ids are the same in each process. A peer may choose its own routing id, and one that connects under the
    next id aborts the process with the next ordinary connection (assertion "ok", socket_base.cpp).
    """
    _LIBC.srand(ctypes.c_uint(int.from_bytes(os.urandom(4), "little")))
