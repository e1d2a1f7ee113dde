"""The chain's example: crops at the border, and a recogniser that knows which way edges run."""

from __future__ import annotations

from typing import Any

import numpy as np
import openvino as ov
import pytest
from examples.reading.crops import crop
from examples.reading.model import DIRECTIONS, build


def test_crops_end_at_the_border_and_come_from_their_row() -> None:
    """One array per peak, as large as its blob allows."""
    image = np.zeros((2, 1, 60, 80), np.uint8)
    image[1] = 9
    peaks = np.array([[0, 0, 30, 40], [1, 0, 0, 0], [1, 3, 59, 79]], np.int32)
    crops = crop(image, peaks)["crops"]
    assert [0, 9, 9] == [int(each.max()) for each in crops]
    whole, corner, other = (each.shape for each in crops)
    assert whole[1] == whole[2] == 2 * corner[1] - 1 == 2 * corner[2] - 1
    assert other[1] > corner[1]
    assert [] == crop(image, peaks[:0])["crops"]


@pytest.fixture(scope="module")
def read() -> Any:
    """The model, compiled."""
    return ov.Core().compile_model(build(), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})


@pytest.mark.parametrize("direction", range(4))
@pytest.mark.parametrize("size", [9, 40])
def test_stripes_are_read_by_the_way_they_run(read: Any, direction: int, size: int) -> None:
    """Of each direction, in crops of any size."""
    y, x = np.mgrid[:size, :size]
    along = (y, x + y, x, x - y)[direction]
    stripes = ((along // 3 % 2) * 200).astype(np.uint8)
    edges = read(stripes[None, None])["edges"][0]
    assert DIRECTIONS[direction] == DIRECTIONS[int(edges.argmax())]
