"""The datatypes of the Open Inference Protocol (`FP32`), and our element types (`f32`)."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy.typing as npt

from shapestream_engine.element_types import element_type_of

DATATYPES: Mapping[str, str] = MappingProxyType(
    {
        "boolean": "BOOL",
        "u8": "UINT8",
        "u16": "UINT16",
        "u32": "UINT32",
        "u64": "UINT64",
        "i8": "INT8",
        "i16": "INT16",
        "i32": "INT32",
        "i64": "INT64",
        "f16": "FP16",
        "f32": "FP32",
        "f64": "FP64",
        "bf16": "BF16",
        "str": "BYTES",
        "bytes": "BYTES",
    }
)
"""Element type -> datatype. `BYTES` is text for one model, and bytes of any meaning for another."""


def datatype_of(array: npt.NDArray[Any]) -> str:
    """Return the datatype of an output's array."""
    return "BYTES" if array.dtype == object else DATATYPES[element_type_of(array.dtype)]


def config_datatype(element_type: str) -> str:
    """Return the name of an element type in a Triton model configuration, such as `TYPE_FP32`."""
    datatype = DATATYPES[element_type]
    return "TYPE_STRING" if datatype == "BYTES" else f"TYPE_{datatype}"
