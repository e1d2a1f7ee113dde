"""What came back for a picture, and whether it is right: to the bit, and as a whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from examples import coverage
from examples.detector.pictures import Picture, Pixels
from shapestream import Timings

Peaks = npt.NDArray[np.int32]
Scores = npt.NDArray[np.float32]
Detector: TypeAlias = Callable[[Pixels], tuple[Peaks, Scores]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The server's result for one picture."""

    picture: Picture
    peaks: Peaks
    scores: Scores
    timings: Timings


def mismatches(answers: Iterable[Answer], detect: Detector, by: str) -> list[str]:
    """What differs, by a single bit, from `detect` run on each row of each picture alone; `by` names it."""
    found = []
    for answer in answers:
        peaks, scores = _row_by_row(answer.picture.image, detect)
        if _same(answer.peaks, peaks) and _same(answer.scores, scores):
            continue
        shape = list(answer.picture.image.shape)
        found.append(
            f"picture {answer.picture.number} ({answer.picture.name}, {shape}): {len(answer.peaks)} detections, "
            f"{len(peaks)} by {by}; peaks or scores differ"
        )
    return found


def shortcomings(answers: Sequence[Answer], *, requests: int) -> list[str]:
    """What the run as a whole did not show, and should have."""
    found = coverage.shortcomings([answer.timings for answer in answers], requests=requests)
    numbers = {answer.picture.number for answer in answers}
    if len(numbers) < len(answers):
        found.append(f"{len(answers) - len(numbers)} pictures were answered more than once")
    if all(len(answer.peaks) for answer in answers):
        found.append("no result was empty")
    return found


def _row_by_row(image: Pixels, detect: Detector) -> tuple[Peaks, Scores]:
    """The detections of each row as if it had come alone, with the row's own index in column 0."""
    all_peaks, all_scores = [], []
    for index in range(len(image)):
        peaks, scores = detect(image[index : index + 1])
        all_peaks.append(peaks + np.array([index, 0, 0, 0], dtype=peaks.dtype))
        all_scores.append(scores)
    return np.concatenate(all_peaks), np.concatenate(all_scores)


def _same(one: npt.NDArray[np.generic], other: npt.NDArray[np.generic]) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
