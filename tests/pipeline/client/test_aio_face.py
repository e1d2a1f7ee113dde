"""What only the asyncio face can get wrong: its event loop, and asyncio's cancellation."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shapestream

ROW = {"x": np.ones((1, 3), np.float32)}


async def test_a_cancelled_call_is_cancelled_at_the_server(aio_face: Any) -> None:
    """Whether by `cancel()` or by a timeout, the server is told, and the client goes on."""
    async with aio_face.connect() as client:
        await client.signature("double")
        aio_face.server.hold()
        call = asyncio.create_task(client.infer("double", ROW))
        await aio_face.until(lambda server: len(server.held) == 1)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await aio_face.until(lambda server: server.cancelled == [1])
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await client.infer("double", ROW)
        await aio_face.until(lambda server: server.cancelled == [1, 2])
        aio_face.server.release()
        await client.infer("double", ROW)


async def test_a_cancelled_consumer_leaves_its_stream(aio_face: Any) -> None:
    """Cancelled while it waits for the next result, it withdraws the rest on its way out."""

    async def consume(client: shapestream.aio.Client) -> None:
        async with client.stream("double", [ROW] * 9, max_in_flight=3) as results:
            async for _ in results:
                pytest.fail("the server answers nothing")

    async with aio_face.connect() as client:
        aio_face.server.hold()
        consumer = asyncio.create_task(consume(client))
        await aio_face.until(lambda server: len(server.held) == 3)
        consumer.cancel()
        with pytest.raises(asyncio.CancelledError):
            await consumer
        await aio_face.until(lambda server: len(server.cancelled) == 3)


async def test_a_cancelled_connect_leaves_no_thread(aio_face: Any, tmp_path: Path) -> None:
    """Cancelled while it waits for a server, the background thread ends."""
    connecting = asyncio.create_task(shapestream.aio.connect(f"ipc://{tmp_path}/nobody").__aenter__())
    while not _client_threads():  # noqa: ASYNC110 - a thread's start sets no event of asyncio's
        await asyncio.sleep(0)
    (thread,) = _client_threads()
    connecting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await connecting
    await asyncio.to_thread(thread.join, 10)
    assert not thread.is_alive()


def _client_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "shapestream-client"]


async def test_a_producer_that_blocks_does_not_block_the_event_loop(aio_face: Any) -> None:
    """Its `next()` waits for something that only the loop does, and gets it."""
    go_on = threading.Event()

    def source() -> Iterator[Any]:
        yield ROW
        assert go_on.wait(120)
        yield ROW

    async with aio_face.connect() as client:
        async with client.stream("double", source()) as results:
            await anext(results)
            asyncio.get_running_loop().call_later(0.001, go_on.set)
            await anext(results)


async def test_what_is_finished_together_wakes_the_loop_once(
    aio_face: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sixty-four results that arrive in one message cross to the loop's thread in one call, each to its own task."""
    loop = asyncio.get_running_loop()
    async with aio_face.connect() as client:
        await client.signature("double")
        aio_face.server.hold()
        async with asyncio.TaskGroup() as group:
            calls = [group.create_task(client.infer("double", {"x": [[n]]})) for n in range(64)]
            await aio_face.until(lambda server: len(server.held) == 64)
            crossings: list[Any] = []
            cross = loop.call_soon_threadsafe

            def counted(callback: Any, *arguments: Any, **options: Any) -> Any:
                crossings.append(callback)
                return cross(callback, *arguments, **options)

            monkeypatch.setattr(loop, "call_soon_threadsafe", counted)
            aio_face.server.release()
        assert 1 == len(crossings)
        assert [2.0 * n for n in range(64)] == [call.result()["y"].item() for call in calls]
