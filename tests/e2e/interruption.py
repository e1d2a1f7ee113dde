"""Signals end a command of this folder as Ctrl-C does, so that it ends its servers and clients first."""

from __future__ import annotations

import signal


def obey() -> None:
    """Raise KeyboardInterrupt in the main thread for SIGINT, SIGTERM and SIGHUP, also where a shell has them ignored."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
