"""What the serving tests share: a server in memory, with the ways to talk to it, and what its parts are played by."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import trio
from tests.entries import Execute, ResultEntry, Role
from tests.pipeline.serving.echo_model import request
from tests.pipeline.serving.raw_peer import RawPeer
from tests.pipeline.serving.scripted_slots import ScriptedSlots

from shapestream.serving.server import Server, serve
from shapestream.serving.slot_threads import SlotThreads
from shapestream.settings import ServerSettings
from shapestream.transport.interface import Connection
from shapestream.transport.memory import MemoryServer, memory_server


class Running:
    """A server over memory endpoints, with the ways to talk to it."""

    def __init__(self, server: Server, clients: MemoryServer, workers: MemoryServer) -> None:
        self.server = server
        self.clients = clients
        self.workers = workers

    def client(self) -> RawPeer:
        """A new connection of a client."""
        return RawPeer(self.clients.connect())

    def worker(self) -> RawPeer:
        """A new connection of a worker."""
        return RawPeer(self.workers.connect(), Role.WORKER, dial=self._dial)

    async def _dial(self) -> Connection:
        return self.workers.connect()

    async def greeted(self, client: bytes = b"c" * 16, model: str | None = "echo") -> RawPeer:
        """A client whose session is open, and so is a model if one is named."""
        peer = self.client()
        await peer.open_session(client, model)
        return peer

    async def joined(self, name: str = "w", slots: int = 1, **said: Any) -> RawPeer:
        """A worker that was welcomed; `said` is the rest of its greeting."""
        peer = self.worker()
        await peer.join_as_worker(name, slots, **said)
        return peer

    async def client_and_worker(self) -> tuple[RawPeer, RawPeer]:
        """One of each, introduced."""
        worker = await self.joined()
        return await self.greeted(), worker

    async def busy_worker(self) -> tuple[RawPeer, RawPeer, Execute]:
        """The same, and the batch of the client's one request, which the worker was given."""
        client, worker = await self.client_and_worker()
        client.say(request(1))
        return client, worker, await worker.hear(Execute)

    async def assert_redone(self, client: RawPeer, sequence: int = 1) -> None:
        """Another worker comes, and the request is answered by it."""
        other = await self.joined("other")
        await other.run_next()
        result = await client.hear(ResultEntry)
        assert (sequence, "other/0") == (result.sequence, result.timings.worker)


class Owner:
    """Owns the processes that it is told to own, and notes whom it should kill."""

    def __init__(self, *owned: str) -> None:
        self.owned = set(owned)
        self.killed: list[str] = []
        self.held: set[str] = set()
        self.leaving: set[str] = set()
        self.ready: list[str] = []

    def owns(self, worker: str) -> bool:
        """By name."""
        return worker in self.owned

    @property
    def moves(self) -> bool:
        """Whether any is held."""
        return bool(self.held)

    def holds(self, worker: str) -> bool:
        """By name."""
        return worker in self.held

    def leaves(self, worker: str) -> bool:
        """By name."""
        return worker in self.leaving

    def greeted(self, worker: str) -> None:
        """Notes it."""
        self.ready.append(worker)

    def kill(self, worker: str, reason: str) -> None:
        """Notes it."""
        self.killed.append(worker)


def serve_with(**options: Any) -> Callable[..., Awaitable[None]]:
    """`serve` with these settings; those of `options` that are no settings are arguments of it."""
    settings = {key: options.pop(key) for key in list(options) if key in ServerSettings.model_fields}
    return partial(serve, ServerSettings(**settings), **options)


@asynccontextmanager
async def memory_serving(local: SlotThreads | None = None, **options: Any) -> AsyncIterator[Running]:
    """A server over memory endpoints for the time of the block."""
    clients, workers = memory_server(), memory_server()
    async with trio.open_nursery() as nursery:
        server = await nursery.start(
            partial(serve_with(**options), local=local, clients=clients, workers=workers)
        )
        yield Running(server, clients, workers)
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def scripted_client(**options: Any) -> AsyncIterator[tuple[RawPeer, ScriptedSlots]]:
    """A client of a server with one scripted slot; its session and model are open."""
    slots = ScriptedSlots()
    async with memory_serving(slots, **options) as running:
        yield await running.greeted(), slots
