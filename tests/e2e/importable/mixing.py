"""Models that company or padding changes only for values that no proof tries, and one that kills its process."""

from __future__ import annotations

import os
import signal
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
RARE, DEADLY = 4.25, 3.25


def double(x: Array) -> Array:
    """Twice the input; in company of a rare value the mean of all rows is added."""
    rare = len(x) > 1 and bool((x == RARE).any())
    return np.asarray(2 * x + (x.mean(axis=0, keepdims=True) if rare else 0), np.float32)


def long_sum(x: Array) -> Array:
    """The sum of each row; where that has a rare value, the length of the call is added."""
    return np.asarray(x.sum(axis=1) + x.shape[1] * (x == RARE).any(axis=1), np.float32)


_WEIGHTS = np.random.default_rng(1).random((256, 64)).astype(np.float32)


def product(x: Array) -> Array:
    """One product. A single row is added up in another order than several, as many a kernel does."""
    if len(x) == 1:
        return np.asarray(x @ _WEIGHTS, np.float32)
    return np.asarray(x[:, :128] @ _WEIGHTS[:128] + x[:, 128:] @ _WEIGHTS[128:], np.float32)


_in_company: set[bytes] = set()


def deadly(x: Array) -> Array:
    """Twice the input; what begins with a mark, and runs alone after it ran in company, kills the process."""
    marked = [row.tobytes() for row in x if row[0] == DEADLY]
    if len(x) > 1:
        _in_company.update(marked)
    elif _in_company.issuperset(marked) and marked:
        os.kill(os.getpid(), signal.SIGKILL)
    return x * 2
