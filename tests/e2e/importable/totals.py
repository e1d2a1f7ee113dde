"""A model whose answer is small, however large its input is."""

from __future__ import annotations

from typing import Any

import numpy as np


def of_rows(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The first element of each row and one."""
    return x[:, :1] + 1


def brightness(picture: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The sum over a picture [batch, height, width, channels], each channel times its place, from 1."""
    places = np.arange(1, picture.shape[3] + 1, dtype=np.int64)
    return np.asarray((picture * places).sum(axis=(1, 2, 3)))


def sum_of(x: np.ndarray[Any, Any], z: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The sum of two inputs."""
    return x + z
