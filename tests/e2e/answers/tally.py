"""The counts of one client process. They lie in a mapped file, so that they outlive a killed process."""

from __future__ import annotations

import os
from enum import IntEnum, auto
from pathlib import Path

import numpy as np
from tests.e2e.answers.models import Question


class Count(IntEnum):
    """What is counted."""

    ASKED = 0
    ANSWERED = auto()
    WITHDRAWN = auto()
    EXPIRED = auto()
    WRONG = auto()
    """Among the answered."""
    MODEL_ERROR = auto()
    REFUSED = auto()
    """Another failure than was asked for."""
    LOST = auto()
    """Not ended within the patience."""
    DUPLICATED = auto()
    """Ended a second time."""


ENDS = (Count.ANSWERED, Count.WITHDRAWN, Count.EXPIRED, Count.MODEL_ERROR, Count.REFUSED, Count.LOST)
DEFECTS = (Count.WRONG, Count.MODEL_ERROR, Count.REFUSED, Count.LOST, Count.DUPLICATED)
NOTES = "notes"
"""The file beside the tallies that says what each defect looked like."""


class Tally:
    """Counts of one client; one process writes, others may read."""

    def __init__(self, path: Path, *, mode: str = "r+") -> None:
        self.counts = np.memmap(path, np.int64, mode, shape=(len(Count),))  # type: ignore[call-overload]
        self._path = path
        self._notes = path.with_name(NOTES)

    def add(self, what: Count, number: int = 1) -> None:
        """Count."""
        self.counts[what] += number

    def note(self, what: Count, question: Question, words: str, number: int = 1) -> None:
        """Count a defect, and write down what it looked like."""
        self.add(what, number)
        line = f"{self._path.name} {what.name.lower()}: {question.model.name} {question.x.shape}: {words}\n"
        file = os.open(self._notes, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(file, line.encode())
        os.close(file)

    def failed(self, question: Question, code: str, message: str, *, hurried: bool, withdrawn: bool) -> None:
        """A failure: what it counts as depends on what was asked for."""
        if hurried and code in ("deadline_exceeded", "overloaded"):  # foreseen that it would pass
            self.add(Count.EXPIRED)
        elif code == "cancelled" and withdrawn:
            self.add(Count.WITHDRAWN)
        elif code == "model_error":
            self.note(Count.MODEL_ERROR, question, message)
        else:
            self.note(Count.REFUSED, question, f"{code}: {message}")

    def answered(self, question: Question, outputs: dict[str, np.ndarray]) -> None:  # type: ignore[type-arg]
        """A result, which is compared."""
        self.add(Count.ANSWERED)
        if words := question.difference(outputs):
            self.note(Count.WRONG, question, words)
