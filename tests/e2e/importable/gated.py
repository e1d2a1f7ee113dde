"""Functions that the tests serve from worker processes; this folder is on their PYTHONPATH."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np


def double_when_open(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Says that this worker is in the middle of a batch, waits for the gate, and returns twice the input."""
    folder = Path(os.environ["E2E_FOLDER"])
    (folder / f"entered-{os.getpid()}").touch()
    give_up_at = time.monotonic() + 600
    while not (folder / "open").exists() and time.monotonic() < give_up_at:
        time.sleep(0.005)
    return x * 2


def double(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Twice the input; an input that holds 13 kills the process, one that holds 14 fails."""
    if (x == 13).any():
        os.kill(os.getpid(), signal.SIGKILL)
    if (x == 14).any():
        raise ValueError("fourteen is not to my liking")
    print("models may print what they like")
    return x * 2


def double_in_silence(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Twice the input, thousands of times; an input that holds 13 kills the process."""
    if (x == 13).any():
        os.kill(os.getpid(), signal.SIGKILL)
    return x * 2


def fourteen(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Fails on everything."""
    raise ValueError("fourteen is not to my liking")


def centred(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The input less the mean of the whole batch, so that a row depends on who else is there."""
    return (x - x.mean()).astype(x.dtype)


def noted_when_open(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The same as `double_when_open`, and writes down each number that it is given, when it begins."""
    with (Path(os.environ["E2E_FOLDER"]) / "begun").open("a") as file:
        file.write("".join(f"{value:g}\n" for value in x[:, 0]))
    return double_when_open(x)


def held(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Twice the input. A number from 100 on is written down when it begins; 100 never ends, 101 lasts two seconds."""
    if (x >= 100).any():
        with (Path(os.environ["E2E_FOLDER"]) / "begun").open("a") as file:
            file.write("".join(f"{value:g}\n" for value in x[:, 0]))
    if (x == 100).any():
        threading.Event().wait()
    if (x == 101).any():
        time.sleep(2.0)
    return x * 2


def double_slowly(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Twice the input, after a time that grows with its size; one that holds 14 fails."""
    time.sleep(0.02 + x.size * 2e-6)
    if (x == 14).any():
        raise ValueError("fourteen is not to my liking")
    return x * 2


def mebibytes(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """As many MiB for each row as its first number says."""
    return np.zeros((len(x), int(x[0, 0]) * 262_144), np.float32)
