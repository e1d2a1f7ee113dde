"""The memory of a serving process: what is freed, and the pages of what stays.

It keeps freed memory, and returns it to the kernel when it is idle or short of memory.

A server and a worker allocate a buffer for every large frame and every large result. By default glibc maps and unmaps
them, or trims its heaps. Each new page then costs a page fault and 4 KiB of zeros: a third of the server's CPU time at
1 MB per request. Keeping the memory gave 1.4 times the throughput. After a peak (a huge message, slow readers) the kept
memory is useless, so an idle process returns it.

What is loaded stays, in huge pages. A request that comes alone finds nothing of its 1,900 pages of 4 KiB in the processor's
caches, nor their places in the page tables. In pages of 2 MiB the latter are a few dozen.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

IDLE_BYTES = 160 * 1024 * 1024
"""Resident bytes of an idle server below which nothing is returned: code and Python's heap take about 80 MiB."""

HUGE_BYTES = 2 * 1024 * 1024
"""Bytes of a huge page of x86-64, and of arm64 with pages of 4 KiB. Where they are larger, none is joined."""
LEAST_RESIDENT = 0.75
"""Part of such a page that must be in use: the rest is taken, too."""
_MADV_COLLAPSE = 25
"""madvise(2), since Linux 6.1."""

# mallopt(3): parameters, and the largest threshold that a 64-bit glibc takes.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_MMAP_THRESHOLD_BYTES = 32 * 1024 * 1024
_TRIM_THRESHOLD_BYTES = 256 * 1024 * 1024
LARGE_BYTES = 4 * 1024 * 1024
"""Bytes from which a buffer of a gateway is mapped by itself. Bodies of 1 MiB cost a gateway what they did; one of 16 MiB
takes 37 instead of 27 ms of its CPU (two cores, 2026-11-29)."""


def keep_freed_memory() -> bool:
    """Keep freed memory in this process. Call it once, at the start. Returns whether the C library accepted it.

    Up to 256 MiB per heap stay with the process after a peak; buffers above 32 MiB are mapped as before. Does nothing
    if the C library is not glibc.
    """
    mallopt = _of_the_c_library("mallopt")
    if mallopt is None:
        return False
    taken = [
        mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES),
        mallopt(_M_TRIM_THRESHOLD, _TRIM_THRESHOLD_BYTES),
    ]
    return all(taken)


def return_large_buffers() -> bool:
    """Let each large buffer be mapped, and returned to the kernel when it is freed. Returns whether the C library took it.

    For a process that is seldom asked for much. By default glibc raises its threshold to the largest buffer that was freed,
    and `malloc_trim` returns nothing of the end of a heap that is not the main one: a gateway whose ZeroMQ thread had freed
    bodies of 16 MiB kept up to three of them.
    """
    mallopt = _of_the_c_library("mallopt")
    if mallopt is None:
        return False
    return all([mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES), mallopt(_M_TRIM_THRESHOLD, 2 * LARGE_BYTES)])


def give_back_freed_memory(above_bytes: int = 0) -> bool:
    """Return freed memory to the kernel, if more than `above_bytes` is resident and unused by C code.

    Returns whether it did. It takes the locks of the heaps one after the other, for 20 to 30 ms if 100 MiB are free, so it
    does not belong on the hot path. The check alone takes about 20 us.
    """
    malloc_trim = _of_the_c_library("malloc_trim")
    if malloc_trim is None or (above_bytes and _resident_and_unused_bytes(above_bytes) <= above_bytes):
        return False
    return bool(malloc_trim(0))


def join_pages(addresses: Iterable[int]) -> int:
    """Put the memory around these addresses in huge pages, where nearly all of it is in use.

    Return the number of pages that the kernel agreed to; it leaves out those that lie in two mappings. 0 where it cannot do
    it, as Linux before 6.1. Each takes about a millisecond, and up to `1 - LEAST_RESIDENT` of a page more memory.
    """
    madvise = _of_the_c_library("madvise")
    if madvise is None:
        return 0
    madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    page_bytes, joined = os.sysconf("SC_PAGE_SIZE"), 0
    try:
        with Path("/proc/self/pagemap").open("rb", buffering=0) as pagemap:
            for number in {address // HUGE_BYTES for address in addresses}:
                start = number * HUGE_BYTES
                pagemap.seek(start // page_bytes * 8)
                entries = memoryview(pagemap.read(HUGE_BYTES // page_bytes * 8)).cast("Q")
                resident = sum([entry >> 63 for entry in entries])
                if resident >= LEAST_RESIDENT * len(entries):
                    joined += madvise(start, HUGE_BYTES, _MADV_COLLAPSE) == 0
    except (OSError, ValueError):
        return joined  # the kernel shows no page tables
    return joined


def _resident_and_unused_bytes(above_bytes: int) -> int:
    """Return the resident bytes that no C code uses; 0 if unknown. Only a large process asks: the C library walks its
    heaps."""
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
    """Return the resident bytes of this process; 0 if unknown."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 0  # no file descriptor is left
    return pages * os.sysconf("SC_PAGE_SIZE")


@cache
def _of_the_c_library(name: str) -> Any:
    """Return a function of glibc; None if there is none.

    It is kept: each `CDLL` makes a class, which only the collector frees.
    """
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None
