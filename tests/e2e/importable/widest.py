"""A model of twenty inputs, each with a length of its own, that the tests serve: the sum of each row, over all of them."""

from __future__ import annotations

from typing import Any

import numpy as np

INPUTS = 20


def sums(**inputs: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Of each row."""
    total: np.ndarray[Any, Any] = sum(np.sum(value, axis=1, dtype=np.float32) for value in inputs.values())  # type: ignore[assignment] # at least one
    return total


def doubled(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Twice the input."""
    return x * 2
