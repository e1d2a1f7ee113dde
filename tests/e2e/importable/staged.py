"""Two generations of a function, whose start and whose calls the test holds; what runs is written down."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import numpy as np

RECORDED = 100_000.0
"""The least value of a request; what a proof tries is smaller."""
HELD = 4_000_000.0
"""The least value whose call is held."""


def hold(step: str) -> None:
    """Say that this process has come to a step, and wait until the test lets it go on."""
    folder = Path(os.environ["E2E_FOLDER"])
    (folder / f"at-{step}-{os.getpid()}").touch()
    never = threading.Event()
    while not (folder / f"go-{step}").exists():
        never.wait(0.005)


def _run(x: np.ndarray[Any, Any], factor: int) -> np.ndarray[Any, Any]:
    recorded = x[:, 0][x[:, 0] >= RECORDED]
    if len(recorded):
        with (Path(os.environ["E2E_FOLDER"]) / "runs").open("a") as file:
            file.write("".join(f"{value:.0f}\n" for value in recorded))
    if (x >= HELD).any():
        hold("running")
    return x * factor


def double(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Twice the input: the old generation."""
    return _run(x, 2)


def triple(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Three times the input: the new one."""
    return _run(x, 3)


def triple_in_steps(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The same; its first call, which is one of the proof, is held."""
    if not (x >= RECORDED).any():
        hold("proving")
    return _run(x, 3)
