"""Values of one row as inputs of a model, and its outputs as values of a row, by the model's signature.

For `shapestream run` and `shapestream.ray`. A row of a table, or a picture, has no batch axis: a value of a port
`[batch, seq]` is a list. So the axis is added on the way in and taken away on the way out, wherever the signature has it,
and never because some size happens to be 1. A file of arrays is a request as the model takes it, and its results keep the
axis; where the arrays lack it, it is added.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from shapestream.errors import ConfigurationError, InvalidRequest, did_you_mean
from shapestream_engine.element_types import dtype_of
from shapestream_engine.ports import InputPort, OutputPort
from shapestream_engine.shapes import BATCH
from shapestream_engine.signature import ModelSignature

Array = np.ndarray[Any, Any]


def batch_axis(port: InputPort | OutputPort) -> int | None:
    """Return the place of the batch axis; None without one."""
    return port.shape.names.index(BATCH) if BATCH in port.shape.names else None


def columns_of(signature: ModelSignature, given: Mapping[str, str], option: str) -> dict[str, str]:
    """Return the column of each input that has to have one. Raises `ConfigurationError` for ports that do not exist.

    `option`: the argument that gives columns, for the error.
    """
    names = [port.name for port in signature.inputs]
    for name in given:
        if name not in names:
            raise ConfigurationError(
                [f"{option} {name}: the model has no such input {did_you_mean(name, names)}"]
            )
    return {
        port.name: given.get(port.name, port.name)
        for port in signature.inputs
        if port.name in given or not port.may_lack
    }


def inputs_of_row(
    signature: ModelSignature, values: Mapping[str, Any], *, adds_batch: bool
) -> dict[str, Array]:
    """Return the inputs of a row: arrays, or lists, by port. Raises `InvalidRequest` for a value that does not fit.

    `adds_batch`: no value has the batch axis; else those of full rank have it. Shapes are left to the server. Here are the
    mistakes that an array would hide: nothing, and another type.
    """
    arrays: dict[str, Array] = {}
    for port in signature.inputs:
        if port.name not in values:
            if port.may_lack:
                continue
            raise InvalidRequest(f"{port.name}: there is no value")
        value = values[port.name]
        if value is None:
            raise InvalidRequest(f"{port.name}: the value is nothing (null)")
        axis = batch_axis(port)
        array = _whole(port, _typed(port, value), axis)
        if axis is not None and (adds_batch or array.ndim == port.shape.rank - 1):
            array = np.expand_dims(array, min(axis, array.ndim))
        arrays[port.name] = array
    return arrays


def _whole(port: InputPort, array: Array, axis: int | None) -> Array:
    """Return a value with all of its axes: a list of no lists does not say how long these would be.

    They are as long as the port says, or else 0.
    """
    sizes = [
        dimension.minimum if not dimension.is_dynamic else 0
        for place, dimension in enumerate(port.shape.dimensions)
        if place != axis
    ]
    if array.size or array.ndim >= len(sizes):
        return array
    return array.reshape(*array.shape, *sizes[array.ndim :])


def _typed(port: InputPort, value: Any) -> Array:
    """Return a value as an array of the port's type; numbers are converted if nothing of their kind is lost."""
    if port.is_string:
        return _strings(port, value)
    dtype = dtype_of(port.element_type)
    try:
        array = value if isinstance(value, np.ndarray) else np.asarray(value)
    except ValueError:
        raise InvalidRequest(f"{port.name}: the lists differ in length") from None
    if array.size == 0 and not isinstance(value, np.ndarray):
        return array.astype(dtype)
    if array.dtype == object:
        raise InvalidRequest(f"{port.name}: there is nothing (null) or another type among the numbers")
    if array.dtype == dtype:
        return array
    kinds = {"b": "b", "i": "iuf", "u": "iuf", "f": "f", "V": "fV"}
    if dtype.kind not in kinds.get(array.dtype.kind, "") and not (
        array.dtype.kind == "f" and dtype.kind == "V"
    ):
        raise InvalidRequest(f"{port.name}: expected {port.element_type}, got {array.dtype}")
    with np.errstate(over="ignore", invalid="ignore"):
        found = array.astype(dtype)
    if array.dtype.kind in "iu" and (found != array).any():
        raise InvalidRequest(f"{port.name}: a number is beyond {port.element_type}")
    if dtype.kind in "fV" and array.dtype.kind == "f" and (np.isinf(found) & ~np.isinf(array)).any():
        raise InvalidRequest(f"{port.name}: a number is beyond {port.element_type}")
    return found


def _strings(port: InputPort, value: Any) -> Array:
    wanted = bytes if port.element_type == "bytes" else str
    if isinstance(value, list | np.ndarray):
        array = np.array(value, object)
    else:
        array = np.empty((), object)
        array[...] = value
    for element in array.ravel().tolist():
        if not isinstance(element, wanted):
            raise InvalidRequest(f"{port.name}: expected {port.element_type}, got {type(element).__name__}")
    return array


def outputs_of_row(
    signature: ModelSignature, outputs: Mapping[str, Any], *, drops_batch: bool
) -> dict[str, Any]:
    """Return the outputs of a row by name: arrays, or lists of arrays, if asked without their batch axis."""
    found: dict[str, Any] = {}
    for port in signature.outputs:
        if port.name not in outputs:
            continue  # the shapes of a list's arrays, which they have themselves
        value, axis = outputs[port.name], batch_axis(port)
        found[port.name] = value.squeeze(axis) if axis is not None and drops_batch else value
    return found
