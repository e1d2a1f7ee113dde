"""The transport within one process: bounds, restarts, and no time that passes by itself."""

from __future__ import annotations

import numpy as np
import pytest
import trio
import trio.testing
from tests.pipeline.serving.clocks import virtual_time

from shapestream.errors import AddressInUse, OutboxFull, PeerGone
from shapestream.transport.memory import MemoryEndpoint, memory_server


@virtual_time
async def test_a_slow_server_makes_its_clients_wait() -> None:
    """`send_nowait` says WouldBlock at the bound; `send` waits for a message to be read, and can be cancelled."""

    server = memory_server(capacity_messages=3)
    connection = server.connect()
    for number in range(3):
        connection.send_nowait([b"%d" % number])
    with pytest.raises(trio.WouldBlock):
        connection.send_nowait([b"too many"])
    with trio.move_on_after(5) as scope:
        await connection.send([b"too many"])
    assert scope.cancelled_caught
    async with trio.open_nursery() as nursery:
        nursery.start_soon(connection.send, [b"3"])
        await trio.testing.wait_all_tasks_blocked()
        assert 3 == len(server.receive_nowait())
    assert [[b"3"]] == [frames for _, frames in server.receive_nowait()]


@virtual_time
async def test_a_slow_client_is_given_up() -> None:
    """The server never waits for a client: at the bound it is told, and others are not affected."""

    server = memory_server(capacity_messages=3)
    connection = server.connect()
    connection.send_nowait([b"hello"])
    ((peer, _),) = server.receive_nowait()
    for _ in range(3):
        server.send_nowait(peer, [b"answer"])
    with pytest.raises(OutboxFull):
        server.send_nowait(peer, [b"answer"])
    server.forget(peer)
    assert 3 == len(connection.receive_nowait())
    server.send_nowait(peer, [b"answer"])


@virtual_time
async def test_a_server_that_comes_back_hears_what_waited() -> None:
    """As with ZeroMQ: unread messages die with the server, unsent ones wait, and the peer id is a new one."""

    endpoint = MemoryEndpoint(capacity_messages=2)
    connection = endpoint.connect()
    connection.send_nowait([b"early"])
    peers = set()
    async with endpoint.bind() as server:
        with pytest.raises(AddressInUse):
            endpoint.bind()
        ((peer, frames),) = await server.receive()
        assert [b"early"] == frames
        peers.add(peer)
        connection.send_nowait([b"lost with the server"])
    for frame in (b"kept", b"kept, too"):
        connection.send_nowait([frame])
    with pytest.raises(trio.WouldBlock):
        connection.send_nowait([b"too many"])
    async with endpoint.bind() as server:
        came = await server.receive()
        assert [[b"kept"], [b"kept, too"]] == [frames for _, frames in came]
        peers.add(came[0][0])
        with pytest.raises(PeerGone):
            server.send_nowait(peer, [b"to the old id"])
    assert 2 == len(peers)


@virtual_time
async def test_small_frames_are_copied_and_large_ones_shared() -> None:
    """What arrives is of the same kinds as from ZeroMQ, and cannot be written."""

    server = memory_server()
    connection = server.connect()
    small, large = np.ones(3, "f4"), np.ones(100_000, "f4")
    connection.send_nowait([b"header", small, large])
    small[:] = 2
    ((_, (header, came, view)),) = server.receive_nowait()
    assert [bytes, bytes, memoryview] == [type(header), type(came), type(view)]
    np.testing.assert_array_equal(np.ones(3, "f4"), np.frombuffer(came, "f4"))
    assert np.shares_memory(large, np.frombuffer(view, "u1"))
    assert view.readonly


@virtual_time
async def test_what_a_cut_off_peer_had_sent_before_is_dropped() -> None:
    """Messages that wait when the peer is cut off are not handed over either."""

    server = memory_server()
    bad, good = server.connect(), server.connect()
    bad.send_nowait([b"bad"])
    ((peer, _),) = server.receive_nowait()
    bad.send_nowait([b"worse"])
    good.send_nowait([b"good"])
    server.cut_off(peer)
    assert [[b"good"]] == [frames for _, frames in server.receive_nowait()]
