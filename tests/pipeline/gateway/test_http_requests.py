"""Requests that are good: what the handler gets, and what the peer gets back."""

from __future__ import annotations

import json
from email.utils import parsedate_to_datetime

import numpy as np
import pytest
import trio
from structlog.testing import capture_logs
from tests.pipeline.gateway.http_site import GET, Hold, Peer, Site, echo, report, serve, served
from trio.testing import wait_all_tasks_blocked

from shapestream.web.messages import HttpError, HttpRequest, HttpResponse


@served(report)
async def test_a_request_reaches_the_handler_whole(site: Site) -> None:
    """Names in lower case, values without blanks around them, repeated ones joined; the query as it was sent."""
    told = json.loads(
        (
            await site.ask(
                b"POST /v2/models/a%20b%2Fc/infer?x=%20&y HTTP/1.1\r\nHOST: h\r\nX-A:  1 \t\r\nX-a: 2\r\n"
                b"X-Empty:\r\nX-Latin: \xe4\r\nContent-Length: 5 \r\n\r\nhello"
            )
        ).body
    )
    assert {
        "method": "POST",
        "path": "/v2/models/a b/c/infer",
        "query": "x=%20&y",
        "headers": {"host": "h", "x-a": "1, 2", "x-empty": "", "x-latin": "ä", "content-length": "5"},
        "body": "hello",
        "peer": "127.0.0.1",
    } == told


@served(report)
@pytest.mark.parametrize(
    ("target", "path", "query"),
    [
        ("/", "/", ""),
        ("/a?b?c", "/a", "b?c"),
        ("/a?", "/a", ""),
        ("//a", "//a", ""),
        ("/%C3%A4%25%32%35", "/ä%25", ""),
        ("http://h:80/a?b", "/a", "b"),
        ("HTTPS://h", "/", ""),
        ("http://h?b", "/", "b"),
    ],
)
async def test_targets(site: Site, target: str, path: str, query: str) -> None:
    """Paths are decoded once. An address of HTTP stands for its path."""
    told = json.loads((await site.ask(f"GET {target} HTTP/1.1\r\nHost: x\r\n\r\n".encode())).body)
    assert (path, query) == (told["path"], told["query"])


