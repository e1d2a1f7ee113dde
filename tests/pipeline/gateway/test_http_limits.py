"""What one peer may use: sizes, times, and connections."""

from __future__ import annotations

import gzip
import tracemalloc
import zlib
from collections.abc import AsyncGenerator, Callable

import pytest
import trio
from structlog.testing import capture_logs
from tests.pipeline.gateway.http_site import GET, Hold, Peer, Site, echo, serve, served
from trio.testing import wait_all_tasks_blocked

from shapestream.web.connection import LINGER_S
from shapestream.web.messages import Handler, HttpError, HttpRequest, HttpResponse

POST = b"POST / HTTP/1.1\r\nHost: x\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
MIB = 1024 * 1024


async def refused(site: Site, status: int, data: bytes) -> str:
    """The text of the refusal that ends a connection, while `data` may still be on its way."""
    peer = await site.connect()

    async def send() -> None:
        try:
            await peer.send(data)
        except trio.BrokenResourceError:
            return

    async with trio.open_nursery() as nursery:
        nursery.start_soon(send)
        answer = await peer.answer()
        assert (status, True) == (answer.status, answer.closes)
        assert b"" == await peer.end()
    return answer.error


# ---------------------------------------------------------------- sizes


@served(max_head_bytes=1000, max_headers=10)
async def test_heads(site: Site) -> None:
    """The largest is served. One that is larger is refused, also if it never ends."""
    largest = GET[:-2] + b"X: %s\r\n\r\n" % (b"a" * (1000 - len(GET) - 5))
    assert (1000, 200) == (len(largest), (await site.ask(largest)).status)
    await refused(site, 431, largest.replace(b"X", b"XX"))
    await refused(site, 431, b"GET /" + b"a" * 1000)
    await refused(site, 431, b"\r\n" * 1000)
    assert 200 == (await site.ask(GET[:-2] + b"X: 1\r\n" * 9 + b"\r\n")).status
    await refused(site, 431, GET[:-2] + b"X: 1\r\n" * 10 + b"\r\n")


@served(max_body_bytes=1000)
async def test_bodies(site: Site) -> None:
    """By length and by chunks: the largest is served, one more byte is not, and is not read either."""
    largest = b"a" * 1000
    assert largest == (await site.ask(POST + b"Content-Length: 1000\r\n\r\n" + largest)).body
    await refused(site, 413, POST + b"Content-Length: 1001\r\n\r\n")
    await refused(site, 413, POST + b"Content-Length: 1001\r\n\r\n" + b"a" * 10_000_000)
    await refused(site, 413, POST + b"Content-Length: 1001\r\nExpect: 100-continue\r\n\r\n")
    assert largest == (await site.ask(CHUNKED + b"1f4\r\n%b\r\n" % largest[:500] * 2 + b"0\r\n\r\n")).body
    await refused(site, 413, CHUNKED + b"3e9\r\n" + largest + b"a")
    await refused(site, 413, CHUNKED + b"fffffffffffffff\r\n" + b"a" * 10_000_000)


@served(max_body_bytes=MIB)
async def test_chunks_with_little_in_them(site: Site) -> None:
    """Sizes with many zeros, long extensions, and endless trailers are no way to keep the server reading."""
    tiny = b"1\r\na\r\n" * 100_000
    assert 100_000 == len((await site.ask(CHUNKED + tiny + b"0\r\n\r\n")).body)
    await refused(site, 400, CHUNKED + b"0" * MIB)
    await refused(site, 400, CHUNKED + b"1;" + b"a" * MIB)
    await refused(site, 400, CHUNKED + b"0\r\n" + b"A: b\r\n" * MIB)


