"""The demo's workload: the photographs that scikit-image carries in its wheel, and crops of them; nothing is downloaded."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from skimage import data

Pixels = npt.NDArray[np.uint8]

# Those in the wheel itself; others would be fetched, which needs the package `pooch`.
PHOTOGRAPHS = (
    "coins",
    "hubble_deep_field",
    "rocket",
    "astronaut",
    "coffee",
    "camera",
    "gravel",
    "chelsea",
    "moon",
    "clock",
    "page",
    "text",
)
# Height and width of the crops, in pixels.
CROP_SIZES = (
    (48, 64),
    (64, 64),
    (64, 96),
    (80, 80),
    (96, 96),
    (96, 128),
    (100, 150),
    (128, 128),
    (120, 160),
    (160, 120),
    (144, 192),
    (168, 256),
)
# One crop request in so many carries two or three rows.
ROWS_EVERY = 8
SEED = 2026


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """One request: a photograph, or crops of one size, as rows of `image [rows, 1, height, width]`."""

    number: int
    name: str
    """The photograph that it shows, or `crop`."""
    image: Pixels

    @property
    def is_crop(self) -> bool:
        """Whether this is part of a photograph, or parts of several."""
        return self.name == "crop"

    @property
    def size(self) -> tuple[int, int]:
        """Height and width in pixels."""
        return self.image.shape[2], self.image.shape[3]


def load_photographs() -> dict[str, Pixels]:
    """The photographs by name, in grey: [height, width]."""
    return {name: _grey(getattr(data, name)()) for name in PHOTOGRAPHS}


def make_workload(photographs: dict[str, Pixels], *, crops_per_size: int) -> list[Picture]:
    """Each photograph once, and many crops of each size, shuffled; the same ones every time."""
    rng = random.Random(SEED)
    shown = [(name, pixels[None, None]) for name, pixels in photographs.items()]
    shown += [
        ("crop", rows) for size in CROP_SIZES for rows in _crops(photographs, size, crops_per_size, rng)
    ]
    rng.shuffle(shown)
    return [Picture(number=number, name=name, image=image) for number, (name, image) in enumerate(shown)]


def _crops(
    photographs: dict[str, Pixels], size: tuple[int, int], count: int, rng: random.Random
) -> Iterator[Pixels]:
    """Requests of crops of one size; the rows of one request come from different photographs."""
    height, width = size
    for number in range(count):
        rows = 1 if number % ROWS_EVERY else rng.choice((2, 3))
        sources = rng.sample(sorted(photographs), rows)
        yield np.stack([_cut(photographs[name], height, width, rng)[None] for name in sources])


def _cut(pixels: Pixels, height: int, width: int, rng: random.Random) -> Pixels:
    top = rng.randint(0, pixels.shape[0] - height)
    left = rng.randint(0, pixels.shape[1] - width)
    return pixels[top : top + height, left : left + width]


def _grey(pixels: Pixels) -> Pixels:
    """Luma of ITU-R BT.601 in integers, so that it is the same everywhere; grey pictures stay as they are."""
    if pixels.ndim == 2:
        return pixels
    weights = np.array([77, 150, 29], dtype=np.uint32)
    return (pixels[..., :3].astype(np.uint32) @ weights >> 8).astype(np.uint8)
