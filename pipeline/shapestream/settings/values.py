"""Checks of single values of the configuration, and the words of their errors.

Each `read_` or `check_` function takes a raw value of the YAML and returns the value to keep, or raises the error that
`wrong` makes, whose text is a problem with its remedy in brackets.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated, Any, TypeAlias

from pydantic import BaseModel, BeforeValidator, ConfigDict, WithJsonSchema
from pydantic_core import PydanticCustomError

from shapestream.settings.yaml_source import Location
from shapestream_engine.backends.registry import known_engines
from shapestream_engine.element_types import ELEMENT_TYPES
from shapestream_engine.errors import ShapeError
from shapestream_engine.shapes import NamedShape

__all__ = [
    "COUNT",
    "TEXT",
    "Bytes",
    "Finding",
    "Section",
    "address_meant",
    "check_element_type",
    "check_engine",
    "check_pad_value",
    "check_shape",
    "closest",
    "describe",
    "did_you_mean",
    "engine_of_path",
    "read_auto",
    "read_bytes",
    "read_hang_limit",
    "read_invariant",
    "read_memory_limit",
    "read_property",
    "read_rule_argument",
    "read_sizes",
    "wrong",
]

Finding: TypeAlias = tuple[Location, str]
"""The place of the key to change, and the problem with its remedy in brackets."""


class Section(BaseModel):
    """Base of all sections. It is strict: nothing is converted, and unknown keys are refused."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, use_attribute_docstrings=True)


def closest(word: str, known: Sequence[str]) -> str | None:
    """The known word that `word` was probably meant to be."""
    close = difflib.get_close_matches(word.lower(), known, n=1, cutoff=0.6)
    return close[0] if close else None


def did_you_mean(word: str, known: Sequence[str]) -> str:
    """The hint `(did you mean "x"?)`, or the list of known words."""
    if (close := closest(word, known)) is not None:
        return f'(did you mean "{close}"?)'
    return f"(known: {', '.join(dict.fromkeys(known))})" if known else "(none is known)"


def describe(value: Any) -> str:
    """A value as the user wrote it, short: `"8"`, `true`, `a list`, `nothing`."""
    if value is None:
        return "nothing"
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."


def address_meant(value: Any) -> str | None:
    """The address that a text without `tcp://` or `ipc://` probably means; None where it cannot be told."""
    if not isinstance(value, str) or "://" in value:
        return None
    host, colon, port = value.rpartition(":")
    if colon and port.isascii() and port.isdigit() and "/" not in value:
        return f"tcp://{host or '127.0.0.1'}:{port}"
    return f"ipc://{value}" if value.endswith(".sock") or "/" in value else None


def wrong(message: str) -> PydanticCustomError:
    """The error to raise for a value; `message` is the problem with its remedy in brackets."""
    # The text is a template for pydantic; braces of ours are not fields of it.
    return PydanticCustomError("setting", "{message}", {"message": message})


# A Python process with NumPy and one small model takes more.
MIN_MEMORY_LIMIT = 64 << 20
MAX_BYTES = 1 << 53
"""Largest number of bytes, 8 PiB: more than any machine has, and exact in every format that carries it."""
MAX_ALLOWED_SIZE = (1 << 31) - 1
"""Largest size that a strategy may name: `shapestream_engine.strategy` takes no larger one."""

_UNITS = {
    "": 1,
    "B": 1,
    "KIB": 1 << 10,
    "MIB": 1 << 20,
    "GIB": 1 << 30,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
}
_SIZE = re.compile(r"(\d{1,12})\s*([A-Za-z]*)")


def read_bytes(value: Any) -> int:
    """Read a number of bytes, or a text such as "256 MiB"."""
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return _believable(value, value)
    if isinstance(value, str) and (match := _SIZE.fullmatch(value.strip())) is not None:
        scale = _UNITS.get(match[2].upper())
        if scale is not None and int(match[1]) > 0:
            return _believable(int(match[1]) * scale, value)
    raise wrong(f'expected a size, got {describe(value)} (write bytes, or "256 MiB")')


def _believable(nbytes: int, value: Any) -> int:
    if nbytes > MAX_BYTES:
        raise wrong(f"{describe(value)} is more than any machine has (write at most {MAX_BYTES})")
    return nbytes


TEXT = {"type": "string"}
COUNT = {"type": "integer", "minimum": 1}

Bytes: TypeAlias = Annotated[
    int, BeforeValidator(read_bytes), WithJsonSchema({"anyOf": [COUNT, {**TEXT, "examples": ["256 MiB"]}]})
]