@pytest.mark.parametrize(
    "coding",
    ["gzip", *(pytest.param(coding, marks=pytest.mark.thorough) for coding in ("x-gzip", "deflate", "raw"))],
)
def test_a_bomb_stops_at_the_limit(coding: str) -> None:
    """A gibibyte of zeros arrives as a mebibyte. Memory stays near the limit."""
    deflater = zlib.compressobj(9, wbits={"deflate": 15, "raw": -15}.get(coding, 31))
    zeros = bytes(16 * MIB)
    bomb = b"".join([*(deflater.compress(zeros) for _ in range(64)), deflater.flush()])
    assert len(bomb) < 2 * MIB
    name = "deflate" if coding == "raw" else coding
    head = POST + f"Content-Encoding: {name}\r\nContent-Length: {len(bomb)}\r\n\r\n".encode()

    async def play(site: Site) -> None:
        tracemalloc.start()
        try:
            assert "after" in await refused(site, 413, head + bomb)
            assert tracemalloc.get_traced_memory()[1] < 20 * MIB
        finally:
            tracemalloc.stop()

    serve(play, max_body_bytes=8 * MIB)


@served(max_body_bytes=100_000)
async def test_a_body_may_be_as_large_as_the_limit_after_inflating(site: Site) -> None:
    """And not one byte larger, whether it is inflated at once or in a thread."""
    for size in (1, 65_535, 65_536, 65_537, 99_999, 100_000):
        packed = gzip.compress(b"a" * size)
        request = POST + b"Content-Encoding: gzip\r\nContent-Length: %d\r\n\r\n%s" % (len(packed), packed)
        assert size == len((await site.ask(request)).body)
    packed = gzip.compress(b"a" * 100_001)
    await refused(
        site, 413, POST + b"Content-Encoding: gzip\r\nContent-Length: %d\r\n\r\n%s" % (len(packed), packed)
    )


def by_header(request: HttpRequest) -> str:
    """The caller of a request, who says so himself; nobody is refused."""
    if request.headers.get("x-caller") == "nobody":
        raise HttpError(401, "who are you?")
    return request.headers.get("x-caller", request.peer)


def head_of(caller: str, nbytes: int | None = None) -> bytes:
    """The head of a caller's request with so many bytes, or with chunks."""
    length = "Transfer-Encoding: chunked" if nbytes is None else f"Content-Length: {nbytes}"
    return POST + f"X-Caller: {caller}\r\n{length}\r\n\r\n".encode()


async def begun(site: Site, *heads: bytes) -> list[Peer]:
    """Peers that have sent 700,000 bytes of a body each, of which the server holds all but what came with the head."""
    peers = [await site.connect() for _ in heads]
    held = site.server.held_bytes
    for peer, head in zip(peers, heads, strict=True):
        await peer.send(head + b"a" * 700_000)
    while site.server.held_bytes < held + 600_000 * len(heads):
        await trio.lowlevel.checkpoint()
    return peers


@served(caller_of=by_header, max_body_bytes=MIB, most_bodies=4)
async def test_a_caller_holds_as_much_as_it_leaves_to_others(site: Site) -> None:
    """Of 4 MiB two unfinished bodies, whole or in chunks; then a third is refused, and that of another caller is served.

    A third caller has half of what is left then. Small bodies are served; whoever leaves, or is answered, makes room.
    """
    chunked = head_of("one") + b"f4240\r\n"
    first, second = await begun(site, head_of("one", 1_000_000), chunked)
    for third in (
        head_of("one", 1_000_000) + b"a" * 1_000_000,
        chunked + b"a" * 1_000_000 + b"\r\n0\r\n\r\n",
        POST + b"X-Caller: one\r\n" + gzipped(b"a" * 1_000_000),
    ):
        peer = await site.connect()
        await peer.sent_and_read(third)
        answer = await peer.answer()
        assert (429, "1", True) == (answer.status, answer.headers["retry-after"], answer.closes)
    assert 200 == (await site.ask(head_of("one", 5) + b"small")).status
    other = await site.connect()
    await other.sent_and_read(head_of("two", 1_000_000) + b"a" * 1_000_000)
    assert 1_000_000 == len((await other.answer()).body)
    await begun(site, head_of("two", 1_000_000))
    assert 800_000 == len((await site.ask(head_of("three", 800_000) + b"a" * 800_000)).body)
    await first.sent_and_read(b"a" * 300_000)
    assert 1_000_000 == len((await first.answer()).body)
    await second.stream.aclose()
    while site.server.held_bytes > 700_000:
        await trio.lowlevel.checkpoint()
    assert 1_000_000 == len((await site.ask(head_of("one", 1_000_000) + b"a" * 1_000_000)).body)


