"""Raw values of the YAML, of whatever type they came: what checks of several settings together look at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from shapestream.yaml_source import Location

__all__ = ["Finding", "is_number", "mapping", "sequence"]

Finding: TypeAlias = tuple[Location, str]
"""The place of the key to change, and what is wrong (what to do)."""


def is_number(value: Any) -> bool:
    """Whether it is one, as YAML understands numbers."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def mapping(value: Any) -> Mapping[str, Any]:
    """It, or an empty one where it is none: its type is complained about elsewhere."""
    return value if isinstance(value, dict) else {}


def sequence(value: Any) -> Sequence[Any]:
    """The same for a list."""
    return value if isinstance(value, list) else []
