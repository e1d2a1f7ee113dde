"""From a request's layout, which nobody has checked, to its sizes, which everybody relies on.

The slow and thorough way, taken once per distinct layout: `ModelSignature.resolve` remembers the outcome.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from shapestream_engine.dimension_table import DimensionTable
from shapestream_engine.element_types import dtype_of
from shapestream_engine.errors import ElementTypeError, ShapeError
from shapestream_engine.layout import Tensors
from shapestream_engine.ports import InputPort
from shapestream_engine.shapes import MAX_SIZE, exact_nbytes

__all__ = ["RequestShape", "resolve_layout"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestShape:
    """A request's layout once it is known to fit its model's signature."""

    sizes: tuple[int, ...]
    """The request's size of each of the signature's `dimensions`."""
    rows: int
    """Its size along the batch axis; 1 for a model that has none."""
    nbytes: tuple[int, ...]
    """Bytes of each tensor, parallel to the layout."""
    total_nbytes: int
    positions: tuple[int | None, ...]
    """Per input of the signature: its place in the layout; None for a mask that the request leaves out."""
    rounded: tuple[int, ...] = ()
    """What the model's strategy pads it to, rows excepted; requests share calls by these. Its own sizes if empty."""
    answer: Tensors | None = None
    """The results of a request without elements, where the ports tell them: it needs no call."""
    elements: int = field(init=False)
    """The product of its sizes: what it computes, before any padding."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "rounded", self.rounded or self.sizes)
        object.__setattr__(self, "elements", math.prod(self.sizes))


def resolve_layout(
    inputs: Sequence[InputPort],
    table: DimensionTable,
    round_up: Callable[[tuple[int, ...]], tuple[int, ...]],
    layout: Any,
) -> RequestShape:
    """Check everything about a layout that needs no tensor bytes.

    Raises `ShapeError`, which names the port, the dimension and the remedy.
    """
    positions = _positions(inputs, layout)
    sizes: list[int | None] = [None] * len(table.names)
    first_port: dict[int, str] = {}
    nbytes = [0] * len(layout)
    for number, port in enumerate(inputs):
        position = positions[number]
        if position is None:
            continue
        _, element_type, shape = layout[position]
        _check_tensor(port, element_type, shape)
        for axis, dimension in enumerate(table.axes[number]):
            if dimension is None:
                continue
            known = sizes[dimension]
            if known is None:
                sizes[dimension], first_port[dimension] = shape[axis], port.name
            elif known != shape[axis]:
                raise ShapeError(
                    f"input {port.name!r}: dimension {table.names[dimension]!r} is {shape[axis]}, "
                    f"but {known} in input {first_port[dimension]!r}; the same name is the same size"
                )
        nbytes[position] = _nbytes(port, shape)
    total = sum(nbytes)
    if total > MAX_SIZE:
        raise ShapeError(f"the request has {total} bytes, which is more than {MAX_SIZE}")
    own = _within_bounds(table, sizes, first_port)
    return RequestShape(
        sizes=own,
        rows=own[0] if table.has_batch else 1,
        nbytes=tuple(nbytes),
        total_nbytes=total,
        positions=tuple(positions),
        rounded=round_up(own),
    )


def _positions(inputs: Sequence[InputPort], layout: Any) -> list[int | None]:
    """Which entry of the layout is which input."""
    if not isinstance(layout, tuple):
        raise ShapeError(f"a layout is a tuple of (port, element type, shape), not {type(layout).__name__}")
    positions: list[int | None] = [None] * len(inputs)
    for position, entry in enumerate(layout):
        if not isinstance(entry, tuple) or len(entry) != 3:
            raise ShapeError(f"a layout's entry is (port, element type, shape), not {entry!r}")
        number = entry[0]
        if type(number) is not int or not 0 <= number < len(inputs):
            raise ShapeError(f"there is no input number {number!r}; the model has {_listing(inputs)}")
        if positions[number] is not None:
            raise ShapeError(f"input {inputs[number].name!r} is given twice")
        positions[number] = position
    missing = [
        port.name
        for port, position in zip(inputs, positions, strict=True)
        if position is None and port.mask_of is None
    ]
    if missing:
        raise ShapeError(f"missing input {', '.join(map(repr, missing))}; the model has {_listing(inputs)}")
    return positions


def _check_tensor(port: InputPort, element_type: Any, shape: Any) -> None:
    """Element type, rank, and each size by itself."""
    if element_type != port.element_type:
        raise ElementTypeError(
            f"input {port.name!r} is of element type {port.element_type}, not {element_type!r}; "
            f"convert it before sending"
        )
    if not isinstance(shape, tuple):
        raise ShapeError(f"input {port.name!r}: a shape is a tuple of integers, not {shape!r}")
    if len(shape) != port.shape.rank:
        raise ShapeError(
            f"input {port.name!r} has {port.shape.rank} dimensions, [{port.shape}], "
            f"not {len(shape)}: {list(shape)}"
        )
    for axis, (size, admitted) in enumerate(zip(shape, port.shape.dimensions, strict=True)):
        if size in admitted:
            continue
        where = f"input {port.name!r}: {_axis_text(port, axis)}"
        if type(size) is not int:
            raise ShapeError(f"{where} is {size!r}; a size is an integer")
        if not 0 <= size <= MAX_SIZE:
            side = "negative" if size < 0 else "too large"
            raise ShapeError(f"{where} is {side}; a size lies within 0..{MAX_SIZE}")
        raise ShapeError(f"{where} is {size}, the model takes {admitted}: [{port.shape}]")


def _nbytes(port: InputPort, shape: tuple[int, ...]) -> int:
    try:
        return exact_nbytes(dtype_of(port.element_type).itemsize, shape)
    except ShapeError as error:
        raise ShapeError(f"input {port.name!r}: {error}") from error


def _within_bounds(
    table: DimensionTable, sizes: Sequence[int | None], first_port: dict[int, str]
) -> tuple[int, ...]:
    """The bounds that the inputs have together may be tighter than those of the port that was looked at."""
    own = []
    for number, size in enumerate(sizes):
        # Known always: a mask, which alone may be left out, has no dimension that its source has not.
        assert size is not None
        if size not in table.bounds[number]:
            raise ShapeError(
                f"input {first_port[number]!r}: dimension {table.names[number]!r} is {size}, "
                f"the inputs together take {table.bounds[number]}"
            )
        own.append(size)
    return tuple(own)


def _axis_text(port: InputPort, axis: int) -> str:
    name = port.shape.names[axis]
    return f"axis {axis}" if name is None else f"dimension {name!r}"


def _listing(inputs: Sequence[InputPort]) -> str:
    if not inputs:
        return "no inputs"
    return "; ".join(f"{number} {port.name!r}" for number, port in enumerate(inputs))
