"""A server of this process at a real address, and peers that dial it: real sockets, and slots on real threads."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import trio
from tests.entries import Role
from tests.pipeline.serving.harness import serve_with
from tests.pipeline.serving.raw_peer import RawPeer

from shapestream.serving.server import Server
from shapestream.serving.slot_threads import SlotThreads
from shapestream.transport.zeromq import DealerSocket


@asynccontextmanager
async def socket_serving(address: str, local: SlotThreads, **options: Any) -> AsyncIterator[Server]:
    """A server that listens there for the time of the block; it drains at the end."""
    start = partial(serve_with(listen=(address,), **options), local=local)
    async with trio.open_nursery() as nursery:
        server: Server = await nursery.start(start)
        yield server
        server.drain()


@asynccontextmanager
async def dialled(address: str, role: Role = Role.CLIENT) -> AsyncIterator[RawPeer]:
    """A connection on which nothing was said yet."""
    sockets: list[DealerSocket] = []

    async def dial() -> DealerSocket:
        socket = DealerSocket()
        sockets.append(socket)
        socket.connect(address)
        await nursery.start(socket.run)
        return socket

    async with trio.open_nursery() as nursery:
        try:
            yield RawPeer(await dial(), role, dial=dial)
        finally:
            for socket in sockets:
                socket.close()
        nursery.cancel_scope.cancel()
