"""Tensors between stages: as received, taken apart without a copy, and put together from the results of a stage.

The bytes of an array of a list, or of a row, are a view of the frame that they came in; those of strings are copies.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple, TypeAlias

from shapestream_engine import string_arrays
from shapestream_engine.array_lists import places
from shapestream_engine.element_types import dtype_of
from shapestream_engine.layout import Buffer
from shapestream_engine.shapes import exact_nbytes
from shapestream_engine.string_arrays import STRING_TYPES


class Tensor(NamedTuple):
    """One tensor: C-contiguous, little-endian bytes."""

    element_type: str
    shape: tuple[int, ...]
    """The shape as in a layout: that of strings ends with their bytes (`string_arrays`)."""
    buffer: Buffer

    @property
    def nbytes(self) -> int:
        """Return the length of its bytes."""
        return memoryview(self.buffer).nbytes

    @property
    def sizes(self) -> tuple[int, ...]:
        """Return the size of each axis: the shape, without the bytes with which that of strings ends."""
        return self.shape[:-1] if self.element_type in STRING_TYPES else self.shape

    def rows(self, *, keep_axis: bool) -> list[Tensor]:
        """Return a tensor for each index of the first axis: `[1, …]` if that axis is kept, else without it.

        Rows of numbers are views, those of strings copies.
        """
        count, inner = self.sizes[0], self.sizes[1:]
        return self.divided([(1, *inner) if keep_axis else inner] * count)

    def divided(self, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
        """Return tensors of these shapes, whose elements follow each other here. Raises `ShapeError` for other elements."""
        element_type, view = self.element_type, _bytes_of(self.buffer)
        if element_type in STRING_TYPES:
            found = places(shapes, 1, prod(self.sizes))
            groups = string_arrays.divided(self.shape, view, [end - begin for _, begin, end in found])
            return [
                Tensor(element_type, (*shape, nbytes), buffer)
                for (shape, _, _), (nbytes, buffer) in zip(found, groups, strict=True)
            ]
        itemsize = dtype_of(element_type).itemsize
        return [
            Tensor(element_type, shape, view[begin:end])
            for shape, begin, end in places(shapes, itemsize, view.nbytes)
        ]


class Items:
    """A list of tensors of one element type and rank.

    One that was received is taken apart when a stage needs its tensors: until then it may have any number of them.
    """

    __slots__ = ("_ports", "_tensors", "element_type", "rank")

    def __init__(self, element_type: str, rank: int, tensors: Sequence[Tensor]) -> None:
        self.element_type = element_type
        self.rank = rank
        self._tensors: Sequence[Tensor] | None = tensors
        self._ports: tuple[Tensor, Tensor] | None = None

    @classmethod
    def read(cls, elements: Tensor, shapes: Tensor) -> Items:
        """Return the list of these two outputs (`list_ports`)."""
        items = cls(elements.element_type, shapes.shape[1], ())
        items._tensors, items._ports = None, (elements, shapes)
        return items

    @property
    def tensors(self) -> Sequence[Tensor]:
        """Its tensors. Raises `ShapeError` if the two outputs contradict each other."""
        if self._tensors is None:
            assert self._ports is not None
            elements, shapes = self._ports
            count, rank = shapes.shape
            rows: Sequence[Sequence[int]] = [()] * count
            if count and rank:
                rows = _bytes_of(shapes.buffer).cast("q", [count, rank]).tolist()  # type: ignore[assignment] # typeshed knows one axis
            self._tensors = elements.divided(rows)
        return self._tensors

    def write(self) -> tuple[Tensor, Tensor]:
        """Return the two outputs of a list: the elements of all tensors, and their shapes."""
        if self._ports is not None:
            return self._ports
        sizes = [size for tensor in self.tensors for size in tensor.sizes]
        elements = sum(prod(tensor.sizes) for tensor in self.tensors)
        return (
            _joined(self.element_type, (elements,), self.tensors),
            Tensor(
                "i64", (len(self.tensors), self.rank), b"".join(size.to_bytes(8, "little") for size in sizes)
            ),
        )

    def as_batch(self) -> Tensor:
        """Return one tensor with the items along a new first axis. Raises ValueError if their shapes differ."""
        shapes = {tensor.sizes for tensor in self.tensors}
        if len(shapes) > 1:
            first, second = sorted(shapes)[:2]
            raise ValueError(f"a batch needs arrays of one shape, not {list(first)} and {list(second)}")
        inner = shapes.pop() if shapes else (0,) * self.rank
        return _joined(self.element_type, (len(self.tensors), *inner), self.tensors)


Value: TypeAlias = Tensor | Items
"""What goes along an edge of a chain."""


def stacked(tensors: Sequence[Tensor | None], element_type: str, inner: tuple[int, ...]) -> Tensor:
    """Return tensors of the shape `inner`, or `[1, *inner]`, along one first axis; zeros, or empty strings, for None."""
    nothing = blank(element_type, inner)
    parts = [nothing if tensor is None else tensor for tensor in tensors]
    if any(part.sizes not in (inner, (1, *inner)) for part in parts):
        raise ValueError(f"a row is not of the shape {list(inner)}")
    return _joined(element_type, (len(parts), *inner), parts)


def listed(
    tensors: Sequence[Tensor | None], element_type: str, smallest: tuple[int, ...], *, drop_row: bool
) -> Items:
    """Return tensors as a list, without their first axis of size 1 if `drop_row`.

    In place of None are zeros, or empty strings, of the `smallest` shape, which is that of an empty tensor unless all its
    sizes are fixed.
    """
    nothing = blank(element_type, smallest)
    return Items(element_type, len(smallest), [*_listed(tensors, nothing, drop_row=drop_row)])


def blank(element_type: str, sizes: tuple[int, ...]) -> Tensor:
    """Return a tensor of zeros, or of empty strings."""
    if element_type in STRING_TYPES:
        shape = (*sizes, 0)
        return Tensor(element_type, shape, bytes(string_arrays.nbytes_of(shape)))
    return Tensor(element_type, sizes, bytes(exact_nbytes(dtype_of(element_type).itemsize, sizes)))


def _joined(element_type: str, sizes: tuple[int, ...], parts: Sequence[Tensor]) -> Tensor:
    """Return the elements of all parts, one part after the other, as one tensor. One part alone is not copied."""
    if element_type in STRING_TYPES:
        nbytes, buffer = string_arrays.joined([(part.shape, _bytes_of(part.buffer)) for part in parts])
        return Tensor(element_type, (*sizes, nbytes), buffer)
    buffers = [_bytes_of(part.buffer) for part in parts]
    return Tensor(element_type, sizes, buffers[0] if len(buffers) == 1 else b"".join(buffers))


def _listed(tensors: Sequence[Tensor | None], nothing: Tensor, *, drop_row: bool) -> Iterator[Tensor]:
    for tensor in tensors:
        if tensor is None:
            yield nothing
        else:
            yield tensor._replace(shape=tensor.shape[1:]) if drop_row else tensor


def _bytes_of(buffer: Buffer) -> memoryview:
    view = memoryview(buffer)
    if not view.nbytes:
        return _NOTHING  # a view without elements cannot be cast
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


_NOTHING = memoryview(b"")
