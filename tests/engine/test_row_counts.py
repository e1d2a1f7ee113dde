"""The program that tells which kernels depend on the number of rows, and what docs/backends.md says of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks.row_counts import COUNTS, ENGINES, GRAPHS, THREADS, told, words_of

Array = np.ndarray[Any, Any]

ROWS = np.arange(COUNTS[-1], dtype=np.float32)[:, None]


def shifted(by: Callable[[int], float]) -> Callable[[Array], Array]:
    """A model that adds something to every row by the number of rows of the call."""
    return lambda x: x + np.float32(by(len(x)))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda x: 2 * x, "equal"),
        (shifted(lambda rows: rows == 1), "1 | 2 to 129"),
        (shifted(lambda rows: rows > 50), "1 to 50 | 51 to 129"),
        (shifted(lambda rows: 1 < rows <= 50), "1, 51 to 129 | 2 to 50"),
        (shifted(lambda rows: rows == 7), "1 to 6, 8 to 129 | 7"),
        (
            lambda x: x + np.float32(1) * (np.arange(len(x)) % 16 == 15)[:, None],
            "1 to 15 | 16 to 129, by place",
        ),
    ],
    ids=["equal", "a lone row", "beyond 50", "both", "one number", "each sixteenth row"],
)
def test_the_words_name_the_numbers_of_rows_that_give_equal_bits(
    call: Callable[[Array], Array], words: str
) -> None:
    """Groups of numbers, each with the bits of its least."""
    assert words == words_of(call, ROWS)


def test_a_model_that_does_not_repeat_its_bits_is_told() -> None:
    """The second call of the same rows differs."""
    calls = iter(range(10_000))
    assert words_of(lambda x: x + np.float32(next(calls)), ROWS).endswith("does not repeat itself")


def test_the_document_names_each_operator() -> None:
    """In the table or in the list of those that are equal; what came of them is for the program to tell."""
    text = " ".join((Path(__file__).parents[2] / "docs" / "backends.md").read_text(encoding="utf-8").split())
    _, _, section = text.partition("## Decisions that rounding flips")
    assert [] == [name for name in GRAPHS if name not in section]


@pytest.mark.thorough
@pytest.mark.parametrize("name", GRAPHS)
def test_each_operator_can_be_tried(name: str) -> None:
    """On at least one engine, whatever the other says of it; the end of the process comes as words, too."""
    found = told(name)
    assert len(ENGINES) * len(THREADS) == len(found)
    assert any(not words.startswith("cannot be tried") for words in found if words != "-"), found
