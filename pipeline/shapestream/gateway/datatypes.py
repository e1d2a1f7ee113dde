"""The names that the Open Inference Protocol gives to element types."""

from __future__ import annotations

from types import MappingProxyType

from shapestream_engine.element_types import ELEMENT_TYPES

ELEMENT_TYPE_OF = MappingProxyType(
    {
        "BOOL": "boolean",
        **{
            f"{kind}{bits}": f"{kind[0].lower()}{bits}"
            for kind in ("UINT", "INT")
            for bits in (8, 16, 32, 64)
        },
        **{f"FP{bits}": f"f{bits}" for bits in (16, 32, 64)},
        **({"BF16": "bf16"} if "bf16" in ELEMENT_TYPES else {}),
    }
)
"""Datatype of the protocol -> element type. BYTES is missing: strings are not served."""

DATATYPE_OF = MappingProxyType({element_type: datatype for datatype, element_type in ELEMENT_TYPE_OF.items()})
"""Element type -> datatype of the protocol."""
