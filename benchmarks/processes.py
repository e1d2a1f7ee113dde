"""Child processes under measurement: start, CPU time, end.

As a program it computes for as long as stdin says, in seconds of CPU per line: `python -m benchmarks.processes`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

from shapestream import ShapestreamError, blocking
from shapestream_workers.lab.serving import end_child

STOP_GRACE_S = 30.0
START_S = 180.0
"""Compiling, proving where nothing is proved yet, calibrating."""
_POLL_S = 0.05


def cpu_s(pid: int) -> float:
    """User + system time of a process with all its threads, in seconds; raises OSError where it has ended.

    The number of the clock is Linux's own, as `clock_getcpuclockid` makes it; psutil would count ticks of 10 ms.
    """
    return time.clock_gettime((~pid << 3) | 2)


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
        """CPU time used so far, in seconds."""
        return cpu_s(self.pid)

    def loop_cpu_s(self) -> float:
        """CPU time used so far by the main thread, where a server's event loop runs, and ZeroMQ's, in seconds."""
        return sum(
            int((thread / "schedstat").read_text().split()[0]) * 1e-9
            for thread in Path(f"/proc/{self.pid}/task").iterdir()
            if thread.name == str(self.pid) or (thread / "comm").read_text().startswith("ZMQ")
        )

    def children_cpu_s(self) -> float:
        """The same, summed over the process's own children that are alive: a server's workers."""
        return sum(cpu_s(child.pid) for child in self._handle.children(recursive=True))


@contextmanager
def child_process(
    arguments: Sequence[str],
    *,
    log: Path,
    environment: Mapping[str, str] | None = None,
    python: str | Path = sys.executable,
) -> Iterator[Child]:
    """Runs `python ARGUMENTS` until the block ends; its output goes to the file `log`.

    `environment` is added to this process's own, and gives way to it, but for the folders of PYTHONPATH, which come before.
    `python` is this process's own by default.
    """
    added = dict(environment or {})
    folders = [part["PYTHONPATH"] for part in (added, os.environ) if part.get("PYTHONPATH")]
    path = {"PYTHONPATH": os.pathsep.join(folders)} if folders else {}
    with log.open("wb") as sink:
        process = subprocess.Popen(
            [python, *arguments],
            stdout=sink,
            stderr=sink,
            env={"SHAPESTREAM_ANY_FUNCTION": "1", **added, **os.environ, **path},
        )
        try:
            yield Child(process)
        finally:
            end_child(process, STOP_GRACE_S)


def wait_for_slots(child: Child, address: str, slots: int, log: Path) -> None:
    """Until a server has so many slots; before that it may be busy with its models, and not listen yet.

    Raises RuntimeError with the end of its log if it ended, or takes longer than `START_S`.
    """
    give_up_at = time.monotonic() + START_S
    while not _has_slots(address, slots):
        if child.ended or time.monotonic() > give_up_at:
            raise RuntimeError(f"the server did not start:\n{log.read_text(errors='replace')[-4000:]}")
        time.sleep(_POLL_S)


def _has_slots(address: str, slots: int) -> bool:
    try:
        with blocking.connect(address, connect_timeout=2.0) as client:
            return len(client.statistics()["slots"]) >= slots  # a wide slot is one more
    except ShapestreamError:
        return False


def spin(seconds: float) -> None:
    """Use so many seconds of CPU in this thread."""
    until_s = time.thread_time() + seconds
    while time.thread_time() < until_s:
        pass


if __name__ == "__main__":
    for _line in sys.stdin:
        spin(float(_line))
