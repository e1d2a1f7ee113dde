"""No process outlives the one that started it, whatever it does when that ends.

The parent holds the writing end of a pipe, which the kernel closes when it ends, even by SIGKILL. A thread that waits for
that is not enough: a call that holds the interpreter, such as a regular expression without end, holds that thread, too.
"""

from __future__ import annotations

import fcntl
import os
import signal
from contextlib import suppress


def die_with_writer(pipe: int) -> None:
    """Let the kernel kill this process when `pipe` is written to, or its last writer has gone.

    What is no pipe is left alone, and what has ended before is not noticed: a thread that reads it is still needed.
    """
    with suppress(OSError):
        fcntl.fcntl(pipe, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(pipe, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)
