"""The asyncio face: `async with shapestream.aio.connect(address) as client`.

The core runs in a thread of its own, under trio. What it finishes in one turn comes over in one
`call_soon_threadsafe`; what is asked for goes there without any waiting, so the event loop is never blocked.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Self

from shapestream.client.async_face import WAY_IN, AsyncClient
from shapestream.client.background import BackgroundCore
from shapestream.client.connecting import AsyncEntered, connecting, require_asyncio
from shapestream.client.connector import Address, connector_for
from shapestream.client.core import Core
from shapestream.client.inbox import Withdraw
from shapestream.client.link import LinkSettings
from shapestream.client.outcomes import check, software
from shapestream.client.producing import ThreadPermits, pull_async, start_pulling
from shapestream.client.results import Result
from shapestream.client.streaming import Item, ItemT, Nothing, StreamOptions, StreamState
from shapestream.client.terms import deadline_at
from shapestream.client.tickets import (
    AnyTicket,
    Question,
    WelcomeTicket,
    hand_back,
)

__all__ = ["Client", "Stream", "connect"]


@connecting("shapestream.aio")
async def connect(
    address: Address,
    *,
    connect_timeout: float = 10.0,
    silence: float = 10.0,
    unavailable_after: float = 60.0,
    key: str | Path | None = None,
    server_key: str | Path | None = None,
) -> AsyncIterator[Client]:
    """Connect to a server, under asyncio: `async with shapestream.aio.connect(address) as client`.

    `address` is `tcp://HOST:PORT` or `ipc://PATH`. `connect_timeout` is how many seconds a server may take to answer. Later
    interruptions are healed without notice: a server that says nothing for `silence` seconds is given up and looked for
    anew, and unfinished requests are sent again under the same numbers. After `unavailable_after` seconds without any
    server they fail with `Unavailable`. A server that asks for keys is reached with `key`, the file of your secret key, and
    `server_key`, its public key or a file of that.

    Leaving the block ends what is unfinished, here and at the server; tasks that still wait for it get `Cancelled`. The
    connection is kept by a thread in the background, so the event loop is never blocked.

    Raises `Unavailable` where no server answers in time, `TransportError` for what is no address, `ConfigurationError` for
    keys that cannot be used, TypeError and ValueError for times that are none, and RuntimeError outside of asyncio.
    """
    loop = require_asyncio()
    ended = asyncio.Event()

    def in_loop(act: Any, *arguments: Any) -> None:
        try:
            loop.call_soon_threadsafe(act, *arguments)
        except RuntimeError:  # the loop was closed under us, so nobody waits any more
            background.core.stop()

    background = BackgroundCore(
        connector_for(address, key=key, server_key=server_key),
        software=software("asyncio"),
        settings=LinkSettings(silence_s=silence, unavailable_after_s=unavailable_after),
        deliver=lambda tickets: in_loop(hand_back, tickets),
        ended=lambda: in_loop(ended.set),
        is_abandoned=loop.is_closed,
    )
    background.start()
    try:
        core = background.core
        call = _Call(core)
        check(await call.ask(WelcomeTicket(call, deadline=deadline_at(core.clock, connect_timeout))))
        yield Client(core)
    finally:
        background.stop()
        await ended.wait()
        background.check()


class _Call:
    """One task that waits for one answer."""

    __slots__ = ("_core", "_future", "closed")

    def __init__(self, core: Core) -> None:
        self.closed = False
        self._core = core
        self._future = asyncio.get_running_loop().create_future()

    def finish(self, tickets: list[AnyTicket]) -> None:
        if not self._future.done():
            self._future.set_result(None)

    async def ask(self, ticket: Question) -> Any:
        """The ticket's outcome; when cancelled, the ticket is withdrawn."""
        try:
            self._core.post_from_thread(ticket)
            await self._future
        finally:
            if ticket.outcome is None:
                self.closed = True
                self._core.post_from_thread(Withdraw(ticket))
        return ticket.outcome


class Stream(AsyncEntered, Generic[ItemT]):
    """A stream of results: `async with` it, then `async for` over it, in one task or several."""

    _way_in = WAY_IN

    def __init__(
        self,
        client: Client,
        model: str,
        source: Iterable[Any] | AsyncIterable[Any],
        options: StreamOptions,
    ) -> None:
        self._client = client
        self._model = model
        self._source = source
        self._options = options
        self._state: _State[ItemT] | None = None
        self._producer: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        client, core = self._client, self._client._core
        client._check_loop()
        post = core.post_from_thread
        opened = client._models.get(self._model) or await client._open(self._model, None)
        if isinstance(self._source, AsyncIterable):
            permits = _Permits()
            self._state = _State(opened, self._options, permits, post, core.clock)
            self._state.begin()
            self._producer = asyncio.create_task(pull_async(self._source, self._state, permits, post))
        else:
            thread_permits = ThreadPermits()
            self._state = _State(opened, self._options, thread_permits, post, core.clock)
            self._state.begin()
            start_pulling(self._source, self._state, thread_permits, post)
        return self

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> ItemT:
        if self._state is None:
            raise RuntimeError(f"enter the stream first: {WAY_IN}")
        while True:
            item = self._state.take()
            if item is Nothing.YET:
                self._client._check_loop()
                await self._state.news.wait()
            elif item is Nothing.ANY_MORE:
                raise StopAsyncIteration
            else:
                return item

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._state is not None:
            self._state.close()
            self._state.news.set()
        if self._producer is not None:
            self._producer.cancel()
            # Returns when it has ended, and does not raise what it raised: nobody is left to care.
            await asyncio.wait([self._producer])


class Client(AsyncClient[Stream[Result], Stream[Item]]):
    """A connected client, for any number of tasks of one event loop. Made by `connect`."""

    def __init__(self, core: Core) -> None:
        super().__init__(core, _Call, asyncio.get_running_loop)

    def _stream(
        self, model: str, source: Iterable[Any] | AsyncIterable[Any], options: StreamOptions
    ) -> Stream[Any]:
        return Stream(self, model, source, options)


class _State(StreamState[ItemT]):
    """A stream's state, and the event that wakes those who wait for its next item."""

    def __init__(self, *args: Any) -> None:
        self.news = asyncio.Event()
        super().__init__(*args)

    def take(self) -> ItemT | Nothing:
        item = super().take()
        if item is Nothing.YET:
            self.news.clear()
        return item

    def finish(self, tickets: list[AnyTicket]) -> None:
        super().finish(tickets)
        self.news.set()


class _Permits:
    """Permits that a task waits for."""

    def __init__(self) -> None:
        self.available = 0
        self._some = asyncio.Event()

    def grant(self, number: int) -> None:
        self.available += number
        self._some.set()

    def stop(self) -> None:
        """The producer's task is cancelled anyway."""

    async def wait(self) -> None:
        while self.available < 1:
            self._some.clear()
            await self._some.wait()
