"""Child processes of a tuning run: started, waited for, and ended by their ids, however the run ends.

Each gets a session of its own, so that Ctrl-C reaches the command alone, which then ends them in order.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import trio

__all__ = ["Child", "ChildEnded", "family_bytes", "running"]

GRACE_S = 5.0
"""After SIGTERM; then SIGKILL."""
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_SHOWN_LINES = 6


class ChildEnded(Exception):
    """A child process ended, or had to be ended, before it did what it was for; the message says how."""


class Child:
    """A child process that runs, and the file with what it writes to stderr."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process = process
        self.log = log

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.process.pid

    def last_words(self) -> str:
        """How it ended, and the end of its log."""
        status = self.process.poll()
        if status is None:
            how = "it still ran"
        elif status < 0:
            how = f"ended by {signal.Signals(-status).name}"
        else:
            how = f"ended with status {status}"
        lines = self.log.read_text(errors="replace").splitlines()[-_SHOWN_LINES:]
        return "\n".join([how, *lines])

    async def output(self, timeout_s: float) -> bytes:
        """All that it writes to stdout until its end. Raises `ChildEnded` where that takes longer."""
        assert self.process.stdout is not None  # `running` opened it
        parts: list[bytes] = []
        descriptor = self.process.stdout.fileno()
        with trio.move_on_after(timeout_s) as scope:
            while part := await _read(descriptor):
                parts.append(part)
            await trio.to_thread.run_sync(self.process.wait, abandon_on_cancel=True)
        if scope.cancelled_caught:
            raise ChildEnded(f"not done within {timeout_s:.0f} s")
        return b"".join(parts)


async def _read(descriptor: int) -> bytes:
    await trio.lowlevel.wait_readable(descriptor)
    return os.read(descriptor, 1 << 16)


@contextmanager
@trio.lowlevel.enable_ki_protection
def running(arguments: Sequence[str], log: Path) -> Iterator[Child]:
    """Runs `python -P -m ARGUMENTS` until the block ends; its stdin closes when this process dies.

    Ctrl-C waits while it starts and while it is ended: a process that is half started would be nobody's.
    """
    with log.open("wb") as sink:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=sink,
            start_new_session=True,
        )
    try:
        yield Child(process, log)
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


def family_bytes(pid: int) -> int:
    """Memory of a process and its descendants: what several share is counted once. 0 once it has ended."""
    return sum(map(_held_bytes, [pid, *_descendants(pid)]))


def _held_bytes(pid: int) -> int:
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_BYTES
    except OSError:
        return 0


def _descendants(pid: int) -> list[int]:
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                # "PID (any name) STATE PPID ...": the name may hold anything, parentheses too.
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, IndexError):
                continue
            parents.setdefault(parent, []).append(int(entry.name))
    found: list[int] = []
    wanted = [pid]
    while wanted:
        children = parents.get(wanted.pop(), [])
        found += children
        wanted += children
    return found
