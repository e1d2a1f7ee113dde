"""What every section of the YAML is made of: strict models, and the types that several of them use."""

from __future__ import annotations

from typing import Annotated, TypeAlias

from pydantic import BaseModel, BeforeValidator, ConfigDict, WithJsonSchema

from shapestream.settings_values import read_bytes

__all__ = ["COUNT", "TEXT", "Bytes", "Section"]

TEXT = {"type": "string"}
COUNT = {"type": "integer", "minimum": 1}

Bytes: TypeAlias = Annotated[
    int, BeforeValidator(read_bytes), WithJsonSchema({"anyOf": [COUNT, {**TEXT, "examples": ["256 MiB"]}]})
]


class Section(BaseModel):
    """Strict: nothing is converted, nothing unknown is let through."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, use_attribute_docstrings=True)
