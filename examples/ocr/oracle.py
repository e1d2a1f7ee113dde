"""The bound of all batching: the lines of all pages are known beforehand, and run in the best groups of equal widths."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from examples.ocr import stages
from examples.ocr.alone import Cut, Plain
from examples.ocr.pages import Page

_ROWS = (1, 2, 4, 8, 16)
_WIDTHS = (80, 160, 320, 640, 1280)
_TRIES = 2

Floats = npt.NDArray[np.float32]


def measure_best_rows(plain: Plain) -> dict[int, int]:
    """The rows of a call with the least time per row, for a few widths; each call is timed twice, the faster counts."""
    best = {}
    for width in _WIDTHS:
        seconds = {}
        for rows in _ROWS:
            lines = np.zeros((rows, 3, stages.LINE_HEIGHT, width), np.float32)
            plain.recognise(lines)  # the first call of a shape prepares it
            times = []
            for _ in range(_TRIES):
                began = time.perf_counter()
                plain.recognise(lines)
                times.append(time.perf_counter() - began)
            seconds[rows] = min(times) / rows
        best[width] = min(_ROWS, key=seconds.__getitem__)
    return best


class Oracle:
    """The recorded lines of some pages, in groups of one width; everything before the recogniser runs as it comes."""

    def __init__(self, plain: Plain, pages: Sequence[Page], cut: Cut, best_rows: dict[int, int]) -> None:
        self._plain, self._pages, self._cut = plain, pages, cut
        by_width = defaultdict[int, list[Floats]](list)
        for page in pages:
            for line in plain.lines(page.pixels, cut)[2]:
                by_width[line.shape[2]].append(line)
        self._groups = []
        for width, lines in sorted(by_width.items()):
            rows = best_rows[min(best_rows, key=lambda known: abs(known - width))]
            self._groups += [np.array(lines[first : first + rows]) for first in range(0, len(lines), rows)]

    @property
    def rows_per_call(self) -> float:
        """The mean number of lines in a call."""
        return sum(len(group) for group in self._groups) / len(self._groups)

    def run(self) -> None:
        """Find the lines of all pages, then read the recorded ones."""
        for page in self._pages:
            self._plain.lines(page.pixels, self._cut)
        for group in self._groups:
            for label, likely in zip(*self._plain.recognise(group), strict=True):
                stages.decode(label, likely)
