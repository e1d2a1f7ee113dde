"""The end of the HTTP server, in good order and at once."""

from __future__ import annotations

import pytest
import trio
from tests.pipeline.gateway.http_site import GET, Hold, Site, serve, served
from trio.testing import wait_all_tasks_blocked

from shapestream.transport.http_listener import listen_at
from shapestream.web.connection import LAST_WORDS_S, LINGER_S
from shapestream.web.ending import FIRST_REQUEST_S, QUIET_S
from shapestream.web.server import LOOK_S, STOPPING_LOOK_S, HttpServer, for_all, listeners_of

GRACE_S = 30.0
BEGUN = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\na"


def test_requests_that_have_begun_are_answered() -> None:
    """Also those whose bytes are on their way; their peers are told that the connection ends."""
    hold = Hold()

    async def play(site: Site) -> None:
        reading, handled = await site.connect(), await site.connect()
        await reading.sent_and_read(BEGUN)
        await handled.sent_and_read(GET + GET)
        site.server.stop(GRACE_S)
        await wait_all_tasks_blocked()
        assert 2 == site.server.open_connections
        with pytest.raises(OSError, match="connect"):
            await trio.open_tcp_stream("127.0.0.1", site.port)
        hold.go.set()
        assert (200, True) == ((answer := await handled.answer()).status, answer.closes)
        assert b"" == await handled.end(), "the second request has not begun"
        assert b"abc" == (await reading.ask(b"bc")).body
        assert b"" == await reading.end()
        await reading.stream.aclose()
        await handled.stream.aclose()
        await wait_all_tasks_blocked()
        assert (2, 0) == (hold.begun, site.server.open_connections)

    serve(play, hold)


@served(virtual_time=True)
async def test_a_quiet_connection_ends_at_once_and_the_others_may_ask_once(site: Site) -> None:
    """Busy ones, those that the system alone has accepted, and new ones. Some that ask nothing are closed after seconds."""
    quiet, busy, still, new, silent = [await site.connect() for _ in range(5)]
    for asked in (quiet, busy, still):
        assert 200 == (await asked.ask(GET)).status
    await site.pass_time(QUIET_S + 1)
    for asked in (busy, still):
        assert (200, False) == ((answer := await asked.ask(GET)).status, answer.closes)
    site.server.stop(GRACE_S)
    late = await site.connect()
    for peer in (busy, new, late):
        assert (200, True) == ((answer := await peer.ask(GET)).status, answer.closes)
    await site.pass_time(STOPPING_LOOK_S)
    assert b"" == await quiet.end()
    await site.pass_time(QUIET_S)
    assert b"" == await still.end()
    await site.pass_time(FIRST_REQUEST_S + LINGER_S)
    assert b"" == await silent.end()


@served(virtual_time=True)
async def test_a_server_that_leaves_ends_connections_by_their_next_answers(site: Site) -> None:
    """It accepts new ones, and closes none that is idle."""
    busy, idle = await site.connect(), await site.connect()
    for peer in (busy, idle):
        assert (200, False) == ((answer := await peer.ask(GET)).status, answer.closes)
    site.server.leave()
    for peer in (busy, await site.connect()):
        assert (200, True) == ((answer := await peer.ask(GET)).status, answer.closes)
        assert b"" == await peer.end()
    await site.pass_time(10.0)
    assert (200, True) == ((answer := await idle.ask(GET)).status, answer.closes)
    assert (True, None) == (site.serves, site.server.empty_since), (
        "the last one is read until its peer has closed"
    )
    await site.pass_time(LAST_WORDS_S)
    assert site.server.empty_since is not None


@served(virtual_time=True, max_connection_s=100, idle_s=1000)
async def test_an_old_connection_that_is_idle_is_closed(site: Site) -> None:
    """Between 90 and 110 s after its beginning."""
    idle = await site.connect()
    for seconds in (0.0, 89.0):
        await site.pass_time(seconds)
        assert not (await idle.ask(GET)).closes
    await site.pass_time(21.0 + LOOK_S)
    assert b"" == await idle.end()


@served(virtual_time=True, max_connection_s=100)
async def test_an_old_connection_that_is_busy_ends_with_its_next_answer(site: Site) -> None:
    """It is never closed while its peer may be sending a request."""
    busy = await site.connect()
    answered = 0
    while not (await busy.ask(GET)).closes:
        answered += 1
        await site.pass_time(QUIET_S / 2)
    assert 180 <= answered <= 221
    assert b"" == await busy.end()


@served(Hold(), virtual_time=True)
async def test_requests_have_a_grace(site: Site) -> None:
    """Then they are cancelled and answered, and `run` returns."""
    peer, reading = await site.connect(), await site.connect()
    await peer.sent_and_read(GET)
    await site.pass_time(20)
    await reading.sent_and_read(BEGUN)
    site.server.stop(GRACE_S)
    await site.pass_time(GRACE_S - 1)
    assert 1 == site.server.handled_requests
    await site.pass_time(2)
    for waiting in (peer, reading):
        answer = await waiting.answer()
        assert (503, True, "1") == (answer.status, answer.closes, answer.headers["retry-after"])
    await site.pass_time(LAST_WORDS_S)
    assert not site.serves
    assert 0 == site.server.open_connections


@served()
async def test_a_server_without_connections_stops_at_once(site: Site) -> None:
    """And a second stop changes nothing."""
    site.server.stop(GRACE_S)
    site.server.stop(GRACE_S)
    await wait_all_tasks_blocked()
    assert not site.serves


@served()
async def test_a_server_stops_before_it_runs(site: Site) -> None:
    """It closes its listeners."""
    server = HttpServer(for_all(Hold()))
    server.stop(GRACE_S)
    listeners = listeners_of(listen_at("127.0.0.1:0"))
    await server.run(listeners)
    with pytest.raises(trio.ClosedResourceError):
        await listeners[0].accept()


def test_a_cancelled_server_ends_its_requests() -> None:
    """With everything that it has opened."""
    hold = Hold()

    async def play(site: Site) -> None:
        for data in (b"", GET[:5], BEGUN, GET):
            await (await site.connect()).sent_and_read(data)
        assert (4, 1) == (site.server.open_connections, site.server.handled_requests)
        site.nursery.cancel_scope.cancel()

    serve(play, hold)
    assert (1, 1) == (hold.begun, hold.cancelled)
