"""Errors of the SDK as statuses: each has one, says when to come again where it may, and is in the description."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

import pytest

from shapestream import errors
from shapestream.errors import RequestError
from shapestream.gateway.openapi import described
from shapestream.gateway.sdk_errors import STATUSES, http_error

EXPECTED = {
    "invalid": 400,
    "forbidden": 403,
    "too_large": 413,
    "overloaded": 503,
    "draining": 503,
    "unavailable": 503,
    "worker_lost": 503,
    "deadline_exceeded": 504,
    "poisoned": 500,
    "model_error": 500,
    "internal": 500,
    "cancelled": 500,
    "conflict": 500,
    "answered": 500,
}
KINDS = RequestError.__subclasses__()


def test_each_error_has_a_status() -> None:
    """An error that is added must be thought of here."""
    assert {kind.code: http_error(kind("why")).status for kind in KINDS} == EXPECTED
    assert set(STATUSES) <= set(KINDS)
    assert 500 == http_error(errors.error_from_code("of-a-newer-server", "why")).status


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.code)
def test_errors_that_may_pass_say_when_to_come_again(kind: type[RequestError]) -> None:
    """Whole seconds, at least one, and never too early; what is said is the message without the code."""
    for estimate_s, told in ((None, "1"), (0.0, "1"), (0.01, "1"), (1.0, "1"), (2.1, "3")):
        error = http_error(kind("why", retry_after_s=estimate_s))
        assert "why" == error.message
        assert ((("Retry-After", told),) if kind.retryable else ()) == tuple(error.headers)
    assert kind.retryable == (503 == error.status)


def test_statuses_are_described_where_they_can_come() -> None:
    """Those of an inference are all of them; `default` hides none."""
    paths: dict[str, Any] = described("1")["paths"]
    infer = paths["/v2/models/{model}/infer"]["post"]["responses"]
    assert {str(status) for status in EXPECTED.values()} <= infer.keys()
    for path, operations in paths.items():
        for method in operations.keys() & {"get", "post"}:
            for status in operations[method]["responses"]:
                assert HTTPStatus(int(status)), (path, method)
