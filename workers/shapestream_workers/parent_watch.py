"""Ends of this process that nothing can hold back, least of all a thread inside an engine.

`end_with_parent`: no worker outlives its server, even one that ends by SIGKILL.

The parent holds the writing end of our stdin and never writes. When it dies the kernel closes that end, and a
read returns. A thread waits for it, so that a busy event loop or a long compilation delays nothing, and the kernel sees
to it where even the thread cannot run. Linux'
PR_SET_PDEATHSIG would not do: it fires when the *thread* that started us ends, and trio starts processes from
threads that come and go.
"""

from __future__ import annotations

import os
import threading

from shapestream_engine.parent_pipe import die_with_writer

__all__ = ["EXIT_ORPHANED", "end_with_parent", "exit_after"]

EXIT_ORPHANED = 1


def end_with_parent(stdin: int = 0) -> None:
    """Starts the watch. What `stdin` delivers is thrown away."""
    die_with_writer(stdin)
    threading.Thread(target=_watch, args=(stdin,), name="parent-watch", daemon=True).start()


def exit_after(seconds: float, status: int = 1) -> None:
    """Ends the process by then if it has not ended by itself."""
    timer = threading.Timer(seconds, os._exit, (status,))
    timer.daemon = True
    timer.start()


def _watch(stdin: int) -> None:
    try:
        while os.read(stdin, 4096):
            pass
    except OSError:
        pass
    # Not sys.exit: nothing that this process still holds is of use to anybody.
    os._exit(EXIT_ORPHANED)
