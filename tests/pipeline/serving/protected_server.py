"""A protected server on real sockets, and peers that prove keys."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import trio
from tests.entries import Role
from tests.pipeline.serving.harness import serve_with
from tests.pipeline.serving.raw_peer import RawPeer
from tests.pipeline.serving.scripted_slots import ScriptedSlots

from shapestream.serving.server import Server
from shapestream.transport.curve import KeyRing, ServerSecurity
from shapestream.transport.curve_keys import CallerKeys, KeyPair, new_key_pair
from shapestream.transport.zeromq import DealerSocket

SERVER, ALICE, BOB, ADMIN, GATEWAY, BOX, OTHER_BOX = (new_key_pair() for _ in range(7))
SECURITY = ServerSecurity(
    key=SERVER,
    ring=KeyRing(
        clients={ALICE.public: "alice", BOB.public: "bob"},
        admins={ADMIN.public: "admin"},
        gateways={GATEWAY.public: "gateway"},
        workers={BOX.public: "box", OTHER_BOX.public: "other"},
    ),
)


class Place:
    """A protected server, and ways to it."""

    def __init__(self, server: Server, nursery: trio.Nursery) -> None:
        self.server = server
        self._nursery = nursery
        self.sockets: list[DealerSocket] = []

    async def client(self, pair: KeyPair, client: bytes) -> RawPeer:
        """A client with this key and this id, whose session and model are open."""
        peer = await self.peer(pair)
        await peer.open_session(client)
        return peer

    async def peer(self, pair: KeyPair, role: Role = Role.CLIENT) -> RawPeer:
        """A new connection with this key."""
        addresses = self.server.worker_addresses if role is Role.WORKER else self.server.addresses

        async def dial() -> DealerSocket:
            dealer = DealerSocket(keys=CallerKeys(key=pair, server_key=SERVER.public))
            self.sockets.append(dealer)
            dealer.connect(addresses[0])
            await self._nursery.start(dealer.run)
            return dealer

        return RawPeer(await dial(), role, dial=dial)


@asynccontextmanager
async def serving(slots: ScriptedSlots | None = None, **settings: Any) -> AsyncIterator[Place]:
    """A protected server for the time of the block, with scripted slots or a port for workers."""
    start = serve_with(
        listen=("tcp://127.0.0.1:*",),
        worker_listen=None if slots is not None else "tcp://127.0.0.1:*",
        keys=SECURITY,
        **settings,
    )
    async with trio.open_nursery() as nursery:

        async def run(task_status: trio.TaskStatus[Server]) -> None:
            await start(local=slots, task_status=task_status)

        place = Place(await nursery.start(run), nursery)
        with trio.fail_after(60):
            yield place
        for dealer in place.sockets:
            dealer.close()
        nursery.cancel_scope.cancel()
