"""Tensors between stages: as received, taken apart without a copy, and put together from the results of a stage.

The bytes of an array of a list, or of a row, are a view of the frame that they came in.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple, TypeAlias

from shapestream_engine.array_lists import places
from shapestream_engine.element_types import dtype_of
from shapestream_engine.layout import Buffer
from shapestream_engine.shapes import exact_nbytes


class Tensor(NamedTuple):
    """One tensor: C-contiguous, little-endian bytes."""

    element_type: str
    shape: tuple[int, ...]
    buffer: Buffer

    @property
    def nbytes(self) -> int:
        """Return the length of its bytes."""
        return memoryview(self.buffer).nbytes

    def rows(self, *, keep_axis: bool) -> list[Tensor]:
        """Return a tensor for each index of the first axis, as views: `[1, …]` if that axis is kept, else without it."""
        count, inner = self.shape[0], self.shape[1:]
        shape = (1, *inner) if keep_axis else inner
        nbytes = exact_nbytes(dtype_of(self.element_type).itemsize, inner)
        view = _bytes_of(self.buffer)
        return [
            Tensor(self.element_type, shape, view[row * nbytes : (row + 1) * nbytes]) for row in range(count)
        ]


class Items(NamedTuple):
    """A list of tensors of one element type and rank."""

    element_type: str
    rank: int
    tensors: Sequence[Tensor]

    @classmethod
    def read(cls, elements: Tensor, shapes: Tensor) -> Items:
        """Read the two outputs of a list (`list_ports`). Raises `ShapeError` if they contradict each other."""
        count, rank = shapes.shape
        view, element_type = _bytes_of(elements.buffer), elements.element_type
        rows: Sequence[Sequence[int]] = [()] * count
        if count and rank:
            rows = _bytes_of(shapes.buffer).cast("q", [count, rank]).tolist()  # type: ignore[assignment] # typeshed knows one axis
        tensors = [
            Tensor(element_type, shape, view[begin:end])
            for shape, begin, end in places(rows, dtype_of(element_type).itemsize, view.nbytes)
        ]
        return cls(element_type, rank, tensors)

    def write(self) -> tuple[Tensor, Tensor]:
        """Return the two outputs of a list: the elements of all tensors, and their shapes."""
        sizes = [size for tensor in self.tensors for size in tensor.shape]
        elements = sum(prod(tensor.shape) for tensor in self.tensors)
        return (
            Tensor(
                self.element_type, (elements,), b"".join(_bytes_of(tensor.buffer) for tensor in self.tensors)
            ),
            Tensor(
                "i64", (len(self.tensors), self.rank), b"".join(size.to_bytes(8, "little") for size in sizes)
            ),
        )

    def as_batch(self) -> Tensor:
        """Return one tensor with the items along a new first axis. Raises ValueError if their shapes differ."""
        shapes = {tensor.shape for tensor in self.tensors}
        if len(shapes) > 1:
            first, second = sorted(shapes)[:2]
            raise ValueError(f"a batch needs arrays of one shape, not {list(first)} and {list(second)}")
        inner = shapes.pop() if shapes else (0,) * self.rank
        parts = [_bytes_of(tensor.buffer) for tensor in self.tensors]
        return Tensor(
            self.element_type, (len(parts), *inner), parts[0] if len(parts) == 1 else b"".join(parts)
        )


Value: TypeAlias = Tensor | Items
"""What goes along an edge of a chain."""


def stacked(tensors: Sequence[Tensor | None], element_type: str, inner: tuple[int, ...]) -> Tensor:
    """Return tensors of the shape `inner`, or `[1, *inner]`, along one first axis; zeros in place of None."""
    nbytes = exact_nbytes(dtype_of(element_type).itemsize, inner)
    parts = [bytes(nbytes) if tensor is None else _bytes_of(tensor.buffer) for tensor in tensors]
    if any(len(part) != nbytes for part in parts):
        raise ValueError(f"a row is not of the shape {list(inner)}")
    return Tensor(element_type, (len(parts), *inner), b"".join(parts))


def listed(
    tensors: Sequence[Tensor | None], element_type: str, smallest: tuple[int, ...], *, drop_row: bool
) -> Items:
    """Return tensors as a list, without their first axis of size 1 if `drop_row`.

    In place of None are zeros of the `smallest` shape, which is that of an empty tensor unless all its sizes are fixed.
    """
    nothing = Tensor(element_type, smallest, bytes(exact_nbytes(dtype_of(element_type).itemsize, smallest)))
    return Items(element_type, len(smallest), [*_listed(tensors, nothing, drop_row=drop_row)])


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
