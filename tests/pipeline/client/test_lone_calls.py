"""A call that is alone ends as any other does, and others are heard meanwhile."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest
import trio
from tests.entries import Goodbye

import shapestream
from shapestream.errors import Cancelled, DeadlineExceeded
from shapestream.testing import ScriptedServer

ROW = {"x": np.ones((1, 3), np.float32)}


@asynccontextmanager
async def connected(face: Any, **options: Any) -> AsyncIterator[shapestream.Client]:
    """A client whose last calls came one by one, so that the next is sent at once."""
    async with face.connect(**options) as client:
        for _ in range(3):
            await client.infer("double", ROW)
        yield client
        await client.infer("double", ROW)


def _has(server: ScriptedServer, *, requests: int) -> bool:
    return len(server.requests) == requests and len(server.held) == 2


async def test_it_ends_at_its_deadline(trio_face: Any) -> None:
    """The core's timer ends it, and no message; afterwards the server's goodbye is heard though no call follows."""
    async with connected(trio_face, silence=100) as client:
        trio_face.server.go_silent()
        with trio.fail_after(50), pytest.raises(DeadlineExceeded):
            await client.infer("double", ROW, deadline=0.05)
        trio_face.server.go_silent(False)
        trio_face.server.say(Goodbye())
        await trio_face.until(lambda server: server.hellos == 2)


async def test_it_is_withdrawn_when_its_task_is_cancelled(trio_face: Any) -> None:
    """The server is told, and the next call is served."""
    async with connected(trio_face) as client:
        trio_face.server.hold()
        with trio.move_on_after(0.05) as scope:
            await client.infer("double", ROW)
        assert scope.cancelled_caught
        await trio_face.until(lambda server: server.cancelled == [4])
        trio_face.server.release()


async def test_calls_and_streams_beside_it_are_answered_before_it(trio_face: Any) -> None:
    """They begin while it waits."""
    ended: list[str] = []

    async def call(client: shapestream.Client) -> None:
        await client.infer("double", ROW)
        ended.append("first")

    async with connected(trio_face) as client, trio.open_nursery() as nursery:
        trio_face.server.hold()
        nursery.start_soon(call, client)
        await trio_face.until(lambda server: len(server.held) == 1)
        async with trio.open_nursery() as others:

            async def second() -> None:
                await client.infer("double", ROW)
                async with client.stream("double", [ROW] * 9, max_in_flight=1) as results:
                    assert 9 == len([result async for result in results])
                ended.append("second")

            others.start_soon(second)
            for number in range(10):
                await trio_face.until(partial(_has, requests=5 + number))
                trio_face.server.release(1, newest_first=True)
        assert ["second"] == ended
        trio_face.server.release()
    assert ["second", "first"] == ended


async def test_it_survives_its_connection(trio_face: Any) -> None:
    """The server leaves, and another one takes its place: the request is sent again."""
    async with connected(trio_face) as client, trio.open_nursery() as nursery:
        trio_face.server.hold()
        nursery.start_soon(client.infer, "double", ROW)
        await trio_face.until(lambda server: len(server.held) == 1)
        trio_face.server.say(Goodbye())
        trio_face.server.restart()
        await trio_face.until(lambda server: server.hellos == 2 and len(server.held) == 1)
        trio_face.server.release()


async def test_it_ends_with_its_client(trio_face: Any) -> None:
    """Its task is outside of the client's block, and is told."""
    ended: list[Exception] = []

    async def call(client: shapestream.Client) -> None:
        try:
            await client.infer("double", ROW)
        except Cancelled as error:
            ended.append(error)

    async with trio.open_nursery() as nursery:
        async with trio_face.connect() as client:
            for _ in range(3):
                await client.infer("double", ROW)
            trio_face.server.hold()
            nursery.start_soon(call, client)
            await trio_face.until(lambda server: len(server.held) == 1)
    assert 1 == len(ended)


@pytest.mark.parametrize("long", [False, True], ids=["short", "long"])
async def test_the_connection_is_watched_after_it(trio_face: Any, long: bool) -> None:
    """The client hears the server's goodbye though no call follows."""
    async with connected(trio_face) as client:
        if long:
            async with trio.open_nursery() as nursery:
                trio_face.server.hold()
                nursery.start_soon(client.infer, "double", ROW)
                await trio_face.until(lambda server: len(server.held) == 1)
                for _ in range(50):
                    await client.statistics()
                trio_face.server.release()
        trio_face.server.say(Goodbye())
        await trio_face.until(lambda server: server.hellos == 2)
