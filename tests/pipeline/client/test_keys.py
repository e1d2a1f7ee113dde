"""Clients that prove a key, in each face, and what is said where the keys that were given cannot be used."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

import shapestream
from shapestream import aio, blocking
from shapestream.errors import ConfigurationError, Unavailable
from shapestream.serving.server import Server, serve
from shapestream.settings import ServerSettings
from shapestream.transport.curve import KeyRing, ServerSecurity
from shapestream.transport.curve_keys import new_key_pair, write_key_pair

SERVER, ALICE, STRANGER = (new_key_pair() for _ in range(3))
SECURITY = ServerSecurity(key=SERVER, ring=KeyRing(clients={ALICE.public: "alice"}))


async def with_trio(address: str, **keys: Any) -> Any:
    """What the server says to the face for trio."""
    async with shapestream.connect(address, connect_timeout=5, **keys) as client:
        return await client.statistics()


async def with_asyncio(address: str, **keys: Any) -> Any:
    """The same for asyncio, in a loop and a thread of its own."""

    async def ask() -> Any:
        async with aio.connect(address, connect_timeout=5, **keys) as client:
            return await client.statistics()

    return await trio.to_thread.run_sync(asyncio.run, ask())


async def with_threads(address: str, **keys: Any) -> Any:
    """The same without async code."""

    def ask() -> Any:
        with blocking.connect(address, connect_timeout=5, **keys) as client:
            return client.statistics()

    return await trio.to_thread.run_sync(ask)


FACES = pytest.mark.parametrize("ask", [with_trio, with_asyncio, with_threads])


@FACES
def test_every_face_proves_its_key(ask: Callable[..., Any], tmp_path: Path) -> None:
    """A listed key is let in; another one is told that it is refused."""
    secret, _ = write_key_pair(tmp_path, "alice", ALICE)
    strange, _ = write_key_pair(tmp_path, "stranger", STRANGER)
    _, public = write_key_pair(tmp_path, "server", SERVER)
    settings = ServerSettings(listen=("tcp://127.0.0.1:*",))

    async def main() -> None:
        async with trio.open_nursery() as nursery:

            async def run(task_status: trio.TaskStatus[Server]) -> None:
                await serve(settings, keys=SECURITY, task_status=task_status)

            (address,) = (await nursery.start(run)).addresses
            with trio.fail_after(60):
                seen = await ask(address, key=str(secret), server_key=SERVER.public)
                assert "forbidden" in seen
                with pytest.raises(Unavailable, match="it refuses this key"):
                    await ask(address, key=strange, server_key=public)
            nursery.cancel_scope.cancel()

    trio.run(main)


@FACES
def test_keys_that_cannot_be_used(ask: Callable[..., Any], tmp_path: Path) -> None:
    """Each is said before a connection is tried: half of a pair, a key over ipc, a file that is none."""
    secret, public = write_key_pair(tmp_path, "alice", ALICE)
    tcp, given = "tcp://127.0.0.1:1", {"key": secret, "server_key": public}
    for address, keys, words in (
        (tcp, {"key": secret}, "key and server_key go together"),
        (tcp, {"server_key": public}, "key and server_key go together"),
        (f"ipc://{tmp_path}/s", given, "keys are for tcp"),
        (tcp, {**given, "key": tmp_path / "none"}, "shapestream keys new"),
        (tcp, {**given, "key": public}, "holds no secret key|lets others"),
        (tcp, {**given, "server_key": "too short"}, "No such file"),
        (tcp, {**given, "server_key": secret}, "holds a secret key"),
    ):
        with pytest.raises(ConfigurationError, match=words):
            trio.run(partial(ask, address, **keys))
