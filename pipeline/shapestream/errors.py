"""Every error of the product, split by whose fault it is.

    ShapestreamError
    ├── RequestError            one request failed; it carries the code that travels on the wire
    │   ├── InvalidRequest      invalid            the caller must change the request
    │   ├── TooLarge            too_large          the caller must send less at once
    │   ├── Overloaded          overloaded         the queue is full; try again later
    │   ├── Draining            draining           the server is going away; try another, or later
    │   ├── Unavailable         unavailable        no server, or no worker for this model, can be reached
    │   ├── DeadlineExceeded    deadline_exceeded  the time that the caller gave has passed
    │   ├── Cancelled           cancelled          the caller withdrew the request
    │   ├── WorkerLost          worker_lost        the workers that ran it died
    │   ├── Poisoned            poisoned           it kills workers, and is not run again
    │   ├── Conflict            conflict           another request had this id
    │   ├── AlreadyAnswered     answered           it was answered before; the reply is no longer kept
    │   ├── Forbidden           forbidden          this key may not do that
    │   ├── ModelError          model_error        the engine refused this input; its own words follow
    │   └── InternalError       internal           our fault
    ├── ProtocolError           the peer does not speak protocol version 1
    ├── TransportError          the way to a peer is closed
    │   ├── AddressInUse        another process listens there already
    │   ├── PeerGone            the peer has disconnected, or was never there
    │   └── OutboxFull          the peer reads too slowly; it must be cut off
    └── ConfigurationError      the YAML, or a file that it names, is wrong

Errors of libraries are turned into these at the edges only: the codec, the slots, the settings loader.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import ClassVar


class ShapestreamError(Exception):
    """The base of every error that this project raises on purpose."""


class RequestError(ShapestreamError):
    """One request ended without a result.

    `code` is stable and travels on the wire; `retryable` says whether the same request may succeed
    later, unchanged; `retry_after_s` is the server's estimate of when, in seconds, where it has one. `request_id` is the
    id that the server knows the request by; None where the request never got one.
    """

    code: ClassVar[str] = "internal"
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after_s = retry_after_s
        self.request_id: str | None = None

    def __str__(self) -> str:
        return f"{self.code}: {self.message}"


class InvalidRequest(RequestError):
    """The request can never be served as it is: unknown model, wrong names, types, shapes or lengths; or the model says that
    it does not take the input (`shapestream_engine.InvalidInput`).
    """

    code = "invalid"


class TooLarge(RequestError):
    """The request exceeds a limit of the server or of the model; send fewer rows or fewer bytes."""

    code = "too_large"


class Overloaded(RequestError):
    """The server's queue, or this client's share of it, is full."""

    code = "overloaded"
    retryable = True


class Draining(RequestError):
    """The server finishes what it has and takes nothing new."""

    code = "draining"
    retryable = True


class Unavailable(RequestError):
    """No server answers, or no worker serves this model at the moment."""

    code = "unavailable"
    retryable = True


class DeadlineExceeded(RequestError):
    """The request's time had passed before its result was ready."""

    code = "deadline_exceeded"


class Cancelled(RequestError):
    """The caller withdrew the request."""

    code = "cancelled"


class WorkerLost(RequestError):
    """The workers that ran this request died, more often than is retried."""

    code = "worker_lost"
    retryable = True


class Poisoned(RequestError):
    """The request killed the worker that ran it alone; it, and any equal request, is refused for a while."""

    code = "poisoned"


class Conflict(RequestError):
    """A request with this id and another content came before: a client must not use an id twice."""

    code = "conflict"


class AlreadyAnswered(RequestError):
    """The request was answered before, and its reply is no longer kept: it may have run."""

    code = "answered"


class Forbidden(RequestError):
    """The key that the caller proved to have may not do this."""

    code = "forbidden"


class ModelError(RequestError):
    """The engine could not run the model on this input; the message holds the engine's own words."""

    code = "model_error"


class InternalError(RequestError):
    """A defect of the server."""

    code = "internal"


class ProtocolError(ShapestreamError):
    """A message could not be read as protocol version 1 (docs/protocol.md)."""


class TransportError(ShapestreamError):
    """The base of a socket's refusals; no message was sent."""


class AddressInUse(TransportError):
    """Another process listens at this address already."""


class PeerGone(TransportError):
    """No connected peer has this id; messages queued for it are dropped."""


class OutboxFull(TransportError):
    """The peer reads too slowly: the bound of its outbox is reached, and the message was not taken."""


class ConfigurationError(ShapestreamError):
    """A configuration, or a file that it names, cannot be used.

    `problems` holds every problem found, each a line that starts with `file:line:column:` where known.
    """

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


_BY_CODE: dict[str, type[RequestError]] = {kind.code: kind for kind in RequestError.__subclasses__()}


def error_from_code(code: str, message: str, *, retry_after_s: float | None = None) -> RequestError:
    """Return the error of this code. An unknown code, from a newer server, becomes `InternalError`."""
    kind = _BY_CODE.get(code)
    if kind is None:
        return InternalError(f"{message} (unknown code {code!r})", retry_after_s=retry_after_s)
    return kind(message, retry_after_s=retry_after_s)


def closest(word: str, known: Sequence[str]) -> str | None:
    """Return the known word that `word` is probably a mistake for, or None."""
    close = difflib.get_close_matches(word.lower(), known, n=1, cutoff=0.6)
    return close[0] if close else None


def did_you_mean(word: str, known: Sequence[str]) -> str:
    """Return the hint `(did you mean "x"?)`, or the list of known words."""
    if (close := closest(word, known)) is not None:
        return f'(did you mean "{close}"?)'
    return f"(known: {', '.join(dict.fromkeys(known))})" if known else "(none is known)"
