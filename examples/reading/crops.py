"""The stage between the two models: the part of a picture around each blob, as large as the blob."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from examples.detector.kernels import blob_radius

# A crop reaches this much further than the blob.
MARGIN = 1.5


def box_of(peak: npt.NDArray[np.int32], height: int, width: int) -> tuple[int, int, int, int]:
    """Top, left, bottom and right of the part of a picture around a peak (row, channel, y, x)."""
    _, channel, y, x = peak.tolist()
    reach = round(MARGIN * blob_radius(channel))
    return max(0, y - reach), max(0, x - reach), min(height, y + reach + 1), min(width, x + reach + 1)


def crop(image: npt.NDArray[np.uint8], peaks: npt.NDArray[np.int32]) -> dict[str, Any]:
    """One array [1, height, width] per peak, cut out of its row of `image [rows, 1, height, width]`."""
    crops = []
    for peak in peaks:
        top, left, bottom, right = box_of(peak, image.shape[2], image.shape[3])
        crops.append(image[peak[0], :, top:bottom, left:right])
    return {"crops": crops}
