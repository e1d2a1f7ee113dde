"""From arrays to a request's input tensors: the convenience of `infer(inputs)`. The hot path gathers instead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from shapestream_engine.element_types import dtype_of
from shapestream_engine.errors import ElementTypeError, ShapeError
from shapestream_engine.ports import InputPort

__all__ = ["InputArrays", "as_port_array", "in_port_order"]

InputArrays: TypeAlias = "Mapping[str, Any] | Sequence[Any]"
"""Per input, by name or in the order of the signature, an array (or what NumPy makes one of) or a tensor."""


def in_port_order(ports: Sequence[InputPort], inputs: InputArrays) -> list[Any]:
    """The values in the order of the ports; raises `ShapeError` where one is missing, or too many."""
    names = [port.name for port in ports]
    if isinstance(inputs, Mapping):
        for wrong, what in ((set(names) - set(inputs), "missing"), (set(inputs) - set(names), "unknown")):
            if wrong:
                listed = ", ".join(sorted(map(str, wrong)))
                raise ShapeError(f"{what}: {listed}; the model takes {', '.join(names)}")
        return [inputs[name] for name in names]
    if isinstance(inputs, str | bytes | np.ndarray):
        raise ShapeError(f"inputs come as a list or a mapping, with one entry for each of {', '.join(names)}")
    if len(inputs) != len(names):
        raise ShapeError(f"{len(inputs)} inputs were given; the model takes {', '.join(names)}")
    return list(inputs)


def as_port_array(port: InputPort, value: Any) -> np.ndarray[Any, Any]:
    """The value in the port's element type; raises `ElementTypeError` rather than turn numbers of one kind into another.

    Precision may be lost, as from f64 to f32, which is what NumPy makes of numbers by itself; fractions are not.
    """
    array, dtype = np.asarray(value), dtype_of(port.element_type)
    source, target = array.dtype.kind, dtype.kind
    if source in "iu" and target in "iu":
        fits = _within(array, dtype)
    elif target == "V":  # bf16, of which NumPy knows no kind
        fits = source in "biuf" or array.dtype == dtype
    else:
        fits = source in "biuf" and np.can_cast(array.dtype, dtype, "same_kind")
    if not fits:
        raise ElementTypeError(
            f"input {port.name!r} is {port.element_type}, which does not hold {array.dtype}"
        )
    return array.astype(dtype, copy=False)


def _within(array: np.ndarray[Any, Any], dtype: np.dtype[Any]) -> bool:
    if array.size == 0:
        return True
    limits = np.iinfo(dtype)
    return int(array.min()) >= int(limits.min) and int(array.max()) <= int(limits.max)