@served(report)
@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE"])
async def test_any_method_is_the_handlers_business(site: Site, method: str) -> None:
    """The server knows nothing of routes."""
    answer = await site.ask(f"{method} / HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    assert method == json.loads(answer.body)["method"]


@served(report)
async def test_a_star_is_the_target_of_options(site: Site) -> None:
    """It is no path, and is handed on as it is."""
    assert "*" == json.loads((await site.ask(b"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n")).body)["path"]


@served()
async def test_an_answer_has_its_length_and_date(site: Site) -> None:
    """And no more headers than needed."""
    answer = await site.ask(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\nab")
    assert (200, b"ab") == (answer.status, answer.body)
    assert {"content-type", "content-length", "date"} == answer.headers.keys()
    assert parsedate_to_datetime(answer.headers["date"]).tzinfo is not None


@served()
async def test_a_connection_serves_one_request_after_another(site: Site) -> None:
    """Bodies by length, by chunks and none, in any order."""
    peer = await site.connect()
    for _ in range(3):
        assert b"" == (await peer.ask(GET)).body
        assert b"abc" == (await peer.ask(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nabc")).body
        chunked = b"3;ext=1\r\nabc\r\n0002\r\nde\r\n0\r\nTrailer: x\r\n\r\n"
        assert (
            b"abcde"
            == (
                await peer.ask(b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" + chunked)
            ).body
        )
    assert 1 == site.server.open_connections


@served()
async def test_pipelined_requests_are_answered_in_order(site: Site) -> None:
    """Also where thousands come at once, more than one read takes."""
    peer = await site.connect()
    bodies = [str(number).encode() * 7 for number in range(3000)]

    async def send() -> None:
        await peer.send(
            b"".join(
                b"PUT / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(b), b) for b in bodies
            )
        )

    async with trio.open_nursery() as nursery:
        nursery.start_soon(send)
        assert bodies == [(await peer.answer()).body for _ in bodies]


def test_nothing_is_read_while_a_request_is_handled() -> None:
    """A peer that sends requests without end is held back by TCP, and the next one begins after the answer."""
    hold = Hold()

    async def play(site: Site) -> None:
        peer = await site.connect()

        async def send() -> None:
            await peer.send(GET * 1_000_000)
            pytest.fail("27 MB of requests were taken")

        async with trio.open_nursery() as nursery:
            nursery.start_soon(send)
            await wait_all_tasks_blocked()
            assert 1 == hold.begun
            nursery.cancel_scope.cancel()

    serve(play, hold)


@served()
async def test_two_connections_take_turns(site: Site) -> None:
    """One that has thousands of requests in its buffer does not keep another waiting."""
    busy, other = await site.connect(), await site.connect()
    await busy.send(GET * 2000)
    answer = await other.ask(GET)
    assert 200 == answer.status
    assert 2000 > (await first_bytes(busy)).count(b"HTTP/1.1 200")


async def first_bytes(peer: Peer) -> bytes:
    """What has come so far."""
    return bytes(await peer.stream.receive_some())


@served()
async def test_head_is_answered_without_a_body(site: Site) -> None:
    """With the headers of GET."""
    peer = await site.connect()
    await peer.send(b"HEAD / HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nabc" + GET)
    answer = await peer.answer(bodiless=True)
    assert ("3", b"") == (answer.headers["content-length"], answer.body)
    assert 200 == (await peer.answer()).status


@served(virtual_time=True)
async def test_the_server_asks_for_a_body_that_waits(site: Site) -> None:
    """A peer may wait for `100 Continue` before it sends; it gets it once the head is found good."""
    peer = await site.connect()
    head = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nExpect: 100-Continue\r\n\r\n"
    assert 100 == (await peer.ask(head)).status
    assert b"abc" == (await peer.ask(b"abc")).body
    assert b"abc" == (await peer.ask(head + b"abc")).body, "nothing is asked for that is there"


@served()
async def test_http_1_0(site: Site) -> None:
    """The connection ends after the answer, but where the peer asks to keep it."""
    peer = await site.connect()
    kept = await peer.ask(b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
    assert "keep-alive" == kept.headers["connection"]
    assert (await peer.ask(b"GET / HTTP/1.0\r\n\r\n")).closes
    assert b"" == await peer.end()


@served()
async def test_a_peer_asks_for_the_end(site: Site) -> None:
    """Requests that it sends after that are not looked at."""
    peer = await site.connect()
    assert (await peer.ask(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n" + GET)).closes
    assert b"" == await peer.end()


@served()
async def test_an_offer_of_another_protocol_is_ignored(site: Site) -> None:
    """`curl --http2` makes one with its first request, which has a body."""
    offer = b"POST / HTTP/1.1\r\nHost: x\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n"
    peer = await site.connect()
    assert b"abc" == (await peer.ask(offer + b"Content-Length: 3\r\n\r\nabc")).body
    assert b"abc" == (await peer.ask(offer + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n")).body


@served()
async def test_empty_lines_before_a_request_are_ignored(site: Site) -> None:
    """Some clients end a body with one (RFC 9112, 2.2)."""
    peer = await site.connect()
    for before in (b"\r\n", b"\r\n\r\n", b"\r\n\r\n\r\n\r\n\r\n"):
        assert 200 == (await peer.ask(before + GET)).status


async def pieces(request: HttpRequest) -> HttpResponse:
    """Answers in pieces of all kinds and sizes."""
    large = np.arange(40_000, dtype=np.float32).reshape(200, 200)
    return HttpResponse(
        body=(
            b"a",
            bytearray(b"b"),
            memoryview(b"c"),
            b"",
            large.data,
            b"d",
            np.empty((0, 3)).data,
            b"e" * 20_000,
            b"f",
        )
    )


@served(pieces)
async def test_an_answer_of_many_pieces(site: Site) -> None:
    """One after another, whatever the items of their arrays are."""
    body = (await site.ask(GET)).body
    assert b"abc" + np.arange(40_000, dtype=np.float32).tobytes() + b"d" + b"e" * 20_000 + b"f" == body


@served(lambda request: echo_many(20_000))
async def test_an_answer_of_very_many_pieces(site: Site) -> None:
    """More than one call of the system takes."""
    assert b"ab" * 20_000 == (await site.ask(GET)).body


async def echo_many(count: int) -> HttpResponse:
    """Answers in small pieces."""
    return HttpResponse(body=[b"a", b"b"] * count)


@served(lambda request: large_pieces())
async def test_an_answer_of_very_many_large_pieces(site: Site) -> None:
    """They are not joined, and are more than one call of the system takes."""
    assert b"ab" * 8192 * 1100 == (await site.ask(GET)).body


async def large_pieces() -> HttpResponse:
    """Answers in 1,100 pieces of 16 KiB."""
    return HttpResponse(body=[b"ab" * 8192] * 1100)


@served()
async def test_a_body_of_several_mebibytes(site: Site) -> None:
    """It is neither cut nor changed, both ways."""
    body = np.random.default_rng(0).bytes(5_000_001)
    peer = await site.connect()
    for _ in range(2):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(
                peer.send, b"PUT / HTTP/1.1\r\nHost: x\r\nContent-Length: 5000001\r\n\r\n" + body
            )
            assert body == (await peer.answer()).body


async def nothing(request: HttpRequest) -> HttpResponse:
    """Answers without a body."""
    return HttpResponse(status=204, body=(b"ignored",))


@served(nothing)
async def test_an_answer_without_content_has_no_length(site: Site) -> None:
    """Status 204 (RFC 9110, 8.6), and the next answer follows at once."""
    peer = await site.connect()
    for _ in range(2):
        answer = await peer.ask(GET)
        assert (204, b"") == (answer.status, answer.body)
        assert not {"content-length", "content-type"} & answer.headers.keys()


async def refuse(request: HttpRequest) -> HttpResponse:
    """Refuses any request."""
    raise HttpError(503, "overloaded: ä", (("Retry-After", "2"),))


@served(refuse)
async def test_a_handler_refuses(site: Site) -> None:
    """Its status, text and headers reach the peer, and the connection goes on."""
    peer = await site.connect()
    for _ in range(2):
        answer = await peer.ask(GET)
        assert (503, "overloaded: ä", "2") == (answer.status, answer.error, answer.headers["retry-after"])
        assert not answer.closes


async def break_down(request: HttpRequest) -> HttpResponse:
    """A defect."""
    raise RuntimeError("secret")


async def break_a_line(request: HttpRequest) -> HttpResponse:
    """A defect that an attacker may provoke: part of a request in a header."""
    return HttpResponse(headers=(("X-A", "b\r\nSet-Cookie: c"),))


async def answer_nothing(request: HttpRequest) -> HttpResponse:
    """A defect that mypy would find."""
    return None  # type: ignore[return-value]


async def double_the_length(request: HttpRequest) -> HttpResponse:
    """A defect that would mislead the peer."""
    return HttpResponse(headers=(("content-length", "7"),))


@pytest.mark.parametrize("handler", [break_down, break_a_line, answer_nothing, double_the_length])
def test_a_defect_of_a_handler_is_logged_and_not_told(handler: object) -> None:
    """Once, with its traceback; the peer gets 500 without details, and the connection goes on."""

    async def play(site: Site) -> None:
        peer = await site.connect()
        with capture_logs() as lines:
            assert (500, "internal error") == ((answer := await peer.ask(GET)).status, answer.error)
        assert [("HTTP request failed", True)] == [(line["event"], line["exc_info"]) for line in lines]
        assert 500 == (await peer.ask(GET)).status

    serve(play, handler)  # type: ignore[arg-type]


@served(echo)
async def test_many_connections_at_once(site: Site) -> None:
    """Each gets its own answers."""

    async def converse(number: int) -> None:
        peer = await site.connect()
        for turn in range(20):
            body = b"%d of %d" % (turn, number)
            request = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
            assert body == (await peer.ask(request)).body

    async with trio.open_nursery() as nursery:
        for number in range(50):
            nursery.start_soon(converse, number)
