"""The detector in NumPy, in int64 throughout: what the model must compute, to the bit."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from examples.detector.kernels import RADIUS, RESPONSE_SCALE, THRESHOLD, WINDOW, gaussian_kernels


def detect(images: npt.NDArray[np.uint8]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
    """Peaks [n, 4] and scores [n] of images [batch, 1, height, width]."""
    blurred = np.stack(
        [_blur(images[:, 0].astype(np.int64), kernel) for kernel in gaussian_kernels()], axis=1
    )
    response = blurred[:, :-1] - blurred[:, 1:]
    strongest = _largest_around(response.max(axis=1, keepdims=True))
    is_peak = (response == strongest) & (response > THRESHOLD * RESPONSE_SCALE)
    scores = response[is_peak].astype(np.float32) / np.float32(RESPONSE_SCALE)
    return np.argwhere(is_peak).astype(np.int32), scores


def _blur(images: npt.NDArray[np.int64], kernel: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Rows, then columns of [batch, height, width]; the border pixels repeat outwards."""
    height, width = images.shape[1:]
    padded = np.pad(images, ((0, 0), (RADIUS, RADIUS), (RADIUS, RADIUS)), mode="edge")
    rows = sum(weight * padded[:, :, shift : shift + width] for shift, weight in enumerate(kernel))
    return np.asarray(sum(weight * rows[:, shift : shift + height] for shift, weight in enumerate(kernel)))


def _largest_around(response: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The maximum over WINDOW x WINDOW around each pixel of [batch, 1, height, width], inside the border."""
    height, width = response.shape[2:]
    reach = WINDOW // 2
    padded = np.pad(
        response, ((0, 0), (0, 0), (reach, reach), (reach, reach)), constant_values=np.iinfo(np.int64).min
    )
    rows = np.maximum.reduce([padded[..., shift : shift + width] for shift in range(WINDOW)])
    return np.asarray(np.maximum.reduce([rows[..., shift : shift + height, :] for shift in range(WINDOW)]))