@served(caller_of=by_header, max_connections=4)
async def test_unfinished_bodies_of_one_caller_leave_connections_to_others(site: Site) -> None:
    """Of four connections two; with the third the caller is refused, and it ends. Bodies that come with their head do not
    count."""
    for head in (head_of("one", 1_000_000), head_of("one")):
        await (await site.connect()).sent_and_read(head)
    refused = await site.ask(head_of("one", 10))
    assert (429, "1", True) == (refused.status, refused.headers["retry-after"], refused.closes)
    assert b"small" == (await site.ask(head_of("one", 5) + b"small")).body
    other = await site.connect()
    await other.sent_and_read(head_of("two", 10) + b"01234")
    await other.send(b"56789")
    assert b"0123456789" == (await other.answer()).body


async def eight_mebibytes(request: HttpRequest) -> HttpResponse:
    """An answer that no socket takes at once; a small one to a request with a body."""
    return HttpResponse(body=(request.body or bytes(8 * MIB),))


@served(eight_mebibytes, caller_of=by_header, max_body_bytes=8 * MIB, most_bodies=8)
async def test_answers_that_are_not_read_count_in_their_callers_quota(site: Site) -> None:
    """Of 64 MiB a caller holds three answers of 8 MiB and their heads; one more is refused. Another caller's is sent.

    One that is read makes room.
    """
    get = GET[:-2] + b"X-Caller: one\r\n\r\n"
    unread = [await site.connect() for _ in range(3)]
    for number, peer in enumerate(unread, 1):
        await peer.send(get)
        while site.server.held_bytes < number * 8 * MIB:
            await trio.lowlevel.checkpoint()
    refused = await site.connect()
    answer = await refused.ask(get)
    assert (429, "1", False) == (answer.status, answer.headers["retry-after"], answer.closes)
    assert b"small" == (await refused.ask(head_of("one", 5) + b"small")).body
    assert 8 * MIB == len((await site.ask(GET)).body)
    assert 8 * MIB == len((await unread[0].answer()).body)
    assert 8 * MIB == len((await refused.ask(get)).body)
    for peer in unread[1:]:
        await peer.stream.aclose()
    while site.server.held_bytes:
        await trio.lowlevel.checkpoint()


@served(caller_of=by_header)
async def test_nothing_is_read_of_a_caller_that_is_refused(site: Site) -> None:
    """Whose body is still to come: the connection ends. Without a body, or where it has come, the next request may."""
    for head in (head_of("nobody", 1_000_000), head_of("nobody")):
        peer = await site.connect()
        await peer.sent_and_read(head + b"a" * 1000)
        answer = await peer.answer()
        assert (401, "who are you?", True) == (answer.status, answer.error, answer.closes)
        assert 0 == site.server.held_bytes
        assert b"" == await peer.end()
    peer = await site.connect()
    assert 401 == (await peer.ask(GET[:-2] + b"X-Caller: nobody\r\n\r\n")).status
    assert 401 == (await peer.ask(head_of("nobody", 3) + b"abc")).status
    assert b"abc" == (await peer.ask(head_of("one", 3) + b"abc")).body


def gzipped(body: bytes) -> bytes:
    """The rest of a request with this body."""
    packed = gzip.compress(body)
    return b"Content-Encoding: gzip\r\nContent-Length: %d\r\n\r\n%s" % (len(packed), packed)


def test_a_promised_body_takes_no_memory() -> None:
    """A hundred peers promise 64 MiB each and send a byte."""

    async def play(site: Site) -> None:
        before = resident_bytes()
        for _ in range(100):
            await (await site.connect()).send(POST + b"Content-Length: 67108864\r\n\r\na")
        await wait_all_tasks_blocked()
        assert resident_bytes() - before < 20 * MIB

    serve(play)


