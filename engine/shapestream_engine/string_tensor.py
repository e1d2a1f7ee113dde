"""A tensor of strings: an array of objects, which is made anew for each shape."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shapestream_engine.errors import ElementTypeError
from shapestream_engine.shapes import checked_sizes
from shapestream_engine.string_arrays import STRING_TYPES, Array


class StringTensor:
    """A tensor of elements `str` or `bytes`, with the interface of `Tensor`; each shape begins with empty strings.

        tensor = StringTensor("str", (2,))
        tensor.data[...] = ["a", "b"]

    Without a shape, the tensor starts empty, `(0,)`. The elements are Python objects, so no memory is reserved, and
    `reallocations` stays 0.
    """

    __slots__ = ("_data", "_element_type", "_shape")

    def __init__(self, element_type: str, shape: Sequence[int] | None = None) -> None:
        if element_type not in STRING_TYPES:
            raise ElementTypeError(f"strings are {' or '.join(STRING_TYPES)}, not {element_type!r}")
        self._element_type = element_type
        self._resize((0,) if shape is None else checked_sizes(shape))

    @property
    def element_type(self) -> str:
        """`str` or `bytes`."""
        return self._element_type

    @property
    def shape(self) -> tuple[int, ...]:
        """The size of each axis; setting it is `set_shape`."""
        return self._shape

    @shape.setter
    def shape(self, shape: tuple[int, ...]) -> None:
        self.set_shape(shape)

    @property
    def data(self) -> Array:
        """The array of objects of `shape`, valid until the shape is set again."""
        return self._data

    @property
    def reallocations(self) -> int:
        """0: an array of objects has no memory that is worth keeping."""
        return 0

    def set_shape(self, shape: Sequence[int]) -> None:
        """Resize the tensor: another shape makes all elements empty. Raises `ShapeError` for sizes that are none."""
        if shape != self._shape:
            self._resize(checked_sizes(shape))

    def _resize(self, sizes: tuple[int, ...]) -> None:
        self._data = np.full(sizes, "" if self._element_type == "str" else b"", object)
        self._shape = sizes

    def __repr__(self) -> str:
        return f"StringTensor({self._element_type}, {list(self.shape)})"
