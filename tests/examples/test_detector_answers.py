"""The demo's checks see what is wrong: a single bit, a missing answer, a run that showed too little."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from examples.detector.answers import Answer, Peaks, Scores, mismatches, shortcomings
from examples.detector.pictures import Picture, Pixels

from shapestream import Timings


def detect(image: Pixels) -> tuple[Peaks, Scores]:
    """Stands in for the model: one peak per row whose first pixel is not 0, its score that pixel."""
    rows = np.flatnonzero(image[:, 0, 0, 0])
    peaks = np.array([[row, 1, 0, 0] for row in rows], dtype=np.int32).reshape(-1, 4)
    return peaks, image[rows, 0, 0, 0].astype(np.float32)


def answer(number: int, *pixels: int, worker: str = "w0/0", company: int = 2) -> Answer:
    """What `detect` says about rows of one pixel each."""
    image = np.array(pixels, dtype=np.uint8).reshape(-1, 1, 1, 1)
    peaks, scores = detect(image)
    timings = Timings(
        queue_us=1, run_us=1, total_us=3, batch_requests=company, batch_rows=company, worker=worker
    )
    picture = Picture(number=number, name="crop", image=image)
    return Answer(picture=picture, peaks=peaks, scores=scores, timings=timings)


GOOD = [answer(0, 7, 9), answer(1, 0, worker="w1/0"), answer(2, 3)]


def test_right_answers_pass() -> None:
    """Rows are compared one by one, each with its own index, and an empty answer is an answer."""
    assert [] == mismatches([*GOOD, answer(3, 0, 5, 0, 6)], detect, "the model")
    assert [] == shortcomings(GOOD, requests=3)


def test_one_bit_is_a_mismatch() -> None:
    """A score that differs in its last bit is reported, with the picture that it belongs to."""
    scores = GOOD[2].scores.copy()
    scores.view(np.uint32)[0] ^= 1
    problems = mismatches([GOOD[0], replace(GOOD[2], scores=scores)], detect, "the model")
    assert 1 == len(problems)
    assert "picture 2" in problems[0]


@pytest.mark.parametrize(
    "change",
    [
        {"peaks": np.array([[1, 1, 0, 0], [1, 1, 0, 0]], dtype=np.int32)},
        {"peaks": GOOD[0].peaks.astype(np.int64)},
        {"peaks": GOOD[0].peaks[:1], "scores": GOOD[0].scores[:1]},
        {"peaks": GOOD[0].peaks[::-1], "scores": GOOD[0].scores[::-1]},
    ],
    ids=["another row", "another element type", "one missing", "another order"],
)
def test_other_differences_are_mismatches(change: dict[str, np.ndarray]) -> None:
    """Rows, types, numbers and order of detections all count."""
    assert 1 == len(mismatches([replace(GOOD[0], **change)], detect, "the model"))


@pytest.mark.parametrize(
    ("answers", "complaint"),
    [
        (GOOD[:2], "2 answers to 3 requests"),
        ([GOOD[0], GOOD[1], GOOD[1]], "answered more than once"),
        ([answer(0, 7), answer(1, 8, worker="w1/0"), answer(2, 3)], "no result was empty"),
        ([answer(0, 7), answer(1, 0), answer(2, 3)], "fewer than two workers took part: w0"),
        (
            [answer(0, 7, company=1), answer(1, 0, worker="w1/0", company=1), answer(2, 3, company=1)],
            "no batch",
        ),
    ],
)
def test_shortcomings_are_named(answers: list[Answer], complaint: str) -> None:
    """A run that lost answers, or showed no batch, no empty result or one worker only, does not pass."""
    problems = shortcomings(answers, requests=3)
    assert 1 == len(problems)
    assert complaint in problems[0]


def test_nothing_at_all_is_no_success() -> None:
    """Without a single answer the run fails rather than passing vacuously."""
    assert "0 answers to 3 requests" in shortcomings([], requests=3)
