"""What happens to freed memory: it stays with the process while it serves, and goes back when idle or short of memory.

A server and a worker allocate a buffer for every large frame and every large result. By default glibc maps and
unmaps them, or trims its heaps, and each new page then costs a fault and 4 KiB of zeros: at 1 MB per request
that was a third of the server's CPU time, and 1.4 times the throughput went with it. After a peak (an endless message,
slow readers) the same memory would be kept for nothing.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path
from typing import Any

IDLE_BYTES = 160 * 1024 * 1024
"""Kept by a server without work: its programs and Python's own heap are some 80 MiB of it."""

# mallopt(3): parameters, and the largest threshold that a 64-bit glibc takes.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_MMAP_THRESHOLD_BYTES = 32 * 1024 * 1024
_TRIM_THRESHOLD_BYTES = 256 * 1024 * 1024


def keep_freed_memory() -> bool:
    """Keep freed memory, in a process that serves. Call it once, at its start. Returns whether the C library took it.

    Up to 256 MiB per heap stay with the process after a peak; buffers beyond 32 MiB are mapped as before. Does
    nothing where the C library is not glibc.
    """
    mallopt = _of_the_c_library("mallopt")
    if mallopt is None:
        return False
    taken = [
        mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES),
        mallopt(_M_TRIM_THRESHOLD, _TRIM_THRESHOLD_BYTES),
    ]
    return all(taken)


def give_back_freed_memory(above_bytes: int = 0) -> bool:
    """Hand freed memory back to the kernel if more than this is resident and not in use by C code. Returns whether it did.

    For a process that is short of memory, or without work. Takes the locks of the heaps one after the other, for
    20 to 30 ms where 100 MiB are free: not on the hot path. The look alone costs some 20 us.
    """
    malloc_trim = _of_the_c_library("malloc_trim")
    if malloc_trim is None or (above_bytes and _resident_and_unused_bytes(above_bytes) <= above_bytes):
        return False
    return bool(malloc_trim(0))


def _resident_and_unused_bytes(above_bytes: int) -> int:
    """0 where it cannot be told. Only a large process asks the C library, which then looks at each free piece."""
    mallinfo2 = _of_the_c_library("mallinfo2")
    if mallinfo2 is None or (resident := _resident_bytes()) <= above_bytes:
        return 0
    mallinfo2.restype = _Mallinfo2
    heaps = mallinfo2()
    return resident - int(heaps.uordblks) - int(heaps.hblkhd)


class _Mallinfo2(ctypes.Structure):
    """mallinfo(3), of all heaps together."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
        )
    )  # fmt: skip


def _resident_bytes() -> int:
    """0 where it cannot be told."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 0  # no descriptor is left to look with
    return pages * os.sysconf("SC_PAGE_SIZE")


def _of_the_c_library(name: str) -> Any:
    """A function of glibc, None where there is none."""
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None
