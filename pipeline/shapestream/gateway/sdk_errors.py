"""The errors of the SDK as HTTP statuses."""

from __future__ import annotations

import math
from collections.abc import Mapping

from shapestream.errors import (
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
from shapestream.gateway.gateway_errors import EmptyList, NotGiven, UnknownModel, Unsupported, WrongField
from shapestream.gateway.infer_options import OWN_ID
from shapestream.web.messages import HttpError

STATUSES: dict[type[RequestError], int] = {
    InvalidRequest: 400,
    Unsupported: 400,
    WrongField: 400,
    EmptyList: 400,
    NotGiven: 400,
    UnknownModel: 404,
    Forbidden: 403,
    TooLarge: 413,
    Overloaded: 503,
    Draining: 503,
    Unavailable: 503,
    WorkerLost: 503,
    DeadlineExceeded: 504,
}
"""Statuses of errors; any other error is 500."""
RETRY_AFTER_S = 1
"""Seconds after which a caller may try again, where the server has no estimate."""


def http_error(error: RequestError, statuses: Mapping[type[RequestError], int] = STATUSES) -> HttpError:
    """Return the answer to a request that the server refused; a retryable one says when."""
    status = statuses.get(type(error), 500)
    own_id = () if error.request_id is None else ((OWN_ID, error.request_id),)
    if not error.retryable:
        return HttpError(status, error.message, own_id)
    seconds = RETRY_AFTER_S if error.retry_after_s is None else max(1, math.ceil(error.retry_after_s))
    return HttpError(status, error.message, (("Retry-After", str(seconds)), *own_id))
