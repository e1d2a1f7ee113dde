"""The asyncio face: `async with shapestream.aio.connect(address) as client`.

The core runs in a thread of its own, under trio. The tickets that it finishes in one turn come over in one
`call_soon_threadsafe`; questions go there without any waiting, so the event loop is never blocked.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Coroutine, Iterable
from pathlib import Path
from typing import Any

from shapestream.client.async_face import AsyncClient, AsyncStream, connecting, require_asyncio
from shapestream.client.connector import Address, connector_for
from shapestream.client.core import BackgroundCore, Core, Withdraw, software
from shapestream.client.link import LinkSettings
from shapestream.client.results import Result
from shapestream.client.streaming import Item, ItemT, StreamOptions
from shapestream.client.tickets import AnyTicket, Question, WelcomeTicket, deadline_at, hand_back, outcome_of


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

    Leaving the block ends unfinished requests, here and at the server; tasks that still wait for them get `Cancelled`. The
    connection is kept by a thread in the background, so the event loop is never blocked.

    Raises `Unavailable` where no server answers in time, `TransportError` for a bad address, `ConfigurationError` for
    keys that cannot be used, TypeError and ValueError for bad times, and RuntimeError outside of asyncio.
    """
    loop = require_asyncio()
    ended = asyncio.Event()

    def in_loop(act: Any, *arguments: Any) -> None:
        try:
            loop.call_soon_threadsafe(act, *arguments)
        except RuntimeError:  # the loop was closed under us, and its tasks with it
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
        welcome = WelcomeTicket(call, deadline=deadline_at(core.clock, connect_timeout))
        await call.ask(welcome)
        outcome_of(welcome, bool)
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

    async def ask(self, ticket: Question) -> None:
        """Wait until the ticket is finished; when cancelled, the ticket is withdrawn."""
        try:
            self._core.post(ticket)
            await self._future
        finally:
            if ticket.outcome is None:
                self.closed = True
                self._core.post(Withdraw(ticket))


class _Wakeup:
    """The tasks that wait for news."""

    def __init__(self) -> None:
        self._news = asyncio.Event()
        self.wake = self._news.set

    async def wait(self) -> None:
        self._news.clear()
        await self._news.wait()


class Stream(AsyncStream[ItemT]):
    """A stream of results: `async with` it, then `async for` over it, in one task or several."""

    _producer: asyncio.Task[None] | None = None

    def _start_producer(self, pull: Coroutine[Any, Any, None]) -> None:
        self._producer = asyncio.create_task(pull)

    async def _end_producer(self) -> None:
        if self._producer is not None:
            self._producer.cancel()
            # Returns when the task has ended, and does not raise its error: the stream has told its own.
            await asyncio.wait([self._producer])


class Client(AsyncClient[Stream[Result], Stream[Item]]):
    """A connected client, for any number of tasks of one event loop. Made by `connect`."""

    def __init__(self, core: Core) -> None:
        super().__init__(
            core,
            call=_Call,
            wakeup=_Wakeup,
            current_loop=asyncio.get_running_loop,
        )

    def _stream(
        self, model: str, source: Iterable[Any] | AsyncIterable[Any], options: StreamOptions
    ) -> Stream[Any]:
        return Stream(self, model, source, options)