@served(caller_of=by_header, max_body_bytes=8 * MIB, most_bodies=1)
async def test_a_body_that_is_refused_while_it_comes_is_kept_no_longer(site: Site) -> None:
    """Its connection stays until the peer has read the answer; what had come of it is counted no more, and is gone."""
    tracemalloc.start()
    try:
        for head in (head_of("one", 8_000_000), head_of("one") + b"7a1200\r\n"):
            peer = await site.connect()
            before, _ = tracemalloc.get_traced_memory()
            await peer.sent_and_read(head + b"a" * 5_000_000)
            assert 429 == (await peer.answer()).status
            assert tracemalloc.get_traced_memory()[0] - before < 2_000_000
    finally:
        tracemalloc.stop()


@served()
async def test_an_idle_connection_keeps_no_body(site: Site) -> None:
    """Neither that of its last request nor that of its last answer, nor what came in chunks."""
    tracemalloc.start()
    try:
        for head, end in (
            (POST + b"Content-Length: 5000000\r\n\r\n", b""),
            (CHUNKED + b"4c4b40\r\n", b"\r\n0\r\n\r\n"),
        ):
            peer = await site.connect()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(peer.send, head + bytes(5_000_000) + end)
                assert 5_000_000 == len((await peer.answer()).body)
        await wait_all_tasks_blocked()
        assert 2 == site.server.open_connections
        assert tracemalloc.get_traced_memory()[0] < MIB
    finally:
        tracemalloc.stop()


