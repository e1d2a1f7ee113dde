"""The datatypes of the Open Inference Protocol (`FP32`), and our element types (`f32`)."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

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
    }
)
"""Element type -> datatype. The protocol's `BYTES` is missing: no model here takes strings."""


def config_datatype(element_type: str) -> str:
    """Return the name of an element type in a Triton model configuration, such as `TYPE_FP32`."""
    return f"TYPE_{DATATYPES[element_type]}"
