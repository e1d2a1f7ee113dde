"""The table of a model's dynamic dimensions: what its inputs have in common.

Axes of one name are one dimension: it has the same size in all inputs of a request, and the bounds that all of them admit.
A dynamic axis without a name is a dimension of its own, `<input>.<axis>`. A table is made from the inputs alone, and never
changes. A dimension's number in it is its place in the sizes of each request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shapestream_engine.errors import ShapeError, SignatureError
from shapestream_engine.ports import InputPort
from shapestream_engine.shapes import BATCH, Dimension


@dataclass(frozen=True, slots=True, kw_only=True)
class DimensionTable:
    """Names, bounds and positions of the dynamic dimensions; tuples are parallel to `names` unless stated otherwise."""

    names: tuple[str, ...]
    """`batch` first if there is a batch axis, then in order of first occurrence."""
    bounds: tuple[Dimension, ...]
    """The sizes of each dimension that all inputs admit."""
    paddable: tuple[bool, ...]
    """True if every input with the dimension allows padding; always False for `batch`."""
    has_batch: bool
    """True if every input has a dynamic dimension `batch`; otherwise requests cannot share calls."""
    axes: tuple[tuple[int | None, ...], ...]
    """The dimension number of each axis of each input; None for a static axis."""
    strings: tuple[int | None, ...]
    """The number of the dimension that each input of strings implies, the mean bytes of its elements; else None.

    No axis has it, and no element is ever added to it. So it is always paddable: requests of any means share a call.
    """

    @classmethod
    def of(cls, inputs: Sequence[InputPort]) -> DimensionTable:
        """Return the table of these inputs; raises `SignatureError` if they contradict each other."""
        axis_names = [port.axis_names for port in inputs]
        has_batch = bool(inputs) and all(BATCH in names for names in axis_names)
        first = [BATCH] if has_batch else []
        implied = [port.bytes_dimension for port in inputs]
        per_input = zip(axis_names, implied, strict=True)
        names = tuple(
            dict.fromkeys(first + [name for own, last in per_input for name in (*own, last) if name])
        )
        number = {name: index for index, name in enumerate(names)}
        for port, per_axis in zip(inputs, axis_names, strict=True):
            if per_axis.count(BATCH) > 1:
                raise SignatureError(
                    f"input {port.name!r} has two batch axes: [{port.shape}]", key=("inputs", port.name)
                )
        _check_static_names(inputs)
        return cls(
            names=names,
            bounds=_bounds(names, inputs, axis_names),
            paddable=tuple(
                all(port.pads(name) for port, per in zip(inputs, axis_names, strict=True) if name in per)
                for name in names
            ),
            has_batch=has_batch,
            axes=tuple(
                tuple(None if name is None else number[name] for name in per_axis) for per_axis in axis_names
            ),
            strings=tuple(None if name is None else number[name] for name in implied),
        )


def _bounds(
    names: Sequence[str], inputs: Sequence[InputPort], axis_names: Sequence[Sequence[str | None]]
) -> tuple[Dimension, ...]:
    """Return the sizes that all axes of a name admit; a static axis fixes the dynamic axes of its name."""
    bounds = dict.fromkeys(names, Dimension())
    for port, per_axis in zip(inputs, axis_names, strict=True):
        if (implied := port.bytes_dimension) is not None:
            bounds[implied] = Dimension(1, port.at_most_bytes)
        for axis, dimension in enumerate(port.shape.dimensions):
            name = per_axis[axis] or port.shape.names[axis]
            if name not in bounds:
                continue
            try:
                bounds[name] = bounds[name].intersection(dimension)
            except ShapeError as error:
                raise SignatureError(
                    f"input {port.name!r}: dimension {name!r} contradicts the other inputs: {error}",
                    key=("inputs", port.name),
                ) from error
    return tuple(bounds.values())


def _check_static_names(inputs: Sequence[InputPort]) -> None:
    """Raise `SignatureError` if static axes of one name differ, such as `c:3` and `c:4`."""
    seen: dict[str, tuple[str, Dimension]] = {}
    for port in inputs:
        for name, dimension in zip(port.shape.names, port.shape.dimensions, strict=True):
            if name is None or dimension.is_dynamic:
                continue
            other, size = seen.setdefault(name, (port.name, dimension))
            if size != dimension:
                raise SignatureError(
                    f"dimension {name!r} is {size} in input {other!r} and {dimension} in input {port.name!r}",
                    key=("inputs", other),
                )
