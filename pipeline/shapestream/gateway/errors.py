"""The errors of a gateway: those that it finds before the server is asked, and the SDK's as HTTP statuses.

grpc_service.py has their statuses over gRPC.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from shapestream.errors import (
    DeadlineExceeded,
    Draining,
    Forbidden,
    InvalidRequest,
    ModelError,
    Overloaded,
    RequestError,
    TooLarge,
    Unavailable,
    WorkerLost,
)
from shapestream.web.messages import HttpError
from shapestream.web.quotas import BeyondQuota

VERSION = "x-model-version"
"""Header with the version that answered, where the model states one."""
OWN_ID = "x-request-id"
"""Header with the caller's id of a request; of an answer, with the id in logs and stories."""


class UnknownModel(InvalidRequest):
    """No model, or no version of it, has this name."""


class UnknownService(InvalidRequest):
    """A health check asks for a service that is not here."""


class Unsupported(InvalidRequest):
    """The request asks for a part of the protocol that is not served here."""


class UnusableVectors(ModelError):
    """The model gave no vector for each text, or vectors of no numbers: its own fault, and not that of the texts."""


class WrongField(InvalidRequest):
    """A field of the request's body has a wrong value."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


class EmptyList(WrongField):
    """A list of texts has none."""


class NotGiven(InvalidRequest):
    """The model does not give what the endpoint needs."""


STATUSES: dict[type[RequestError], int] = {
    InvalidRequest: 400,
    Unsupported: 400,
    WrongField: 400,
    EmptyList: 400,
    NotGiven: 400,
    UnknownModel: 404,
    Forbidden: 403,
    TooLarge: 413,
    BeyondQuota: 429,
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
