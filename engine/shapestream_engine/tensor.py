"""Tensors that are resized in place: a shape over a buffer whose capacity is kept between requests."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from math import prod
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np

from shapestream_engine.element_types import dtype_of, element_type_of
from shapestream_engine.errors import ElementTypeError, ShapeError
from shapestream_engine.ports import InputPort, OutputPort
from shapestream_engine.shapes import Dimension, NamedShape, checked_sizes, exact_nbytes
from shapestream_engine.signature import ModelSignature
from shapestream_engine.string_arrays import STRING_TYPES

Array: TypeAlias = "np.ndarray[Any, Any]"

RESERVE_BYTES = 64 * 2**20
"""Upper bounds up to this size in bytes are reserved at once, so that no request reallocates."""

_ALIGNMENT = 64
"""Alignment in bytes: a cache line and the widest vector register; engines copy less aligned memory."""


@runtime_checkable
class TensorLike(Protocol):
    """The interface of tensors that are resized in place, this package's and the engines'."""

    @property
    def element_type(self) -> str:
        """OpenVINO's name of the element type, such as `f32`."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The size of each axis; setting it resizes in place, and the contents become undefined."""

    @shape.setter
    def shape(self, shape: tuple[int, ...]) -> None: ...

    @property
    def data(self) -> Array:
        """A C-contiguous view of `shape`, valid until the shape is set again."""

    @property
    def reallocations(self) -> int:
        """Number of moves of the data to another address since the tensor was made."""


class _OwnTensor(ABC):
    """Base of this package's tensors: their shape, and their data as an array."""

    __slots__ = ("_data", "_element_type", "_shape")
    _data: Array
    _element_type: str
    _shape: tuple[int, ...]

    @property
    def element_type(self) -> str:
        """The name of the element type, OpenVINO's for numbers: `f32`, `str`."""
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
        """The array of `shape`, C-contiguous and valid until the shape is set again."""
        return self._data

    def set_shape(self, shape: Sequence[int]) -> None:
        """Resize the tensor in place; the contents become undefined, or empty strings.

            tensor.set_shape((4, 128))

        Raises `ShapeError`, and changes nothing, for sizes that are no integers from 0, and beyond the upper bound.
        """
        if shape != self._shape:
            self._resize(checked_sizes(shape))

    @abstractmethod
    def _resize(self, sizes: tuple[int, ...]) -> None: ...


class Tensor(_OwnTensor):
    """A C-contiguous tensor, aligned to 64 bytes, with the semantics of OpenVINO's `set_shape`.

        tensor = Tensor("f32", (2, 3))
        tensor.data[...] = 1
        tensor.set_shape((1, 3))  # keeps the memory

    A new shape reuses the memory unless it exceeds the capacity. Contents are not kept. Without a shape, the tensor starts
    empty, `(0,)`. An `upper_bound_bytes` up to `reserve_bytes` is reserved at once; otherwise the capacity doubles when it
    must grow, up to the bound.
    """

    __slots__ = (
        "_address",
        "_capacity_bytes",
        "_dtype",
        "_offset",
        "_reallocations",
        "_storage",
        "_upper_bound_bytes",
    )

    def __init__(
        self,
        element_type: str,
        shape: Sequence[int] | None = None,
        *,
        upper_bound_bytes: int | None = None,
        reserve_bytes: int = RESERVE_BYTES,
    ) -> None:
        self._element_type = element_type
        self._dtype = dtype_of(element_type)
        self._upper_bound_bytes = upper_bound_bytes
        self._reallocations = 0
        sizes = (0,) if shape is None else checked_sizes(shape)
        capacity = self._nbytes_of(sizes)
        if upper_bound_bytes is not None and upper_bound_bytes <= reserve_bytes:
            capacity = upper_bound_bytes
        self._allocate(capacity)
        self._shape, self._data = sizes, self._view(sizes)

    @property
    def byte_size(self) -> int:
        """Size in bytes of the present shape."""
        return self._data.nbytes

    @property
    def capacity_bytes(self) -> int:
        """Largest size in bytes of a shape without a reallocation."""
        return self._capacity_bytes

    @property
    def reallocations(self) -> int:
        """Number of moves of the data to another address since the tensor was made."""
        return self._reallocations

    def _resize(self, sizes: tuple[int, ...]) -> None:
        needed = self._nbytes_of(sizes)
        if needed > self._capacity_bytes:
            before = self._address
            self._allocate(self._grown(needed))
            self._reallocations += self._address != before
        self._shape, self._data = sizes, self._view(sizes)

    def _nbytes_of(self, sizes: tuple[int, ...]) -> int:
        nbytes, bound = exact_nbytes(self._dtype.itemsize, sizes), self._upper_bound_bytes
        if bound is not None and nbytes > bound:
            raise ShapeError(f"the shape {list(sizes)} needs {nbytes} bytes; the upper bound is {bound}")
        return nbytes

    def _grown(self, needed: int) -> int:
        """Return double the capacity, so that data moves rarely, but not beyond the upper bound."""
        doubled = 2 * self._capacity_bytes
        if self._upper_bound_bytes is not None:
            doubled = min(doubled, self._upper_bound_bytes)
        return max(needed, doubled)

    def _allocate(self, capacity: int) -> None:
        # The old memory stays until the new memory is assigned, so a failed allocation changes nothing.
        storage = self._new_storage(capacity + _ALIGNMENT - 1)
        start = storage.ctypes.data
        self._storage, self._offset = storage, -start % _ALIGNMENT
        self._address, self._capacity_bytes = start + self._offset, capacity

    def rest_on(self, memory: Array, shape: tuple[int, ...]) -> None:
        """Adopt `memory`, contiguous bytes that an engine filled with a tensor of this shape, without a copy.

        A change of address counts as a reallocation.
        """
        address = memory.ctypes.data
        self._reallocations += address != self._address
        self._storage, self._offset = memory, 0
        self._address, self._capacity_bytes = address, memory.nbytes
        self._shape, self._data = shape, self._view(shape)

    def _new_storage(self, nbytes: int) -> Array:
        """Allocate the tensor's memory; subclasses for devices may allocate another kind."""
        return np.empty(nbytes, np.uint8)

    def _view(self, sizes: tuple[int, ...]) -> Array:
        return np.ndarray(sizes, self._dtype, self._storage.data, self._offset)

    def __repr__(self) -> str:
        used = f"{self.byte_size} of {self._capacity_bytes} bytes"
        return f"Tensor({self._element_type}, {list(self.shape)}, {used})"


