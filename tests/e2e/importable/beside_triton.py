"""The functions that Triton and a server of ours both serve, for the comparison of their answers."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def sort(a: Array) -> dict[str, Array]:
    """Each row, sorted."""
    return {"sorted": np.sort(a)}


def places(a: Array) -> dict[str, Array]:
    """The places of a picture that are not zero: their number depends on the data."""
    return {"places": np.argwhere(a).astype(np.int64)}


def scale(x: Array, k: Array) -> dict[str, Array]:
    """Each row times its own integer, and the number of its elements that are not zero."""
    return {
        "scaled": x * k.astype(np.float32),
        "count": np.count_nonzero(x, axis=1, keepdims=True).astype(np.int32),
    }


def same(**arrays: Array) -> dict[str, Array]:
    """All inputs, by names that end in _out."""
    return {f"{name}_out": array.copy() for name, array in arrays.items()}


def root(x: Array) -> dict[str, Array]:
    """The square root: NaN for negative numbers, and infinity stays infinity."""
    with np.errstate(invalid="ignore"):
        return {"y": np.sqrt(x)}


def fail(x: Array) -> dict[str, Array]:
    """Raise for 13, else the input."""
    if (x == 13).any():
        raise ValueError("thirteen is not taken")
    return {"y": x.copy()}
