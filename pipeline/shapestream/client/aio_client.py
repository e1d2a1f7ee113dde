"""The asyncio face: `async with shapestream.aio.connect(address) as client`.

The core runs in a thread of its own. The tickets that it finishes in one turn come over in one
`call_soon_threadsafe`; questions go there without any waiting, so the event loop is never blocked.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

from shapestream.client.async_face import Client, connecting
from shapestream.client.calls import connects, core_for
from shapestream.client.connector import Addresses
from shapestream.client.core import AnyCore, CoreThread, Withdraw
from shapestream.client.tickets import AnyTicket, Question, hand_back


@connecting("asyncio")
@connects("shapestream.aio", "asyncio")
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
    """Connect to a server from asyncio code. A thread keeps the connection, so the event loop is never blocked.

    Leaving the block ends unfinished requests, here and at the server; tasks that still wait for them get `Cancelled`.
    """
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()

    def in_loop(act: Any, *arguments: Any) -> None:
        try:
            loop.call_soon_threadsafe(act, *arguments)
        except RuntimeError:  # the loop was closed under us, and its tasks with it
            core.stop()

    core = core_for(
        "asyncio",
        address,
        silence=silence,
        unavailable_after=unavailable_after,
        key=key,
        server_key=server_key,
        spread=spread,
        clock=time.monotonic,
        deliver=lambda tickets: in_loop(hand_back, tickets),
        is_abandoned=loop.is_closed,
    )
    thread = CoreThread(core, ended=lambda: in_loop(ended.set))
    thread.start()
    try:
        client = Client(core, _AsyncioLoop())
        await client._ask(client._calls.welcome(connect_timeout))
        yield client
    finally:
        core.stop()
        await ended.wait()
        thread.check()


class _AsyncioCall:
    """One task that waits for one answer."""

    __slots__ = ("_core", "_future", "closed")

    def __init__(self, core: AnyCore) -> None:
        self.closed = False
        self._core = core
        self._future = asyncio.get_running_loop().create_future()

    def finish(self, tickets: list[AnyTicket]) -> None:
        if not self._future.done():
            self._future.set_result(None)

    async def ask(self, ticket: Question) -> None:
        """Wait until the ticket is finished; when cancelled, the ticket is withdrawn."""
        try:
            self._core.submissions.post(ticket)
            await self._future
        finally:
            if ticket.outcome is None:
                self.closed = True
                self._core.submissions.post(Withdraw(ticket))


class _AsyncioWakeup:
    """The tasks that wait for news."""

    def __init__(self) -> None:
        self._news = asyncio.Event()
        self.wake = self._news.set

    async def wait(self) -> None:
        self._news.clear()
        await self._news.wait()


class _AsyncioLoop:
    """The waits and tasks of the running event loop."""

    current = staticmethod(asyncio.get_running_loop)
    call = _AsyncioCall
    wakeup = _AsyncioWakeup

    async def checkpoint(self) -> None:
        """Do nothing: asyncio raises where a task waits."""

    def start(self, pull: Coroutine[Any, Any, None]) -> Callable[[], Coroutine[Any, Any, None]]:
        """Run a producer in a task; the returned function cancels it, and waits for its end."""
        task = asyncio.create_task(pull)

        async def end() -> None:
            task.cancel()
            # Returns when the task has ended, and does not raise its error: the stream has told its own.
            await asyncio.wait([task])

        return end
