"""The demo's workload: what it promises about sizes, repetition and determinism."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from examples.detector.pictures import CROP_SIZES, PHOTOGRAPHS, Pixels, load_photographs, make_workload


@pytest.fixture(scope="module")
def photographs() -> dict[str, Pixels]:
    """Those of the demo."""
    return load_photographs()


def test_photographs_are_grey_bytes(photographs: dict[str, Pixels]) -> None:
    """Every photograph lies in the wheel and comes as [height, width] of u8, within the bounds of the YAML."""
    assert list(PHOTOGRAPHS) == list(photographs)
    for pixels in photographs.values():
        assert np.uint8 == pixels.dtype
        assert all(16 <= size <= 1024 for size in pixels.shape)


def test_workload_is_the_same_every_time(photographs: dict[str, Pixels]) -> None:
    """Two calls give the same pictures in the same order."""
    one, other = (make_workload(photographs, crops_per_size=9) for _ in range(2))
    assert [picture.name for picture in one] == [picture.name for picture in other]
    assert all(np.array_equal(a.image, b.image) for a, b in zip(one, other, strict=True))


def test_sizes_repeat_in_shuffled_order(photographs: dict[str, Pixels]) -> None:
    """Each of twelve crop sizes occurs as often as asked, mixed with the others; each photograph occurs once."""
    pictures = make_workload(photographs, crops_per_size=9)
    crops = [picture.size for picture in pictures if picture.is_crop]
    assert dict.fromkeys(CROP_SIZES, 9) == Counter(crops)
    assert 12 == len(CROP_SIZES)
    assert sorted(PHOTOGRAPHS) == sorted(picture.name for picture in pictures if not picture.is_crop)
    assert sum(one != other for one, other in pairwise(crops)) > len(crops) / 2


def test_some_requests_have_several_rows(photographs: dict[str, Pixels]) -> None:
    """Requests carry one row, mostly, and sometimes two or three that differ."""
    crops = [picture.image for picture in make_workload(photographs, crops_per_size=40) if picture.is_crop]
    rows = Counter(len(image) for image in crops)
    assert {1, 2, 3} == set(rows)
    assert rows[1] > rows[2] + rows[3]
    assert all(not np.array_equal(image[0], image[1]) for image in crops if len(image) > 1)
