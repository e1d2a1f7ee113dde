"""The answer to a request without elements, as far as the ports tell it: then no call is needed.

Such a request has no bytes and may claim any sizes beside its 0. What a call for it would hold depends on the claim alone,
once it is padded or filled up, so what the ports do not tell is not run at padded sizes either.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import numpy as np

from shapestream_engine.dimension_table import DimensionTable
from shapestream_engine.element_types import dtype_of
from shapestream_engine.errors import ShapeError
from shapestream_engine.layout import Tensors
from shapestream_engine.ports import InputPort, OutputPort
from shapestream_engine.resolution import RequestShape
from shapestream_engine.rules import Counts, IndexColumn, PaddedCounts, Recount, With
from shapestream_engine.shapes import exact_nbytes

__all__ = ["empty_answer"]


def empty_answer(
    inputs: Sequence[InputPort],
    outputs: Sequence[OutputPort],
    table: DimensionTable,
    request: RequestShape,
    *,
    exactly: bool,
) -> Tensors | None:
    """The results of a request without elements; None where only a call of exactly its sizes can tell.

    `exactly`: it would be run at exactly its sizes.

    Raises `ShapeError` for one whose call may be padded or filled up, or needs a mask that is larger than itself.
    """
    own = dict(zip(table.names, request.sizes, strict=True))
    shapes = [_shape(port, own, has_rows=not table.has_batch or request.rows > 0) for port in outputs]
    unknown = [port.name for port, shape in zip(outputs, shapes, strict=True) if shape is None]
    if not unknown:
        known = [shape for shape in shapes if shape is not None]
        return _tensors(outputs, known)
    about = f"a request without elements, of the sizes {list(request.sizes)}, cannot be answered: "
    if not exactly:
        raise ShapeError(
            f"{about}output {unknown[0]!r} needs a call, which would hold padding alone; send elements"
        )
    for number, port in enumerate(inputs):
        if request.positions[number] is None and all(own.get(name or "", 1) for name in port.axis_names):
            raise ShapeError(f"{about}send the mask {port.name!r}, which has more elements than the request")
    return None


def _shape(port: OutputPort, own: Mapping[str, int], *, has_rows: bool) -> tuple[int, ...] | None:
    """What the output is for such a request; None where the data decides, or has elements of the model's own."""
    rule = port.rule
    data_axis = port.data_axis
    if isinstance(rule, Recount):
        return None if has_rows else (1,) * port.shape.rank
    # Where there are no rows, none was found. How many things are in rows without elements only the model knows.
    if isinstance(rule, IndexColumn | With | Counts | PaddedCounts) and has_rows:
        return None
    sizes = []
    for axis, (name, dimension) in enumerate(zip(port.shape.names, port.shape.dimensions, strict=True)):
        if axis == data_axis and isinstance(rule, IndexColumn | With | Counts | PaddedCounts):
            sizes.append(0)
        elif name is not None and name in own:
            sizes.append(own[name])
        elif dimension.is_dynamic:
            return None
        else:
            sizes.append(dimension.minimum)
    return tuple(sizes) if 0 in sizes else None


def _tensors(outputs: Sequence[OutputPort], shapes: Sequence[tuple[int, ...]]) -> Tensors:
    layout, buffers = [], []
    for number, (port, shape) in enumerate(zip(outputs, shapes, strict=True)):
        dtype = dtype_of(port.element_type)
        exact_nbytes(dtype.itemsize, shape)  # what no array has the shape of cannot be received either
        layout.append((number, port.element_type, shape))
        buffers.append(np.zeros(prod(shape), dtype).tobytes())
    return Tensors(layout=tuple(layout), buffers=buffers)
