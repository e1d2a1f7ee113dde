"""How many elements a call computes, as a float that no size makes infinite.

Sizes are claimed by callers. The product of sixty of them overflows a double long before any of them is too large by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = ["elements_of", "elements_of_many"]

Floats: TypeAlias = NDArray[np.float64]

_MOST = 1 << 400
"""More counts as this. Times a size, and squared where a line is fitted, it is still finite."""


def elements_of(sizes: Sequence[int]) -> float:
    """The product of the sizes of one call, worked out in integers."""
    return float(min(prod(sizes), _MOST))


def elements_of_many(columns: Sequence[NDArray[np.intp]]) -> Floats:
    """The same of many calls; one array per dimension. 1.0 without dimensions."""
    elements = np.asarray(1.0)
    for column in columns:
        elements = np.minimum(elements * column, float(_MOST))
    return elements
