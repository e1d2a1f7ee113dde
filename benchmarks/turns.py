"""The turns of event loops in other processes, for `benchmarks.floods` and `benchmarks.attacks`.

A turn is the CPU time of the loop's thread between two waits. A process writes its longest turn into a file, which the
benchmark maps, reads, and sets to 0 before each attack.

With a profile, the functions of the longest turn above `PROFILED_S` are written beside it, with the CPU time of each garbage
collection. cProfile slows functions in Python down several times: such turns are not to be compared with others.
"""

from __future__ import annotations

import cProfile
import gc
import io
import mmap
import pstats
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import trio

PROFILED_S = 0.005
"""Turns up to the aim of `benchmarks.attacks` are not told."""
TOLD_FUNCTIONS = 12
"""Functions of a turn that are told, by their own time."""
_LONGEST, _PROFILE = ".turns", ".profile"


class Turns(trio.abc.Instrument):
    """The longest turn of an event loop, in a file that another process reads and sets to 0."""

    def __init__(self, folder: Path, name: str, *, profiles: bool = False) -> None:
        path = folder / f"{name}{_LONGEST}"
        path.write_bytes(struct.pack("d", 0.0))
        self._longest = _mapped(path)
        self._began = 0.0
        self._told = path.with_suffix(_PROFILE)
        self._profile = cProfile.Profile(time.thread_time) if profiles else None
        self._collections: list[str] = []
        self._collection_began = 0.0
        if profiles:
            gc.callbacks.append(self._collected)

    def after_io_wait(self, timeout: float) -> None:
        """Begin a turn."""
        self._began = time.thread_time()
        if self._profile is not None:
            self._profile.enable()

    def before_io_wait(self, timeout: float) -> None:
        """End it."""
        if self._profile is not None:
            self._profile.disable()
        took = time.thread_time() - self._began
        if self._began and took > struct.unpack("d", self._longest[:])[0]:
            self._longest[:] = struct.pack("d", took)
            if self._profile is not None and took > PROFILED_S:
                self._tell(took)
        if self._profile is not None:
            self._profile.clear()
            self._collections.clear()

    def _tell(self, took: float) -> None:
        told = io.StringIO()
        stats: Any = pstats.Stats(self._profile, stream=told)
        stats.strip_dirs().sort_stats("tottime").print_stats(TOLD_FUNCTIONS)
        lines = [line for line in told.getvalue().splitlines() if line.strip()]
        self._told.write_text("\n".join([f"{took * 1e3:.1f} ms of CPU", *self._collections, *lines]) + "\n")

    def _collected(self, phase: str, info: Mapping[str, int]) -> None:
        if phase == "start":
            self._collection_began = time.thread_time()
            return
        took_ms = (time.thread_time() - self._collection_began) * 1e3
        if took_ms > 0.1:
            self._collections.append(f"a collection of generation {info['generation']}: {took_ms:.1f} ms")


def longest_turn_s(folder: Path, *, reset: bool = False) -> tuple[float, str]:
    """The longest turn of all event loops since the last reset, and its loop's name."""
    longest, name = 0.0, ""
    for path in folder.glob(f"*{_LONGEST}"):
        turns = _mapped(path)
        longest, name = max((longest, name), (struct.unpack("d", turns[:])[0], path.stem))
        if reset:
            turns[:] = struct.pack("d", 0.0)
            path.with_suffix(_PROFILE).unlink(missing_ok=True)
    return longest, name


def profiles_in(folder: Path) -> dict[str, str]:
    """What was told of the longest turn of each loop since the last reset, by the loop's name."""
    return {path.stem: path.read_text() for path in sorted(folder.glob(f"*{_PROFILE}"))}


def _mapped(path: Path) -> mmap.mmap:
    """The 8 bytes of a file, shared between processes."""
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), 8)
