"""Call shapes that have a static model of their own beside the dynamic one: how they are written, and checked.

    shapes: {static: [{batch: 1, seq: [8, 16, 24]}, {batch: 4, seq: 16}]}

Each names every dynamic dimension of the model; a list of sizes stands for one shape per size. What a static shape
gains, and what it costs: docs/strategies.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from math import prod
from typing import TypeAlias

from shapestream_engine.dimension_table import DimensionTable
from shapestream_engine.errors import SignatureError

__all__ = ["MAX_STATIC", "StaticShape", "bind_static", "check_static", "parse_static", "plain_static"]

StaticShape: TypeAlias = tuple[tuple[str, int], ...]
"""Names and sizes, in the order of the names, so that equal shapes are equal however they were written."""

MAX_STATIC = 256
"""Static models of one model, at most: each keeps a copy of most weights in memory."""


def parse_static(value: object) -> tuple[StaticShape, ...]:
    """The shapes that a list of mappings means. Raises `SignatureError`."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise SignatureError(_complaint(value), key=("strategy", "static"))
    shapes: list[StaticShape] = []
    for entry in value:
        if not isinstance(entry, Mapping) or not entry or not all(isinstance(name, str) for name in entry):
            raise SignatureError(_complaint(entry), key=("strategy", "static"))
        columns = [
            sizes if isinstance(sizes, list | tuple) else (sizes,)
            for _, sizes in sorted(entry.items(), key=lambda item: str(item[0]))
        ]
        # Counted before they are made: a few long lists are already more than anybody has memory for.
        if len(shapes) + prod(map(len, columns)) > MAX_STATIC:
            raise SignatureError(
                f"strategy native: static: no more than {MAX_STATIC} shapes", key=("strategy", "static")
            )
        shapes += [tuple(zip(sorted(entry), sizes, strict=True)) for sizes in product(*columns)]
    return tuple(shapes)


def plain_static(shapes: Sequence[StaticShape]) -> list[dict[str, int]]:
    """Plain data that `parse_static` turns into the same shapes."""
    return [dict(shape) for shape in shapes]


def check_static(shapes: Sequence[StaticShape]) -> None:
    """Raises `SignatureError` for sizes that cannot be meant, and for a shape that is listed twice."""
    if len(shapes) > MAX_STATIC:
        raise SignatureError(
            f"strategy native: static: no more than {MAX_STATIC} shapes", key=("strategy", "static")
        )
    for shape in shapes:
        if [name for name, _ in shape] != sorted({name for name, _ in shape}):
            raise SignatureError(
                f"strategy native: static: {_spelled(shape)}: names stand once, in their order",
                key=("strategy", "static"),
            )
        for name, size in shape:
            if type(size) is not int or not 1 <= size < 1 << 31:
                raise SignatureError(
                    f"strategy native: static: {name!r}: {size!r} is no size; write an integer from 1",
                    key=("strategy", "static"),
                )
    twice = next((shape for shape in shapes if shapes.count(shape) > 1), None)
    if twice is not None:
        raise SignatureError(
            f"strategy native: static: {_spelled(twice)} is listed twice", key=("strategy", "static")
        )


def bind_static(shapes: Sequence[StaticShape], table: DimensionTable) -> tuple[tuple[int, ...], ...]:
    """The sizes of each in the order of the model's dimensions.

    Raises `SignatureError` where one leaves out a dimension, names one that is none, or is more than the model takes.
    """
    return tuple(_bound(shape, table) for shape in shapes)


def _bound(shape: StaticShape, table: DimensionTable) -> tuple[int, ...]:
    sizes = dict(shape)
    about = f"strategy native: static: {_spelled(shape)}"
    has = f"it has {', '.join(table.names)}" if table.names else "all of its dimensions are fixed"
    for name in sizes:
        if name not in table.names:
            raise SignatureError(
                f"{about}: {name!r} is no dynamic dimension of the model; {has}", key=("strategy", "static")
            )
    for name, bounds in zip(table.names, table.bounds, strict=True):
        if name not in sizes:
            raise SignatureError(
                f"{about}: it says nothing of {name!r}; a static shape has a size for each dimension: {has}",
                key=("strategy", "static"),
            )
        if sizes[name] not in bounds:
            raise SignatureError(
                f"{about}: {name!r}: {sizes[name]} is not within {bounds}, which the model takes",
                key=("strategy", "static"),
            )
    return tuple(sizes[name] for name in table.names)


def _spelled(shape: StaticShape) -> str:
    return "{" + ", ".join(f"{name}: {size}" for name, size in shape) + "}"


def _complaint(value: object) -> str:
    return f"strategy native: static: a list of shapes such as [{{batch: 1, seq: 16}}], not {value!r}"
