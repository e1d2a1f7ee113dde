"""The errors of the SDK as gRPC's statuses."""

from __future__ import annotations

import math

import grpc

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
from shapestream.gateway.gateway_errors import UnknownModel, UnknownService, Unsupported
from shapestream.gateway.sdk_errors import RETRY_AFTER_S

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
