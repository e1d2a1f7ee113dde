"""Connections between a server and clients in other threads of its process."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing, suppress
from typing import Any

import pytest
import trio
from tests.pipeline.serving.clocks import real_time

from shapestream.errors import OutboxFull
from shapestream.transport.crossing import CrossingConnection, CrossingServer
from shapestream.transport.interface import Wake

COUNT = 5000


@asynccontextmanager
async def served(server: CrossingServer) -> AsyncIterator[None]:
    """Serves echoes until the block is left."""

    def echo() -> bool:
        for peer, frames in server.receive_nowait():
            sent = False
            while not sent:
                with suppress(OutboxFull):  # its client reads soon, in another thread
                    server.send_nowait(peer, frames)
                    sent = True
        return not server.drained

    server.on_messages = echo
    async with trio.open_nursery() as nursery:
        await nursery.start(server.run)
        try:
            with trio.fail_after(120):
                yield
        finally:
            server.close()


def numbers(messages: list[Any]) -> list[int]:
    """What the messages hold."""
    return [int(bytes(message[0])) for message in messages]


def talk_in_thread(server: CrossingServer) -> list[int]:
    """Sends numbers as fast as there is room, and returns what came back; in a thread without an event loop."""
    wake, came, sent = Wake(), [], 0
    with closing(server.connect()) as connection:
        while len(came) < COUNT:
            full = False
            while sent < COUNT and not full:
                try:
                    connection.send_nowait([b"%d" % sent])
                    sent += 1
                except trio.WouldBlock:
                    full = True
            connection.wait(wake, math.inf, for_room=full)
            came += numbers(connection.receive_nowait())
    return came


def talk_in_trio(server: CrossingServer) -> list[int]:
    """The same in an event loop of its own."""
    came: list[int] = []

    async def talk() -> None:
        with closing(server.connect()) as connection:
            done = trio.Event()

            def take() -> None:
                came.extend(numbers(connection.receive_nowait()))
                if len(came) == COUNT:
                    done.set()

            connection.on_messages = take
            async with trio.open_nursery() as nursery:
                await nursery.start(connection.run)
                for number in range(COUNT):
                    await connection.send([b"%d" % number])
                await done.wait()
                nursery.cancel_scope.cancel()

    trio.run(talk)
    return came


@pytest.mark.parametrize("talk", [talk_in_thread, talk_in_trio], ids=["thread", "trio"])
@real_time
async def test_no_message_is_left_behind(talk: Callable[[CrossingServer], list[int]]) -> None:
    """Both sides fall asleep and are woken at any moment, with room for few messages: each arrives, once and in order."""
    server = CrossingServer(most_messages=7, most_answers=7)
    came: list[list[int]] = []

    async def in_thread() -> None:
        came.append(await trio.to_thread.run_sync(talk, server, abandon_on_cancel=True))

    async with served(server), trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(in_thread)
    assert [list(range(COUNT))] * 3 == came


def opened(server: CrossingServer) -> tuple[CrossingConnection, bytes]:
    """A connection that has been heard, and its id."""
    connection = server.connect()
    connection.send_nowait([b"hello"])
    ((peer, _),) = server.receive_nowait()
    return connection, peer


@real_time
async def test_what_is_unread_has_a_bound_in_both_directions() -> None:
    """In messages, and towards the server in bytes; the first is taken whatever its size. What was read makes room."""
    server = CrossingServer(most_messages=3, most_bytes=1000, most_answers=3)
    connection, peer = opened(server)
    for _ in range(3):
        connection.send_nowait([b"x"])
        server.send_nowait(peer, [b"x"])
    with pytest.raises(trio.WouldBlock):
        connection.send_nowait([b"x"])
    with pytest.raises(OutboxFull):
        server.send_nowait(peer, [b"x"])
    assert (3, 3) == (len(server.receive_nowait()), len(connection.receive_nowait()))
    connection.send_nowait([bytes(5000)])
    server.send_nowait(peer, [bytes(5000)])
    server.send_nowait(peer, [bytes(5000)])
    with pytest.raises(trio.WouldBlock):
        connection.send_nowait([b"x"])
    assert (1, 2) == (len(server.receive_nowait()), len(connection.receive_nowait()))
    connection.send_nowait([b"x"])


@real_time
async def test_a_closed_server_says_so() -> None:
    """Connections that it had, and those that are made later, tell why nothing comes; sending to it does nothing."""
    server = CrossingServer(most_messages=2)
    before, peer = opened(server)
    server.send_nowait(peer, [b"last words"])
    server.close()
    after = server.connect()
    for connection in (before, after):
        assert ("the server of this process has ended", True) == (connection.refusal, connection.broke)
        for _ in range(5):
            connection.send_nowait([b"nobody hears this"])
    assert [[b"last words"]] == before.receive_nowait()
    assert [] == after.receive_nowait()


@real_time
async def test_a_wait_ends_by_the_wake_and_by_time() -> None:
    """So a core's thread takes what its faces post, and does what is due."""
    server = CrossingServer()
    connection, peer = opened(server)
    wake = Wake()
    assert connection.wait(wake, 0.001, for_room=False) is False
    wake.set()
    assert connection.wait(wake, math.inf, for_room=False) is False
    assert connection.wait(wake, math.inf, for_room=True) is True
    server.send_nowait(peer, [b"news"])
    assert connection.wait(wake, math.inf, for_room=False) is True
