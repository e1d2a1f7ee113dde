"""Which axis of an output follows which dimension of the inputs, as seen on the calls that ran."""

from __future__ import annotations

from collections.abc import Sequence

from shapestream_engine.signature import ModelSignature

__all__ = ["followed"]


def followed(
    signature: ModelSignature, calls: Sequence[tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]]
) -> dict[str, str]:
    """Per output its axes: the dimension that each had the size of in every call, a constant size, or `?`.

    A dimension that was tried in one size only is not told from a constant. Two that were always equal are both named.
    """
    found = {}
    for number, port in enumerate(signature.outputs):
        shapes = [
            (sizes, outputs[number]) for sizes, outputs in calls if len(outputs[number]) == port.shape.rank
        ]
        if shapes and port.shape.rank:
            found[port.name] = ", ".join(_axis(signature, shapes, axis) for axis in range(port.shape.rank))
    return found


def _axis(
    signature: ModelSignature, calls: Sequence[tuple[tuple[int, ...], tuple[int, ...]]], axis: int
) -> str:
    own = {shape[axis] for _, shape in calls}
    names = [
        name
        for number, name in enumerate(signature.dimensions)
        if len({sizes[number] for sizes, _ in calls}) > 1
        and all(sizes[number] == shape[axis] for sizes, shape in calls)
    ]
    if names:
        return " or ".join(names)
    return str(own.pop()) if len(own) == 1 else "?"
