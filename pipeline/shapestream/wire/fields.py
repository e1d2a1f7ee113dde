"""Fields of an entry: a check for each type, and the reader and writer that are made from a kind's fields.

A check takes a value as msgpack gave it, and returns it or raises `BadEntryError`. Types are exact (True is not an integer)
and values are bounded. `reader_of` and `writer_of` serve all kinds without tensors; both are made once per kind.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, TypeAlias, TypeVar, get_type_hints

import msgpack

from shapestream.wire.limits import (
    MAX_INTEGER,
    MAX_MESSAGE_CHARACTERS,
    MAX_NAME_CHARACTERS,
    MAX_PLAIN_DEPTH,
    Limits,
)
from shapestream.wire.messages import Entry
from shapestream_engine.layout import Buffer

T = TypeVar("T")
Fields: TypeAlias = tuple[Any, ...]
"""An unpacked entry: its kind, its number of frames, its fields."""
Reader: TypeAlias = Callable[[Fields, Sequence[Buffer], int, int, Limits], Entry]
"""Fields, frames of the message, the entry's first frame and the one after its last, limits -> the entry.

Raises `BadEntryError`."""
Writer: TypeAlias = Callable[[Any, list[Buffer]], bytes]
"""Entry, frames of the message so far (to append to) -> the packed entry."""
# One packer for the process: making one costs more than packing an entry. `pack` is a single C call that runs
# no Python code, so threads cannot interleave inside it.
pack: Callable[[Any], bytes] = msgpack.Packer(autoreset=True).pack


class BadEntryError(Exception):
    """One unusable entry; its neighbours are served."""


def must_be(what: str, value: Any) -> BadEntryError:
    """Return the error for a value that is not `what`. It shows numbers and the start of a text, and the size of others."""
    match value:
        case None:
            shown = "nil"
        case bool() | int() | float():
            shown = str(value).lower()
        case str():
            shown = f"{value[:32]!r} of {len(value)} characters"
        case bytes() | tuple() | dict():
            shown = f"{_TYPES[type(value)]} of {len(value)}"
        case _:
            shown = type(value).__name__
    return BadEntryError(f"must be {what}, not {shown}")


_TYPES = {bytes: "a bin", tuple: "an array", dict: "a map"}


def checked(where: str, check: Callable[[Any], T], value: Any) -> T:
    """Return the checked value; a `BadEntryError` names the field, `where`."""
    try:
        return check(value)
    except BadEntryError as error:
        raise BadEntryError(f"{where} {error}") from None


def integer(value: Any) -> int:
    """Check a count or number of 63 bits."""
    if type(value) is not int or not 0 <= value <= MAX_INTEGER:
        raise must_be(INTEGER, value)
    return value


def check_integers(kind: str, **numbers: Any) -> None:
    """Raise `BadEntryError` for a field that is no `integer`; one call for all those of a hot kind."""
    for column, value in numbers.items():
        if type(value) is not int or not 0 <= value <= MAX_INTEGER:
            raise BadEntryError(f"{kind}.{column} {must_be(INTEGER, value)}")


INTEGER = "an integer from 0 to 2^63-1"
NAME = f"a string of at most {MAX_NAME_CHARACTERS} characters"


def optional_integer(value: Any) -> int | None:
    """Check an integer, or nil."""
    return None if value is None else integer(value)


def flag(value: Any) -> bool:
    """Check true or false."""
    if type(value) is not bool:
        raise must_be("true or false", value)
    return value


def name(value: Any) -> str:
    """Check a name or code."""
    if type(value) is not str or len(value) > MAX_NAME_CHARACTERS:
        raise must_be(NAME, value)
    return value


def words(value: Any) -> str:
    """Check a message for humans."""
    if type(value) is not str or len(value) > MAX_MESSAGE_CHARACTERS:
        raise must_be(f"a string of at most {MAX_MESSAGE_CHARACTERS} characters", value)
    return value


def uuid(value: Any) -> bytes:
    """Check an id of 16 bytes."""
    if type(value) is not bytes or len(value) != 16:
        raise must_be("16 bytes", value)
    return value


def plain_map(value: Any) -> dict[str, Any]:
    """Check a map of plain data; `decode` has checked that its keys are strings."""
    if type(value) is not dict:
        raise must_be("a map", value)
    if _is_deeper_than(MAX_PLAIN_DEPTH, value):
        raise BadEntryError(f"is nested more than {MAX_PLAIN_DEPTH} deep")
    return value


def _is_deeper_than(limit: int, value: Any) -> bool:
    """Tell whether a map or an array is nested deeper. It is searched by levels, hence in few calls."""
    level = [value]
    for _ in range(limit):
        level = [
            item
            for outer in level
            for item in (outer.values() if type(outer) is dict else outer)
            if type(item) in _NESTED
        ]
        if not level:
            return False
    return True


_NESTED = (dict, tuple)


def names(value: Any) -> tuple[str, ...]:
    """Check an array of names."""
    if type(value) is not tuple:
        raise must_be("an array of strings", value)
    return tuple([name(item) for item in value])


def map_of_maps(value: Any) -> dict[str, dict[str, Any]]:
    """Check a map of maps of plain data."""
    for key, item in plain_map(value).items():
        name(key)
        if type(item) is not dict:
            raise must_be("a map of maps", item)
    known: dict[str, dict[str, Any]] = value
    return known


def map_of_names(value: Any) -> dict[str, str]:
    """Check a map of names."""
    return {name(key): name(item) for key, item in plain_map(value).items()}


_CHECKS: dict[Any, Callable[[Any], Any]] = {
    int: integer,
    int | None: optional_integer,
    bool: flag,
    str: name,
    bytes: uuid,
    tuple[str, ...]: names,
    dict[str, Any]: plain_map,
    dict[str, str]: map_of_names,
    dict[str, dict[str, Any]]: map_of_maps,
}
"""The check of a field, by its annotation; a `str` called `message` is checked by `words`."""


def reader_of(kind: type[Entry]) -> Reader:
    """Return the reader of a kind without tensors; raises `KeyError` for an annotation that has no check."""
    hints = get_type_hints(kind)
    checks = {column: words if column == "message" else _CHECKS[hints[column]] for column in columns_of(kind)}
    most, least = len(checks), len(checks) - kind.OPTIONAL

    def read(fields: Fields, frames: Sequence[Buffer], first: int, last: int, limits: Limits) -> Entry:
        if not least <= len(fields) - 2 <= most:
            raise BadEntryError(f"{kind.NAME} has {len(fields)} elements instead of {most + 2}")
        if first != last:
            raise BadEntryError(f"{kind.NAME} owns no frames, but claims {last - first}")
        values = {
            column: checked(f"{kind.NAME}.{column}", check, value)
            for (column, check), value in zip(checks.items(), fields[2:], strict=least == most)
        }
        return kind(**values)

    return read


def writer_of(kind: type[Entry]) -> Writer:
    """Return the writer of a kind without tensors.

    A `message` is cut to its limit, and its surrogates are replaced: engines write long ones, and ones that are no UTF-8.
    """
    columns = columns_of(kind)
    if not columns:
        whole = pack((kind.KIND, 0))
        return lambda entry, frames: whole
    if len(columns) == 1:
        only = attrgetter(*columns)
        return lambda entry, frames: pack((kind.KIND, 0, only(entry)))
    values = attrgetter(*columns)
    if "message" not in columns:
        return lambda entry, frames: pack((kind.KIND, 0, *values(entry)))
    at = columns.index("message")

    def write(entry: Any, frames: list[Buffer]) -> bytes:
        row = list(values(entry))
        row[at] = row[at][:MAX_MESSAGE_CHARACTERS].encode(errors="replace").decode()
        return pack((kind.KIND, 0, *row))

    return write


def columns_of(kind: type[Any]) -> list[str]:
    """Return the names of the fields, in their order on the wire."""
    return [column.name for column in dataclasses.fields(kind)]
