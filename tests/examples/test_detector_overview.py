"""The demo's picture: its circles are where the detections are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from examples.detector.overview import Found, draw
from PIL import Image


def test_circles_are_drawn_where_detections_are(tmp_path: Path) -> None:
    """With a detection the picture gets colour around that place only; without one it stays grey."""
    pixels = np.full((320, 420), 100, np.uint8)
    peaks = np.array([[0, 2, 200, 300]], np.int32)
    nothing = np.empty((0, 4), np.int32)
    sheets = []
    for number, found in enumerate((peaks, nothing)):
        path = tmp_path / f"{number}.png"
        draw([Found(name="even", pixels=pixels, peaks=found)], path)
        sheets.append(np.asarray(Image.open(path)).astype(int))
    # The first tile starts at the left margin, below the header, and has just this size.
    tile, plain = (sheet[96:416, 24:444] for sheet in sheets)
    assert (plain == 100).all()
    coloured = np.argwhere((tile != plain).any(axis=2))
    assert len(coloured) > 0
    assert [200, 300] == coloured.mean(axis=0).round().astype(int).tolist()
    assert np.abs(coloured - [200, 300]).max() <= 17
