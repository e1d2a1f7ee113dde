"""A trace: when requests came, for which model, from whom and how large. Never what was in them.

The file format (JSON lines, plain or .gz) is specified in docs/capacity.md. `trace_recorder.py` writes it in the
server; the simulator and the tuner read it.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from sys import float_info
from typing import IO, Any, NamedTuple, cast

from shapestream.errors import ConfigurationError

__all__ = [
    "MAX_LINE",
    "TRACE_VERSION",
    "TraceReader",
    "TraceRequest",
    "header_line",
    "open_text",
    "request_line",
]

TRACE_VERSION = 1
MAX_LINE = 1 << 20
"""Characters of a line; a longer one is no line of a trace."""


class TraceRequest(NamedTuple):
    """One request of a trace. A named tuple, since a trace may have millions of them."""

    at_s: float
    """Seconds since the trace began."""
    model: int
    """Its number among the trace's models."""
    client: int
    sizes: tuple[int, ...]
    """The request's own size of each of its model's dimensions, before any rounding."""
    deadline_s: float | None = None
    """Seconds from its arrival."""
    priority: int = 0


def header_line(models: Mapping[str, tuple[str, ...]]) -> str:
    """The first line of a trace; `models` are names with their dynamic dimensions."""
    return json.dumps({"shapestream_trace": TRACE_VERSION, "models": models}) + "\n"


def request_line(request: TraceRequest) -> str:
    """The line of a request. Formatted by hand: the server pays for it with every request."""
    at_s, model, client, sizes, deadline_s, priority = request
    deadline = "null" if deadline_s is None else f"{deadline_s:.6f}"
    return f"[{at_s:.6f},{model},{client},[{','.join(map(str, sizes))}],{deadline},{priority}]\n"


def open_text(path: Path, mode: str) -> IO[str]:
    """Opens a trace, compressed if it is called so. Raises OSError."""
    if path.suffix == ".gz":
        file = gzip.open(path, f"{mode}t", 5, encoding="utf-8", newline="\n")  # noqa: SIM115 - returned open
        return cast(IO[str], file)
    return path.open(mode, encoding="utf-8", newline="\n", buffering=1 << 16)


class TraceReader:
    """Reads a trace file from its beginning to its end, as often as it is iterated over.

    Strict: raises `ConfigurationError` with file and line for what is not a trace of version 1. A last line that is
    not ended was cut off by a crash or a full disk, and is left out. Holds one line at a time.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.models: dict[str, tuple[str, ...]] = {}
        """Names and dynamic dimensions, by number; those that only came later join while it is read."""
        for number, line in self._lines():
            self._add_models(self._header(number, line), number)
            break
        else:
            raise ConfigurationError([f"{self.path}: empty; a trace begins with a line of its models"])

    def __iter__(self) -> Iterator[TraceRequest]:
        latest = 0.0
        widths = [len(dimensions) for dimensions in self.models.values()]
        for number, line in self._lines():
            if number == 1:
                continue
            plain = self._parse(number, line)
            if type(plain) is dict:
                self._add_models(plain, number)
                widths = [len(dimensions) for dimensions in self.models.values()]
                continue
            request = self._request(number, plain, widths)
            if request.at_s < latest:
                raise self._error(number, f"time goes back from {latest:g} s to {request.at_s:g} s")
            latest = request.at_s
            yield request

    def _lines(self) -> Iterator[tuple[int, str]]:
        try:
            with open_text(self.path, "r") as file:
                number = 0
                while line := file.readline(MAX_LINE):
                    number += 1
                    if not line.endswith("\n"):
                        if len(line) >= MAX_LINE or number == 1:
                            raise self._error(number, "this is no line of a trace")
                        return
                    yield number, line
        except EOFError:
            return  # a .gz whose end is missing: what could be read was read
        except (OSError, UnicodeDecodeError, zlib.error) as error:
            reason = "no such file" if isinstance(error, FileNotFoundError) else str(error)
            raise ConfigurationError([f"{self.path}: {reason}"]) from error

    def _parse(self, number: int, line: str) -> Any:
        try:
            return json.loads(line)
        except (ValueError, RecursionError) as error:
            raise self._error(number, f"not JSON: {error}") from error

    def _header(self, number: int, line: str) -> Any:
        plain = self._parse(number, line)
        if type(plain) is not dict or "shapestream_trace" not in plain:
            raise self._error(number, 'a trace begins with {"shapestream_trace": 1, "models": {...}}')
        if plain["shapestream_trace"] != TRACE_VERSION:
            raise self._error(
                number, f"version {plain['shapestream_trace']!r}; this program reads {TRACE_VERSION}"
            )
        return plain

    def _add_models(self, plain: Mapping[str, Any], number: int) -> None:
        models = plain.get("models")
        if type(models) is not dict:
            raise self._error(number, 'expected {"models": {NAME: [DIMENSION, ...]}}')
        for name, dimensions in models.items():
            if type(dimensions) is not list or not all(type(dimension) is str for dimension in dimensions):
                raise self._error(
                    number, f"model {name!r}: expected its dimensions' names, got {dimensions!r}"
                )
            if self.models.setdefault(name, tuple(dimensions)) != tuple(dimensions):
                raise self._error(number, f"model {name!r} had other dimensions before")

    def _request(self, number: int, plain: Any, widths: list[int]) -> TraceRequest:
        if type(plain) is not list or len(plain) != 6:
            raise self._error(number, "expected [t_s, model, client, [sizes], deadline_s or null, priority]")
        at_s, model, client, sizes, deadline_s, priority = plain
        if not _is_seconds(at_s):
            raise self._error(number, f"t_s: expected seconds >= 0, got {at_s!r}")
        if type(model) is not int or not 0 <= model < len(widths):
            raise self._error(number, f"model: expected a number below {len(widths)}, got {model!r}")
        if type(client) is not int or type(priority) is not int:
            raise self._error(number, f"client, priority: expected integers, got {client!r}, {priority!r}")
        if type(sizes) is not list or not all(type(size) is int and size >= 0 for size in sizes):
            raise self._error(number, f"sizes: expected integers >= 0, got {sizes!r}")
        if len(sizes) != widths[model]:
            raise self._error(number, f"sizes: this model has {widths[model]} dimensions, not {len(sizes)}")
        if deadline_s is not None and not _is_seconds(deadline_s):
            raise self._error(number, f"deadline_s: expected seconds >= 0 or null, got {deadline_s!r}")
        return TraceRequest(at_s, model, client, tuple(sizes), deadline_s, priority)

    def _error(self, number: int, what: str) -> ConfigurationError:
        return ConfigurationError([f"{self.path}:{number}: {what}"])


def _is_seconds(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value <= float_info.max
