"""The network cuts requests anywhere; the answers do not depend on where."""

from __future__ import annotations

import gzip
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.pipeline.gateway.http_site import GET, Answer, Site, report, serve

DEFLATED = zlib.compress(b"deflated " * 20)
REQUESTS = {
    "no body": GET,
    "a body": b"POST /%61?b HTTP/1.1\r\nHost: x\r\nX: \tpadded \r\nContent-Length: 8\r\n\r\n\r\n\r\n\r\n\r\n",
    "chunks": b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"4;a=b\r\n\r\n\r\n\r\n10\r\n0123456789abcdef\r\n0\r\nA: \r\nB: c\r\n\r\n",
    "deflate": b"PUT / HTTP/1.1\r\nHost: x\r\nContent-Encoding: deflate\r\nContent-Length: %d\r\n\r\n%s"
    % (len(DEFLATED), DEFLATED),
    "both lengths": b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
    "a bad chunk": b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabcd\r\n",
    "empty lines before it": b"\r\n\r\n\r\n" + GET,
}


async def answers(site: Site, pieces: list[bytes], count: int) -> list[object]:
    """What a peer gets that sends these pieces one after another, the times left out."""
    peer = await site.connect()
    for piece in pieces:
        try:
            await peer.sent_and_read(piece)
        except OSError:
            break  # it has been refused
    found: list[Answer] = []
    while len(found) < count and (not found or not found[-1].closes):
        found.append(await peer.answer())
    await peer.stream.aclose()
    return [answer.lasting for answer in found]


@pytest.mark.parametrize("request_bytes", REQUESTS.values(), ids=REQUESTS)
def test_a_request_cut_at_any_byte(request_bytes: bytes) -> None:
    """In two pieces, and in single bytes: the answer, and that to the request behind it, are the same."""
    data = request_bytes + GET

    async def play(site: Site) -> None:
        whole = await answers(site, [data], 2)
        for at in range(1, len(data)):
            assert whole == await answers(site, [data[:at], data[at:]], 2), data[:at]
        assert whole == await answers(site, [data[at : at + 1] for at in range(len(data))], 2)

    serve(play, report)


@st.composite
def requests(draw: st.DrawFn) -> bytes:
    """A request with a body of any bytes, in any form."""
    body = draw(st.one_of(st.binary(max_size=60), st.sampled_from([b"\r\n\r\n" * 9, b"0\r\n\r\n", GET])))
    head = b"POST /a HTTP/1.1\r\nHost: x\r\n"
    if draw(st.booleans()):
        body, head = gzip.compress(body, 1), head + b"Content-Encoding: gzip\r\n"
    if draw(st.booleans()):
        return b"%sContent-Length: %d\r\n\r\n%s" % (head, len(body), body)
    chunks = []
    while body:
        size = draw(st.integers(1, len(body)))
        chunks.append(b"%x%s\r\n%s\r\n" % (size, draw(st.sampled_from([b"", b";a", b';a="b"'])), body[:size]))
        body = body[size:]
    trailer = draw(st.sampled_from([b"", b"A: b\r\n"]))
    return head + b"Transfer-Encoding: chunked\r\n\r\n" + b"".join(chunks) + b"0\r\n" + trailer + b"\r\n"


@given(st.data())
@settings(max_examples=50)
def test_requests_cut_at_random(data: st.DataObject) -> None:
    """Several that come together are answered as each by itself."""
    several = data.draw(st.lists(requests(), min_size=1, max_size=4))
    together = b"".join(several)
    cuts = sorted(data.draw(st.sets(st.integers(1, len(together) - 1), max_size=8)))
    pieces = [together[start:end] for start, end in zip([0, *cuts], [*cuts, len(together)], strict=True)]

    async def play(site: Site) -> None:
        alone = [answer for each in several for answer in await answers(site, [each], 1)]
        assert alone == await answers(site, pieces, len(several))

    serve(play, report)
