"""SIGTERM and SIGINT before an event loop receives them: while models are read, compiled, proved and measured.

The first signal raises KeyboardInterrupt in the main thread, so that `finally` blocks run. A call of an engine, or a thread
that is waited for, may delay that; then the process ends after `TIDY_UP_S`. A server and a worker have nothing to finish at
that time, so their status is 0, as after any other first signal. The status of a command that prints an answer is 1.

    obey          at the beginning of the command
    handed_over   around `trio.run`: signals are kept until its receiver is ready, and then raised again
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FrameType

from shapestream_workers import EXIT_OK, EXIT_RUNTIME

TIDY_UP_S = 1.0
"""Seconds from the signal to the end of the process, whatever the main thread does."""
STATUSES = {
    "serve": EXIT_OK,
    "worker": EXIT_OK,
    "gateway": EXIT_OK,
    "check": EXIT_RUNTIME,
    "models": EXIT_RUNTIME,
}
"""The commands that compile models, and their status when a signal ends them before they serve."""


class _Interruption:
    """The handlers of this process, until an event loop has its own."""

    def __init__(self, command: str) -> None:
        self.status = STATUSES[command]
        self._told = False
        self._interrupted = False
        self._hands_over = False
        self._kept: list[int] = []
        # An early SIGHUP waits until the server can reload. It ends other commands, as it ends any program.
        reloads = (signal.SIGHUP,) if command == "serve" else ()
        self._before = {
            number: handler
            for number in (signal.SIGTERM, signal.SIGINT, *reloads)
            if (handler := signal.getsignal(number)) is not signal.SIG_IGN
        }
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        for number in self._before:
            signal.signal(number, self._obey)
        signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._watch, name="interruption", daemon=True).start()

    def _obey(self, number: int, frame: FrameType | None) -> None:
        if self._hands_over or number == signal.SIGHUP:
            self._kept.append(number)
        elif not self._interrupted:
            self._interrupted = True
            raise KeyboardInterrupt

    def _watch(self) -> None:
        """End the process soon after a signal. It reaches this thread at once, and the main thread later."""
        while numbers := self._reader.recv(64):
            if not {signal.SIGTERM, signal.SIGINT}.isdisjoint(numbers):
                time.sleep(TIDY_UP_S)
                self.tell()
                os._exit(self.status)

    def tell(self) -> None:
        """Say once that it was a signal."""
        if not self._told:
            self._told = True
            os.write(2, b"interrupted\n")

    @contextmanager
    def handed_over(self) -> Iterator[Callable[[], None]]:
        """Keep signals, yield a function that raises the kept ones again, and restore the earlier handlers at the end."""
        self._hands_over = True
        signal.set_wakeup_fd(-1)
        self._writer.close()  # the thread ends

        def raise_kept() -> None:
            kept, self._kept = self._kept, []
            for number in kept:
                signal.raise_signal(number)

        try:
            yield raise_kept
        finally:
            for number, handler in self._before.items():
                signal.signal(number, handler)


_current: _Interruption | None = None


def obey(command: str) -> None:
    """Let signals end this command from now on, if it is one that compiles models. Call it from the main thread, once."""
    global _current  # noqa: PLW0603 - signals belong to the process
    if command in STATUSES:
        _current = _Interruption(command)


def interrupted() -> int:
    """Say so; return the status of a command that ends by KeyboardInterrupt.

    CPython 3.11 marks a KeyboardInterrupt that leaves an `exec` of text (dataclasses use it while they are imported) as
    unhandled, and ends the process by SIGINT although it was caught. The next `exec` of text takes the mark away.
    """
    exec("")
    if _current is None:
        print("interrupted", file=sys.stderr)
        return EXIT_RUNTIME
    _current.tell()
    return _current.status


def handed_over() -> AbstractContextManager[Callable[[], None]]:
    """Keep signals while `trio.run` starts. Yields the function to call once the event loop receives signals."""
    return nullcontext(lambda: None) if _current is None else _current.handed_over()
