"""A model that some inputs make raise anything, mostly no `Exception`, or end the slot's thread after its answer."""

from __future__ import annotations

import asyncio
import ctypes
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import trio


class PanicException(BaseException):
    """As PyO3 has it: derived from `BaseException`."""


class Mute(BaseException):
    """An error that has no message to give."""

    def __str__(self) -> str:
        raise PanicException("no words")


def cancelled() -> BaseException:
    """The exception by which trio ends a task; nobody else can make one."""
    caught: list[BaseException] = []

    async def main() -> None:
        with trio.CancelScope() as scope:
            scope.cancel()
            try:
                await trio.lowlevel.checkpoint()
            except trio.Cancelled as error:
                caught.append(error)
                raise

    trio.run(main)
    return caught[0]


RAISED: dict[int, Callable[[], BaseException]] = {
    101: lambda: PanicException("index out of bounds"),
    102: lambda: KeyboardInterrupt(),
    103: lambda: SystemExit(3),
    104: lambda: GeneratorExit(),
    105: lambda: asyncio.CancelledError("too slow"),
    106: cancelled,
    107: lambda: Mute(),
    108: lambda: sys.exit(0),  # type: ignore[func-returns-value]
    109: lambda: ValueError("no such row"),
}
"""What the model raises, by the number that a request holds."""
END_THREAD = 200


def raising(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Twice the input."""
    for number, made in RAISED.items():
        if (x == number).any():
            raise made()
    if (x == END_THREAD).any():
        # After the answer, when the thread is idle: CPython raises this in it as soon as it wakes up.
        ident = ctypes.c_ulong(threading.get_ident())
        end = ctypes.pythonapi.PyThreadState_SetAsyncExc
        threading.Timer(0.5, end, (ident, ctypes.py_object(SystemExit))).start()
    return x * 2


def panicking(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Twice the input, of a single row."""
    if len(x) > 1:
        raise PanicException("one row at a time")
    return x * 2
