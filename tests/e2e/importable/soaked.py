"""The models of the soak: one that keeps nothing, and one that leaks, which the soak must find."""

from __future__ import annotations

from typing import Any

import numpy as np

_LEAKED: list[bytes] = []


def plus_one(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The input and one; an input that begins with -1 fails."""
    if (x[:, 0] == -1).any():
        raise ValueError("minus one is not to my liking")
    return x + 1


def plus_one_and_a_leak(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The same, and 4 KiB for good."""
    _LEAKED.append(bytes(bytearray(4096)))
    return plus_one(x)
