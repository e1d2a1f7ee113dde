"""Ends a child process with its parent, whatever the child does.

The parent holds the writing end of a pipe, which the kernel closes when the parent ends, even by SIGKILL. A waiting thread
does not suffice: a call that holds the interpreter, such as an endless regular expression, stops that thread as well.
"""

from __future__ import annotations

import fcntl
import os
import signal
from contextlib import suppress


def die_with_writer(pipe: int) -> None:
    """Let the kernel kill this process when `pipe` is written to or loses its last writer.

    Other files are ignored, and a parent that ended earlier is not noticed, so a reading thread is still needed.
    """
    with suppress(OSError):
        fcntl.fcntl(pipe, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(pipe, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)
