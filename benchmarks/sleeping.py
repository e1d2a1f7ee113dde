"""A model whose calls last exactly as long as they say, and take no CPU: the capacity of its server is known."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

CALL_S = 0.008
ROW_S = 0.004
MOST_ROWS = 8


def sleeping(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The input and one, after a time for the call and for each of its rows."""
    time.sleep(CALL_S + ROW_S * len(x))
    return x + 1


READ_CALL_S = 0.005
READ_ROW_S = 0.001


def reading(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The input, after a shorter time for the call and for each of its rows: a recogniser of crops."""
    time.sleep(READ_CALL_S + READ_ROW_S * len(x))
    return x
