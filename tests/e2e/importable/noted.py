"""A model that the tests serve: it writes down each request that it is given, with the time, before it answers."""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

RUN_S = 0.004
_WAITED_S: dict[int, float] = {}
"""By the slot's thread: what this process had waited for a CPU when the last call came."""


def waited_s() -> float:
    """How long the threads of this process, which were ready to run, have waited for a CPU so far, together."""
    total_ns = 0
    for thread in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # it has ended, or the kernel does not count
            total_ns += int((thread / "schedstat").read_text().split()[1])
    return total_ns / 1e9


def noted(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Twice the input and one.

    A row begins with the request's number and its deadline by the clock that all processes of a host share, 0 for none.
    Also written down is for how long a CPU was waited for since the last call: it may have been just before this line.
    """
    now = time.monotonic()
    waited = waited_s()
    since_s = waited - _WAITED_S.get(threading.get_ident(), 0.0)
    _WAITED_S[threading.get_ident()] = waited
    lines = "".join(f"{number:.0f} {now:.6f} {deadline:.6f} {since_s:.6f}\n" for number, deadline in x[:, :2])
    journal = os.open(Path(os.environ["E2E_FOLDER"]) / "journal", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(journal, lines.encode())
    finally:
        os.close(journal)
    time.sleep(RUN_S)
    return x * 2 + 1
