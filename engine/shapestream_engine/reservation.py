"""How much memory the tensors of a request take at once: their upper bounds, while these are small together."""

from __future__ import annotations

from collections.abc import Sequence

from shapestream_engine.element_types import dtype_of
from shapestream_engine.ports import InputPort
from shapestream_engine.shapes import Dimension, NamedShape, exact_nbytes
from shapestream_engine.signature import ModelSignature
from shapestream_engine.tensor import RESERVE_BYTES

__all__ = ["bound_shape", "fixed_ports", "output_bounds", "port_bounds", "reserved", "upper_bounds"]


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


def fixed_ports(signature: ModelSignature, sizes: Sequence[int | None]) -> tuple[InputPort, ...]:
    """The inputs of a model that takes only these sizes (parallel to the signature's dimensions; None: any)."""
    ports = []
    for port, axes in zip(signature.inputs, signature.table.axes, strict=True):
        dimensions = []
        for number, dimension in zip(axes, port.shape.dimensions, strict=True):
            size = None if number is None else sizes[number]
            dimensions.append(dimension if size is None else Dimension(size, size))
        ports.append(InputPort(port.name, port.element_type, NamedShape(port.shape.names, tuple(dimensions))))
    return tuple(ports)


def port_bounds(ports: Sequence[InputPort]) -> tuple[int | None, ...]:
    """The most bytes that each of these inputs can need by itself; None: unbounded."""
    bounds: list[int | None] = []
    for port in ports:
        most = [dimension.maximum for dimension in port.shape.dimensions]
        sizes = [size for size in most if size is not None]
        whole = len(sizes) == len(most)
        bounds.append(exact_nbytes(dtype_of(port.element_type).itemsize, sizes) if whole else None)
    return tuple(bounds)


def bound_shape(signature: ModelSignature, output: int) -> tuple[int, ...] | None:
    """The largest shape that an output can have; None: unbounded along some axis."""
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
    """The most bytes that each output can need; None: unbounded."""
    return tuple(
        None
        if (shape := bound_shape(signature, number)) is None
        else exact_nbytes(dtype_of(port.element_type).itemsize, shape)
        for number, port in enumerate(signature.outputs)
    )


def reserved(bounds: Sequence[int | None], budget: int = RESERVE_BYTES) -> tuple[bool, ...]:
    """Which tensors are given their upper bound at once: in their order, while the budget of the request lasts."""
    chosen = []
    for bound in bounds:
        fits = bound is not None and bound <= budget
        budget -= bound if fits and bound is not None else 0
        chosen.append(fits)
    return tuple(chosen)
