"""Pictures as arrays: the one place that imports Pillow (the extra `[files]`)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shapestream.errors import ConfigurationError
from shapestream_engine.files import open_regular


@dataclass(frozen=True, slots=True, kw_only=True)
class PictureFormat:
    """The form of decoded pictures: u8, by Pillow."""

    mode: str = "rgb"
    """rgb, bgr or l (grey)."""
    layout: str = "hwc"
    """hwc or chw."""

    @classmethod
    def parse(cls, text: str) -> PictureFormat:
        """Read `rgb,hwc`. Raises ValueError."""
        mode, _, layout = text.lower().partition(",")
        if mode not in ("rgb", "bgr", "l") or layout not in ("hwc", "chw"):
            raise ValueError(f"{text!r} is no form of pictures: write rgb,hwc or bgr,chw or l,hwc")
        return cls(mode=mode, layout=layout)

    def __str__(self) -> str:
        return f"{self.mode},{self.layout}"


class Decoder:
    """Decodes pictures to arrays of u8 in one form. Only the first frame of several is read; EXIF turns nothing."""

    def __init__(self, wanted: PictureFormat) -> None:
        """Load Pillow. Raises `ConfigurationError` without it."""
        try:
            from PIL import Image
        except ModuleNotFoundError:
            raise ConfigurationError(["pictures need Pillow (pip install 'shapestream[files]')"]) from None
        self._image = Image
        self._wanted = wanted

    def read(self, path: Path) -> dict[str, Any]:
        """Return the picture as `""`: [height, width, channels] or [channels, height, width].

        Raises OSError for a file that is cut off or no picture, and ValueError for one of too many pixels.
        """
        wanted = self._wanted
        with open_regular(path) as file:
            try:
                with self._image.open(file) as picture:
                    array = np.asarray(picture.convert("L" if wanted.mode == "l" else "RGB"))
            except self._image.DecompressionBombError as error:
                raise ValueError(str(error)) from error
        if wanted.mode == "bgr":
            array = array[:, :, ::-1]
        if array.ndim == 2:
            array = array[:, :, None]
        return {"": np.ascontiguousarray(array.transpose(2, 0, 1) if wanted.layout == "chw" else array)}
