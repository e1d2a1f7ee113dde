"""The dynamic dimensions of a model's inputs, numbered: places, bounds, and whether each may be padded.

Worked out once per signature, so that a request's shape is a short tuple of sizes, and everything on the
way of a request is a look-up by number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shapestream_engine.errors import ShapeError, SignatureError
from shapestream_engine.ports import InputPort
from shapestream_engine.shapes import Dimension

__all__ = ["BATCH", "DimensionTable"]

BATCH = "batch"
"""The name of the dimension along which requests are put together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DimensionTable:
    """Names, bounds and places of the dynamic dimensions; parallel to `names` unless said otherwise."""

    names: tuple[str, ...]
    """`batch` first where there is a batch axis, then in order of first occurrence."""
    bounds: tuple[Dimension, ...]
    """What all inputs admit together."""
    paddable: tuple[bool, ...]
    """Every input that has the dimension allows padding of it, which none may do for `batch`."""
    has_batch: bool
    """Every input has a dynamic dimension `batch`; otherwise requests cannot be put together."""
    axes: tuple[tuple[int | None, ...], ...]
    """Per input, per axis: the number of its dimension, or None where the axis is static."""

    @classmethod
    def of(cls, inputs: Sequence[InputPort]) -> DimensionTable:
        """The table of these inputs; raises `SignatureError` where they contradict each other."""
        axis_names = [port.axis_names for port in inputs]
        has_batch = bool(inputs) and all(BATCH in names for names in axis_names)
        first = [BATCH] if has_batch else []
        names = tuple(dict.fromkeys(first + [name for per_port in axis_names for name in per_port if name]))
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
        )


def _bounds(
    names: Sequence[str], inputs: Sequence[InputPort], axis_names: Sequence[Sequence[str | None]]
) -> tuple[Dimension, ...]:
    """What all axes of a name admit. A static axis of the same name ties the dynamic ones to its size."""
    bounds = dict.fromkeys(names, Dimension())
    for port, per_axis in zip(inputs, axis_names, strict=True):
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
    """Names whose axes are all static must agree too: `c:3` here and `c:4` there cannot both be meant."""
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
