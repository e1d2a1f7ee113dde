"""Pydantic's findings in our words: what was expected, what was given, and what to do about it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from pydantic_core import ErrorDetails

from shapestream.settings import Settings
from shapestream.settings_words import address_meant, closest, describe
from shapestream.yaml_source import Location

__all__ = ["explain", "json_schema"]

_EXPECTED: Mapping[str, str] = {
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "tuple_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
}
_BOUNDS: Mapping[str, tuple[str, str]] = {
    "greater_than": ("gt", "more than"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "less than"),
    "less_than_equal": ("le", "at most"),
}


def explain(detail: ErrorDetails) -> tuple[Location, str]:
    """Where it is wrong, and a sentence that says what is wrong and what to do.

    The sentence is empty for what only follows from others: a list that is too short for want of sound items.
    """
    location: Location = detail["loc"]
    kind, given, context = detail["type"], detail.get("input"), detail.get("ctx", {})
    if kind == "extra_forbidden":
        return location, _unknown_key(location, given)
    if kind == "missing":
        return location[:-1], f'missing "{location[-1]}"'
    if kind == "too_short" and given:
        return location, ""
    if kind in _EXPECTED:
        of_groups = location[:1] == ("workers",) and len(location) < 3
        hint = _group_hint(given, is_list=len(location) == 1) if of_groups else ""
        return location, f"expected {_EXPECTED[kind]}, got {describe(given)}{hint or _hint(kind, given)}"
    if kind == "literal_error":
        return location, f"expected {context['expected']}, got {describe(given)}".replace("'", '"')
    if kind in _BOUNDS:
        key, words = _BOUNDS[kind]
        return location, f"must be {words} {context[key]}, got {describe(given)}"
    if kind in ("too_short", "too_long", "missing_positional_argument") or kind.startswith("string_"):
        return location, f"{_plain(detail['msg'])}, got {describe(given)}"
    return location, _plain(detail["msg"])


def _plain(message: str) -> str:
    return message[:1].lower() + message[1:]


def _hint(kind: str, given: Any) -> str:
    if given is None:
        return " (fill it in, or remove the key)"
    if kind in ("int_type", "float_type") and isinstance(given, str):
        return " (remove the quotes)" if _reads_as_number(given, int if kind == "int_type" else float) else ""
    if kind in ("int_type", "int_from_float") and isinstance(given, float) and given.is_integer():
        return f" (write {int(given)})"
    if kind == "bool_type" and isinstance(given, str):
        word = {"yes": "true", "on": "true", "true": "true", "no": "false", "off": "false", "false": "false"}
        return f" (write {word[given.lower()]})" if given.lower() in word else ""
    if kind == "string_type" and isinstance(given, (bool, int, float)):
        return " (put it in quotes)"
    if kind == "tuple_type" and not isinstance(given, dict):
        meant = address_meant(given)
        return f" (write [{given}])" if meant is None else f' (write ["{meant}"])'
    return ""


def _group_hint(given: Any, *, is_list: bool) -> str:
    """What to write for workers that are no list of groups, or for a group that is none: a number is taken for a count."""
    if isinstance(given, dict):
        return " (a list of groups: write [{count: 1}])"
    group = f"{{count: {given if _reads_as_number(str(given), int) else 1}}}"
    return f" (write {f'[{group}]' if is_list else group})"


def _reads_as_number(text: str, kind: Callable[[str], float]) -> bool:
    try:
        kind(text)
    except ValueError:
        return False
    return True


def json_schema() -> dict[str, Any]:
    """The schema of the file for editors (JSON Schema 2020-12)."""
    schema = Settings.model_json_schema()
    schema["properties"]["in_process"]["anyOf"].insert(0, {"type": "boolean"})
    security = schema["$defs"]["ServerSettings"]["properties"]["security"]
    security["anyOf"].insert(0, {"const": "network"})
    probe = schema["$defs"]["ModelSettings"]["properties"]["probe"]
    probe["anyOf"] = [{"type": "string"}, {key: probe.pop(key) for key in ("additionalProperties", "type")}]
    schema["title"] = "shapestream configuration"
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


_schema = functools.cache(json_schema)


def _unknown_key(location: Location, given: Any) -> str:
    known = _known_keys(location[:-1])
    word = str(location[-1])
    if (close := closest(word, known)) is not None:
        return f'unknown key (did you mean "{close}"?)'
    # A shape without quotes in {...} ends at its first comma; what follows are keys without values.
    if ".." in word or ("shape" in known and (given is None or ":" in word)):
        return 'unknown key (put a shape that holds commas in quotes: "batch, 4")'
    return f"unknown key (known: {', '.join(known)})"


def _known_keys(location: Location) -> list[str]:
    schema = _schema()
    definitions: Mapping[str, Any] = schema.get("$defs", {})
    nodes = [schema]
    for part in location:
        nodes = [step for node in nodes for step in _steps(_resolve(node, definitions), part)]
        nodes = [branch for node in nodes for branch in node.get("anyOf", [node])]
    return [key for node in nodes for key in _resolve(node, definitions).get("properties", {})]


def _resolve(node: Mapping[str, Any], definitions: Mapping[str, Any]) -> Mapping[str, Any]:
    reference = node.get("$ref")
    return definitions[reference.rpartition("/")[2]] if isinstance(reference, str) else node


def _steps(node: Mapping[str, Any], part: str | int) -> Iterator[dict[str, Any]]:
    if isinstance(part, int):
        candidates = [node.get("items")]
    else:
        candidates = [node.get("properties", {}).get(part), node.get("additionalProperties")]
    for candidate in candidates:
        if isinstance(candidate, dict):
            yield candidate
            return
