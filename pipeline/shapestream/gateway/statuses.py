"""The HTTP status of each error."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from types import MappingProxyType

from shapestream.errors import (
    AlreadyAnswered,
    Cancelled,
    Conflict,
    DeadlineExceeded,
    Draining,
    Forbidden,
    InternalError,
    InvalidRequest,
    ModelError,
    Overloaded,
    Poisoned,
    RequestError,
    TooLarge,
    Unavailable,
    WorkerLost,
)
from shapestream.gateway.http_messages import HttpError

STATUS_OF: Mapping[type[RequestError], int] = MappingProxyType(
    {
        InvalidRequest: 400,
        Forbidden: 403,
        TooLarge: 413,
        Overloaded: 503,
        Draining: 503,
        Unavailable: 503,
        WorkerLost: 503,
        # The gateway withdraws requests only when it ends.
        Cancelled: 503,
        DeadlineExceeded: 504,
        Poisoned: 500,
        ModelError: 500,
        InternalError: 500,
        # The gateway chooses the numbers of its requests, so these two are its own defects.
        Conflict: 500,
        AlreadyAnswered: 500,
    }
)


def http_error(error: RequestError) -> HttpError:
    """Return the answer to a request that failed. One that may succeed later says when to try again, in seconds."""
    status = STATUS_OF[type(error)]
    seconds = 1 if error.retry_after_s is None else max(1, ceil(error.retry_after_s))
    headers = (("Retry-After", str(seconds)),) if status == 503 else ()
    return HttpError(status, str(error), headers)
