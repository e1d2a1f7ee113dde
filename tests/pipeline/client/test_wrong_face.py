"""The first mistakes with three faces: each error names the right face, or the right keyword."""

from __future__ import annotations

import asyncio
import gc
import threading
from typing import Any

import numpy as np
import pytest
import trio

import shapestream
from shapestream import aio, blocking

ROW = {"x": np.ones((1, 3), np.float32)}


async def enter(connecting: Any) -> None:
    """Enter and leave."""
    async with connecting:
        pytest.fail("entered")


def test_the_trio_face_under_asyncio_names_the_asyncio_face(address: str) -> None:
    """A notebook runs asyncio."""
    with pytest.raises(RuntimeError, match=r"use shapestream\.aio\.connect"):
        asyncio.run(enter(shapestream.connect(address)))


def test_the_asyncio_face_under_trio_names_the_trio_face(address: str) -> None:
    """The other way round."""
    with pytest.raises(RuntimeError, match=r"use shapestream\.connect"):
        trio.run(enter, aio.connect(address))


@pytest.mark.parametrize("face", [shapestream, aio], ids=["trio", "asyncio"])
def test_an_async_face_without_an_event_loop_names_the_blocking_face(face: Any, address: str) -> None:
    """Driven by hand, or by an event loop that neither of them knows."""
    with pytest.raises(RuntimeError, match=r"use shapestream\.blocking\.connect"):
        enter(face.connect(address)).send(None)


async def test_connect_without_async_with_says_how(async_face: Any) -> None:
    """Awaited, entered by `with`, or used as if it were the client."""
    way_in = r"async with shapestream(\.aio)?\.connect\(…\) as client"

    with pytest.raises(TypeError, match=way_in):
        await async_face.connect()
    with pytest.raises(TypeError, match=way_in):
        with async_face.connect():
            pytest.fail("entered")
    with pytest.raises(AttributeError, match=way_in):
        await async_face.connect().infer("double", ROW)
    assert not hasattr(async_face.connect(), "close")


async def test_a_stream_without_async_with_says_how(async_face: Any) -> None:
    """Awaited, or entered by `with`."""
    way_in = r"async with client\.stream\(…\) as results"

    async with async_face.connect() as client:
        with pytest.raises(TypeError, match=way_in):
            await client.stream("double", [ROW])
        with pytest.raises(TypeError, match=way_in):
            with client.stream("double", [ROW]):
                pytest.fail("entered")


async def test_the_blocking_face_with_async_with_names_the_others(aio_face: Any) -> None:
    """The connection that was made is closed."""
    with pytest.raises(TypeError, match=r"shapestream\.aio\.connect"):
        async with blocking.connect(aio_face.address):  # type: ignore[attr-defined]
            pytest.fail("entered")
    await aio_face.until(lambda server: server.goodbyes == 1)


async def test_the_blocking_face_works_inside_an_event_loop(async_face: Any) -> None:
    """It blocks the loop, as any blocking call does; in the cell of a notebook that is what is wanted."""
    with blocking.connect(async_face.address) as client:
        assert 6.0 == client.infer("double", ROW)["y"].sum()


def test_what_is_refused_leaves_nothing_behind(address: str) -> None:
    """No thread, and no warning of a coroutine that was never awaited."""
    before = set(threading.enumerate())
    connecting = aio.connect(address)
    with pytest.raises(TypeError):
        connecting.__enter__()  # type: ignore[attr-defined]
    del connecting
    gc.collect()
    assert set() == set(threading.enumerate()) - before
