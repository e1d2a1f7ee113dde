"""From a finished ticket to what the caller gets: the value, or the error raised."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from shapestream.client.tickets import ModelHandle, Outcome
from shapestream.errors import InternalError
from shapestream.wire.messages import Result as Answer

__all__ = ["answer_of", "counters_of", "handle_of", "software"]


def answer_of(outcome: Outcome | None) -> Answer:
    """A request's answer."""
    if type(outcome) is Answer:
        return outcome
    raise _error(outcome)


def handle_of(outcome: Outcome | None) -> ModelHandle:
    """An opened model."""
    if type(outcome) is ModelHandle:
        return outcome
    raise _error(outcome)


def counters_of(outcome: Outcome | None) -> dict[str, Any]:
    """The server's counters."""
    if type(outcome) is dict:
        return outcome
    raise _error(outcome)


def check(outcome: Outcome | None) -> None:
    """Raise the error, if it is one."""
    if isinstance(outcome, BaseException):
        raise outcome


def software(face: str) -> str:
    """What a client calls itself in the server's logs."""
    try:
        own = version("shapestream")
    except PackageNotFoundError:  # run from a source tree that nobody installed
        own = "unknown"
    return f"shapestream/{own} {face} python/{platform.python_version()}"


def _error(outcome: Outcome | None) -> BaseException:
    if isinstance(outcome, BaseException):
        return outcome
    return InternalError(f"the session handed back {type(outcome).__name__}")
