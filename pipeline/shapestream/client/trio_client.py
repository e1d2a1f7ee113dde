"""The trio face: `async with shapestream.connect(address) as client`."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Self

import trio

from shapestream.client.async_face import WAY_IN, AsyncClient
from shapestream.client.connecting import AsyncEntered, connecting, require_trio
from shapestream.client.connector import Address, connector_for
from shapestream.client.core import Core
from shapestream.client.inbox import Withdraw
from shapestream.client.link import LinkSettings
from shapestream.client.outcomes import check, software
from shapestream.client.producing import ThreadPermits, pull_async, start_pulling
from shapestream.client.results import Result
from shapestream.client.streaming import Item, ItemT, Nothing, StreamOptions, StreamState
from shapestream.client.terms import deadline_at
from shapestream.client.tickets import AnyTicket, Question, WelcomeTicket

__all__ = ["Client", "Stream", "connect"]


@connecting("shapestream")
async def connect(
    address: Address,
    *,
    connect_timeout: float = 10.0,
    silence: float = 10.0,
    unavailable_after: float = 60.0,
    key: str | Path | None = None,
    server_key: str | Path | None = None,
) -> AsyncIterator[Client]:
    """Connect to a server, under trio: `async with shapestream.connect(address) as client`.

    `address` is `tcp://HOST:PORT` or `ipc://PATH`. `connect_timeout` is how many seconds a server may take to answer. Later
    interruptions are healed without notice: a server that says nothing for `silence` seconds is given up and looked for
    anew, and unfinished requests are sent again under the same numbers. After `unavailable_after` seconds without any
    server they fail with `Unavailable`. A server that asks for keys is reached with `key`, the file of your secret key, and
    `server_key`, its public key or a file of that.

    Leaving the block ends what is unfinished, here and at the server; tasks that still wait for it get `Cancelled`. An
    exception raised in the block comes out as it is, not in a group.

    Raises `Unavailable` where no server answers in time, `TransportError` for what is no address, `ConfigurationError` for
    keys that cannot be used, TypeError and ValueError for times that are none, and RuntimeError outside of trio.
    """
    require_trio()
    core = Core(
        connector_for(address, key=key, server_key=server_key),
        software=software("trio"),
        settings=LinkSettings(silence_s=silence, unavailable_after_s=unavailable_after),
        clock=trio.lowlevel.current_clock().current_time,
    )
    alone: BaseException | None = None
    try:
        # A nursery around a yield is sound in this one form: entered and left by the same `async with`.
        async with trio.open_nursery() as nursery:
            await nursery.start(core.run)
            try:
                call = _Call(core)
                check(await call.ask(WelcomeTicket(call, deadline=deadline_at(core.clock, connect_timeout))))
                yield Client(core, nursery)
            finally:
                nursery.cancel_scope.cancel()
    except BaseExceptionGroup as group:
        if len(group.exceptions) != 1:
            raise
        alone = group.exceptions[0]
    if alone is not None:
        raise alone


class _Call:
    """One task that waits for one answer."""

    __slots__ = ("_core", "_task", "closed")

    def __init__(self, core: Core) -> None:
        self.closed = False
        self._core = core
        self._task: trio.lowlevel.Task | None = None

    def finish(self, tickets: list[AnyTicket]) -> None:
        if self._task is not None:
            trio.lowlevel.reschedule(self._task)

    async def ask(self, ticket: Question) -> Any:
        """The ticket's outcome; when cancelled, the ticket is withdrawn."""
        self._core.post(ticket)
        if ticket.outcome is not None:  # the client is closed
            await trio.lowlevel.checkpoint()
            return ticket.outcome

        def abort(_: Any) -> trio.lowlevel.Abort:
            self.closed = True
            self._core.post(Withdraw(ticket))
            return trio.lowlevel.Abort.SUCCEEDED

        self._task = trio.lowlevel.current_task()
        await trio.lowlevel.wait_task_rescheduled(abort)
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
        self._producer = trio.CancelScope()
        self._producer_ended = trio.Event()

    async def __aenter__(self) -> Self:
        client, core = self._client, self._client._core
        client._check_loop()
        opened = client._models.get(self._model) or await client._open(self._model, None)
        if isinstance(self._source, AsyncIterable):
            permits = _Permits()
            self._state = _State(opened, self._options, permits, core.post, core.clock)
            self._state.begin()
            try:
                client._nursery.start_soon(self._pull, self._source, self._state, permits)
            except (
                RuntimeError
            ):  # the client is closed, and has told the stream so: the first item raises that
                self._producer_ended.set()
        else:
            self._producer_ended.set()  # not waited for: nobody knows how long a next() in a thread takes
            thread_permits = ThreadPermits()
            self._state = _State(opened, self._options, thread_permits, core.post, core.clock)
            self._state.begin()
            start_pulling(self._source, self._state, thread_permits, core.post_from_thread)
        return self

    async def _pull(self, source: AsyncIterable[Any], state: _State[ItemT], permits: _Permits) -> None:
        try:
            with self._producer:
                await pull_async(source, state, permits, self._client._core.post)
        finally:
            self._producer_ended.set()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> ItemT:
        if self._state is None:
            raise RuntimeError(f"enter the stream first: {WAY_IN}")
        # Cheap where an item is there: no turn of the event loop. There are at most max_in_flight in a row.
        await trio.lowlevel.checkpoint_if_cancelled()
        while True:
            item = self._state.take()
            if item is Nothing.YET:
                self._client._check_loop()
                await self._state.waiting.park()
            elif item is Nothing.ANY_MORE:
                raise StopAsyncIteration
            else:
                return item

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._state is not None:
            self._state.close()
            self._state.waiting.unpark_all()
            self._producer.cancel()
            await self._producer_ended.wait()


class Client(AsyncClient[Stream[Result], Stream[Item]]):
    """A connected client, for any number of tasks of one trio run. Made by `connect`."""

    def __init__(self, core: Core, nursery: trio.Nursery) -> None:
        super().__init__(core, _Call, trio.lowlevel.current_trio_token)
        self._nursery = nursery

    def _stream(
        self, model: str, source: Iterable[Any] | AsyncIterable[Any], options: StreamOptions
    ) -> Stream[Any]:
        return Stream(self, model, source, options)


class _State(StreamState[ItemT]):
    """A stream's state, and the tasks that wait for its next item."""

    def __init__(self, *args: Any) -> None:
        self.waiting = trio.lowlevel.ParkingLot()
        super().__init__(*args)

    def finish(self, tickets: list[AnyTicket]) -> None:
        super().finish(tickets)
        self.waiting.unpark_all()


class _Permits:
    """Permits that a task waits for."""

    def __init__(self) -> None:
        self.available = 0
        self._lot = trio.lowlevel.ParkingLot()

    def grant(self, number: int) -> None:
        self.available += number
        self._lot.unpark_all()

    def stop(self) -> None:
        """The producer's task is cancelled anyway."""

    async def wait(self) -> None:
        while self.available < 1:
            await self._lot.park()
