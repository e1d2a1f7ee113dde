"""Traces: arrival time, model, client and sizes of each request, and its place in a chain; never its data.

docs/capacity.md specifies the file format (JSON lines, plain or .gz). The journal calls `TraceRecorder` for every
request that arrives; the simulator and `tune` read the file. An error ends the recording, never the server.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from sys import float_info
from typing import IO, Any, NamedTuple, TypeAlias, cast

from shapestream.errors import ConfigurationError
from shapestream.telemetry.logging import get_logger

TRACE_VERSION = 1
MAX_LINE = 1 << 20
"""Largest number of characters of a line."""


class TracePart(NamedTuple):
    """The place of a request in a chain."""

    parent: int
    """Number of the chain's request that it is for."""
    stage: int
    """Number of its stage."""


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
    part: TracePart | None = None
    """None: a client sent it."""


class TraceStage(NamedTuple):
    """A stage of a chain."""

    needs: tuple[str, ...]
    """The stages whose outputs it takes; all of them come before it."""
    at_most: int | None = None
    """Requests that it reserves for one request of the chain; None: it always has one, which is not reserved."""


class TraceChain(NamedTuple):
    """A request of a chain."""

    at_s: float
    chain: int
    """Number of the chain in the trace."""
    client: int
    deadline_s: float | None = None
    priority: int = 0
    number: int = 0
    """The `parent` of its stages' requests."""
    rows: Sequence[Sequence[tuple[int, tuple[int, ...]]]] = ()
    """By stage, the model and the sizes of each of its requests, in the order of the lines."""


Sent: TypeAlias = TraceRequest | TraceChain
"""What a client sent."""


def header_line(models: Mapping[str, tuple[str, ...]]) -> str:
    """Return the first line of a trace. `models` holds the dynamic dimensions by name."""
    return json.dumps({"shapestream_trace": TRACE_VERSION, "models": models}) + "\n"


def request_line(request: TraceRequest) -> str:
    """Return the line of a request. It is formatted by hand because the server does it for each request."""
    at_s, model, client, sizes, deadline_s, priority, place = request
    deadline = "null" if deadline_s is None else f"{deadline_s:.6f}"
    part = "" if place is None else f",{place.parent},{place.stage}"
    return f"[{at_s:.6f},{model},{client},[{','.join(map(str, sizes))}],{deadline},{priority}{part}]\n"


def chain_line(name: str, stages: Mapping[str, TraceStage]) -> str:
    """Return the line that names a chain. Chains are numbered in the order of these lines."""
    return json.dumps({"chain": name, "stages": {key: each._asdict() for key, each in stages.items()}}) + "\n"


