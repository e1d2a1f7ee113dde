"""The trio core and its connections, one after another: servers that are not there, leave, hang or talk nonsense."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgpack
import pytest
import trio
import trio.testing
from tests.entries import Goodbye, ResultEntry
from tests.pipeline.client.virtual_time import ROW, serving, until

import shapestream
from shapestream.errors import (
    DeadlineExceeded,
    InternalError,
    TransportError,
    Unavailable,
)
from shapestream.testing import (
    MemoryConnection,
    MemoryEndpoint,
    ScriptedModel,
    ScriptedServer,
    identity_signature,
)


async def test_a_server_may_come_after_its_client() -> None:
    """Connecting waits for it, within the timeout."""
    endpoint = MemoryEndpoint()
    server = ScriptedServer(ScriptedModel(identity_signature()))

    async def come_late() -> None:
        await trio.sleep(5)
        await server.run(endpoint.bind())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(come_late)
        async with shapestream.connect(endpoint.connect) as client:
            await client.infer("identity", ROW)
        nursery.cancel_scope.cancel()


async def test_a_server_that_hangs_is_given_up_and_found_again() -> None:
    """After the silence a new connection is made; the request is answered once the server is back."""
    async with serving() as (server, endpoint), shapestream.connect(endpoint.connect) as client:
        await client.signature("identity")
        first = set(endpoint.connections)
        server.go_silent()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.infer, "identity", ROW)
            await trio.sleep(15)
            server.go_silent(False)
        assert first.isdisjoint(endpoint.connections)
        assert 1 == len(endpoint.connections)


async def test_a_server_that_stays_away_fails_what_waits() -> None:
    """After `unavailable_after` seconds requests end as `Unavailable`, and later ones do so at once."""
    async with serving() as (server, endpoint):
        async with shapestream.connect(endpoint.connect, silence=10, unavailable_after=30) as client:
            await client.signature("identity")
            server.go_silent()
            start = trio.current_time()
            with pytest.raises(Unavailable, match="no server has answered"):
                await client.infer("identity", ROW)
            assert 40 == pytest.approx(trio.current_time() - start, abs=1)
            start = trio.current_time()
            with pytest.raises(Unavailable):
                await client.infer("identity", ROW)
            assert start == trio.current_time()


async def test_a_server_that_says_goodbye_is_looked_for_again() -> None:
    """A restart that is announced costs half a second, not the silence."""
    async with serving() as (server, endpoint), shapestream.connect(endpoint.connect) as client:
        await client.signature("identity")
        server.say(Goodbye())
        server.restart()
        await trio.testing.wait_all_tasks_blocked()
        start = trio.current_time()
        await client.infer("identity", ROW)
        assert trio.current_time() - start < 1
        assert 2 == server.hellos


class Gate:
    """Stands before a connection, and can be shut: like libzmq at its high-water mark."""

    def __init__(self, connection: MemoryConnection) -> None:
        self.opened = trio.Event()
        self.opened.set()
        self._pass_nowait, self._pass = connection.send_nowait, connection.send
        connection.send_nowait, connection.send = self.send_nowait, self.send  # type: ignore[method-assign]

    def send_nowait(self, frames: Sequence[Any]) -> None:
        """Refuse while shut."""
        if not self.opened.is_set():
            raise trio.WouldBlock
        self._pass_nowait(frames)

    async def send(self, frames: Sequence[Any]) -> None:
        """Wait while shut."""
        await self.opened.wait()
        await self._pass(frames)


async def test_a_blocked_connection_keeps_what_can_still_be_withdrawn() -> None:
    """Behind a full socket deadlines pass, cancelled calls are never sent, and the rest goes in order."""
    async with serving() as (server, endpoint):
        connection = endpoint.connect()
        gate = Gate(connection)
        async with shapestream.connect(lambda: connection) as client:
            await client.signature("identity")
            gate.opened = trio.Event()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(client.infer, "identity", ROW)
                await trio.testing.wait_all_tasks_blocked()
                with pytest.raises(DeadlineExceeded, match="never sent"):
                    await client.infer("identity", ROW, deadline=2)
                with trio.move_on_after(2):
                    await client.infer("identity", ROW)
                nursery.start_soon(client.infer, "identity", ROW)
                await trio.testing.wait_all_tasks_blocked()
                assert [] == server.requests
                gate.opened.set()
            assert [1, 4] == [request.sequence for request in server.requests]
            assert [] == server.cancelled


async def test_a_message_that_makes_no_sense_starts_a_new_connection() -> None:
    """The connection is given up, and what was unfinished is sent again on the next."""
    async with serving() as (server, endpoint), shapestream.connect(endpoint.connect) as client:
        await client.signature("identity")
        server.hold()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.infer, "identity", ROW)
            await until(lambda: server.held)
            assert endpoint.server is not None
            endpoint.server.send_nowait(server.held[0][0], [b"\xc1 is no msgpack"])
            await until(lambda: server.hellos == 2)
            server.release()
        assert [1, 1] == [request.sequence for request in server.requests]


async def test_an_answer_that_makes_no_sense_fails_its_request_alone() -> None:
    """A result that cannot be read ends its request; one without a number is ignored."""
    failed: list[InternalError] = []

    async def ask(client: shapestream.Client) -> None:
        try:
            await client.infer("identity", ROW)
        except InternalError as error:
            failed.append(error)

    async with serving() as (server, endpoint), shapestream.connect(endpoint.connect) as client:
        server.hold()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, client)
            nursery.start_soon(ask, client)
            await until(lambda: len(server.held) == 2)
            assert endpoint.server is not None
            peer, request = server.held.pop(0)
            nonsense = [1, [[ResultEntry.KIND, 0, request.sequence], [ResultEntry.KIND, 0]]]
            endpoint.server.send_nowait(peer, [msgpack.packb(nonsense)])
            server.release()
    assert ["the server's answer could not be read: Result has 3 elements instead of 6"] == [
        error.message for error in failed
    ]


async def test_where_no_connection_can_be_made_for_a_while_the_client_goes_on_trying() -> None:
    """No descriptors are left just when the server must be looked for: nothing that waits is lost over it."""
    async with serving() as (server, endpoint):
        refusals = [TransportError("too many open files")] * 3
        failed: list[TransportError] = []

        def connect() -> MemoryConnection:
            if server.hellos and len(failed) < len(refusals):
                failed.append(refusals[len(failed)])
                raise failed[-1]
            return endpoint.connect()

        async with shapestream.connect(connect) as client:
            await client.signature("identity")
            server.say(Goodbye())
            server.restart()
            await client.infer("identity", ROW)
        assert refusals == failed
        assert 2 == server.hellos


async def test_who_waits_while_no_connection_can_be_made_is_told_why() -> None:
    """At the deadline, or when nothing has helped for `unavailable_after` seconds."""
    async with serving() as (server, endpoint):

        def connect() -> MemoryConnection:
            if server.hellos:
                raise TransportError("too many open files")
            return endpoint.connect()

        async with shapestream.connect(connect, unavailable_after=30) as client:
            await client.signature("identity")
            server.say(Goodbye())
            await trio.testing.wait_all_tasks_blocked()
            with pytest.raises(DeadlineExceeded, match="too many open files"):
                await client.infer("identity", ROW, deadline=3)
            with pytest.raises(Unavailable, match="too many open files"):
                await client.infer("identity", ROW)
