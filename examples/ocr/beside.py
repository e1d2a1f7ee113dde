"""The package beside the chain: its boxes and texts, and whose texts are nearer to what was drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from rapidocr_onnxruntime import RapidOCR

from examples.ocr.pages import Page

# What the package leaves out of its answers.
LEAST_SCORE = 0.5
MOST_PIXELS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Texts:
    """The lines of a page: corners [lines, 4, 2] and texts, whoever read them."""

    boxes: npt.NDArray[np.float32]
    texts: Sequence[str]


class Package:
    """rapidocr-onnxruntime in this process, with so many threads a call; None: as many as it takes by itself."""

    def __init__(self, threads: int | None) -> None:
        count = -1 if threads is None else threads
        self._read = RapidOCR(intra_op_num_threads=count, inter_op_num_threads=count)

    def read(self, image: npt.NDArray[np.uint8]) -> Texts:
        """Read a page."""
        lines = self._read(image)[0] or []
        boxes = np.array([corners for corners, _, _ in lines], np.float32).reshape(-1, 4, 2)
        return Texts(boxes=boxes, texts=[text for _, text, _ in lines])


def certain(boxes: npt.NDArray[np.int32], texts: Sequence[str], scores: npt.NDArray[np.float32]) -> Texts:
    """The lines that the package would keep."""
    kept = np.flatnonzero(scores >= LEAST_SCORE)
    return Texts(boxes=boxes[kept].astype(np.float32), texts=[texts[number] for number in kept.tolist()])


def agreement(ours: Texts, theirs: Texts) -> tuple[int, int]:
    """How many of our boxes are one of theirs within two pixels, and how many of these have its text."""
    boxes = texts = 0
    for corners, text in zip(ours.boxes, ours.texts, strict=True):
        distances = np.abs(theirs.boxes - corners).max((1, 2), initial=0)
        if len(distances) and distances.min() <= MOST_PIXELS:
            boxes += 1
            texts += theirs.texts[int(distances.argmin())] == text
    return boxes, texts


def mistakes(page: Page, read: Texts) -> tuple[int, int]:
    """Lines that were read otherwise than drawn, and characters to change in them."""
    lines = characters = 0
    for line in page.lines:
        distances = np.hypot(*(read.boxes.mean(1) - line.centre).T)
        text = read.texts[int(distances.argmin())] if len(distances) else ""
        lines += text != line.text
        characters += _changes(line.text, text)
    return lines, characters


def _changes(one: str, other: str) -> int:
    """The least number of characters to insert, delete or replace (Levenshtein's distance)."""
    row = list(range(len(other) + 1))
    for number, character in enumerate(one, 1):
        above, row = row, [number]
        for column, its in enumerate(other):
            row.append(min(above[column + 1] + 1, row[column] + 1, above[column] + (character != its)))
    return row[-1]
