"""The trio face: `async with shapestream.connect(address) as client`."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Coroutine, Iterable
from pathlib import Path
from typing import Any

import trio

from shapestream.client.async_face import AsyncClient, AsyncStream, connecting, require_trio
from shapestream.client.connector import Address, connector_for
from shapestream.client.core import Core, Withdraw, software
from shapestream.client.link import LinkSettings
from shapestream.client.results import Result
from shapestream.client.streaming import Item, ItemT, StreamOptions
from shapestream.client.tickets import AnyTicket, Question, WelcomeTicket, deadline_at, outcome_of


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

    Leaving the block ends unfinished requests, here and at the server; tasks that still wait for them get `Cancelled`. An
    exception raised in the block comes out as it is, not in a group.

    Raises `Unavailable` where no server answers in time, `TransportError` for a bad address, `ConfigurationError` for
    keys that cannot be used, TypeError and ValueError for bad times, and RuntimeError outside of trio.
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
                welcome = WelcomeTicket(call, deadline=deadline_at(core.clock, connect_timeout))
                await call.ask(welcome)
                outcome_of(welcome, bool)
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

    async def ask(self, ticket: Question) -> None:
        """Wait until the ticket is finished; when cancelled, the ticket is withdrawn."""
        self._core.ask(ticket)
        if ticket.outcome is not None:  # the client is closed
            await trio.lowlevel.checkpoint()
            return

        def abort(_: Any) -> trio.lowlevel.Abort:
            self.closed = True
            self._core.post(Withdraw(ticket))
            return trio.lowlevel.Abort.SUCCEEDED

        self._task = trio.lowlevel.current_task()
        await trio.lowlevel.wait_task_rescheduled(abort)


class _Wakeup:
    """The tasks that wait for news."""

    def __init__(self) -> None:
        lot = trio.lowlevel.ParkingLot()
        self.wait = lot.park
        self.wake = lot.unpark_all


class Stream(AsyncStream[ItemT]):
    """A stream of results: `async with` it, then `async for` over it, in one task or several."""

    # Cheap where an item is there: no turn of the event loop. There are at most max_in_flight in a row.
    _checkpoint = staticmethod(trio.lowlevel.checkpoint_if_cancelled)

    def __init__(
        self, client: Client, model: str, source: Iterable[Any] | AsyncIterable[Any], options: StreamOptions
    ) -> None:
        super().__init__(client, model, source, options)
        self._nursery = client._nursery
        self._producer = trio.CancelScope()
        self._producer_ended = trio.Event()
        self._producer_ended.set()  # a thread is not waited for: how long its next() takes is not known

    def _start_producer(self, pull: Coroutine[Any, Any, None]) -> None:
        try:
            self._nursery.start_soon(self._produce, pull)
        except RuntimeError:  # the client is closed, and has told the stream so: the first item raises that
            pull.close()
        else:
            self._producer_ended = trio.Event()

    async def _produce(self, pull: Coroutine[Any, Any, None]) -> None:
        try:
            with self._producer:
                await pull
        finally:
            self._producer_ended.set()

    async def _end_producer(self) -> None:
        self._producer.cancel()
        await self._producer_ended.wait()


class Client(AsyncClient[Stream[Result], Stream[Item]]):
    """A connected client, for any number of tasks of one trio run. Made by `connect`."""

    def __init__(self, core: Core, nursery: trio.Nursery) -> None:
        super().__init__(
            core,
            call=_Call,
            wakeup=_Wakeup,
            current_loop=trio.lowlevel.current_trio_token,
        )
        self._nursery = nursery

    def _stream(
        self, model: str, source: Iterable[Any] | AsyncIterable[Any], options: StreamOptions
    ) -> Stream[Any]:
        return Stream(self, model, source, options)
