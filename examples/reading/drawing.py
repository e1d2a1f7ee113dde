"""The example's picture: photographs, with a box around each blob in the colour of the way it runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont

from examples.reading.crops import box_of
from examples.reading.model import DIRECTIONS

_COLUMNS, _TILE, _MARGIN, _CAPTION, _HEADER = 4, (420, 320), 24, 30, 80
_BACKGROUND, _INK, _FAINT = "#14161b", "#eceff4", "#9aa3b2"
# One per direction; told apart with any colour vision (after Okabe and Ito, 2002).
_COLOURS = ("#56b4e9", "#f0e442", "#ff9f1c", "#ff5db1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """A photograph, and the chain's answer."""

    name: str
    pixels: npt.NDArray[np.uint8]
    peaks: npt.NDArray[np.int32]
    edges: npt.NDArray[np.float32]


def draw(answers: Sequence[Read], path: Path) -> None:
    """Writes the sheet as PNG."""
    (wide, high), lines = _TILE, -(-len(answers) // _COLUMNS)
    size = (_COLUMNS * (wide + _MARGIN) + _MARGIN, _HEADER + lines * (high + _CAPTION + _MARGIN))
    sheet = Image.new("RGB", size, _BACKGROUND)
    canvas = ImageDraw.Draw(sheet)
    canvas.text((_MARGIN, 24), "shapestream: which way the blobs run", _INK, ImageFont.load_default(26))
    left = float(size[0] - _MARGIN)
    font = ImageFont.load_default(17)
    for direction, colour in reversed([*zip(DIRECTIONS, _COLOURS, strict=True)]):
        left -= canvas.textlength(direction, font)
        canvas.text((left, 40), direction, _INK, font, anchor="lm")
        canvas.rectangle((left - 22, 33, left - 8, 47), outline=colour, width=3)
        left -= 48
    for number, answer in enumerate(answers):
        line, column = divmod(number, _COLUMNS)
        place = (_MARGIN + column * (wide + _MARGIN), _HEADER + line * (high + _CAPTION + _MARGIN))
        tile = _tile(answer)
        sheet.paste(tile, (place[0] + (wide - tile.width) // 2, place[1] + (high - tile.height) // 2))
        canvas.text(
            (place[0], place[1] + high + 6), f"{answer.name}: {len(answer.peaks)} crops", _FAINT, font
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    sheet.save(path, optimize=True)


def _tile(answer: Read) -> Image.Image:
    height, width = answer.pixels.shape
    scale = min(_TILE[0] / width, _TILE[1] / height)
    tile = Image.fromarray(answer.pixels).convert("RGB").resize((round(width * scale), round(height * scale)))
    canvas = ImageDraw.Draw(tile)
    for peak, edges in zip(answer.peaks, answer.edges, strict=True):
        top, left, bottom, right = (scale * side for side in box_of(peak, height, width))
        canvas.rectangle((left, top, right - 1, bottom - 1), outline=_COLOURS[int(edges.argmax())], width=2)
    return tile