def resident_bytes() -> int:
    """Memory of this process that is really there."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * 4096


# ---------------------------------------------------------------- times


@served(virtual_time=True, idle_s=75, head_s=15)
async def test_an_idle_connection_is_closed(site: Site) -> None:
    """Without an answer: one that nobody asked for could be taken for that to the next request."""
    fresh, used = await site.connect(), await site.connect()
    await used.ask(GET)
    await site.pass_time(74)
    assert 2 == site.server.open_connections
    await site.pass_time(2)
    assert (b"", b"") == (await fresh.end(), await used.end())
    await site.pass_time(LINGER_S)
    assert 0 == site.server.open_connections


@served(virtual_time=True, idle_s=75, head_s=15)
async def test_a_head_must_arrive_in_time(site: Site) -> None:
    """Single bytes do not prolong it."""
    peer = await site.connect()
    await peer.ask(GET)
    await site.pass_time(74)
    for byte in range(15):
        await peer.send(GET[byte : byte + 1])
        await site.pass_time(1)
    assert (408, True) == ((answer := await peer.answer()).status, answer.closes)
    assert answer.error
    assert b"" == await peer.end()


@pytest.mark.parametrize("head", [CHUNKED + b"20000\r\n", POST + b"Content-Length: 131072\r\n\r\n"])
def test_a_body_must_go_on(head: bytes) -> None:
    """64 KiB in each interval do; single bytes do not."""

    async def play(site: Site) -> None:
        steady, slow = await site.connect(), await site.connect()
        for peer in (steady, slow):
            await peer.send(head)
        for _ in range(3):
            await steady.send(bytes(40_000))
            await slow.send(b"a")
            await site.pass_time(14)
        await steady.send(bytes(131_072 - 120_000) + (b"\r\n0\r\n\r\n" if head.startswith(CHUNKED) else b""))
        assert 131_072 == len((await steady.answer()).body)
        assert (408, True) == ((answer := await slow.answer()).status, answer.closes)

    serve(play, virtual_time=True, body_s=30)


@served(virtual_time=True, body_s=30)
async def test_what_stands_beside_the_data_of_chunks_is_no_progress(site: Site) -> None:
    """An extension that does not end keeps no body alive."""
    peer = await site.connect()
    await peer.send(CHUNKED + b"4000\r\n" + bytes(0x4000) + b"\r\n1;")
    for _ in range(3):
        await peer.send(b"a" * 50_000)
        await site.pass_time(14)
    assert (408, True) == ((answer := await peer.answer()).status, answer.closes)


@served(virtual_time=True, write_s=60, idle_s=600)  # idle as soon as the system holds the rest of the answer
async def test_a_reader_must_go_on(site: Site) -> None:
    """One that takes nothing of a long answer is cut off; one that takes its time is not."""
    body = bytes(30_000_000)
    steady, deaf = await site.connect(), await site.connect()

    async def send(peer: Peer) -> None:
        await peer.send(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body))
        await peer.send(body)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(send, steady)
        nursery.start_soon(send, deaf)
    await wait_all_tasks_blocked()
    taken = 0
    while taken < len(body):
        for _ in range(100):  # much, so that the system has room for more
            taken += len(await steady.stream.receive_some())
            if taken >= len(body):
                break
        await site.pass_time(10)
    assert taken < len(body) + 1000
    await site.pass_time(60)
    assert 1 == site.server.open_connections
    with pytest.raises(trio.BrokenResourceError):
        await deaf.send(GET * 1_000_000)


def test_a_handler_may_take_its_time() -> None:
    """No limit of the connection is one of the answer: a request has a deadline of its own."""
    hold = Hold()

    async def play(site: Site) -> None:
        peer = await site.connect()
        await peer.sent_and_read(POST + b"Content-Length: 3\r\n\r\nabc")
        await site.pass_time(10_000)
        hold.go.set()
        assert b"abc" == (await peer.answer()).body

    serve(play, hold, virtual_time=True)


# ---------------------------------------------------------------- connections


def test_a_new_connection_takes_the_place_of_the_oldest_idle_one() -> None:
    """Silent peers cannot keep others out."""

    async def play(site: Site) -> None:
        peers = [await site.connect() for _ in range(10)]
        await peers[0].ask(GET)
        for count in range(1, 6):
            assert 200 == (await site.ask(GET)).status
            assert 10 == site.server.open_connections
            assert b"" == await peers[count - 1].end()

    serve(play, max_connections=10)


@served(max_connections=3)
async def test_a_head_that_does_not_come_gives_way_too(site: Site) -> None:
    """After idle connections, and before a body that is on its way: the oldest, without an answer."""
    slow = [await site.connect() for _ in range(2)]
    for peer in slow:
        await peer.sent_and_read(b"GET / HTTP/1.1\r\n")
    idle = await site.connect()
    await idle.ask(GET)
    body = await site.connect()
    await body.sent_and_read(POST + b"Content-Length: 3\r\n\r\na")
    assert b"" == await idle.end()
    assert 200 == (await site.ask(GET)).status
    assert b"" == await slow[0].end()
    assert 200 == (await site.ask(GET)).status  # in the place of the one before, which is idle
    await body.send(b"bc")
    assert b"abc" == (await body.answer()).body
    assert 200 == (await (await site.connect()).ask(GET)).status


def test_too_many_requests_at_once() -> None:
    """Where no connection is idle, a new one gets 503."""
    hold = Hold()

    async def play(site: Site) -> None:
        peers = [await site.connect() for _ in range(10)]
        for peer in peers:
            await peer.sent_and_read(GET)
        for _ in range(3):
            peer = await site.connect()
            answer = await peer.ask(GET)
            assert (503, True, "1") == (answer.status, answer.closes, answer.headers["retry-after"])
            assert b"" == await peer.end()
        hold.go.set()
        for peer in peers:
            assert 200 == (await peer.answer()).status
        assert 200 == (await site.ask(GET)).status

    serve(play, hold, max_connections=10)


def test_a_flood_of_connections() -> None:
    """Beyond those that are told so, connections are closed. Afterwards all are gone, and nothing was logged."""
    hold = Hold()

    async def play(site: Site) -> None:
        await (await site.connect()).sent_and_read(GET)
        tasks = trio.lowlevel.current_statistics().tasks_living
        flood = [await site.connect() for _ in range(300)]
        await wait_all_tasks_blocked()
        assert 64 == trio.lowlevel.current_statistics().tasks_living - tasks
        for peer in flood:
            peer.stream.socket.close()
        await wait_all_tasks_blocked()
        assert tasks == trio.lowlevel.current_statistics().tasks_living

    with capture_logs() as lines:
        serve(play, hold, max_connections=1)
    assert [] == lines


def test_an_idle_connection_is_one_task_and_little_memory() -> None:
    """1,000 take less than 50 MB, of which half is left to TCP and the event loop."""

    async def play(site: Site) -> None:
        await site.ask(GET)
        tasks = trio.lowlevel.current_statistics().tasks_living
        tracemalloc.start()
        try:
            for number in range(1000):
                peer = await site.connect()
                if number % 2:
                    await peer.ask(GET)
            await wait_all_tasks_blocked()
            assert tracemalloc.get_traced_memory()[0] < 25 * MIB
        finally:
            tracemalloc.stop()
        assert 1000 == trio.lowlevel.current_statistics().tasks_living - tasks

    serve(play, echo)


# ---------------------------------------------------------------- answers without a length


def streaming(pieces: Callable[[], AsyncGenerator[bytes, None]]) -> Handler:
    """A handler whose answer is a stream."""

    async def handle(request: HttpRequest) -> HttpResponse:
        return HttpResponse(body=(b"begins ",), content_type="text/plain", stream=pieces())

    return handle


def test_a_stream_is_written_as_it_comes_until_it_ends() -> None:
    """Without a length, and the connection ends with it; HEAD gets the head alone."""
    go = trio.Event()

    async def pieces() -> AsyncGenerator[bytes, None]:
        yield b"one "
        await go.wait()
        yield b"two"

    async def play(site: Site) -> None:
        peer = await site.connect()
        await peer.send(GET)
        answer = await peer.answer()
        assert (200, True, None) == (answer.status, answer.closes, answer.headers.get("content-length"))
        assert b"begins one " == await peer.received(len(b"begins one "))
        go.set()
        assert b"begins one two" == await peer.end()
        head = await site.connect()
        await head.send(b"HEAD" + GET[3:])
        assert (200, b"") == ((await head.answer()).status, await head.end())

    serve(play, streaming(pieces))


def test_a_viewer_that_leaves_or_does_not_read_ends_its_stream() -> None:
    """At once, and after the time for writing; a stream that says nothing may last."""
    ended = []

    async def loud() -> AsyncGenerator[bytes, None]:
        try:
            while True:
                yield bytes(1_000_000)
        finally:
            ended.append("loud")

    async def still() -> AsyncGenerator[bytes, None]:
        try:
            await trio.sleep_forever()
            yield b""
        finally:
            ended.append("still")

    async def handle(request: HttpRequest) -> HttpResponse:
        return HttpResponse(stream=loud() if request.path == "/loud" else still())

    async def play(site: Site) -> None:
        deaf, quiet = await site.connect(), await site.connect()
        await deaf.send(GET.replace(b"/ ", b"/loud ", 1))
        await quiet.send(GET)
        await site.pass_time(9)
        assert [] == ended
        await site.pass_time(3)
        await site.pass_time(1)
        assert ["loud"] == ended
        await site.pass_time(10_000)
        assert 1 == site.server.open_connections
        await quiet.stream.aclose()
        await wait_all_tasks_blocked()
        assert (["loud", "still"], 0) == (ended, site.server.open_connections)

    serve(play, handle, virtual_time=True, write_s=10)


def test_the_oldest_stream_gives_way() -> None:
    """Viewers cannot keep a health check out."""

    async def still() -> AsyncGenerator[bytes, None]:
        await trio.sleep_forever()
        yield b""

    async def handle(request: HttpRequest) -> HttpResponse:
        return HttpResponse(stream=still()) if request.path == "/" else HttpResponse()

    async def play(site: Site) -> None:
        viewers = [await site.connect() for _ in range(3)]
        for viewer in viewers:
            await viewer.sent_and_read(GET)
        assert 200 == (await site.ask(GET.replace(b"/ ", b"/health ", 1))).status
        await viewers[0].answer()
        assert b"" == await viewers[0].end()
        assert 3 == site.server.open_connections

    serve(play, handle, max_connections=3)
