"""Models that company or padding changes only for values that no proof tries, and one that stays with some requests."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
RARE, STAYS = 4.25, 3.25


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


def staying(x: Array) -> Array:
    """Twice the input; what begins with a mark, and runs alone after it ran in company, stays until its process ends."""
    marked = [row.tobytes() for row in x if row[0] == STAYS]
    if len(x) > 1:
        _in_company.update(marked)
    elif _in_company.issuperset(marked) and marked:
        (Path(os.environ["E2E_FOLDER"]) / f"entered-{os.getpid()}").touch()
        while True:
            time.sleep(0.01)
    return x * 2
