"""Keeps the C library from handing large freed buffers back to the kernel, only to ask for them again.

A server and a worker allocate a buffer for every large frame and every large result. By default glibc maps and
unmaps them, or trims its heaps, and each new page then costs a fault and 4 KiB of zeros: at 1 MB per request
that was a third of the server's CPU time, and 1.4 times the throughput went with it.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path
from typing import Any

__all__ = ["give_back_freed_memory", "give_back_what_is_too_much", "keep_freed_memory"]

# mallopt(3): parameters, and the largest threshold that a 64-bit glibc takes.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_MMAP_THRESHOLD_BYTES = 32 * 1024 * 1024
_TRIM_THRESHOLD_BYTES = 256 * 1024 * 1024
# A server without work keeps so much: its programs and Python's own heap are some 80 MiB of it.
_IDLE_BYTES = 160 * 1024 * 1024


def keep_freed_memory() -> bool:
    """For a process that serves: call it once, at its start. Returns whether the C library took it.

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


def give_back_freed_memory() -> bool:
    """Hands what is free back to the kernel after all, for a process that is short of memory. Returns whether it could.

    Takes the locks of the heaps one after the other, for milliseconds where much is free: not on the hot path.
    """
    malloc_trim = _of_the_c_library("malloc_trim")
    return malloc_trim is not None and bool(malloc_trim(0))


def give_back_what_is_too_much() -> bool:
    """Hands freed memory back if more than `_IDLE_BYTES` of the process are resident and not in use by C code.

    For a moment without work, after a peak: an endless message, slow readers. Returns whether it did. The look costs some
    20 us; only a process that is large enough asks the C library, which then looks at each free piece.
    """
    mallinfo2 = _of_the_c_library("mallinfo2")
    if mallinfo2 is None or (resident := _resident_bytes()) <= _IDLE_BYTES:
        return False
    mallinfo2.restype = _Mallinfo2
    heaps = mallinfo2()
    if resident - heaps.uordblks - heaps.hblkhd <= _IDLE_BYTES:
        return False
    return give_back_freed_memory()


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
