"""A peer that speaks raw protocol, for clients and workers that do nothing by themselves."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import trio
from tests.entries import (
    WORKER_PROTOCOL,
    BatchDone,
    BatchFailedEntry,
    Entry,
    Execute,
    Failure,
    Hello,
    ModelOpened,
    OpenModel,
    ResultEntry,
    Role,
    SlotHello,
    StatisticsEntry,
    StatisticsRequest,
    Welcome,
    WorkerHello,
    WorkerWelcome,
)
from tests.pipeline.serving.echo_model import SIGNATURE, done
from trio.testing import wait_all_tasks_blocked

from shapestream.transport.interface import Connection, Message
from shapestream.transport.memory import MemoryConnection
from shapestream.wire.codec import decode, encode, pack_messages
from shapestream.wire.limits import CLIENT_LIMITS, WORKER_LIMITS
from shapestream_engine.signature import ModelSignature

E = TypeVar("E")


class RawPeer:
    """A client, or a worker, that says and hears single entries; it does nothing by itself.

    A worker's `connection` is its control; `slots` are the connections of its slots, from when it has joined. What it hears
    on any of them stands in one line, and a report goes to the connection that its batch came by.
    """

    def __init__(
        self,
        connection: Connection,
        role: Role = Role.CLIENT,
        *,
        dial: Callable[[], Awaitable[Connection]] | None = None,
    ) -> None:
        self.connection = connection
        self.slots: list[Connection] = []
        self._dial = dial
        self._slot_of: dict[int, int] = {}
        self.role = role
        self.limits = WORKER_LIMITS if role is Role.WORKER else CLIENT_LIMITS
        self.heard: deque[Entry] = deque()

    def say(self, *entries: Entry) -> None:
        """Sends these entries, in as few messages as they fit."""
        by_connection: dict[int, list[Entry]] = {}
        for entry in entries:
            reports = self.slots and isinstance(entry, BatchDone | BatchFailedEntry)
            if isinstance(entry, BatchFailedEntry) and entry.code in ("cancelled", "recalled"):
                reports = False  # the control answers for a batch that was withdrawn
            slot = self._slot_of.get(entry.batch, 0) if reports else -1  # type: ignore[attr-defined]
            by_connection.setdefault(slot, []).append(entry)
        for slot, own in by_connection.items():
            connection = self.connection if slot < 0 else self.slots[slot]
            for frames in pack_messages(own, limits=self.limits):
                connection.send_nowait(frames)

    def close(self) -> None:
        """Ends all its connections."""
        for connection in (self.connection, *self.slots):
            connection.close()

    async def hear(self, kind: type[E]) -> E:
        """The next entry of this kind; others that came before it stay for later."""
        while True:
            for entry in self.heard:
                if isinstance(entry, kind):
                    self.heard.remove(entry)
                    return entry
            await self._receive()

    async def _receive(self) -> None:
        if not self.slots:
            for frames in await self.connection.receive():
                self._take(frames)
            return

        async def receive(connection: Connection) -> None:
            with contextlib.suppress(trio.ClosedResourceError):
                for frames in await connection.receive():
                    self._take(frames)
                nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            for connection in (self.connection, *self.slots):
                nursery.start_soon(receive, connection)

    def _take(self, frames: Message) -> None:
        envelope = decode(frames, role=self.role, limits=self.limits)
        assert [] == envelope.bad
        self.heard.extend(envelope.entries)
        self._slot_of |= {entry.batch: entry.slot for entry in envelope.entries if isinstance(entry, Execute)}

    def take_arrived(self) -> None:
        """Puts what has arrived by now into `heard`."""
        for connection in (self.connection, *self.slots):
            while messages := connection.receive_nowait():
                for frames in messages:
                    self._take(frames)

    async def hear_each(self, kind: type[E], times: int) -> list[E]:
        """So many entries of this kind, in their order."""
        return [await self.hear(kind) for _ in range(times)]

    async def ends(self, times: int) -> list[ResultEntry | Failure]:
        """The terminal replies to so many requests, in the order in which they came."""
        found: list[ResultEntry | Failure] = []
        while len(found) < times:
            entry = await self.hear(object)
            if isinstance(entry, ResultEntry | Failure):
                found.append(entry)
        return found

    async def sequences(self, times: int) -> list[int]:
        """Which requests the next results answer."""
        return [result.sequence for result in await self.hear_each(ResultEntry, times)]

    def has_heard(self, kind: type[Entry]) -> bool:
        """Whether such an entry came and was not asked for."""
        return any(isinstance(entry, kind) for entry in self.heard)

    async def statistics(self) -> dict[str, Any]:
        """The server's counters, as a client gets them; what it said before was carried out."""
        self.say(StatisticsRequest())
        return (await self.hear(StatisticsEntry)).values

    async def open_session(self, client: bytes = b"c" * 16, model: str | None = "echo") -> None:
        """Greets, and opens a model if one is named."""
        self.say(Hello(client=client, software="test"))
        await self.hear(Welcome)
        if model is not None:
            self.say(OpenModel(name=model))
            await self.hear(ModelOpened)

    async def join_as_worker(
        self, name: str = "w", slots: int = 1, signature: ModelSignature = SIGNATURE, **said: Any
    ) -> None:
        """Registers as a worker that has one model, and its slots with it; `said` is the rest of its greeting."""
        await self.greet_as_worker(hello_of(signature, worker=name, slots=slots, **said))

    async def greet_as_worker(self, hello: WorkerHello) -> WorkerWelcome:
        """Greets so, and then with each slot on a connection of its own."""
        self.say(hello)
        welcome = await self.hear(WorkerWelcome)
        assert self._dial is not None
        self.slots = [await self._dial() for _ in range(hello.slots)]
        for slot, connection in enumerate(self.slots):
            greeting = encode([SlotHello(token=welcome.token, slot=slot)], limits=self.limits)
            connection.send_nowait(greeting)
        if isinstance(self.connection, MemoryConnection):
            await wait_all_tasks_blocked()  # the server has heard them
        return welcome

    async def run_next(self, **changes: Any) -> Execute:
        """A worker runs the next batch that it is given, as the model does; reports `changes` of that, if any."""
        execute = await self.hear(Execute)
        self.say(done(execute, **changes))
        return execute


def hello_of(signature: ModelSignature = SIGNATURE, **said: Any) -> WorkerHello:
    """The greeting of a worker that has this model, but for what is said here."""
    sound: dict[str, Any] = {"worker": "w", "pid": 1, "slots": 1, "protocol": WORKER_PROTOCOL}
    return WorkerHello(**(sound | {"models": {signature.name: signature.to_dict()}} | said))


def ending(failure: Failure) -> tuple[int, str]:
    """Of which request, and why."""
    return failure.sequence, failure.code


def verdict(failure: Failure) -> tuple[int, str, bool]:
    """The same, and whether a retry can help."""
    return *ending(failure), failure.retryable
