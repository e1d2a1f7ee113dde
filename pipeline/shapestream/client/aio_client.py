"""The asyncio face: `async with shapestream.aio.connect(address) as client`.

The core runs in a thread of its own, under trio. What it finishes in one turn comes over in one
`call_soon_threadsafe`; what is asked for goes there without any waiting, so the event loop is never blocked.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from shapestream.client.background import BackgroundCore
from shapestream.client.connector import Address, connector_for
from shapestream.client.core import Core, Withdraw
from shapestream.client.link import LinkSettings
from shapestream.client.models import OpenedModel, OpenModels
from shapestream.client.outcomes import answer_of, check, counters_of, handle_of, software
from shapestream.client.producing import ThreadPermits, pull_async, start_pulling
from shapestream.client.results import Result
from shapestream.client.streaming import Item, Nothing, OnError, StreamOptions, StreamState
from shapestream.client.tickets import (
    AnyTicket,
    OpenTicket,
    Question,
    StatisticsTicket,
    WelcomeTicket,
    hand_back,
)
from shapestream_engine.signature import ModelSignature

__all__ = ["Client", "Stream", "connect"]


@asynccontextmanager
async def connect(
    address: Address,
    *,
    connect_timeout: float = 10.0,
    silence: float = 10.0,
    unavailable_after: float = 60.0,
    key: str | Path | None = None,
    server_key: str | Path | None = None,
) -> AsyncIterator[Client]:
    """Connect to a server; as `shapestream.connect`, for asyncio."""
    loop = asyncio.get_running_loop()
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
    )
    background.start()
    try:
        call = _Call(background.core)
        check(await call.ask(WelcomeTicket(call, timeout_s=connect_timeout)))
        yield Client(background.core)
    finally:
        background.stop()
        await ended.wait()
        background.check()


class Client:
    """A connected client, for any number of tasks of one event loop. Made by `connect`."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._models = OpenModels()

    async def infer(
        self,
        model: str,
        inputs: Mapping[str, Any],
        *,
        deadline: float | None = None,
        priority: int = 0,
    ) -> Result:
        """Run `model` on these inputs; as `shapestream.Client.infer`."""
        give_up_at = None if deadline is None else self._core.clock() + deadline
        opened = self._models.get(model) or await self._open(model, deadline)
        if give_up_at is not None:
            deadline = give_up_at - self._core.clock()
        call = _Call(self._core)
        ticket = opened.request(call, inputs, timeout_s=deadline, priority=priority)
        return Result(None, answer_of(await call.ask(ticket)), opened.outputs)

    def stream(
        self,
        model: str,
        source: Iterable[Any] | AsyncIterable[Any],
        *,
        max_in_flight: int = 64,
        ordered: bool = True,
        on_error: OnError = "raise",
        deadline: float | None = None,
        priority: int = 0,
    ) -> Stream:
        """Run `model` on everything that `source` gives; as `shapestream.Client.stream`."""
        options = StreamOptions(
            max_in_flight=max_in_flight,
            ordered=ordered,
            on_error=on_error,
            deadline=deadline,
            priority=priority,
        )
        return Stream(self, model, source, options)

    async def signature(self, model: str, *, deadline: float | None = None) -> ModelSignature:
        """What `model` takes and gives; asked for once, and then remembered."""
        opened = self._models.get(model) or await self._open(model, deadline)
        return opened.signature

    async def statistics(self, *, deadline: float | None = 10.0) -> dict[str, Any]:
        """The server's counters."""
        call = _Call(self._core)
        return counters_of(await call.ask(StatisticsTicket(call, timeout_s=deadline)))

    async def _open(self, name: str, deadline: float | None) -> OpenedModel:
        call = _Call(self._core)
        return self._models.add(handle_of(await call.ask(OpenTicket(call, timeout_s=deadline, name=name))))


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


class Stream:
    """A stream of results: `async with` it, then `async for` over it, in one task or several."""

    def __init__(
        self,
        client: Client,
        model: str,
        source: Iterable[Any] | AsyncIterable[Any],
        options: StreamOptions,
    ) -> None:
        if not isinstance(source, Iterable | AsyncIterable):
            raise TypeError(f"a stream's source is an iterable or an async one, not {type(source).__name__}")
        self._client = client
        self._model = model
        self._source = source
        self._options = options
        self._state: _State | None = None
        self._producer: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Stream:
        client, post = self._client, self._client._core.post_from_thread
        opened = client._models.get(self._model) or await client._open(self._model, None)
        if isinstance(self._source, AsyncIterable):
            permits = _Permits()
            self._state = _State(opened, self._options, permits, post)
            self._state.begin()
            self._producer = asyncio.create_task(pull_async(self._source, self._state, permits, post))
        else:
            thread_permits = ThreadPermits()
            self._state = _State(opened, self._options, thread_permits, post)
            self._state.begin()
            start_pulling(self._source, self._state, thread_permits, post)
        return self

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Item:
        if self._state is None:
            raise RuntimeError("enter the stream first: async with client.stream(…) as results")
        while True:
            item = self._state.take()
            if item is Nothing.YET:
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


class _State(StreamState):
    """A stream's state, and the event that wakes those who wait for its next item."""

    def __init__(self, *args: Any) -> None:
        self.news = asyncio.Event()
        super().__init__(*args)

    def take(self) -> Item | Nothing:
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