def read_memory_limit(value: Any) -> int:
    """Read a size that a process can live in: a bare 2 or 2048 was meant in another unit."""
    if isinstance(value, int) and not isinstance(value, bool) and 0 < value < MIN_MEMORY_LIMIT:
        raise wrong(f'{value} bytes is less than any process takes (name the unit: "{value} MiB"?)')
    try:
        limit = read_bytes(value)
    except PydanticCustomError:
        raise wrong(f'expected a size, got {describe(value)} (write "2 GiB", or remove the key)') from None
    if limit < MIN_MEMORY_LIMIT:
        raise wrong(f"{describe(value)} is less than any process takes (at least 64 MiB)")
    return limit


def read_auto(value: Any) -> Any:
    """Read a count, or `auto`."""
    if value == "auto":
        return value
    if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= 1024:
        return value
    hint = "remove the quotes" if isinstance(value, str) and value.isdigit() else "write auto, or 1 to 1024"
    raise wrong(f"expected auto or a count, got {describe(value)} ({hint})")


def read_hang_limit(value: Any) -> Any:
    """Read seconds, `auto` or `off`."""
    if value in ("auto", "off"):
        return value
    if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= 86400:
        return value
    raise wrong(
        f"expected seconds, auto or off, got {describe(value)} (write auto, off, or a number up to 86400)"
    )


def check_shape(value: Any) -> str:
    """Check a shape in OpenVINO's spelling, with names, or a list of its entries."""
    if isinstance(value, list) and all(type(entry) in (int, str) for entry in value):
        value = ", ".join(str(entry) for entry in value)
    elif isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str):
        raise wrong(f'expected a shape, got {describe(value)} (write "batch:1..64, seq:1..512, 384")')
    try:
        NamedShape.parse(value)
    except ShapeError as error:
        raise wrong(f"{describe(value)} is not a shape: {error}") from error
    return value


def read_sizes(value: Any) -> tuple[int, ...]:
    """Read the allowed sizes of a dimension: one, or an ascending list."""
    sizes = value if isinstance(value, list) else [value]
    if not isinstance(value, list) and type(value) is not int:
        raise wrong(
            f"expected a size or a list of sizes, got {describe(value)} (write [32, 64]; what is no setting is a dimension)"
        )
    if not sizes:
        raise wrong("there is no size (write [32, 64])")
    for size in sizes:
        if type(size) is not int or not 1 <= size <= MAX_ALLOWED_SIZE:
            raise wrong(f"expected sizes, integers from 1 to {MAX_ALLOWED_SIZE}, got {describe(size)}")
    for before, after in pairwise(sizes):
        if before == after:
            raise wrong(f"{before} is listed twice (list each once)")
        if before > after:
            raise wrong(f"sizes ascend; {after} comes after {before} (write them from small to large)")
    return tuple(sizes)


def read_invariant(value: Any) -> bool | int:
    """Read `batch_invariant`: a truth value, or a number of rows."""
    if isinstance(value, bool):
        return value
    if type(value) is not int or value < 1:
        raise wrong(
            f"expected true, false or a number of rows from 1, got {describe(value)} (write true, or 8)"
        )
    return value


def check_element_type(value: Any) -> str:
    """Check the name of an element type."""
    if isinstance(value, str) and value in ELEMENT_TYPES:
        return value
    raise wrong(f"unknown element type {describe(value)} (write one of: {', '.join(ELEMENT_TYPES)})")


def check_engine(value: Any) -> str:
    """Check the name of an engine: a built-in one, or one of an installed package."""
    known = known_engines()
    if isinstance(value, str) and value in known:
        return value
    raise wrong(
        f"unknown engine {describe(value)} (write one of: {', '.join(known)}; packages may add others)"
    )


def engine_of_path(path: str) -> str:
    """The engine that reads files of this kind where none is named."""
    return "torch" if path.lower().endswith(".pt2") else "openvino"


def check_pad_value(value: Any) -> Any:
    """Check a padding value: a number or a truth value."""
    if isinstance(value, (bool, int, float)):
        return value
    hint = " (remove the quotes)" if isinstance(value, str) else " (write the value to pad with, such as 0)"
    raise wrong(f"expected a number, got {describe(value)}{hint}")


def read_property(value: Any) -> str:
    """Read a property of the engine, which takes texts: true is YES, false is NO."""
    if isinstance(value, bool):
        return "YES" if value else "NO"
    if isinstance(value, (str, int, float)):
        return str(value)
    raise wrong(f"expected a text or a number, got {describe(value)}")


def read_rule_argument(value: Any) -> int | None:
    """Read the column of a rule: a count from 0."""
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 0):
        return value
    raise wrong(f"expected a column, got {describe(value)} (write 0 for the first)")
