"""A tensor over the memory of an array that somebody else owns: what it holds is seen without a copy."""

from __future__ import annotations

from typing import Any

import numpy as np

from shapestream_engine.element_types import element_type_of
from shapestream_engine.errors import ElementTypeError, ShapeError
from shapestream_engine.tensor import Tensor

__all__ = ["ArrayTensor"]


class ArrayTensor(Tensor):
    """Any shape that fits into the array, and never another place: a larger one raises `ShapeError`.

    The array is C-contiguous and writeable, and starts out as the tensor's contents. Engines copy from and to memory that
    is aligned to less than 64 bytes more slowly; none of them refuses it.
    """

    __slots__ = ("_array",)

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        if isinstance(array, np.ma.MaskedArray):
            raise ElementTypeError(
                "a masked array's mask is no part of a tensor; give .data, or .filled(value)"
            )
        if not (array.flags.c_contiguous and array.flags.writeable):
            wrong = "read-only" if array.flags.c_contiguous else "not C-contiguous"
            raise ShapeError(
                f"a tensor lies over contiguous memory that may be written; this array is {wrong}"
            )
        self._array = array
        super().__init__(
            element_type_of(array.dtype), array.shape, upper_bound_bytes=array.nbytes, reserve_bytes=0
        )

    def _allocate(self, capacity: int) -> None:
        self._storage, self._offset = self._array.reshape(-1).view(np.uint8), 0
        self._address, self._capacity_bytes = self._array.ctypes.data, self._array.nbytes
