"""Connections between an event loop and threads of its own process."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from typing import Any

import pytest
import trio
import trio.testing
from tests.pipeline.serving.clocks import real_time

from shapestream.errors import PeerGone
from shapestream.transport.interface import Message, Wake
from shapestream.transport.memory import ThreadConnection, ThreadServer


@asynccontextmanager
async def served() -> AsyncIterator[ThreadServer]:
    """A server whose `run` ends when it is closed."""
    server = ThreadServer()
    async with trio.open_nursery() as nursery:
        await nursery.start(server.run)
        try:
            with trio.fail_after(120):
                yield server
        finally:
            server.close()


async def in_thread(server: ThreadServer, work: Callable[[ThreadConnection], Any]) -> Any:
    """Work in a thread with a connection of its own."""
    wake = Wake()

    def run() -> Any:
        with closing(server.dial(wake)) as connection:
            return work(connection)

    return await trio.to_thread.run_sync(run)


@pytest.mark.parametrize("in_watcher", [True, False], ids=["watcher", "receiver"])
@real_time
async def test_no_message_is_left_behind(in_watcher: bool) -> None:
    """Both sides fall asleep and are woken at any moment: each message arrives, once and in order."""
    count, threads = 20_000, 3
    came: dict[bytes, list[int]] = {}

    def talk(connection: ThreadConnection) -> list[int]:
        heard = []
        for number in range(count):
            connection.send([b"%d" % number])
            if number % 3 == 0:  # sometimes two messages are on their way, sometimes none
                heard.append(connection.receive())
        while len(heard) < count:
            heard.append(connection.receive())
        return [int(bytes(message[0])) for message in heard if message is not None]

    async with served() as server:

        def answer(messages: list[tuple[bytes, Message]]) -> None:
            for peer, frames in messages:
                came.setdefault(peer, []).append(int(bytes(frames[0])))
                server.send_nowait(peer, frames)

        async def receive() -> None:
            while True:
                answer(await server.receive())

        heard = []

        async def one() -> None:
            heard.append(await in_thread(server, talk))

        if in_watcher:
            server.on_messages = lambda: answer(server.receive_nowait())
        async with trio.open_nursery() as nursery:
            nursery.start_soon(receive)
            async with trio.open_nursery() as talking:
                for _ in range(threads):
                    talking.start_soon(one)
            nursery.cancel_scope.cancel()
    assert [list(range(count))] * threads == heard
    assert [list(range(count))] * threads == list(came.values())


@real_time
async def test_a_wake_ends_a_wait_without_a_message() -> None:
    """A slot is told in this way that its session is over."""
    async with served() as server:
        wake, waits, result = Wake(), threading.Event(), [b"none"]

        def wait() -> None:
            connection = server.dial(wake)
            waits.set()
            result[:] = [connection.receive()]  # type: ignore[list-item]

        thread = threading.Thread(target=wait)
        thread.start()
        waits.wait()
        wake.set()
        await trio.to_thread.run_sync(thread.join)
        assert [None] == result


@real_time
async def test_a_closed_connection_is_gone() -> None:
    """Its last messages arrive; messages to it are refused."""
    async with served() as server:
        await in_thread(server, lambda connection: connection.send([b"last"]))
        ((peer, message),) = await server.receive()
        assert [b"last"] == message
        with pytest.raises(PeerGone, match="closed its connection"):
            server.send_nowait(peer, [b"too late"])


@real_time
async def test_a_thread_that_is_cut_off_is_not_heard() -> None:
    """It goes on, and what it sends reaches nobody."""
    async with served() as server:
        connection = server.dial(Wake())
        connection.send([b"first"])
        ((peer, _),) = await server.receive()
        connection.send([b"unread"])
        server.cut_off(peer)
        connection.send([b"unheard"])
        assert [] == server.receive_nowait()


@real_time
async def test_closing_ends_run_and_receivers() -> None:
    """The threads are not told."""
    async with served() as server:
        connection = server.dial(Wake())
        async with trio.open_nursery() as nursery:

            async def receive() -> None:
                with pytest.raises(trio.ClosedResourceError):
                    await server.receive()

            nursery.start_soon(receive)
            await trio.testing.wait_all_tasks_blocked()
            server.close()
        assert connection.send([b"unheard"])
