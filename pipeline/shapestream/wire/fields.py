"""Checks of single fields, as msgpack gave them: exact types, bounded values; True is not an integer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from shapestream.wire.limits import (
    MAX_INTEGER,
    MAX_MESSAGE_CHARACTERS,
    MAX_NAME_CHARACTERS,
    MAX_PLAIN_DEPTH,
)

__all__ = [
    "BadEntryError",
    "checked",
    "flag",
    "integer",
    "map_of_maps",
    "map_of_names",
    "name",
    "optional_integer",
    "plain_map",
    "uuid",
    "words",
]

T = TypeVar("T")


class BadEntryError(Exception):
    """This entry, alone, cannot be used; the message says why."""


def checked(where: str, check: Callable[[Any], T], value: Any) -> T:
    """The checked value; what is wrong with it is said together with where it stands."""
    try:
        return check(value)
    except BadEntryError as error:
        raise BadEntryError(f"{where} {error}") from None


def integer(value: Any) -> int:
    """A number that counts or names something."""
    if type(value) is not int or not 0 <= value <= MAX_INTEGER:
        raise BadEntryError("must be an integer from 0 to 2^63-1")
    return value


def optional_integer(value: Any) -> int | None:
    """The same, or nil."""
    return None if value is None else integer(value)


def flag(value: Any) -> bool:
    """True or false."""
    if type(value) is not bool:
        raise BadEntryError("must be true or false")
    return value


def name(value: Any) -> str:
    """A short string."""
    if type(value) is not str or len(value) > MAX_NAME_CHARACTERS:
        raise BadEntryError(f"must be a string of at most {MAX_NAME_CHARACTERS} characters")
    return value


def words(value: Any) -> str:
    """A longer string, for humans."""
    if type(value) is not str or len(value) > MAX_MESSAGE_CHARACTERS:
        raise BadEntryError(f"must be a string of at most {MAX_MESSAGE_CHARACTERS} characters")
    return value


def uuid(value: Any) -> bytes:
    """16 bytes."""
    if type(value) is not bytes or len(value) != 16:
        raise BadEntryError("must be 16 bytes")
    return value


def plain_map(value: Any) -> dict[str, Any]:
    """A map of plain data; `decode` has made sure that its keys are strings."""
    if type(value) is not dict:
        raise BadEntryError("must be a map")
    if _is_deeper_than(MAX_PLAIN_DEPTH, value):
        raise BadEntryError(f"is nested more than {MAX_PLAIN_DEPTH} deep")
    return value


def _is_deeper_than(limit: int, value: Any) -> bool:
    if type(value) is dict:
        value = value.values()
    elif type(value) is not tuple:
        return False
    return limit == 0 or any(_is_deeper_than(limit - 1, item) for item in value)


def map_of_maps(value: Any) -> dict[str, dict[str, Any]]:
    """A map of maps of plain data."""
    return {name(key): plain_map(item) for key, item in plain_map(value).items()}


def map_of_names(value: Any) -> dict[str, str]:
    """A map of short strings."""
    return {name(key): name(item) for key, item in plain_map(value).items()}
