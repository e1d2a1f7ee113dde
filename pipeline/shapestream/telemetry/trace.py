"""Traces: arrival time, model, client and sizes of each request, and never its data.

docs/capacity.md specifies the file format (JSON lines, plain or .gz). The journal calls `TraceRecorder` for every
request that arrives; the simulator and `tune` read the file. An error ends the recording, never the server.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from sys import float_info
from typing import IO, Any, NamedTuple, cast

import structlog

from shapestream.errors import ConfigurationError

TRACE_VERSION = 1
MAX_LINE = 1 << 20
"""Largest number of characters of a line."""


class TraceRequest(NamedTuple):
    """One request of a trace. It is a named tuple because a trace may have millions of them."""

    at_s: float
    """Seconds since the trace began."""
    model: int
    """Number of the model in the trace."""
    client: int
    sizes: tuple[int, ...]
    """The request's size of each of its model's dimensions, before any rounding."""
    deadline_s: float | None = None
    """Seconds from the request's arrival to its deadline."""
    priority: int = 0


def header_line(models: Mapping[str, tuple[str, ...]]) -> str:
    """Return the first line of a trace. `models` holds the dynamic dimensions by name."""
    return json.dumps({"shapestream_trace": TRACE_VERSION, "models": models}) + "\n"


def request_line(request: TraceRequest) -> str:
    """Return the line of a request. It is formatted by hand because the server does it for each request."""
    at_s, model, client, sizes, deadline_s, priority = request
    deadline = "null" if deadline_s is None else f"{deadline_s:.6f}"
    return f"[{at_s:.6f},{model},{client},[{','.join(map(str, sizes))}],{deadline},{priority}]\n"


def open_text(path: Path, mode: str) -> IO[str]:
    """Open a trace, compressed if its name ends in .gz. Raises OSError."""
    if path.suffix == ".gz":
        file = gzip.open(path, f"{mode}t", 5, encoding="utf-8", newline="\n")  # noqa: SIM115 - returned open
        return cast(IO[str], file)
    return path.open(mode, encoding="utf-8", newline="\n", buffering=1 << 16)


class TraceReader:
    """A reader of a trace file; each iteration starts at the beginning.

    Raises `ConfigurationError` with file and line for anything but a trace of version 1. A last line without an end was
    cut off by a crash or a full disk, and is left out. One line at a time is held in memory.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.models: dict[str, tuple[str, ...]] = {}
        """Dynamic dimensions by name, in the order of the numbers. Later models are added while the file is read."""
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
            return  # the end of a .gz is missing
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


log = structlog.get_logger()

MAX_REQUESTS = 5_000_000
"""Requests after which a recording ends: about 200 MB as text, 30 MB as .gz."""
FLUSH_S = 1.0
_MAX_NAMES = 1000


class TraceRecorder:
    """A writer of one trace file. An existing file is kept: the new one gets a number in its name.

    Raises OSError if the file cannot be made. A later error is logged once and ends the recording.
    """

    def __init__(self, path: str | Path, *, max_requests: int = MAX_REQUESTS) -> None:
        self.path, file = _create(Path(path))
        self._file: IO[str] | None = file
        self._left = max_requests
        self._numbers: dict[str, int] = {}
        self._clients: dict[int, int] = {}
        self._began: float | None = None
        self._flush_at = 0.0
        self.recorded = 0
        if self.path != Path(path):
            log.warning(
                "trace file exists already, another is written", exists=str(path), path=str(self.path)
            )
        log.info("recording a trace of shapes", path=str(self.path), max_requests=max_requests)

    def record(
        self,
        now: float,
        client: int,
        model: str,
        dimensions: tuple[str, ...],
        sizes: tuple[int, ...],
        deadline: float | None,
        priority: int,
    ) -> None:
        """Record one request, with times of the server's clock. Does nothing after the recording's end."""
        file = self._file
        if file is None:
            return
        if self._began is None:
            self._began, self._flush_at = now, now + FLUSH_S
        number = self._numbers.get(model)
        try:
            if number is None:
                number = self._add_model(file, model, dimensions)
            deadline_s = None if deadline is None else max(0.0, deadline - now)
            # Clients get new numbers, so that a trace says nothing about earlier requests.
            alias = self._clients.setdefault(client, len(self._clients))
            at_s = now - self._began
            file.write(request_line(TraceRequest(at_s, number, alias, sizes, deadline_s, priority)))
            self.recorded += 1
            if now >= self._flush_at:
                self._flush_at = now + FLUSH_S
                file.flush()
        except OSError as error:
            self._give_up(str(error))
            return
        self._left -= 1
        if self._left <= 0:
            self._give_up(f"{self.recorded} requests, which is the limit")

    def close(self) -> None:
        """Write the buffered lines and close the file. A second call does nothing."""
        file, self._file = self._file, None
        if file is None:
            return
        try:
            if not self._numbers:
                file.write(header_line({}))
            file.close()
        except OSError as error:
            log.warning("the end of the trace is missing", path=str(self.path), why=str(error))
        log.info("trace recorded", path=str(self.path), requests=self.recorded)

    def _add_model(self, file: IO[str], model: str, dimensions: tuple[str, ...]) -> int:
        if not self._numbers:
            file.write(header_line({model: dimensions}))
        else:
            file.write(json.dumps({"models": {model: dimensions}}) + "\n")
        number = self._numbers[model] = len(self._numbers)
        return number

    def _give_up(self, why: str) -> None:
        log.warning("the recording of the trace ends", path=str(self.path), requests=self.recorded, why=why)
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):  # the buffer could not be written before, either
                file.close()


def _create(path: Path) -> tuple[Path, IO[str]]:
    """Create a file of that name, or with the next number in its name. An existing trace is never overwritten."""
    stem, dot, suffixes = path.name.partition(".")
    for number in range(1, _MAX_NAMES):
        candidate = path if number == 1 else path.with_name(f"{stem}-{number}{dot}{suffixes}")
        with suppress(FileExistsError):
            return candidate, open_text(candidate, "x")
    raise FileExistsError(f"{path}: there are {_MAX_NAMES} traces of that name")