# ---------------------------------------------------------------- over an array of the caller


class ArrayTensor(Tensor):
    """A tensor over a caller's array; a shape that does not fit raises `ShapeError`.

        request.set_input_tensor("x", ArrayTensor(array))

    The array is C-contiguous and writeable, and holds the tensor's initial contents. Engines are slower with memory that
    is aligned to less than 64 bytes, but accept it.
    """

    __slots__ = ("_array",)

    def __init__(self, array: Array) -> None:
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


# ---------------------------------------------------------------- of strings


class StringTensor(_OwnTensor):
    """A tensor of elements `str` or `bytes`, with the interface of `Tensor`; each shape begins with empty strings.

        tensor = StringTensor("str", (2,))
        tensor.data[...] = ["a", "b"]

    Without a shape, the tensor starts empty, `(0,)`. The elements are Python objects, so no memory is reserved, and
    `reallocations` stays 0.
    """

    __slots__ = ()

    def __init__(self, element_type: str, shape: Sequence[int] | None = None) -> None:
        if element_type not in STRING_TYPES:
            raise ElementTypeError(f"strings are {' or '.join(STRING_TYPES)}, not {element_type!r}")
        self._element_type = element_type
        self._resize((0,) if shape is None else checked_sizes(shape))

    @property
    def reallocations(self) -> int:
        """0: an array of objects has no memory that is worth keeping."""
        return 0

    def _resize(self, sizes: tuple[int, ...]) -> None:
        self._data = np.full(sizes, "" if self._element_type == "str" else b"", object)
        self._shape = sizes

    def __repr__(self) -> str:
        return f"StringTensor({self._element_type}, {list(self.shape)})"


# ---------------------------------------------------------------- upper bounds


def upper_bounds(signature: ModelSignature) -> tuple[int | None, ...]:
    """Return the largest size in bytes of each input, by the bounds of all inputs together; None: unbounded."""
    return port_bounds(_with_dimensions(signature, signature.bounds))


def fixed_ports(signature: ModelSignature, sizes: Sequence[int | None]) -> tuple[InputPort, ...]:
    """Return the inputs of a model that takes only these sizes; `sizes` is parallel to the dimensions, None: any."""
    return _with_dimensions(signature, [None if size is None else Dimension(size, size) for size in sizes])


def _with_dimensions(
    signature: ModelSignature, dimensions: Sequence[Dimension | None]
) -> tuple[InputPort, ...]:
    """Return the inputs with these dimensions of the signature; None: the port's own. Padding is left out."""
    ports = []
    for port, axes in zip(signature.inputs, signature.table.axes, strict=True):
        own = [
            (None if number is None else dimensions[number]) or dimension
            for number, dimension in zip(axes, port.shape.dimensions, strict=True)
        ]
        ports.append(InputPort(port.name, port.element_type, NamedShape(port.shape.names, tuple(own))))
    return tuple(ports)


def port_bounds(ports: Sequence[InputPort]) -> tuple[int | None, ...]:
    """Return the largest size in bytes of each of these inputs on its own; None: unbounded."""
    return tuple(_most_nbytes(port, [axis.maximum for axis in port.shape.dimensions]) for port in ports)


def bound_shape(signature: ModelSignature, output: int) -> tuple[int, ...] | None:
    """Return the largest shape of an output; None if some axis is unbounded."""
    port, bounds = signature.outputs[output], dict(zip(signature.dimensions, signature.bounds, strict=True))
    shape = []
    for name, dimension in zip(port.shape.names, port.shape.dimensions, strict=True):
        followed = bounds[name].maximum if name in bounds else None
        known = [most for most in (dimension.maximum, followed) if most is not None]
        if not known:
            return None
        shape.append(min(known))
    return tuple(shape)


def output_bounds(signature: ModelSignature) -> tuple[int | None, ...]:
    """Return the largest size in bytes of each output; None: unbounded."""
    return tuple(
        None if (shape := bound_shape(signature, number)) is None else _most_nbytes(port, shape)
        for number, port in enumerate(signature.outputs)
    )


def _most_nbytes(port: InputPort | OutputPort, most: Sequence[int | None]) -> int | None:
    """Return the size in bytes of a tensor of these sizes; None if one of them is unbounded, and for strings."""
    if port.is_string:
        return None  # objects lie anywhere
    sizes = [size for size in most if size is not None]
    return prod(sizes, start=dtype_of(port.element_type).itemsize) if len(sizes) == len(most) else None


def reserved(bounds: Sequence[int | None], budget: int = RESERVE_BYTES) -> tuple[bool, ...]:
    """Choose the tensors whose upper bound is reserved at once, in order, within the request's budget in bytes."""
    chosen = []
    for bound in bounds:
        fits = bound is not None and bound <= budget
        budget -= bound if fits and bound is not None else 0
        chosen.append(fits)
    return tuple(chosen)
