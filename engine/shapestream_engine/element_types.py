"""Element types by OpenVINO's names, and their NumPy dtypes; other types cannot be sent."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from shapestream_engine.errors import ElementTypeError

try:
    # NumPy lacks bfloat16; the optional package ml_dtypes has it.
    from ml_dtypes import bfloat16 as _bfloat16
except ImportError:  # pragma: no cover - depends on the environment
    _bfloat16 = None


def _known_types() -> dict[str, np.dtype[Any]]:
    # Little-endian everywhere, as on the wire, so that received bytes are used as they are.
    codes = {
        "boolean": "?",
        "i8": "<i1",
        "i16": "<i2",
        "i32": "<i4",
        "i64": "<i8",
        "u8": "<u1",
        "u16": "<u2",
        "u32": "<u4",
        "u64": "<u8",
        "f16": "<f2",
        "f32": "<f4",
        "f64": "<f8",
    }
    types: dict[str, np.dtype[Any]] = {name: np.dtype(code) for name, code in codes.items()}
    if _bfloat16 is not None:
        types["bf16"] = np.dtype(_bfloat16)
    return types


ELEMENT_TYPES: Mapping[str, np.dtype[Any]] = MappingProxyType(_known_types())
"""OpenVINO's name -> NumPy dtype, little-endian; `bf16` needs `ml_dtypes`."""

_NAMES: dict[np.dtype[Any], str] = {dtype: name for name, dtype in ELEMENT_TYPES.items()}


EXACT_BITS = {"bf16": 8, "f16": 11, "f32": 24, "f64": 53}
"""Float types, and the bits of the integers that each type holds exactly: up to 2**bits, each integer has its own float."""


def dtype_of(element_type: str) -> np.dtype[Any]:
    """Return the NumPy dtype of an element type such as `f32`; raises `ElementTypeError` for other names."""
    try:
        return ELEMENT_TYPES[element_type]
    except (KeyError, TypeError):
        raise ElementTypeError(
            f"unknown element type {element_type!r}; known are {', '.join(ELEMENT_TYPES)}"
        ) from None


def element_type_of(dtype: np.dtype[Any] | type) -> str:
    """Return OpenVINO's name of a NumPy dtype; raises `ElementTypeError` for dtypes that cannot be sent.

    Objects, text, dates and structures are refused, because their bytes have no meaning elsewhere. The caller converts
    big-endian arrays explicitly: `array.astype(array.dtype.newbyteorder("<"))`.
    """
    dtype = np.dtype(dtype)
    name = _NAMES.get(dtype)
    if name is not None:
        return name
    if dtype.newbyteorder("<") in _NAMES:
        raise ElementTypeError(
            f'the type {dtype.str!r} is big-endian; convert with .astype(array.dtype.newbyteorder("<"))'
        )
    raise ElementTypeError(f"arrays of type {dtype} cannot be sent; known are {', '.join(ELEMENT_TYPES)}")
