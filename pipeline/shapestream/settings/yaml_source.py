"""Read a YAML file as plain values, with the place of each, so that later errors can point at it.

The values are those of the core schema of YAML 1.2: `yes` is text, `010` is ten, `1:30` is text, `1e-3` is a number. Only
mappings, lists and scalars are built. Tags, merge keys and duplicate keys are refused. Aliases are followed, within limits
of depth and of the number of values.

PyYAML parses the text into nodes with places. No loader of PyYAML or ruamel.yaml builds these values: the first reads
YAML 1.1; the second stops at the first duplicate key, follows merge keys, and reads dates and `1_000` as values.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import yaml

Location: TypeAlias = tuple[str | int, ...]
"""The keys and indices that lead to a value: `("models", 0, "batching", "max_batch")`."""

MAX_BYTES = 1 << 20
MAX_VALUES = 100_000
MAX_DEPTH = 64

_STANDARD_TAGS = frozenset(f"tag:yaml.org,2002:{kind}" for kind in ("str", "map", "seq"))
_HALF_CHARACTER = re.compile("[\ud800-\udfff]")
"""Half of a surrogate pair: escapes can write one, and no output can print it."""
_SCALARS: tuple[tuple[str, Callable[[str], Any]], ...] = (
    (r"~|null|Null|NULL|", lambda text: None),
    (r"true|True|TRUE", lambda text: True),
    (r"false|False|FALSE", lambda text: False),
    (r"[-+]?[0-9]{1,400}", int),
    (r"0x[0-9a-fA-F]{1,300}|0o[0-7]{1,400}", lambda text: int(text, 0)),
    (r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", float),
    (r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", lambda text: float(text.replace(".", "", 1))),
)
"""The forms of scalars without quotes, each with its reader; all others are text."""


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """A position in the file; both count from 1."""

    line: int
    column: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceProblem:
    """A problem of the text, which is found before the values are validated."""

    message: str
    location: Location = ()
    place: Place | None = None


@dataclass(slots=True)
class YamlSource:
    """The content of a file: `values` are plain Python, `places` their positions. An entry has the position of its key."""

    values: Any = None
    places: dict[Location, Place] = field(default_factory=dict)
    problems: list[SourceProblem] = field(default_factory=list)
    origins: dict[Location, Location] = field(default_factory=dict)
    """The entry of the file from which an entry of `values` was made, such as a model of a folder's."""

    spellings: dict[Location, str] = field(default_factory=dict)
    """Numbers that are written in another way than they read: `010`, `1.10`, `0x1F`."""
    refused: set[Location] = field(default_factory=set)
    """Entries whose problems are told: what else is wrong with them follows from these."""

    def origin(self, location: Location) -> Location:
        """Return `location` in the file, for a value that was made from another entry."""
        return (*self.origins.get(location[:2], location[:2]), *location[2:])

    def holds(self, location: Location) -> bool:
        """Tell whether `values` has this value: it is in the file, or made from another entry of it."""
        value = self.values
        for key in location:
            match value, key:
                case (dict(), str()) if key in value:
                    value = value[key]
                case (list(), int()) if key < len(value):
                    value = value[key]
                case _:
                    return False
        return True

    def written(self, location: Location) -> Location:
        """Return `location`, or the innermost value around it that is in the file."""
        location = self.origin(location)
        while location and location not in self.places:
            location = location[:-1]
        return location

    def place_of(self, location: Location) -> Place | None:
        """Return the place of `location`, or of the innermost value around it that is in the file."""
        return self.places.get(self.written(location))


def read_yaml(data: bytes) -> YamlSource:
    """Read one document. Nothing is raised for invalid content: all problems are in `problems`."""
    source = YamlSource()
    if len(data) > MAX_BYTES:
        source.problems.append(SourceProblem(message=f"the file is larger than {MAX_BYTES >> 20} MiB"))
        return source
    try:
        root = yaml.compose(data.decode("utf-8-sig"), Loader=yaml.BaseLoader)
    except UnicodeDecodeError as error:
        message = f"not UTF-8 text (byte {error.start}: {error.reason})"
        source.problems.append(SourceProblem(message=message))
    except yaml.reader.ReaderError as error:
        message = f"not YAML: the character {chr(error.character)!r} is not allowed"
        source.problems.append(SourceProblem(message=message, place=_place_of_offset(data, error.position)))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = None if mark is None else _place(mark)
        source.problems.append(SourceProblem(message=_syntax_message(error), place=place))
    except (ValueError, OverflowError):
        # PyYAML converts escapes and versions without a check.
        message = "not YAML: an escape beyond \\U0010FFFF, or an endless version"
        source.problems.append(SourceProblem(message=message))
    except RecursionError:
        source.problems.append(SourceProblem(message="nested too deeply to be a configuration"))
    else:
        if root is not None:
            _Builder(source).run(root)
    return source


