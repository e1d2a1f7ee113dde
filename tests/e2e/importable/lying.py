"""A model that the tests serve: it does not always count what it gives."""

from __future__ import annotations

from typing import Any

import numpy as np


def counted(x: np.ndarray[Any, Any]) -> dict[str, np.ndarray[Any, Any]]:
    """Each row's first number as often as it says; the second is added to the count alone."""
    return {"number": x[:, 0] + x[:, 1], "found": np.repeat(x[:, 0], x[:, 0])}
