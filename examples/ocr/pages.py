"""Pages of text, drawn here: many fonts, sizes, angles and inks, columns of up to 200 lines, and pages without any.

The fonts are those of matplotlib (DejaVu, STIX) and Pillow's own; nothing of the machine, so that a seed draws the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import matplotlib
import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont

SEED = 48
_FONTS = (
    "DejaVuSans", "DejaVuSans-Bold", "DejaVuSans-Oblique", "DejaVuSansMono", "DejaVuSansMono-Bold", "DejaVuSerif",
    "DejaVuSerif-Bold", "DejaVuSerif-Italic", "STIXGeneral", "STIXGeneralBol", "STIXGeneralItalic", None,
)  # fmt: skip
_WORDS = (
    "account amount address balance before between capital carried changes company contract customer date delivered "
    "department discount document during eleven estimate exchange figure forward freight garden general harbour hundred "
    "increase interest invoice journey kitchen ledger letter library machine market measure message minutes number office "
    "order package payment percent picture please premium present produce quality quantity railway receipt reference "
    "remain report request return river saturday season second service seven shipping signature street subject summer "
    "surface telephone thousand together total town traffic transfer under value village volume voyage water weather "
    "weight window winter within without yellow "
)
# Width and height in pixels; few, as scanners and cameras have few.
_SIZES = ((736, 960), (960, 736), (896, 1184))
_LONG_SIZE, _LONG_COLUMNS, _LONG_ROWS = (1408, 1856), 4, 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A line as it was drawn."""

    text: str
    centre: tuple[float, float]  # x, y in pixels


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """A page: pixels [height, width, 3], and the lines on it."""

    name: str
    pixels: npt.NDArray[np.uint8]
    lines: tuple[Line, ...]


def draw_pages(count: int, *, seed: int = SEED) -> list[Page]:
    """So many pages; every eighth is empty, and of 16 or more the last but one has 200 lines."""
    rng = np.random.default_rng(seed)
    pages = [_draw(number, rng, empty=number % 8 == 7) for number in range(count)]
    if count >= 16:
        pages[-2] = _draw_long(count - 2, rng)
    return pages


def _draw(number: int, rng: np.random.Generator, *, empty: bool) -> Page:
    size = _SIZES[rng.integers(len(_SIZES))]
    paper, ink = _colours(rng)
    sheet = Image.new("RGB", size, paper)
    canvas = ImageDraw.Draw(sheet)
    lines = []
    y = float(rng.integers(40, 90))
    while not empty and y < size[1] - 80:
        points = int(rng.choice([15, 18, 20, 24, 28, 34, 44, 56]))
        font = _font(int(rng.integers(len(_FONTS))), points)
        left = float(rng.integers(40, 90))
        text = _text(rng, font, size[0] - left - 50)
        if text:
            canvas.text((left, y), text, ink, font)
            lines.append(Line(text=text, centre=_middle(canvas.textbbox((left, y), text, font))))
        y += points * float(rng.uniform(1.7, 2.6))
    # Every third page lies askew; every fifth is upside down.
    degrees = float(rng.uniform(-6, 6)) if number % 3 == 1 else 0.0
    degrees += 180 if number % 5 == 3 else 0
    sheet = sheet.rotate(degrees, Image.Resampling.BICUBIC, fillcolor=paper)
    return _finished(f"page {number}", sheet, lines, degrees, rng)


def _draw_long(number: int, rng: np.random.Generator) -> Page:
    """Columns of short lines, 200 in all."""
    sheet = Image.new("RGB", _LONG_SIZE, "white")
    canvas = ImageDraw.Draw(sheet)
    lines = []
    wide, high = (_LONG_SIZE[0] - 60) / _LONG_COLUMNS, (_LONG_SIZE[1] - 80) / _LONG_ROWS
    for cell in range(_LONG_COLUMNS * _LONG_ROWS):
        column, row = divmod(cell, _LONG_ROWS)
        font = _font(int(rng.integers(len(_FONTS))), 18)
        at = (40 + column * wide, 40 + row * high)
        text = _text(rng, font, wide - 60)
        canvas.text(at, text, "black", font)
        lines.append(Line(text=text, centre=_middle(canvas.textbbox(at, text, font))))
    return _finished(f"page {number}", sheet, lines, 0.0, rng)


def _finished(
    name: str, sheet: Image.Image, lines: list[Line], degrees: float, rng: np.random.Generator
) -> Page:
    """The page with a camera's noise, and its lines where the turned sheet has them."""
    pixels = np.asarray(sheet, np.float32) + rng.normal(0, 3, (*sheet.size[::-1], 1)).astype(np.float32)
    sine, cosine = math.sin(math.radians(degrees)), math.cos(math.radians(degrees))
    middle_x, middle_y = sheet.width / 2, sheet.height / 2

    def turned(line: Line) -> Line:
        x, y = line.centre[0] - middle_x, line.centre[1] - middle_y
        return Line(
            text=line.text, centre=(middle_x + cosine * x + sine * y, middle_y - sine * x + cosine * y)
        )

    return Page(
        name=name,
        pixels=np.clip(pixels, 0, 255).astype(np.uint8),
        lines=tuple(turned(line) for line in lines),
    )


def _text(rng: np.random.Generator, font: ImageFont.FreeTypeFont, room: float) -> str:
    """Words and numbers that are at most so many pixels wide; none where not even the first fits."""
    text = ""
    for _ in range(int(rng.integers(1, 9))):
        word = str(rng.choice(_WORDS.split()))
        kind = rng.random()
        if kind < 0.2:
            word = f"{rng.integers(1, 100000) / 100:.2f}"
        elif kind < 0.4:
            word = word.capitalize()
        elif kind < 0.5:
            word = f"{word}{rng.choice([',', '.', ':', ';'])}"
        longer = f"{text} {word}".strip()
        if font.getlength(longer) > room:
            break
        text = longer
    return text


def _colours(rng: np.random.Generator) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Paper and ink: dark on light, on one page of four light on dark."""
    light = tuple(int(value) for value in rng.integers(215, 256, 3))
    dark = tuple(int(value) for value in rng.integers(0, 70, 3))
    return (dark, light) if rng.random() < 0.25 else (light, dark)


def _middle(box: tuple[float, float, float, float]) -> tuple[float, float]:
    left, top, right, bottom = box
    return (left + right) / 2, (top + bottom) / 2


@cache
def _font(number: int, points: int) -> ImageFont.FreeTypeFont:
    name = _FONTS[number]
    if name is None:
        font = ImageFont.load_default(points)
        assert isinstance(font, ImageFont.FreeTypeFont)  # Pillow without FreeType has small bitmaps alone
        return font
    return ImageFont.truetype(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / f"{name}.ttf", points)
