"""Structured logs: JSON lines for machines, coloured text on a terminal. See docs/logging.md.

Every process calls `configure` once at its start; `change` follows while it runs. Log lines carry ids, shapes, counts
and times; a tensor, or any other bytes, that reaches a log call by mistake is replaced by its length.

A server inside another program (`shapestream.local`) has no log of its own. What runs in the context of `in_a_host` writes
to the standard library's logger `shapestream`, with the host's levels and handlers; structlog stays as the host has it.
"""

from __future__ import annotations

import logging
import sys
import time
from collections import defaultdict
from collections.abc import MutableMapping
from contextvars import ContextVar
from dataclasses import dataclass, field, is_dataclass
from math import inf
from typing import Any, Literal, TextIO, get_args

import structlog

LogFormat = Literal["auto", "json", "pretty"]
LogLevel = Literal["debug", "info", "warning", "error"]
LEVELS: tuple[LogLevel, ...] = get_args(LogLevel)
"""Log levels, the one with the most lines first."""

MAX_TEXT_CHARACTERS = 2000
"""Characters of a text that a log line holds. Longer texts come from peers or engines."""
MAX_RATE_LIMIT_KEYS = 1024
"""Keys that a rate limit distinguishes. Beyond it the oldest key is forgotten, and may log again early."""

# Without the variables of the frames, which may be tensors.
_TRACEBACKS = structlog.processors.ExceptionRenderer(
    structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
)
_PLAIN = (bool, int, float, type(None))
_MARKS_OF_DATA = ("__array_interface__", "__buffer__", "nbytes")


class _LossyStream:
    """A text stream that drops lines that it cannot write: a full disk or a closed pipe must not end a server."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except (OSError, ValueError):
            return 0

    def flush(self) -> None:
        try:
            self._stream.flush()
        except (OSError, ValueError):
            return


def _plain(value: object) -> object:
    """Return the form of `value` for a log line: texts are cut, containers are kept, data becomes the name of its type."""
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, str):
        if len(value) <= MAX_TEXT_CHARACTERS:
            return value
        return f"{value[:MAX_TEXT_CHARACTERS]}… ({len(value)} characters)"
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    if isinstance(value, BaseException):
        return _plain(f"{type(value).__name__}: {value}")
    if isinstance(value, bytes | bytearray | memoryview):
        return f"<{len(value)} bytes>"
    if is_dataclass(value) or any(hasattr(value, name) for name in _MARKS_OF_DATA):
        return f"<{type(value).__name__}>"  # its text would hold its contents
    return _plain(str(value))


def _only_plain_values(
    logger: object, method: str, event: MutableMapping[str, Any]
) -> MutableMapping[str, Any]:
    """Keep tensors and long texts out of a line: a structlog processor."""
    return {key: value if key == "exc_info" else _plain(value) for key, value in event.items()}


_IN_A_HOST = ContextVar("shapestream_in_a_host", default=False)
HOST_LOGGER = "shapestream"
"""The standard library's logger of a server inside another program."""


def in_a_host() -> None:
    """Write the log lines of the present context, and of those that are copied from it, to the host's `logging`."""
    _IN_A_HOST.set(True)


def _as_record(
    logger: object, method: str, event: MutableMapping[str, Any]
) -> tuple[tuple[str], dict[str, Any]]:
    """Return a line for `logging`: the event and its facts as text. The last processor of the host's logger."""
    options = {"exc_info": event.pop("exc_info")} if "exc_info" in event else {}
    text = "  ".join([str(event.pop("event")), *[f"{name}={value}" for name, value in event.items()]])
    return (text,), options


class _Logger:
    """The log of a module: structlog's, as the process has configured it, or in a host the host's."""

    def __init__(self) -> None:
        self._own = structlog.get_logger()
        self._hosts: Any = structlog.wrap_logger(
            logging.getLogger(HOST_LOGGER),
            processors=[structlog.stdlib.filter_by_level, _within_budget, _only_plain_values, _as_record],
            wrapper_class=structlog.stdlib.BoundLogger,
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._hosts if _IN_A_HOST.get() else self._own, name)


