"""Child processes under measurement: start, CPU time, end."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

STOP_GRACE_S = 30.0


class Child:
    """A running child process; `cpu_s` is user + system time of all its threads, in seconds."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self._handle = psutil.Process(process.pid)

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def ended(self) -> bool:
        """Whether it is gone already."""
        return self._process.poll() is not None

    def cpu_s(self) -> float:
        """CPU time used so far, in seconds (the kernel counts it in ticks of 10 ms: measure over seconds)."""
        times = self._handle.cpu_times()
        return float(times.user + times.system)

    def children_cpu_s(self) -> float:
        """The same, summed over the process's own children that are alive: a server's workers."""
        total = 0.0
        for child in self._handle.children(recursive=True):
            times = child.cpu_times()
            total += float(times.user + times.system)
        return total


@contextmanager
def child_process(arguments: Sequence[str], *, log: Path) -> Iterator[Child]:
    """Runs `python ARGUMENTS` until the block ends; its output goes to the file `log`."""
    with log.open("wb") as sink:
        process = subprocess.Popen([sys.executable, *arguments], stdout=sink, stderr=sink)
        try:
            yield Child(process)
        finally:
            process.terminate()
            try:
                process.wait(STOP_GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
