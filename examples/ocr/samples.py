"""Real inputs of the models, for the proof that their calls may be shared: cut from pages that are drawn here.

python -m examples.ocr.samples     writes .cache/ocr/*.npz, which configs/ocr.yaml names
"""

from __future__ import annotations

import numpy as np

from examples.ocr import models, stages
from examples.ocr.alone import Plain
from examples.ocr.pages import draw_pages

SEED = 7  # pages of no other use
_PAGES, _LINES = 2, 40


def write() -> None:
    """Write what the stages give each other on a few pages."""
    plain = Plain(threads=1)
    pages = draw_pages(_PAGES, seed=SEED)
    pictures, faces, boxes = [], [], []
    lines = list[stages.Floats]()
    for page in pages:
        picture = stages.prepare(page.pixels)["picture"]
        found, _, cut = plain.lines(page.pixels)
        pictures.append(picture)
        boxes.append(found)
        lines.extend(line[None] for line in cut)
        faces.append(stages.find_boxes(page.pixels, plain.detect(picture))["faces"])
    for name, port, arrays in (
        ("pages", "x", pictures),
        ("faces", "x", faces),
        ("boxes", "boxes", boxes),
        ("lines", "x", lines[:_LINES]),
    ):
        np.savez(
            models.FOLDER / f"{name}.npz", **{f"{port}.{number}": each for number, each in enumerate(arrays)}
        )


if __name__ == "__main__":
    write()
