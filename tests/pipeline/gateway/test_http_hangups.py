"""Peers that close their connection before they have their answers."""

from __future__ import annotations

import gc
import os
import socket
import struct

import pytest
import trio
from structlog.testing import capture_logs
from tests.pipeline.gateway.http_site import Hold, Peer, Site, serve
from trio.testing import wait_all_tasks_blocked

CALLERS = 300
POST = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nabc"


def close(peer: Peer) -> None:
    """Closes as a process does that ends."""
    peer.stream.socket.close()


def reset(peer: Peer) -> None:
    """Closes so that the other side gets RST and no FIN."""
    peer.stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    peer.stream.socket.close()


def half_close(peer: Peer) -> None:
    """Says that nothing more will be sent."""
    peer.stream.socket.shutdown(socket.SHUT_WR)


@pytest.mark.parametrize("leave", [close, reset, half_close])
def test_the_handler_is_cancelled(leave: object) -> None:
    """Whatever the peer has sent before that is unread. A half-close is a close: the two look the same here."""
    hold = Hold()

    async def play(site: Site) -> None:
        for requests in (1, 2, 2000):
            peer = await site.connect()
            await peer.sent_and_read(POST * requests)
            assert 1 == site.server.handled_requests
            leave(peer)  # type: ignore[operator]
            await wait_all_tasks_blocked()
            assert 0 == site.server.handled_requests
        assert (3, 3, 0) == (hold.begun, hold.cancelled, site.server.open_connections)

    with capture_logs() as lines:
        serve(play, hold)
    assert [] == lines


def test_only_the_handlers_of_that_connection_are_cancelled() -> None:
    """Others go on."""
    hold = Hold()

    async def play(site: Site) -> None:
        leaving, staying = await site.connect(), await site.connect()
        await staying.sent_and_read(POST)
        await leaving.sent_and_read(POST)
        close(leaving)
        await wait_all_tasks_blocked()
        hold.go.set()
        assert b"abc" == (await staying.answer()).body
        assert (2, 1, 1) == (hold.begun, hold.cancelled, hold.answered)

    serve(play, hold)


def test_a_request_of_a_peer_that_is_gone_does_not_begin() -> None:
    """Requests and the end of the connection come in one turn of the loop."""
    hold = Hold()

    async def play(site: Site) -> None:
        peers = [await site.connect() for _ in range(10)]
        await wait_all_tasks_blocked()
        for peer in peers:
            peer.stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 0, 0))
            os.write(peer.stream.socket.fileno(), POST)
            close(peer)
        await wait_all_tasks_blocked()
        assert 0 == site.server.open_connections
        assert hold.begun == hold.cancelled

    serve(play, hold)


def test_300_callers_vanish() -> None:
    """Each has sent four requests. No handler, task, connection or descriptor is left."""
    hold = Hold()

    async def play(site: Site) -> None:
        await wait_all_tasks_blocked()
        gc.collect()  # what earlier tests of this process left would be closed meanwhile
        descriptors = len(os.listdir("/proc/self/fd"))
        tasks = trio.lowlevel.current_statistics().tasks_living
        callers = [await site.connect() for _ in range(CALLERS)]
        for number, caller in enumerate(callers):
            # Some with a part of a request behind the four, and some within the fourth.
            await caller.send((POST * 4 + POST[: number % 7])[: -1 if number % 2 else None])
        await wait_all_tasks_blocked()
        assert (CALLERS, CALLERS) == (hold.begun, site.server.handled_requests)
        for number, caller in enumerate(callers):
            (close, reset, half_close)[number % 3](caller)
        await wait_all_tasks_blocked()
        assert (CALLERS, 0) == (hold.cancelled, site.server.open_connections)
        for caller in callers:
            await trio.aclose_forcefully(caller.stream)
        assert descriptors == len(os.listdir("/proc/self/fd"))
        assert tasks == trio.lowlevel.current_statistics().tasks_living

    with capture_logs() as lines:
        serve(play, hold)
    assert [] == lines


def test_a_reader_leaves_within_a_long_answer() -> None:
    """The rest of the answer is dropped, and the next request of the same bytes does not begin."""
    hold = Hold()
    hold.go.set()
    body = bytes(20_000_000)

    async def play(site: Site) -> None:
        peer = await site.connect()
        head = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
        await peer.sent_and_read(head + body + POST)
        assert 1 == site.server.open_connections
        await peer.stream.receive_some(1000)
        close(peer)
        await wait_all_tasks_blocked()
        assert (1, 0) == (hold.begun, site.server.open_connections)

    with capture_logs() as lines:
        serve(play, hold)
    assert [] == lines
