"""A model that the tests serve: it keeps a piece of memory for every request, as engines do for every shape."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

_KEPT: list[np.ndarray[Any, Any]] = []


def hoard(x: np.ndarray[Any, Any]) -> dict[str, np.ndarray[Any, Any]]:
    """Twice the input and the process that answered; costs a quarter of a megabyte per row for good."""
    _KEPT.append(np.ones((len(x), 1 << 18), np.int8))
    return {"y": x * 2, "pid": np.full((len(x),), os.getpid(), np.int64)}
