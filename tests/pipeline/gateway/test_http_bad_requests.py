"""Requests that are no requests, or that two readers may understand differently: 400 and the end of the connection."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs
from tests.pipeline.gateway.http_site import GET, Hold, Site, serve
from trio.testing import wait_all_tasks_blocked

POST = b"POST / HTTP/1.1\r\nHost: x\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
BAD_HEADS = {
    "both lengths": POST + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "both lengths, the other way round": POST
    + b"Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n0\r\n\r\n",
    "two lengths": POST + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabcd",
    "two equal lengths": POST + b"Content-Length: 3\r\nContent-Length: 3\r\n\r\nabc",
    "a list of lengths": POST + b"Content-Length: 3, 3\r\n\r\nabc",
    "a length with a sign": POST + b"Content-Length: +3\r\n\r\nabc",
    "a negative length": POST + b"Content-Length: -3\r\n\r\nabc",
    "a hexadecimal length": POST + b"Content-Length: 0x3\r\n\r\nabc",
    "no length": POST + b"Content-Length:\r\n\r\n",
    "a length beyond 64 bits": POST + b"Content-Length: 99999999999999999999\r\n\r\n",
    "another transfer coding": POST + b"Transfer-Encoding: gzip\r\n\r\n",
    "another transfer coding before chunked": POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "another transfer coding after chunked": POST + b"Transfer-Encoding: chunked, gzip\r\n\r\n0\r\n\r\n",
    "chunked twice": POST + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "nearly chunked": POST + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    "a vertical tab before chunked": POST + b"Transfer-Encoding:\x0bchunked\r\n\r\n0\r\n\r\n",
    "a blank before the colon": POST + b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
    "chunked in HTTP/1.0": b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "a continued header": POST + b"X: a\r\n b\r\n\r\n",
    "a first header that is continued": b"GET / HTTP/1.1\r\n Host: x\r\n\r\n",
    "NUL in a value": POST + b"X: a\x00b\r\n\r\n",
    "NUL in a name": POST + b"X\x00: ab\r\n\r\n",
    "CR in a value": POST + b"X: a\rb\r\n\r\n",
    "LF for a line": POST + b"X: a\n\r\n",
    "LF for all lines": b"GET / HTTP/1.1\nHost: x\n\n",
    "LF for the empty line": POST + b"X: a\r\n\n",
    "a control character": POST + b"X: \x01\r\n\r\n",
    "a name with brackets": POST + b"X(: a\r\n\r\n",
    "a name beyond ASCII": POST + b"X\xe4: a\r\n\r\n",
    "no name": POST + b": a\r\n\r\n",
    "no colon": POST + b"X\r\n\r\n",
    "no Host": b"GET / HTTP/1.1\r\n\r\n",
    "two Hosts": b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
    "HTTP/0.9": b"GET /\r\n\r\n",
    "HTTP/1.2": b"GET / HTTP/1.2\r\nHost: x\r\n\r\n",
    "HTTP/2.0": b"GET / HTTP/2.0\r\nHost: x\r\n\r\n",
    "HTTP/2's preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "http": b"GET / http/1.1\r\nHost: x\r\n\r\n",
    "an unknown method": b"FETCH / HTTP/1.1\r\nHost: x\r\n\r\n",
    "a method in lower case": b"get / HTTP/1.1\r\nHost: x\r\n\r\n",
    "a tunnel": b"CONNECT example.org:443 HTTP/1.1\r\nHost: x\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    "no request": b"hello, is this the server?\r\n",
    "a relative target": b"GET a HTTP/1.1\r\nHost: x\r\n\r\n",
    "a fragment": b"GET /a#b HTTP/1.1\r\nHost: x\r\n\r\n",
    "an address of something else": b"GET ftp://h/a HTTP/1.1\r\nHost: x\r\n\r\n",
    "a control character in the path": b"GET /\x01 HTTP/1.1\r\nHost: x\r\n\r\n",
    "raw bytes beyond ASCII in the path": b"GET /\xc3\xa4 HTTP/1.1\r\nHost: x\r\n\r\n",
    "a path that is not UTF-8": b"GET /%c3%28 HTTP/1.1\r\nHost: x\r\n\r\n",
    "an overlong form in the path": b"GET /%c0%af HTTP/1.1\r\nHost: x\r\n\r\n",
    "an escape of one digit": b"GET /%4 HTTP/1.1\r\nHost: x\r\n\r\n",
    "an escape that is none": b"GET /%zz HTTP/1.1\r\nHost: x\r\n\r\n",
    "a chunk size that is no number": CHUNKED + b"G\r\n",
    "a chunk size with 0x": CHUNKED + b"0x3\r\nabc\r\n0\r\n\r\n",
    "a negative chunk size": CHUNKED + b"-3\r\nabc\r\n0\r\n\r\n",
    "a chunk size with a blank after it": CHUNKED + b"3 \r\nabc\r\n0\r\n\r\n",
    "a chunk size with a blank before it": CHUNKED + b" 3\r\nabc\r\n0\r\n\r\n",
    "a chunk size beyond 64 bits": CHUNKED + b"10000000000000003\r\nabc\r\n0\r\n\r\n",
    "no chunk size": CHUNKED + b"\r\n",
    "LF after a chunk size": CHUNKED + b"3\nabc\r\n0\r\n\r\n",
    "CR in a chunk extension": CHUNKED + b"3;a\rb\r\nabc\r\n0\r\n\r\n",
    "LF in a chunk extension": CHUNKED + b"3;a\nb\r\nabc\r\n0\r\n\r\n",
    "NUL in a chunk extension": CHUNKED + b"3;a\x00\r\nabc\r\n0\r\n\r\n",
    "a chunk longer than its size": CHUNKED + b"3\r\nabcd\r\n0\r\n\r\n",
    "a chunk without its line's end": CHUNKED + b"3\r\nabc0\r\n\r\n",
    "a bad trailer": CHUNKED + b"0\r\nX : a\r\n\r\n",
    "a length among the trailers": CHUNKED + b"0\r\nContent-Length: 3\r\n\r\nabc",
    "LF after the last chunk": CHUNKED + b"0\r\n\n",
}


@pytest.mark.parametrize("request_bytes", BAD_HEADS.values(), ids=BAD_HEADS)
def test_a_bad_request_ends_its_connection(request_bytes: bytes) -> None:
    """The bytes behind it, which another reader may have taken for a request, are not looked at."""
    handler = Hold()

    async def play(site: Site) -> None:
        peer = await site.connect()
        await peer.send(request_bytes + GET)
        answer = await peer.answer()
        assert (400, True) == (answer.status, answer.closes)
        assert answer.error
        assert b"" == await peer.end()
        assert 0 == handler.begun

    with capture_logs() as lines:
        serve(play, handler)
    assert [] == lines, "a peer's mistake is no event"


def test_bytes_that_are_no_request_are_refused_at_once() -> None:
    """The peer need not send an end that would never come, and does not wait for a timeout."""

    async def play(site: Site) -> None:
        for data in (b"\x16\x03\x01", b"SSH-2.0-x\r\n", CHUNKED + b"g"):
            assert 400 == (await site.ask(data)).status

    serve(play, virtual_time=True)


def test_an_expectation_that_cannot_be_met() -> None:
    """RFC 9110, 10.1.1."""

    async def play(site: Site) -> None:
        assert 417 == (await site.ask(POST + b"Expect: 200-ok\r\nContent-Length: 1\r\n\r\n")).status

    serve(play)


@pytest.mark.parametrize(
    "data", [GET[:1], GET[:-1], POST + b"Content-Length: 3\r\n\r\nab", CHUNKED + b"3\r\nabc\r\n0\r\n"]
)
def test_a_request_that_ends_early_is_dropped(data: bytes) -> None:
    """Its peer has closed: nobody is left to be told."""
    handler = Hold()

    async def play(site: Site) -> None:
        peer = await site.connect()
        await peer.send(data)
        await peer.stream.send_eof()
        assert b"" == await peer.end()
        await wait_all_tasks_blocked()
        assert (0, 0) == (handler.begun, site.server.open_connections)

    with capture_logs() as lines:
        serve(play, handler)
    assert [] == lines


@given(
    st.one_of(
        st.binary(max_size=300),
        st.builds(
            lambda good, at, new: good[:at] + new + good[at + 1 :],
            st.sampled_from([GET, *BAD_HEADS.values(), POST + b"Content-Length: 5\r\n\r\nhello"]),
            st.integers(0, 100),
            st.binary(max_size=3),
        ),
    )
)
def test_whatever_comes_the_server_goes_on(data: bytes) -> None:
    """Each answer is one of HTTP, and the next connection is served; nothing is logged."""

    async def play(site: Site) -> None:
        peer = await site.connect()
        await peer.send(data)
        await peer.stream.send_eof()
        received = await peer.end()
        assert received == b"" or received.startswith((b"HTTP/1.1 200 ", b"HTTP/1.1 4", b"HTTP/1.1 100 "))
        assert 200 == (await site.ask(GET)).status

    with capture_logs() as lines:
        serve(play)
    assert [] == lines
