"""Which output axis follows which dimension of the inputs: learnt by shape inference, before anything runs.

The model is reshaped to several sets of static sizes, all different, and an output axis that has a dimension's size
in every one of them follows it. Only shapes are inferred, so this takes milliseconds and no input data. What it
finds is checked again on every call, when outputs are divided.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import openvino as ov

from shapestream_engine.backends.openvino.engine_words import engine_words
from shapestream_engine.ports import InputPort
from shapestream_engine.shapes import Dimension

__all__ = ["Findings", "follow"]

_Shapes: TypeAlias = "list[tuple[int | None, ...]]"

# Primes first, since no product or quotient of two of them is a third; large ones to tell an axis that is cut off at
# some size. Then what models with strides, patches or blocks accept.
_SCHEMES = (
    (3, 5, 7, 11, 13, 17, 19, 23, 29, 31),
    (521, 541, 557, 569, 587, 599, 613, 631),
    (8, 24, 40, 56, 72, 88, 104, 120),
    (64, 128, 192, 256, 320, 384, 448, 512),
    (224, 448, 672, 896, 1120, 1344, 1568),
    (60, 120, 180, 240, 300, 360, 420, 480),
    (1, 2, 4, 6, 9, 10, 12, 14),
)
_ENOUGH = 4
"""Sets of sizes that the model accepted; more would tell nothing new."""


@dataclass(frozen=True, slots=True)
class Findings:
    """What shape inference showed."""

    names: list[list[str | None]]
    """Per output and axis: the dimension that it follows, or None."""
    accepted: int
    """Sets of sizes that the model took."""
    varied: frozenset[str]
    """Dimensions that it took in more than one size."""
    complaint: str
    """Why it did not take the last one that it refused."""


def follow(model: ov.Model, inputs: Sequence[InputPort], bounds: Mapping[str, Dimension]) -> Findings:
    """Try the model on sizes within `bounds`, which has an entry per dynamic dimension. The model stays as it is."""
    trial = model.clone()
    tried: list[tuple[dict[str, int], _Shapes]] = []
    complaint = ""
    for tie_axes in (False, True):
        for sizes in _size_sets(_groups(inputs, bounds, tie_axes=tie_axes)):
            try:
                tried.append((sizes, _infer_shapes(trial, inputs, sizes)))
            except RuntimeError as error:
                complaint = engine_words(error)
            if len(tried) >= _ENOUGH:
                break
        if tried:
            break
    # A dimension of which only one size was tried cannot be told from a constant.
    varied = [name for name in bounds if len({sizes[name] for sizes, _ in tried}) > 1]
    named = [name for name in varied if any(name in port.shape.names for port in inputs)]
    return Findings(_following(model, named, tried), len(tried), frozenset(varied), complaint)


def _groups(
    inputs: Sequence[InputPort], bounds: Mapping[str, Dimension], *, tie_axes: bool
) -> list[tuple[list[str], Dimension]]:
    """Dimensions that get the same size. A dimension without a name is on its own or, tied, with those of its axis:
    inputs that are added to each other must agree, whether or not somebody wrote down that they do."""
    groups: dict[object, tuple[list[str], Dimension]] = {}
    for port in inputs:
        for axis, name in enumerate(port.axis_names):
            if name is None:
                continue
            key = axis if tie_axes and port.shape.names[axis] is None else name
            members, _ = groups.setdefault(key, ([], bounds[name]))
            if name not in members:
                members.append(name)
    return list(groups.values())


def _size_sets(groups: list[tuple[list[str], Dimension]]) -> Iterator[dict[str, int]]:
    """Sets in which no two groups have the same size, as far as the bounds allow; no set comes twice."""
    given = []
    for scheme in _SCHEMES:
        for turn in range(2):
            sizes: dict[str, int] = {}
            for number, (members, bounds) in enumerate(groups):
                # Batch axes are seldom divided by anything: small sizes keep them apart from the others.
                wanted = _SCHEMES[0] if "batch" in members else scheme
                own = [size for size in wanted if size in bounds]
                if len(own) < (2 if wanted is _SCHEMES[0] else 1):
                    own = _first_sizes(bounds)
                free = [size for size in own if size not in sizes.values()] or own
                size = free[(number + turn) % len(free)]
                sizes.update(dict.fromkeys(members, size))
            if sizes not in given:
                given.append(sizes)
                yield sizes


def _first_sizes(bounds: Dimension) -> list[int]:
    most = bounds.minimum + 15 if bounds.maximum is None else min(bounds.maximum, bounds.minimum + 15)
    return list(range(max(bounds.minimum, min(1, most)), most + 1))


def _infer_shapes(trial: ov.Model, inputs: Sequence[InputPort], sizes: Mapping[str, int]) -> _Shapes:
    trial.reshape(
        {
            number: ov.PartialShape(
                [
                    dimension.minimum if name is None else sizes[name]
                    for name, dimension in zip(port.axis_names, port.shape.dimensions, strict=True)
                ]
            )
            for number, port in enumerate(inputs)
        }
    )
    return [
        ()
        if output.partial_shape.rank.is_dynamic
        else tuple(axis.get_length() if axis.is_static else None for axis in output.partial_shape)
        for output in trial.outputs
    ]


def _following(
    model: ov.Model, named: Sequence[str], tried: Sequence[tuple[dict[str, int], _Shapes]]
) -> list[list[str | None]]:
    found: list[list[str | None]] = []
    for number, output in enumerate(model.outputs):
        rank = output.partial_shape.rank
        names: list[str | None] = []
        for axis in range(0 if rank.is_dynamic else rank.get_length()):
            fitting = [
                name
                for name in named
                if all(
                    axis < len(shapes[number]) and shapes[number][axis] == sizes[name]
                    for sizes, shapes in tried
                )
            ]
            names.append(fitting[0] if len(fitting) == 1 else None)
        found.append(names)
    return found