class LineBudget:
    """A budget of `burst` lines at once and `per_s` in the long run (a token bucket), with a count of the lines left out.

    It is for ordinary events, all of which are written unless a peer causes thousands of them.
    """

    def __init__(self, burst: int = 200, per_s: float = 20.0) -> None:
        self._burst = burst
        self._per_s = per_s
        self._left = float(burst)
        self._at = 0.0
        self._held_back = 0

    def admit(self, now: float) -> int | None:
        """Return the number of lines that were left out before; None if this line is left out, too."""
        self._left = min(self._burst, self._left + (now - self._at) * self._per_s)
        self._at = now
        if self._left < 1.0:
            self._held_back += 1
            return None
        self._left -= 1.0
        held_back, self._held_back = self._held_back, 0
        return held_back


class RateLimit:
    """A budget of one line per key and `interval_s`, with a count of the lines left out.

    It is for lines that a hostile or broken peer can cause in any number.
    """

    def __init__(self, interval_s: float = 1.0) -> None:
        self._per_s = 1.0 / interval_s if interval_s else inf
        self._budgets: dict[str, LineBudget] = {}

    def admit(self, key: str, now: float) -> int | None:
        """Return the number of lines of this key that were left out before; None if this line is left out, too."""
        budget = self._budgets.get(key)
        if budget is None:
            if len(self._budgets) >= MAX_RATE_LIMIT_KEYS:
                del self._budgets[next(iter(self._budgets))]
            budget = self._budgets[key] = LineBudget(1, self._per_s)
        return budget.admit(now)


def _within_budget(logger: object, method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Keep each event within a `LineBudget` of its own, except at `debug`: a structlog processor.

    So a flood of one event hides no other event, and fills no disk.
    """
    if PRESENT.debug:
        return event
    left_out = PRESENT.budgets[event["event"]].admit(time.monotonic())
    if left_out is None:
        raise structlog.DropEvent
    if left_out:
        event["lines_left_out"] = left_out
    return event


@dataclass(slots=True)
class Present:
    """The present settings of this process's log, which `configure` and `change` set."""

    level: LogLevel = "info"
    format: LogFormat = "auto"
    stream: TextIO | None = None
    """None: stderr."""
    json: bool = False
    """True if lines are JSON; `auto` is resolved."""
    debug: bool = True
    """True if debug lines are written, for code that runs too often to ask structlog."""
    budgets: defaultdict[str, LineBudget] = field(default_factory=lambda: defaultdict(LineBudget))
    """The budget of each event. Events are literals of the code, so there are few."""

    def look(self) -> None:
        """Update `debug` from structlog, which an embedding process may have configured itself."""
        self.debug = bool(log.is_enabled_for(logging.DEBUG))


PRESENT = Present()
log = _Logger()


def get_logger() -> Any:
    """Return the log of a module."""
    return log


def configure(
    level: LogLevel = "info",
    format: LogFormat = "auto",  # noqa: A002 - the word of the YAML
    *,
    stream: TextIO | None = None,
) -> None:
    """Set up logging for this process; `stream` is stderr where not given.

    `auto` is pretty on a terminal and JSON elsewhere. Our dependencies use standard-library
    loggers, which write warnings and errors only. A second call replaces the configuration.
    """
    PRESENT.stream = stream
    PRESENT.budgets.clear()
    _apply(level, format)


def _apply(level: LogLevel, format: LogFormat) -> None:  # noqa: A002 - the word of the YAML
    sink = sys.stderr if PRESENT.stream is None else PRESENT.stream
    pretty = format == "pretty" or (format == "auto" and sink.isatty())
    renderers: list[Any]
    if pretty:
        plain = structlog.dev.plain_traceback
        renderers = [structlog.dev.ConsoleRenderer(colors=sink.isatty(), exception_formatter=plain)]
    else:
        renderers = [_TRACEBACKS, structlog.processors.JSONRenderer()]
    structlog.configure(
        processors=[
            _within_budget,
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            _only_plain_values,
            *renderers,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        # One write per line: otherwise lines of several processes mix on an unbuffered stderr.
        logger_factory=structlog.WriteLoggerFactory(_LossyStream(sink)),  # type: ignore[arg-type] # duck-typed
        cache_logger_on_first_use=False,
    )
    PRESENT.level, PRESENT.format, PRESENT.json = level, format, not pretty
    PRESENT.look()


def change(level: LogLevel | None = None, format: LogFormat | None = None) -> None:  # noqa: A002 - as above
    """Change the log of this process while it runs; None keeps a setting.

    A line at level info says so, if the old or the new level includes it.
    """
    before = PRESENT.level, PRESENT.format
    after = level or before[0], format or before[1]
    if before == after:
        return
    _apply(min(before[0], after[0], key=LEVELS.index), after[1])
    log.info("logging changes", before=before, now=after)
    _apply(*after)
