"""The stages of a chain: boxes of a picture, their crops, and what is read of each."""

from __future__ import annotations

from typing import Any

import gated
import numpy as np

Array = np.ndarray[Any, Any]
BAD = 251
"""A red channel of only this value cannot be read."""


def find(image: Array) -> Array:
    """As many boxes (top, left, height, width) as the first pixel says, at places that its blue decides."""
    count = int(image[0, 0, 0]) % 201
    random = np.random.default_rng(int(image[..., 2].astype(np.int64).sum()))
    top, left = random.integers(0, image.shape[0] - 2, count), random.integers(0, image.shape[1] - 2, count)
    high, wide = random.integers(1, 3, count), random.integers(1, 3, count)
    return np.stack([top, left, high, wide], 1).astype(np.int64)


def crop(image: Array, boxes: Array) -> dict[str, Any]:
    """The boxes' pixels."""
    return {
        "images": [image[top : top + high, left : left + wide] for top, left, high, wide in boxes.tolist()]
    }


def read(image: Array) -> Array:
    """The sum and the largest of each picture of a batch."""
    if (image[..., 0] == BAD).all(axis=(1, 2)).any():
        raise ValueError("it cannot be read")
    flat = image.reshape(len(image), -1).astype(np.float32)
    return np.stack([flat.sum(1), flat.max(1)], 1)


def find_when_open(x: Array) -> Array:
    """Twice the input, once the gate is open."""
    return gated.double_when_open(x)
