"""The vectors of texts, from the model's output to rows that can be written.

A model gives one tensor with a row for each text, or a list with an array for each. Some callers want fewer dimensions, or
vectors of length 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from shapestream.gateway.gateway_errors import UnusableVectors, WrongField
from shapestream.gateway.json_text import SLICE_NUMBERS
from shapestream_engine.layout import value

Matrix = npt.NDArray[np.float32]
"""Vectors, a row for each text, contiguous and aligned."""
SMALLEST_LENGTH = 1e-12
"""The length that a vector of zeros is divided by, as PyTorch's `normalize` has it: it stays zeros."""


@value
class VectorForm:
    """The form in which a caller wants its vectors."""

    dimensions: int | None = None
    """The first numbers of each vector, made a vector of length 1. None: all, as the model gives them."""
    normalize: bool = False
    """True if vectors are made to have length 1."""


def matrix_of(output: npt.NDArray[Any] | list[npt.NDArray[Any]], texts: int) -> Matrix:
    """Return the vectors of so many texts. Raises `UnusableVectors` where the output is not a vector for each."""
    if isinstance(output, list):
        # A stage that had one request for each text may give its row as [1, size].
        rows = [each.reshape(-1) if each.ndim and each.size == each.shape[-1] else each for each in output]
        if len({each.shape for each in rows}) > 1:
            raise UnusableVectors("the model gave vectors of different sizes")
        output = np.stack(rows) if rows else np.empty((0, 0), np.float32)
    if output.ndim != 2 or len(output) != texts:
        raise UnusableVectors(f"the model gave [{', '.join(map(str, output.shape))}] for {texts} texts")
    return np.require(output.astype(np.float32, copy=False), requirements=["C", "A"])


def check_dimensions(form: VectorForm, size: int) -> None:
    """Raise `WrongField` where a caller wants more numbers than the model's vectors have."""
    if form.dimensions is not None and form.dimensions > size:
        raise WrongField(
            "dimensions", f'"dimensions" is {form.dimensions}; the model\'s vectors have {size} numbers'
        )


def vector_slices(matrix: Matrix, form: VectorForm) -> Iterator[tuple[int, Matrix]]:
    """Yield the vectors in the form that is wanted, some rows at a time, with the number of the first.

    Raises `UnusableVectors` where a number is NaN or infinite: nobody can use such a vector, and JSON has no word for it.
    """
    rows = max(1, SLICE_NUMBERS // max(1, matrix.shape[1]))
    for begin in range(0, len(matrix), rows):
        part = matrix[begin : begin + rows]
        finite = np.isfinite(part).all(axis=1)
        if not finite.all():
            raise UnusableVectors(f"the model gave NaN or infinity for text {begin + int(finite.argmin())}")
        yield begin, _in_form(part, form)


def _in_form(part: Matrix, form: VectorForm) -> Matrix:
    cut = form.dimensions is not None and form.dimensions < part.shape[1]
    if cut:
        part = part[:, : form.dimensions]
    if cut or form.normalize:
        lengths = np.linalg.norm(part, axis=1, keepdims=True)
        part = part / np.maximum(lengths, np.float32(SMALLEST_LENGTH))
    return np.ascontiguousarray(part)
