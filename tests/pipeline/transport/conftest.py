"""Both transports behind the same fixture, so that one suite shows that they behave alike."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import pytest
import trio

from shapestream.transport.crossing import CrossingServer
from shapestream.transport.curve import (
    KeyRing,
    KeyRole,
    ProtectedRouter,
    ServerSecurity,
)
from shapestream.transport.curve_keys import CallerKeys, new_key_pair
from shapestream.transport.interface import Connection, PeerSocket
from shapestream.transport.memory import memory_server
from shapestream.transport.router import RouterSocket
from shapestream.transport.zeromq import DealerSocket


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A server, and connections to it; all of them watched."""

    server: PeerSocket
    connections: tuple[Connection, ...]


def _plain(count: int) -> tuple[RouterSocket, list[DealerSocket]]:
    return RouterSocket(), [DealerSocket() for _ in range(count)]


def _protected(count: int) -> tuple[RouterSocket, list[DealerSocket]]:
    server, client = new_key_pair(), new_key_pair()
    security = ServerSecurity(key=server, ring=KeyRing(clients={client.public: "client"}))
    keys = CallerKeys(key=client, server_key=server.public)
    router = ProtectedRouter(security, [KeyRole.CLIENT], port="clients")
    return router, [DealerSocket(keys=keys) for _ in range(count)]


OpenLink: TypeAlias = Callable[[int], AbstractAsyncContextManager[Link]]


@pytest.fixture(params=["memory", "crossing", "ipc", "tcp", "curve"])
def open_link(request: pytest.FixtureRequest, tmp_path: Path) -> OpenLink:
    """Opens a server with so many connections, over each transport in turn."""

    @asynccontextmanager
    async def opened(count: int) -> AsyncIterator[Link]:
        server: PeerSocket
        connections: list[Connection]
        if request.param == "memory":
            memory = memory_server()
            server, connections = memory, [memory.connect() for _ in range(count)]
        elif request.param == "crossing":
            crossing = CrossingServer()
            server, connections = crossing, [crossing.connect() for _ in range(count)]
        else:
            router, dealers = _protected(count) if request.param == "curve" else _plain(count)
            router.bind(f"ipc://{tmp_path}/s" if request.param == "ipc" else "tcp://127.0.0.1:*")
            for dealer in dealers:
                dealer.connect(router.addresses[0])
            server, connections = router, list(dealers)
        async with trio.open_nursery() as nursery:
            for socket in (server, *connections):
                await nursery.start(socket.run)
            try:
                with trio.fail_after(60):
                    yield Link(server=server, connections=tuple(connections))
            finally:
                # Closing ends run(); the nursery waits for that.
                for socket in (server, *connections):
                    socket.close()

    return opened
