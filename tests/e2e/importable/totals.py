"""A model whose answer is small, however large its input is."""

from __future__ import annotations

from typing import Any

import numpy as np


def of_rows(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The first element of each row and one."""
    return x[:, :1] + 1
