"""gzip and deflate, both ways."""

from __future__ import annotations

import gzip
import zlib

import numpy as np
import pytest
from tests.pipeline.gateway.http_site import Site, served

from shapestream.web.content_coding import coding_asked_for
from shapestream.web.messages import HttpRequest, HttpResponse

TEXT = b"a text that shrinks, " * 100
RAW = zlib.compressobj(wbits=-15)
PACKED = {
    "gzip": gzip.compress(TEXT),
    "x-gzip": gzip.compress(TEXT),
    "deflate": zlib.compress(TEXT),
    "DEFLATE": RAW.compress(TEXT) + RAW.flush(),
    "identity": TEXT,
}


def post(body: bytes, *headers: str) -> bytes:
    """A request with a body."""
    lines = "".join(f"{header}\r\n" for header in headers)
    return f"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n{lines}\r\n".encode() + body


@served()
@pytest.mark.parametrize("coding", PACKED)
async def test_a_coded_body_is_undone(site: Site, coding: str) -> None:
    """Also deflate without zlib's header, which some clients send."""
    assert (await site.ask(post(PACKED[coding], f"Content-Encoding: {coding}"))).body == TEXT


@served()
async def test_an_empty_body_has_no_coding(site: Site) -> None:
    """Whatever the header says."""
    assert b"" == (await site.ask(post(b"", "Content-Encoding: gzip"))).body


@served()
@pytest.mark.parametrize("coding", ["gzip", "deflate"])
async def test_a_damaged_body_is_refused(site: Site, coding: str) -> None:
    """Cut off, followed by more, changed, or of another kind; the connection ends."""
    packed = PACKED[coding]
    for bad in (packed[:-1], packed[:-10], packed + b"a", packed * 2, b"hello", b"x", bytes(70_000)):
        answer = await site.ask(post(bad, f"Content-Encoding: {coding}"))
        assert (400, True) == (answer.status, answer.closes)
    large = zlib.compress(np.random.default_rng(0).bytes(200_000))[:-1]
    assert 400 == (await site.ask(post(large, "Content-Encoding: deflate"))).status


@served()
@pytest.mark.parametrize("coding", ["br", "gzip, gzip", "compress"])
async def test_another_coding_is_refused(site: Site, coding: str) -> None:
    """The peer learns which are served (RFC 9110, 12.5.3)."""
    answer = await site.ask(post(b"abc", f"Content-Encoding: {coding}"))
    assert (415, "gzip, deflate") == (answer.status, answer.headers["accept-encoding"])


@served()
async def test_an_empty_list_of_codings_is_none(site: Site) -> None:
    """Some proxies send the header without a value."""
    assert b"abc" == (await site.ask(post(b"abc", "Content-Encoding: "))).body


@served()
async def test_very_many_wishes_are_not_read(site: Site) -> None:
    """They cost milliseconds each time; the answer is not coded, as it may be (RFC 9110, 12.5.3)."""
    answer = await site.ask(post(TEXT, "Accept-Encoding: " + "a," * 30_000 + "gzip"))
    assert ("Accept-Encoding", TEXT) == (answer.headers["vary"], answer.body)
    assert "content-encoding" not in answer.headers


@served()
async def test_an_answer_is_coded_as_the_peer_asks(site: Site) -> None:
    """Caches learn that it depends on that."""
    peer = await site.connect()
    for asked, undo in (("gzip", gzip.decompress), ("deflate", zlib.decompress)):
        answer = await peer.ask(post(TEXT, f"Accept-Encoding: {asked}"))
        assert (asked, "Accept-Encoding") == (answer.headers["content-encoding"], answer.headers["vary"])
        assert TEXT == undo(answer.body)
        assert len(answer.body) < len(TEXT) / 2


@served()
async def test_an_answer_is_not_coded_unasked(site: Site) -> None:
    """Neither where the peer says nothing, nor where it refuses, nor under a kibibyte."""
    for body, *headers in (
        (TEXT,),
        (TEXT, "Accept-Encoding: identity"),
        (TEXT, "Accept-Encoding: gzip;q=0"),
        (TEXT, "Accept-Encoding: br, zstd"),
        (TEXT[:1023], "Accept-Encoding: gzip"),
    ):
        answer = await site.ask(post(body, *headers))
        assert "content-encoding" not in answer.headers
        assert body == answer.body
    assert "gzip" == (await site.ask(post(TEXT[:1024], "Accept-Encoding: gzip"))).headers["content-encoding"]


async def floats(request: HttpRequest) -> HttpResponse:
    """Answers with arrays, more than is coded on the event loop."""
    array = np.arange(100_000, dtype=np.float32)
    return HttpResponse(body=(b"head", array.data, array.reshape(10, -1).data))


@served(floats)
async def test_long_answers_are_coded_too(site: Site) -> None:
    """In a thread; HEAD gets the length that GET has."""
    body = b"head" + np.arange(100_000, dtype=np.float32).tobytes() * 2
    got = await site.ask(b"GET / HTTP/1.1\r\nHost: x\r\nAccept-Encoding: gzip\r\n\r\n")
    assert body == gzip.decompress(got.body)
    peer = await site.connect()
    await peer.send(b"HEAD / HTTP/1.1\r\nHost: x\r\nAccept-Encoding: gzip\r\n\r\n")
    assert got.headers["content-length"] == (await peer.answer(bodiless=True)).headers["content-length"]


@pytest.mark.parametrize(
    ("asked", "coding"),
    [
        ("gzip", "gzip"),
        ("GZIP", "gzip"),
        ("deflate", "deflate"),
        ("gzip, deflate, br", "gzip"),
        ("deflate, gzip;q=0.9", "deflate"),
        ("gzip;q=0.1,deflate;q=0.2", "deflate"),
        ("*", "gzip"),
        ("gzip;q=0, *", "deflate"),
        ("gzip;q=0, *;q=0", None),
        ("identity, gzip;q=0.5", None),
        ("identity;q=0.5, gzip", "gzip"),
        ("*;q=0", None),
        ("br", None),
        ("", None),
        ("gzip;q=x", None),
        ("gzip;q=nan", None),
        ("gzip ; q=1.0", "gzip"),
        (";;,,gzip;level=1", "gzip"),
    ],
)
def test_the_coding_that_is_liked_best(asked: str, coding: str | None) -> None:
    """By the weights of RFC 9110, 12.4.2."""
    assert coding == coding_asked_for(asked)
