"""A signal to a thread that waits for a socket."""

from __future__ import annotations

import math
import os
import select

# Longest wait in one piece; poll() takes milliseconds in 31 bits.
MAX_WAIT_S = 1e6
_LONGEST_WAIT_MS = MAX_WAIT_S * 1000


class Wake:
    """A signal that ends the wait of one thread: for a message, for room, or for nothing else. Any thread may `set` it."""

    def __init__(self) -> None:
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)
        os.set_blocking(self._writer, False)
        self._poll = select.poll()
        self._poll.register(self._reader, select.POLLIN)
        self._descriptor: int | None = None
        """The descriptor that the last wait was for, besides the signal."""

    def fileno(self) -> int:
        """Return the descriptor that is readable once the signal is set."""
        return self._reader

    def set(self) -> None:
        """End the present wait, or the next one."""
        try:  # noqa: SIM105 - once per request; `suppress` takes longer than the call
            os.write(self._writer, b"\0")
        except BlockingIOError:
            pass  # it is set more often than the pipe holds

    def clear(self) -> None:
        """Take the signal."""
        try:  # noqa: SIM105 - as above
            os.read(self._reader, 4096)
        except BlockingIOError:
            pass  # it is not set

    def wait(self, timeout_s: float = math.inf, descriptor: int | None = None) -> bool:
        """Wait for the signal, and take it; for so long; or until `descriptor` is readable, and then return True."""
        if descriptor != self._descriptor:
            if self._descriptor is not None:
                self._poll.unregister(self._descriptor)
            if descriptor is not None:
                self._poll.register(descriptor, select.POLLIN)
            self._descriptor = descriptor
        # Rounded up: a wait that ends too early would be begun again at once.
        timeout_ms = max(0.0, timeout_s) * 1000 + 1 if timeout_s < MAX_WAIT_S else _LONGEST_WAIT_MS
        readable = False
        for number, _ in self._poll.poll(timeout_ms):
            if number == self._reader:
                self.clear()
            else:
                readable = True
        return readable

    def close(self) -> None:
        """Give the descriptors back. Only the thread that waits calls this, when no other can `set` any more."""
        os.close(self._reader)
        os.close(self._writer)
