"""What only the asyncio face can get wrong: its event loop, and asyncio's cancellation."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import shapestream
from shapestream.testing import ScriptedServer

ROW = {"x": np.ones((1, 3), np.float32)}


def test_a_cancelled_call_is_cancelled_at_the_server(server: ScriptedServer, address: str) -> None:
    """Whether by `cancel()` or by a timeout, the server is told, and the client goes on."""

    async def main() -> None:
        async with shapestream.aio.connect(address) as client:
            await client.signature("double")
            server.hold()
            call = asyncio.create_task(client.infer("double", ROW))
            await asyncio.to_thread(server.wait_until, lambda server: len(server.held) == 1)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            await asyncio.to_thread(server.wait_until, lambda server: server.cancelled == [1])
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.01):
                    await client.infer("double", ROW)
            await asyncio.to_thread(server.wait_until, lambda server: server.cancelled == [1, 2])
            server.release()
            await client.infer("double", ROW)

    asyncio.run(main())


def test_a_cancelled_consumer_leaves_its_stream(server: ScriptedServer, address: str) -> None:
    """Cancelled while it waits for the next result, it withdraws the rest on its way out."""

    async def consume(client: shapestream.aio.Client) -> None:
        async with client.stream("double", [ROW] * 9, max_in_flight=3) as results:
            async for _ in results:
                pytest.fail("the server answers nothing")

    async def main() -> None:
        async with shapestream.aio.connect(address) as client:
            server.hold()
            consumer = asyncio.create_task(consume(client))
            await asyncio.to_thread(server.wait_until, lambda server: len(server.held) == 3)
            consumer.cancel()
            with pytest.raises(asyncio.CancelledError):
                await consumer
            await asyncio.to_thread(server.wait_until, lambda server: len(server.cancelled) == 3)

    asyncio.run(main())


def test_a_cancelled_connect_leaves_no_thread(tmp_path: Any) -> None:
    """Cancelled while it waits for a server, the background thread ends."""

    async def main() -> None:
        connecting = asyncio.create_task(shapestream.aio.connect(f"ipc://{tmp_path}/nobody").__aenter__())
        while not _client_threads():  # noqa: ASYNC110 - a thread's start sets no event of asyncio's
            await asyncio.sleep(0)
        (thread,) = _client_threads()
        connecting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await connecting
        await asyncio.to_thread(thread.join, 10)
        assert not thread.is_alive()

    asyncio.run(main())


def _client_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "shapestream-client"]


def test_a_producer_that_blocks_does_not_block_the_event_loop(address: str) -> None:
    """Its `next()` waits for something that only the loop does, and gets it."""
    go_on = threading.Event()

    def source() -> Iterator[Any]:
        yield ROW
        assert go_on.wait(120)
        yield ROW

    async def main() -> None:
        async with shapestream.aio.connect(address) as client:
            async with client.stream("double", source()) as results:
                await anext(results)
                asyncio.get_running_loop().call_later(0.001, go_on.set)
                await anext(results)

    asyncio.run(main())


def test_what_is_finished_together_wakes_the_loop_once(
    server: ScriptedServer, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sixty-four results that arrive in one message cross to the loop's thread in one call."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        async with shapestream.aio.connect(address) as client:
            await client.signature("double")
            server.hold()
            async with asyncio.TaskGroup() as group:
                for _ in range(64):
                    group.create_task(client.infer("double", ROW))
                await asyncio.to_thread(server.wait_until, lambda server: len(server.held) == 64)
                crossings: list[Any] = []
                cross = loop.call_soon_threadsafe

                def counted(callback: Any, *arguments: Any, **options: Any) -> Any:
                    crossings.append(callback)
                    return cross(callback, *arguments, **options)

                monkeypatch.setattr(loop, "call_soon_threadsafe", counted)
                server.release()
            assert 1 == len(crossings)

    asyncio.run(main())


def test_many_tasks_share_a_client(address: str) -> None:
    """Each gets its own answer."""

    async def main() -> None:
        async with shapestream.aio.connect(address) as client:

            async def call(number: int) -> float:
                return float((await client.infer("double", {"x": [[number]]}))["y"][0, 0])

            answers = await asyncio.gather(*(call(number) for number in range(300)))
            assert [2.0 * number for number in range(300)] == answers

    asyncio.run(main())
