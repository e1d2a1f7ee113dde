"""The program that tells what plain OpenVINO does, and what docs/backends.md says of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.openvino_habits import HABITS, told


def test_the_document_has_a_row_for_each_habit() -> None:
    """In the order of the program; what OpenVINO answered on which CPU is for the program to tell."""
    text = (Path(__file__).parents[2] / "docs" / "backends.md").read_text(encoding="utf-8")
    _, _, table = text.partition("| plain OpenVINO |")
    rows = [
        line.split(" | ")[0].removeprefix("| ") for line in table.splitlines()[2:] if line.startswith("| ")
    ]
    assert list(HABITS) == rows[: len(HABITS)]


@pytest.mark.thorough
@pytest.mark.parametrize("habit", HABITS)
def test_each_habit_can_be_tried(habit: str) -> None:
    """Whatever OpenVINO does, the end of the process included, comes as words."""
    words = told(habit)
    assert words
    assert not words.startswith("cannot be tried"), words
