"""The errors of the SDK as HTTP statuses."""

from __future__ import annotations

import pytest

from shapestream.errors import RequestError, error_from_code
from shapestream.gateway.errors import http_error

STATUSES = {
    "invalid": 400,
    "forbidden": 403,
    "too_large": 413,
    "model_error": 500,
    "poisoned": 500,
    "internal": 500,
    "conflict": 500,
    "answered": 500,
    "cancelled": 500,
    "overloaded": 503,
    "draining": 503,
    "unavailable": 503,
    "worker_lost": 503,
    "deadline_exceeded": 504,
}


def test_each_code_has_a_status() -> None:
    """A new code needs a line in this table, and perhaps in that of the gateway."""
    assert {kind.code for kind in RequestError.__subclasses__()} == set(STATUSES)


@pytest.mark.parametrize("code", STATUSES)
def test_the_status_of_a_code(code: str) -> None:
    """The text is that of the error; whoever may try again is told when, in whole seconds of at least one."""
    for retry_after_s, told in ((None, "1"), (0.01, "1"), (2.1, "3")):
        error = error_from_code(code, "why", retry_after_s=retry_after_s)
        answer = http_error(error)
        assert (STATUSES[code], "why") == (answer.status, answer.message)
        expected = {"Retry-After": told} if error.retryable else {}
        assert expected == dict(answer.headers)
        assert error.retryable == (503 == answer.status)


def test_a_code_of_a_newer_server_is_an_internal_error() -> None:
    """Its text goes on."""
    assert 500 == http_error(error_from_code("of-a-newer-server", "why")).status
