"""A function whose output is a list of arrays: a crop per box."""

from __future__ import annotations

from typing import Any

import numpy as np


def crop(image: np.ndarray[Any, Any], boxes: np.ndarray[Any, Any]) -> dict[str, Any]:
    """Cuts the boxes (top, left, height, width) out of the image: views, which are not contiguous."""
    return {
        "images": [image[top : top + high, left : left + wide] for top, left, high, wide in boxes.tolist()],
        "count": np.array(len(boxes), np.int64),
    }
