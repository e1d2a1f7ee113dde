"""How much memory the input tensors of a request take at once: their upper bounds, while these are small together."""

from __future__ import annotations

from collections.abc import Sequence

from shapestream_engine.element_types import dtype_of
from shapestream_engine.signature import ModelSignature
from shapestream_engine.tensor import RESERVE_BYTES

__all__ = ["reserved", "upper_bounds"]


def upper_bounds(signature: ModelSignature) -> tuple[int | None, ...]:
    """The most bytes that each input can need, by the bounds that all inputs have together; None: unbounded."""
    bounds = []
    for port, axes in zip(signature.inputs, signature.table.axes, strict=True):
        nbytes: int | None = dtype_of(port.element_type).itemsize
        for number, dimension in zip(axes, port.shape.dimensions, strict=True):
            most = dimension.maximum if number is None else signature.bounds[number].maximum
            nbytes = None if nbytes is None or most is None else nbytes * most
        bounds.append(nbytes)
    return tuple(bounds)


def reserved(bounds: Sequence[int | None], budget: int = RESERVE_BYTES) -> tuple[bool, ...]:
    """Which inputs are given their upper bound at once: in their order, while the budget of the request lasts."""
    chosen = []
    for bound in bounds:
        fits = bound is not None and bound <= budget
        budget -= bound if fits and bound is not None else 0
        chosen.append(fits)
    return tuple(chosen)
