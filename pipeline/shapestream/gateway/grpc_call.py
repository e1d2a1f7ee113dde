"""The context of a call over gRPC: its caller, metadata and deadline, and the statuses by which it is refused."""

from __future__ import annotations

import math
from urllib.parse import unquote

import grpc

from shapestream.client.tickets import checked_deadline
from shapestream.errors import (
    Cancelled,
    DeadlineExceeded,
    Draining,
    Forbidden,
    InvalidRequest,
    Overloaded,
    RequestError,
    TooLarge,
    Unavailable,
    WorkerLost,
)
from shapestream.gateway.errors import RETRY_AFTER_S, UnknownModel, UnknownService, Unsupported


def refuse(context: grpc.ServicerContext, error: RequestError) -> None:
    """End a call by the status of an error. Raises gRPC's own exception."""
    context.set_trailing_metadata((pushback_of(error),))
    context.abort(status_of(error), error.message[:MOST_WORDS])


def metadata_of(context: grpc.ServicerContext) -> dict[str, str]:
    """Return the metadata of a call that are text; names are lower-case."""
    return {name: value for name, value in context.invocation_metadata() if isinstance(value, str)}


def peer_of(peer: str) -> str:
    """Return the address of a peer without its port: gRPC says `ipv4:127.0.0.1:5`, and `ipv6:%5B::1%5D:5`."""
    kind, _, place = unquote(peer).partition(":")
    return place.rpartition(":")[0].strip("[]") if kind in ("ipv4", "ipv6") else kind


def deadline_of(context: grpc.ServicerContext, wish: float | None) -> float | None:
    """Return the seconds that a request has: the smaller of its own wish and what its call has left; None for no end."""
    # gRPC says some centuries where a call has no deadline.
    left = checked_deadline(context.time_remaining())
    return min((seconds for seconds in (wish, left) if seconds is not None), default=None)


STATUSES: dict[type[RequestError], grpc.StatusCode] = {
    InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    Unsupported: grpc.StatusCode.UNIMPLEMENTED,
    UnknownModel: grpc.StatusCode.NOT_FOUND,
    UnknownService: grpc.StatusCode.NOT_FOUND,
    Forbidden: grpc.StatusCode.PERMISSION_DENIED,
    # gRPC itself says the same of a message that is larger than it takes.
    TooLarge: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Overloaded: grpc.StatusCode.UNAVAILABLE,
    Draining: grpc.StatusCode.UNAVAILABLE,
    Unavailable: grpc.StatusCode.UNAVAILABLE,
    WorkerLost: grpc.StatusCode.UNAVAILABLE,
    DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    Cancelled: grpc.StatusCode.CANCELLED,
}
"""Statuses of errors; any other error is INTERNAL."""
PUSHBACK = "grpc-retry-pushback-ms"
"""Trailing metadata: milliseconds after which a client that retries by itself may do so; below 0, never."""
MOST_WORDS = 2048
"""Characters of a status message. It travels percent-encoded in trailing metadata, which clients limit to 8 KiB."""


def status_of(error: RequestError) -> grpc.StatusCode:
    """Return the status of an error."""
    return STATUSES.get(type(error), grpc.StatusCode.INTERNAL)


def pushback_of(error: RequestError) -> tuple[str, str]:
    """Return the metadata that says when a request may be tried again."""
    if not error.retryable:
        return PUSHBACK, "-1"
    seconds = RETRY_AFTER_S if error.retry_after_s is None else error.retry_after_s
    return PUSHBACK, str(max(1, math.ceil(seconds * 1000)))
