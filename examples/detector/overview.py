"""The demo's picture: the photographs with what was found in them, one circle per detection."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont

from examples.detector.kernels import CHANNELS, blob_radius

_COLUMNS = 4
_TILE_WIDTH, _TILE_HEIGHT = 420, 320
_MARGIN, _CAPTION, _HEADER = 24, 34, 96
_BACKGROUND, _INK, _FAINT = "#14161b", "#eceff4", "#9aa3b2"
# One per channel, small blobs first; told apart with any colour vision (after Okabe and Ito, 2002).
_COLOURS = ("#56b4e9", "#f0e442", "#ff9f1c", "#ff5db1")
_LINE_WIDTH = 2
_SMALLEST_RADIUS = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A photograph and the detector's answer to it."""

    name: str
    pixels: npt.NDArray[np.uint8]
    peaks: npt.NDArray[np.int32]
    """[n, 4]: batch index, channel, y, x."""


def draw(found: Sequence[Found], path: Path) -> None:
    """Writes the overview as PNG."""
    lines = -(-len(found) // _COLUMNS)
    width = _COLUMNS * (_TILE_WIDTH + _MARGIN) + _MARGIN
    height = _HEADER + lines * (_TILE_HEIGHT + _CAPTION + _MARGIN)
    sheet = Image.new("RGB", (width, height), _BACKGROUND)
    _draw_header(ImageDraw.Draw(sheet), width, sum(len(each.peaks) for each in found))
    for number, each in enumerate(found):
        line, column = divmod(number, _COLUMNS)
        left = _MARGIN + column * (_TILE_WIDTH + _MARGIN)
        top = _HEADER + line * (_TILE_HEIGHT + _CAPTION + _MARGIN)
        _draw_tile(sheet, each, left, top)
    path.parent.mkdir(parents=True, exist_ok=True)
    sheet.save(path, optimize=True)


def _draw_header(canvas: ImageDraw.ImageDraw, width: int, detections: int) -> None:
    canvas.text((_MARGIN, 20), "shapestream: what the detector found", _INK, ImageFont.load_default(26))
    canvas.text((_MARGIN, 56), f"{detections} bright blobs", _FAINT, ImageFont.load_default(17))
    font = ImageFont.load_default(17)
    right: float = width - _MARGIN
    for channel in reversed(range(CHANNELS)):
        label = f"radius about {blob_radius(channel):.0f} px"
        right -= canvas.textlength(label, font)
        canvas.text((right, 40), label, _INK, font, anchor="lm")
        right -= 22
        canvas.ellipse((right, 32, right + 14, 46), outline=_COLOURS[channel], width=3)
        right -= 30


def _draw_tile(sheet: Image.Image, found: Found, left: int, top: int) -> None:
    """The photograph, scaled to fit, with its circles, and a caption below."""
    height, width = found.pixels.shape
    scale = min(_TILE_WIDTH / width, _TILE_HEIGHT / height)
    size = round(width * scale), round(height * scale)
    # Circles are drawn at twice the size: Pillow does not smooth them.
    picture = Image.fromarray(found.pixels).convert("RGB")
    picture = picture.resize((2 * size[0], 2 * size[1]), Image.Resampling.LANCZOS)
    canvas = ImageDraw.Draw(picture)
    for _, channel, y, x in found.peaks:
        radius = 2 * max(blob_radius(channel) * scale, _SMALLEST_RADIUS)
        centre_x, centre_y = 2 * (x + 0.5) * scale, 2 * (y + 0.5) * scale
        box = (centre_x - radius, centre_y - radius, centre_x + radius, centre_y + radius)
        canvas.ellipse(box, outline=_COLOURS[channel], width=2 * _LINE_WIDTH)
    picture = picture.resize(size, Image.Resampling.LANCZOS)
    sheet.paste(picture, (left + (_TILE_WIDTH - size[0]) // 2, top + _TILE_HEIGHT - size[1]))

    count = len(found.peaks)
    caption = f"{found.name}, {height} x {width}: {count or 'none'}{' found' if count else ''}"
    centre = left + _TILE_WIDTH / 2, top + _TILE_HEIGHT + _CAPTION / 2
    ImageDraw.Draw(sheet).text(centre, caption, _INK, ImageFont.load_default(18), anchor="mm")
