"""The trio face: `async with shapestream.connect(address) as client`."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import trio

from shapestream.client.async_face import Client, connecting
from shapestream.client.calls import connects, core_for
from shapestream.client.connector import Addresses
from shapestream.client.core import AnyCore, Withdraw
from shapestream.client.tickets import AnyTicket, Question


@connecting("trio")
@connects("shapestream", "trio")
async def connect(
    address: Addresses,
    *,
    connect_timeout: float = 10.0,
    silence: float = 10.0,
    unavailable_after: float = 60.0,
    key: str | Path | None = None,
    server_key: str | Path | None = None,
    spread: bool = False,
) -> AsyncIterator[Client]:
    """Connect to a server from trio code.

    Leaving the block ends unfinished requests, here and at the server; tasks that still wait for them get `Cancelled`. An
    exception raised in the block comes out as it is, not in a group.
    """
    core = core_for(
        "trio",
        address,
        silence=silence,
        unavailable_after=unavailable_after,
        key=key,
        server_key=server_key,
        spread=spread,
        clock=time.monotonic if spread else trio.lowlevel.current_clock().current_time,
    )
    alone: BaseException | None = None
    try:
        # A nursery around a yield is sound in this one form: entered and left by the same `async with`.
        async with trio.open_nursery() as nursery:
            await nursery.start(core.run)
            try:
                client = Client(core, _TrioLoop(nursery))
                await client._ask(client._calls.welcome(connect_timeout))
                yield client
            finally:
                nursery.cancel_scope.cancel()
    except BaseExceptionGroup as group:
        if len(group.exceptions) != 1:
            raise
        alone = group.exceptions[0]
    if alone is not None:
        raise alone


class _TrioCall:
    """One task that waits for one answer."""

    __slots__ = ("_core", "_task", "closed")

    def __init__(self, core: AnyCore) -> None:
        self.closed = False
        self._core = core
        self._task: trio.lowlevel.Task | None = None

    def finish(self, tickets: list[AnyTicket]) -> None:
        if self._task is not None:
            trio.lowlevel.reschedule(self._task)

    async def ask(self, ticket: Question) -> None:
        """Wait until the ticket is finished; when cancelled, the ticket is withdrawn."""
        try:
            self._core.ask(ticket)
            if ticket.outcome is not None:  # the client is closed
                await trio.lowlevel.checkpoint()
            else:
                self._task = trio.lowlevel.current_task()
                await trio.lowlevel.wait_task_rescheduled(self._abort)
        finally:
            if ticket.outcome is None:
                self.closed = True
                self._core.submissions.post(Withdraw(ticket))

    def _abort(self, _: Any) -> trio.lowlevel.Abort:
        self._task = None
        return trio.lowlevel.Abort.SUCCEEDED


class _TrioWakeup:
    """The tasks that wait for news."""

    def __init__(self) -> None:
        lot = trio.lowlevel.ParkingLot()
        self.wait = lot.park
        self.wake = lot.unpark_all


class _TrioLoop:
    """The waits of tasks in a trio run; producers run in the nursery of `connect`."""

    current = staticmethod(trio.lowlevel.current_trio_token)
    call = _TrioCall
    wakeup = _TrioWakeup
    # Cheap where an item is there: no turn of the event loop. There are at most max_in_flight in a row.
    checkpoint = staticmethod(trio.lowlevel.checkpoint_if_cancelled)

    def __init__(self, nursery: trio.Nursery) -> None:
        self._nursery = nursery

    def start(self, pull: Coroutine[Any, Any, None]) -> Callable[[], Coroutine[Any, Any, None]]:
        """Run a producer in a task; the returned function cancels it, and waits for its end."""
        scope, ended = trio.CancelScope(), trio.Event()

        async def produce() -> None:
            try:
                with scope:
                    await pull
            finally:
                ended.set()

        async def end() -> None:
            scope.cancel()
            await ended.wait()

        try:
            self._nursery.start_soon(produce)
        except RuntimeError:  # the client is closed, and has told the stream so: the first item raises that
            pull.close()
            ended.set()
        return end
