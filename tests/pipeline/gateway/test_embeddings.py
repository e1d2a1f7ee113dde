"""Vectors, from a model's output to the form that a caller wants."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shapestream.gateway.errors import UnusableVectors, WrongField
from shapestream.gateway.json_text import SLICE_NUMBERS
from shapestream.gateway.text_bodies import VectorForm, check_dimensions, matrix_of, vector_slices

AS_IT_IS = VectorForm()


def formed(matrix: npt.NDArray[Any], form: VectorForm) -> npt.NDArray[np.float32]:
    """All slices together. Each begins where the one before ended."""
    parts, end = [], 0
    for begin, part in vector_slices(matrix, form):
        assert end == begin
        assert part.flags.c_contiguous
        end += len(part)
        parts.append(part)
    return np.concatenate(parts)


def test_outputs_are_one_matrix_whatever_their_form() -> None:
    """A tensor, a list of vectors, and a list of rows, of any type of floating numbers."""
    wanted = np.array([[1, 2, 3], [4, 5, 6]], np.float32)
    unaligned = np.frombuffer(b"x" + wanted.tobytes(), np.uint8)[1:].view(np.float32).reshape(2, 3)
    for output in (
        wanted,
        wanted.astype(np.float16),
        wanted.astype(np.float64),
        unaligned,
        wanted.T.copy().T,
        [*wanted],
        [wanted[:1], wanted[1:]],
        [wanted[0], wanted[1:]],
    ):
        found = matrix_of(output, 2)
        assert np.float32 == found.dtype
        assert found.flags.c_contiguous
        assert found.flags.aligned
        np.testing.assert_array_equal(wanted, found)


@pytest.mark.parametrize(
    ("output", "words"),
    [
        (np.zeros((3, 4), np.float32), r"\[3, 4\] for 2 texts"),
        (np.zeros((2, 4, 4), np.float32), r"\[2, 4, 4\] for 2 texts"),
        (np.zeros(2, np.float32), r"\[2\] for 2 texts"),
        ([np.zeros(4, np.float32)], r"\[1, 4\] for 2 texts"),
        ([np.zeros((2, 4), np.float32)] * 2, r"\[2, 2, 4\] for 2 texts"),
        ([np.zeros(4, np.float32), np.zeros(5, np.float32)], "different sizes"),
        ([], r"\[0, 0\] for 2 texts"),
        ([np.float32(1)] * 2, r"\[2\] for 2 texts"),
    ],
)
def test_outputs_of_another_form_are_the_models_error(output: Any, words: str) -> None:
    """Nobody gets the vector of another text."""
    with pytest.raises(UnusableVectors, match=words):
        matrix_of(output, 2)


@given(st.integers(1, 9), st.integers(1, 40), st.data())
def test_vectors_are_cut_and_have_length_1(rows: int, size: int, data: st.DataObject) -> None:
    """Dimensions are the first ones, and make a vector of length 1 however many they are."""
    matrix = np.random.default_rng(rows * 41 + size).normal(size=(rows, size)).astype(np.float32)
    dimensions = data.draw(st.integers(1, size))
    normalize = data.draw(st.booleans())
    wanted = matrix[:, :dimensions].astype(np.float64)
    wanted /= np.linalg.norm(wanted, axis=1, keepdims=True)
    found = formed(matrix, VectorForm(dimensions=dimensions, normalize=normalize))
    np.testing.assert_allclose(wanted, found, rtol=1e-5)
    np.testing.assert_array_equal(matrix, formed(matrix, VectorForm()))


def test_a_vector_of_zeros_stays_one() -> None:
    """It has no direction."""
    zeros = np.zeros((2, 3), np.float32)
    np.testing.assert_array_equal(zeros, formed(zeros, VectorForm(normalize=True)))


def test_long_outputs_come_in_slices() -> None:
    """Of so many numbers as are written in one turn of the event loop, and of one row at least."""
    wide = np.ones((2, SLICE_NUMBERS + 1), np.float32)
    assert [0, 1] == [begin for begin, _ in vector_slices(wide, AS_IT_IS)]
    narrow = np.arange(3 * SLICE_NUMBERS, dtype=np.float32).reshape(-1, 3)
    assert 4 == len([*vector_slices(narrow, AS_IT_IS)])
    np.testing.assert_array_equal(narrow, formed(narrow, AS_IT_IS))


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_is_the_models_error(number: float) -> None:
    """It names the text, counted over all slices."""
    matrix = np.ones((40_000, 2), np.float32)
    matrix[33_000, 1] = number
    with pytest.raises(UnusableVectors, match="NaN or infinity for text 33000"):
        formed(matrix, AS_IT_IS)


def test_more_dimensions_than_there_are_are_refused() -> None:
    """The size itself is taken."""
    check_dimensions(VectorForm(dimensions=384), 384)
    check_dimensions(AS_IT_IS, 384)
    with pytest.raises(WrongField, match='"dimensions" is 385; the model\'s vectors have 384 numbers'):
        check_dimensions(VectorForm(dimensions=385), 384)
