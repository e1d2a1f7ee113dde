"""The model of a chaos run, as workers serve it: it knows each answer, checks what arrives, and tells the ledger.

A row of `x` holds, as i64: the token of its request, its deadline in microseconds of CLOCK_MONOTONIC (0: none), how long
it takes to compute in microseconds, what to do, its own length, the CRC-32 of what follows, and then any numbers.
"""

from __future__ import annotations

import os
import signal
import threading
import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from tests.e2e.chaos.witness import Witness

HEADER = 6
TOKEN, DEADLINE, WORK, DEED, LENGTH, CHECKSUM = range(HEADER)
DO_NOTHING, DIE, HANG = range(3)
FOLDER_VARIABLE = "E2E_FOLDER"
"""The environment variable that holds the folder of the run."""
SLOW = 10
"""How many times longer everything takes in a process for which a file `slow-PID` is there."""
LONG_S = 3600.0

_own = threading.local()
"""Of a slot's thread: its connection to the ledger, and how long its process had waited for a CPU at its last call."""


def answer_to(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """What the model answers; the client computes it too."""
    return x * 31 + 7


def rows(
    token: int, deadline_us: int, work_us: int, deed: int, payload: np.ndarray[Any, Any]
) -> np.ndarray[Any, Any]:
    """The input of one request: one row per row of the payload."""
    x = np.empty((len(payload), HEADER + payload.shape[1]), np.int64)
    x[:, HEADER:] = payload
    x[:, :CHECKSUM] = (token, deadline_us, work_us, deed, x.shape[1])
    x[:, CHECKSUM] = [zlib.crc32(row.tobytes()) for row in payload]
    return x


def waited_s() -> float:
    """How long the threads of this process, which were ready to run, have waited for a CPU so far, together."""
    total_ns = 0
    for thread in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # it has ended, or the kernel does not count
            total_ns += int((thread / "schedstat").read_text().split()[1])
    return total_ns / 1e9


def checked(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Tells the ledger when it begins and ends; takes as long as its longest row asks for."""
    return _told(x, answer_to, step="checked")


def split(x: np.ndarray[Any, Any]) -> dict[str, list[np.ndarray[Any, Any]]]:
    """The first stage of the chain, told alike: each row by itself, without what others need to be as long."""
    return {"rows": _told(x, lambda x: [row[: int(row[LENGTH])].copy() for row in x], step="split")}


def restore(y: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The last stage of the chain, told alike: what was asked, from its answers."""
    return _told((y - 7) // 31, lambda x: x, step="restore")


def _told(x: np.ndarray[Any, Any], compute: Callable[[np.ndarray[Any, Any]], Any], *, step: str) -> Any:
    at = time.monotonic()
    witness = getattr(_own, "witness", None)
    if witness is None:
        witness = _own.witness = Witness()
        _own.waited_s = 0.0
    pid, x = os.getpid(), x.copy()
    tokens = [int(token) for token in x[:, TOKEN]]
    before_s, _own.waited_s = _own.waited_s, waited_s()
    witness.tell("run", pid=pid, at=at, tokens=tokens, step=step, waited_s=_own.waited_s - before_s)
    corrupt = [token for token, row in zip(tokens, x, strict=True) if not _sound(row)]
    if corrupt:
        witness.tell("corrupt", pid=pid, tokens=corrupt)
    if (x[:, DEED] == DIE).any():
        os.kill(pid, signal.SIGKILL)
    if (x[:, DEED] == HANG).any():
        time.sleep(LONG_S)
    slow = (Path(os.environ[FOLDER_VARIABLE]) / f"slow-{pid}").exists()
    time.sleep(int(x[:, WORK].max()) * 1e-6 * (SLOW if slow else 1))
    y = compute(x)
    witness.tell("ran", pid=pid, at=time.monotonic(), tokens=tokens)
    return y


def _sound(row: np.ndarray[Any, Any]) -> bool:
    """Whether a row arrived as it was sent, padding apart."""
    return zlib.crc32(row[HEADER : int(row[LENGTH])].tobytes()) == int(row[CHECKSUM])