class _Builder:
    """The builder of values from nodes, which records places and problems."""

    def __init__(self, source: YamlSource) -> None:
        self._source = source
        self._budget = MAX_VALUES

    def run(self, root: yaml.Node) -> None:
        self._source.places[()] = _place(root.start_mark)
        self._source.values = self._build(root, ())
        if self._budget < 0:
            self._source.problems.append(SourceProblem(message=f"more than {MAX_VALUES} values (aliases?)"))

    def _build(self, node: yaml.Node, location: Location) -> Any:
        self._budget -= 1
        if self._budget < 0:
            return None
        if len(location) > MAX_DEPTH:
            self._complain(node, location[:3], "nested too deeply, or an alias that holds itself")
            return None
        if node.tag not in _STANDARD_TAGS:
            self._complain(
                node, location, f"the tag {_short(node.tag)} is not allowed (write plain values only)"
            )
            return None
        if isinstance(node, yaml.MappingNode):
            return {key: self._build(value, (*location, key)) for key, value in self._entries(node, location)}
        if isinstance(node, yaml.SequenceNode):
            return [self._item(value, (*location, index)) for index, value in enumerate(node.value)]
        if _HALF_CHARACTER.search(node.value):
            self._complain(node, location, "half of a character (write the whole one: \\U0001F600)")
            return None
        plain = isinstance(node, yaml.ScalarNode) and node.style is None
        if not plain:
            return node.value
        value = _scalar(node.value)
        if type(value) in (int, float) and str(value) != node.value:
            self._source.spellings[location] = node.value
        return value

    def _item(self, node: yaml.Node, location: Location) -> Any:
        self._source.places.setdefault(location, _place(node.start_mark))
        return self._build(node, location)

    def _entries(self, node: yaml.MappingNode, location: Location) -> Iterator[tuple[str, yaml.Node]]:
        seen: dict[str, Place] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode) or key_node.tag not in _STANDARD_TAGS:
                self._complain(key_node, location, "a key must be plain text")
                continue
            key = str(key_node.value)
            if _HALF_CHARACTER.search(key):
                self._complain(key_node, location, "a key holds half of a character")
                continue
            if key == "<<" and key_node.style is None:
                self._complain(key_node, location, "merge keys (<<) are not read; write the keys out")
                continue
            if (first := seen.get(key)) is not None:
                message = f"duplicate key (it is on line {first.line} already; remove one)"
                self._complain(key_node, (*location, key), message)
                continue
            seen[key] = _place(key_node.start_mark)
            self._source.places[(*location, key)] = seen[key]
            yield key, value_node

    def _complain(self, node: yaml.Node, location: Location, message: str) -> None:
        place = _place(node.start_mark)
        self._source.problems.append(SourceProblem(message=message, location=location, place=place))


def _scalar(text: str) -> Any:
    """Return the value of a scalar that was written without quotes."""
    for form, read in _SCALARS:
        if re.fullmatch(form, text):
            return read(text)
    return text


def _place(mark: yaml.Mark) -> Place:
    return Place(mark.line + 1, mark.column + 1)


def _place_of_offset(data: bytes, offset: int) -> Place:
    before = data.decode("utf-8-sig")[:offset]
    return Place(before.count("\n") + 1, len(before) - (before.rfind("\n") + 1) + 1)


def _syntax_message(error: yaml.MarkedYAMLError) -> str:
    said = ", ".join(part for part in (error.context, error.problem) if part)
    hint = ""
    if "\\t" in said:
        hint = " (indent with spaces, not tabs)"
    elif "mapping values are not allowed" in said:
        hint = " (quote a text that holds a colon, or check the indentation)"
    elif "alias" in said:
        hint = " (quote a text that starts with * or &)"
    return f"not YAML: {said}{hint}"


def _short(tag: str) -> str:
    return tag.replace("tag:yaml.org,2002:", "!!")
