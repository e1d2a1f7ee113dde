"""Errors of the SDK as statuses: each has one, says when to come again where it may, and is in the description."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

import pytest
from shapestream.gateway.openapi import described
from tests.pipeline.gateway.http_site import Site, serve

from shapestream import errors
from shapestream.errors import RequestError
from shapestream.gateway.http_messages import HttpRequest, HttpResponse
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


PATHS: dict[str, Any] = described("1")["paths"]
PAGES = {
    f"{method} {path}": operations[method]["responses"].keys()
    for path, operations in PATHS.items()
    for method in operations.keys() & {"get", "post"}
}
"""Each operation of the description, with its statuses."""


def test_the_statuses_of_errors_are_described_for_inference() -> None:
    """All of them; other pages ask for no deadline."""
    infer = {page: statuses for page, statuses in PAGES.items() if page.endswith("/infer")}
    assert 2 == len(infer)
    for page, statuses in PAGES.items():
        assert all(HTTPStatus(int(status)) for status in statuses)
        missing = {str(status) for status in EXPECTED.values()} - statuses
        assert (set() if page in infer else {"403", "413", "504"}) >= missing, page
    assert "504" not in PAGES["get /v2/models/{model}"]


def test_what_the_http_server_answers_itself_is_described_for_each_page() -> None:
    """Refusals before a page is looked for, and a defect of the page."""
    bad = {
        400: b"Bad Header: 1\r\n\r\n",
        408: b"",
        413: b"Content-Length: 100\r\n\r\n",
        415: b"Content-Encoding: br\r\nContent-Length: 1\r\n\r\n1",
        417: b"Expect: miracles\r\n\r\n",
        431: b"X: %s\r\n\r\n" % (b"x" * 2000),
        500: b"\r\n",
    }

    async def play(site: Site) -> None:
        for status, rest in bad.items():
            peer = await site.connect()
            await peer.sent_and_read(b"POST /v2 HTTP/1.1\r\nHost: x\r\n" + rest)
            for _ in range(17 if 408 == status else 0):
                await site.pass_time(1)
            assert status == (await peer.answer()).status

    serve(play, defect, virtual_time=True, max_body_bytes=99, max_head_bytes=1000)
    for page, statuses in PAGES.items():
        assert {str(status) for status in bad} <= statuses, page


async def defect(request: HttpRequest) -> HttpResponse:
    """A page that fails."""
    raise ZeroDivisionError