def chain_request_line(request: TraceChain) -> str:
    """Return the line of a chain's request, which has no sizes: those of its stages' requests are what the slots do."""
    at_s, chain, client, deadline_s, priority, number, _ = request
    deadline = "null" if deadline_s is None else f"{deadline_s:.6f}"
    return f"[{at_s:.6f},{chain},{client},null,{deadline},{priority},{number}]\n"


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
        self.chains: list[tuple[str, dict[str, TraceStage]]] = []
        """Names and stages of chains, likewise. A chain that a reload has changed comes again."""
        for number, line in self._lines():
            self._add_models(self._header(number, line), number)
            break
        else:
            raise ConfigurationError([f"{self.path}: empty; a trace begins with a line of its models"])

    def __iter__(self) -> Iterator[TraceRequest]:
        """Yield all requests for models, also those of chains' stages, as they came."""
        for sent in self._lines_read():
            if isinstance(sent, TraceRequest):
                yield sent

    def sent(self) -> Iterator[Sent]:
        """Yield what clients sent: requests for models, and those of chains, each with the requests of its stages.

        The sizes of these are held in memory from the first chain on, equal ones once: 8 bytes for each.
        """
        rows: dict[int, list[list[tuple[int, tuple[int, ...]]]]] | None = None
        for sent in self._lines_read():
            if isinstance(sent, TraceChain):
                if rows is None:
                    rows = self._rows()
                yield sent._replace(rows=rows.pop(sent.number))
            elif sent.part is None:
                yield sent

    def _rows(self) -> dict[int, list[list[tuple[int, tuple[int, ...]]]]]:
        """Return the requests of the stages of each chain's request."""
        rows: dict[int, list[list[tuple[int, tuple[int, ...]]]]] = {}
        known: dict[tuple[int, tuple[int, ...]], tuple[int, tuple[int, ...]]] = {}
        for sent in self._lines_read():
            if isinstance(sent, TraceChain):
                rows[sent.number] = [[] for _ in self.chains[sent.chain][1]]
            elif sent.part is not None:
                row = (sent.model, sent.sizes)
                rows[sent.part.parent][sent.part.stage].append(known.setdefault(row, row))
        return rows

    def _lines_read(self) -> Iterator[Sent]:
        self.chains = []
        parents: dict[int, int] = {}
        latest = 0.0
        widths = [len(dimensions) for dimensions in self.models.values()]
        for number, line in self._lines():
            if number == 1:
                continue
            plain = self._parse(number, line)
            if type(plain) is dict:
                if "chain" in plain:
                    self._add_chain(plain, number)
                else:
                    self._add_models(plain, number)
                widths = [len(dimensions) for dimensions in self.models.values()]
                continue
            request: Sent
            if type(plain) is list and len(plain) == 7:
                request = self._chain_request(number, plain)
                parents[request.number] = len(self.chains[request.chain][1])
            else:
                request = self._request(number, plain, widths)
                part = request.part
                if part is not None and not 0 <= part.stage < parents.get(part.parent, 0):
                    raise self._error(number, "parent, stage: no chain's request with this stage came before")
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

    def _add_chain(self, plain: Mapping[str, Any], number: int) -> None:
        name, stages = plain["chain"], plain.get("stages")
        if type(name) is not str or type(stages) is not dict:
            raise self._error(number, 'expected {"chain": NAME, "stages": {NAME: {...}}}')
        read: dict[str, TraceStage] = {}
        for stage, fields in stages.items():
            try:
                needs, at_most = tuple(fields["needs"]), fields["at_most"]
            except (TypeError, KeyError):
                needs, at_most = (), False
            if not all(need in read for need in needs):
                raise self._error(number, f"stage {stage!r}: needs a stage that does not come before it")
            if at_most is not None and (type(at_most) is not int or at_most < 1):
                raise self._error(
                    number, f'stage {stage!r}: expected {{"needs": [...], "at_most": N or null}}'
                )
            read[stage] = TraceStage(needs, at_most)
        self.chains.append((name, read))

    def _chain_request(self, number: int, plain: list[Any]) -> TraceChain:
        at_s, chain, client, sizes, deadline_s, priority, own = plain
        self._check_times(number, at_s, deadline_s)
        if type(chain) is not int or not 0 <= chain < len(self.chains):
            raise self._error(number, f"chain: expected a number below {len(self.chains)}, got {chain!r}")
        if sizes is not None or not all(type(each) is int for each in (client, priority, own)):
            raise self._error(
                number, "expected [t_s, chain, client, null, deadline_s or null, priority, number]"
            )
        return TraceChain(at_s, chain, client, deadline_s, priority, own)

    def _check_times(self, number: int, at_s: Any, deadline_s: Any) -> None:
        if not _is_seconds(at_s):
            raise self._error(number, f"t_s: expected seconds >= 0, got {at_s!r}")
        if deadline_s is not None and not _is_seconds(deadline_s):
            raise self._error(number, f"deadline_s: expected seconds >= 0 or null, got {deadline_s!r}")

    def _request(self, number: int, plain: Any, widths: list[int]) -> TraceRequest:
        if type(plain) is not list or len(plain) not in (6, 8):
            raise self._error(number, "expected [t_s, model, client, [sizes], deadline_s or null, priority]")
        at_s, model, client, sizes, deadline_s, priority = plain[:6]
        self._check_times(number, at_s, deadline_s)
        if type(model) is not int or not 0 <= model < len(widths):
            raise self._error(number, f"model: expected a number below {len(widths)}, got {model!r}")
        if type(client) is not int or type(priority) is not int:
            raise self._error(number, f"client, priority: expected integers, got {client!r}, {priority!r}")
        if type(sizes) is not list or not all(type(size) is int and size >= 0 for size in sizes):
            raise self._error(number, f"sizes: expected integers >= 0, got {sizes!r}")
        if len(sizes) != widths[model]:
            raise self._error(number, f"sizes: this model has {widths[model]} dimensions, not {len(sizes)}")
        if not all(type(each) is int for each in plain[6:]):
            raise self._error(number, f"parent, stage: expected integers, got {plain[6:]!r}")
        part = TracePart(*plain[6:]) if len(plain) == 8 else None
        return TraceRequest(at_s, model, client, tuple(sizes), deadline_s, priority, part)

    def _error(self, number: int, what: str) -> ConfigurationError:
        return ConfigurationError([f"{self.path}:{number}: {what}"])


