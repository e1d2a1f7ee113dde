"""What the detector computes: its Gaussians and thresholds, shared by the model and by the reference.

Everything is an integer below 2^24, which float32 represents exactly, so the result depends neither on the
order of summation nor on who shares the batch. Two passes over 8-bit pixels with kernels that sum to 256 give
at most 255 * 256 * 256 = 16,711,680 < 2^24 = 16,777,216, and the kernels have no negative weight, so partial
sums stay below.
"""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import numpy.typing as npt

# Each is about 1.6 times the one before, where a difference of Gaussians comes close to the Laplacian (Marr
# and Hildreth, 1980).
SIGMAS = (3.0, 5.0, 8.0, 13.0, 21.0)
# Between neighbours: one difference, one channel each.
CHANNELS = len(SIGMAS) - 1
# Pixels to each side; 2.5 standard deviations of the widest.
RADIUS = 53
KERNEL_SUM = 256
# Responses are this many times the contrast in grey levels.
RESPONSE_SCALE = KERNEL_SUM**2
# A detection stands out by more than so many grey levels ...
THRESHOLD = 16
# ... and is the strongest of all channels in a square of so many pixels.
WINDOW = 21


def gaussian_kernel(sigma: float) -> npt.NDArray[np.int64]:
    """The integer kernel of length 2 * RADIUS + 1: symmetric, sums to KERNEL_SUM.

    Rounding the cumulative distribution, rather than each weight, keeps the sum exact without a spike in the
    middle; the tails beyond RADIUS go to the outermost weights.
    """
    edges = np.arange(-RADIUS - 0.5, RADIUS + 1)
    cumulative = [round(KERNEL_SUM * 0.5 * (1 + math.erf(edge / (sigma * math.sqrt(2))))) for edge in edges]
    cumulative[0], cumulative[-1] = 0, KERNEL_SUM
    return np.array([after - before for before, after in pairwise(cumulative)], dtype=np.int64)


def gaussian_kernels() -> npt.NDArray[np.int64]:
    """One kernel per sigma: [5, 107]."""
    return np.stack([gaussian_kernel(sigma) for sigma in SIGMAS])


def blob_radius(channel: int) -> float:
    """The radius in pixels of the disc to which this channel responds most: sqrt(2) x the mean sigma."""
    return math.sqrt(2 * SIGMAS[channel] * SIGMAS[channel + 1])
