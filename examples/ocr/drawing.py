"""The example's picture: pages with the box of each line, and beside each page what was read, where it was read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib
from PIL import Image, ImageDraw, ImageFont

from examples.ocr.beside import Texts
from examples.ocr.pages import Page

_COLUMNS, _SCALE, _MARGIN, _CAPTION, _HEADER = 2, 0.6, 24, 30, 80
_BACKGROUND, _INK, _FAINT, _PAPER, _BOX = "#14161b", "#eceff4", "#9aa3b2", "#f7f7f4", "#e4572e"


def draw(pages: Sequence[Page], read: Sequence[Texts], path: Path) -> None:
    """Write the sheet as PNG."""
    tiles = [_tile(page, texts) for page, texts in zip(pages, read, strict=True)]
    wide, high = (max(getattr(tile, side) for tile in tiles) for side in ("width", "height"))
    rows = -(-len(tiles) // _COLUMNS)
    size = (_MARGIN + _COLUMNS * (wide + _MARGIN), _HEADER + rows * (high + _CAPTION + _MARGIN))
    sheet = Image.new("RGB", size, _BACKGROUND)
    canvas = ImageDraw.Draw(sheet)
    canvas.text(
        (_MARGIN, 24), "shapestream: pages, and what was read on them", _INK, ImageFont.load_default(26)
    )
    for number, (page, texts, tile) in enumerate(zip(pages, read, tiles, strict=True)):
        row, column = divmod(number, _COLUMNS)
        left, top = _MARGIN + column * (wide + _MARGIN), _HEADER + row * (high + _CAPTION + _MARGIN)
        sheet.paste(tile, (left, top))
        words = f"{page.name}: {len(texts.texts)} lines"
        canvas.text((left, top + tile.height + 6), words, _FAINT, ImageFont.load_default(17))
    path.parent.mkdir(parents=True, exist_ok=True)
    sheet.save(path, optimize=True)


def _tile(page: Page, read: Texts) -> Image.Image:
    height, width = (round(_SCALE * side) for side in page.pixels.shape[:2])
    tile = Image.new("RGB", (2 * width, height), _PAPER)
    tile.paste(Image.fromarray(page.pixels).resize((width, height)), (0, 0))
    canvas = ImageDraw.Draw(tile)
    for corners, text in zip(_SCALE * read.boxes, read.texts, strict=True):
        canvas.polygon([(x, y) for x, y in corners.tolist()], outline=_BOX, width=2)
        canvas.polygon([(width + x, y) for x, y in corners.tolist()], outline=_BOX)
        (left, top), (right, bottom) = corners.min(0).tolist(), corners.max(0).tolist()
        font = _fitting(text, right - left)
        canvas.text((width + left, (top + bottom) / 2), text, "black", font, anchor="lm")
    return tile


def _fitting(text: str, room: float) -> ImageFont.FreeTypeFont:
    """A font in which the text is about as wide as its box."""
    path = Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf"
    points = 20
    return ImageFont.truetype(
        path, max(6, int(points * room / max(1, ImageFont.truetype(path, points).getlength(text))))
    )