def _is_seconds(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value <= float_info.max


log = get_logger()

MAX_REQUESTS = 5_000_000
"""Requests after which a recording ends: about 200 MB as text, 30 MB as .gz."""
FLUSH_S = 1.0


class TraceRecorder:
    """A writer of one trace file.

    Raises OSError if the file cannot be made, also where it exists. A later error is logged once and ends the recording.
    """

    def __init__(self, path: str | Path, *, max_requests: int = MAX_REQUESTS) -> None:
        self.path = Path(path)
        self._file: IO[str] | None = open_text(self.path, "x")
        self._left = max_requests
        self._has_header = False
        self._numbers: dict[str, int] = {}
        self._chains: dict[tuple[str, tuple[tuple[str, TraceStage], ...]], int] = {}
        """Numbers of chains, by name and stages: a reload may change these."""
        self._clients: dict[int, int] = {}
        self._began: float | None = None
        self._flush_at = 0.0
        self.recorded = 0
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
        part: TracePart | None = None,
    ) -> None:
        """Record one request, with times of the server's clock. Does nothing after the recording's end."""
        file = self._file
        if file is None:
            return
        number = self._numbers.get(model)
        try:
            if number is None:
                number = self._add_model(file, model, dimensions)
            request = TraceRequest(
                self._at_s(now), number, self._alias(client), sizes, _left(deadline, now), priority, part
            )
            self._write(file, request_line(request), now)
        except OSError as error:
            self._give_up(str(error))

    def record_chain(
        self,
        now: float,
        client: int,
        name: str,
        stages: Mapping[str, TraceStage],
        deadline: float | None,
        priority: int,
        number: int,
    ) -> None:
        """Record one request of a chain. `number` is the `parent` of its stages' requests."""
        file = self._file
        if file is None:
            return
        key = (name, tuple(stages.items()))
        try:
            if key not in self._chains:
                self._begin(file, {})
                file.write(chain_line(name, stages))
                self._chains[key] = len(self._chains)
            request = TraceChain(
                self._at_s(now),
                self._chains[key],
                self._alias(client),
                _left(deadline, now),
                priority,
                number,
            )
            self._write(file, chain_request_line(request), now)
        except OSError as error:
            self._give_up(str(error))

    def _at_s(self, now: float) -> float:
        if self._began is None:
            self._began, self._flush_at = now, now + FLUSH_S
        return now - self._began

    def _alias(self, client: int) -> int:
        """Return a new number of a client, so that a trace says nothing about earlier requests."""
        return self._clients.setdefault(client, len(self._clients))

    def _write(self, file: IO[str], line: str, now: float) -> None:
        file.write(line)
        self.recorded += 1
        if now >= self._flush_at:
            self._flush_at = now + FLUSH_S
            file.flush()
        self._left -= 1
        if self._left <= 0:
            self._give_up(f"{self.recorded} requests, which is the limit")

    def close(self) -> None:
        """Write the buffered lines and close the file. A second call does nothing."""
        file, self._file = self._file, None
        if file is None:
            return
        try:
            self._begin(file, {})
            file.close()
        except OSError as error:
            log.warning("the end of the trace is missing", path=str(self.path), why=str(error))
        log.info("trace recorded", path=str(self.path), requests=self.recorded)

    def _add_model(self, file: IO[str], model: str, dimensions: tuple[str, ...]) -> int:
        if not self._begin(file, {model: dimensions}):
            file.write(json.dumps({"models": {model: dimensions}}) + "\n")
        number = self._numbers[model] = len(self._numbers)
        return number

    def _begin(self, file: IO[str], models: Mapping[str, tuple[str, ...]]) -> bool:
        """Write the header, unless it is written; tell whether that was needed."""
        needed, self._has_header = not self._has_header, True
        if needed:
            file.write(header_line(models))
        return needed

    def _give_up(self, why: str) -> None:
        log.warning("the recording of the trace ends", path=str(self.path), requests=self.recorded, why=why)
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):  # the buffer could not be written before, either
                file.close()


def _left(deadline: float | None, now: float) -> float | None:
    return None if deadline is None else max(0.0, deadline - now)
