"""The client's trio core: between one connection, the session, and the faces in whichever thread.

Tickets come in by its inbox, from any thread; everything that is ready in one turn of the event loop goes out
together, in as few messages as the limits allow, and what a turn finishes is handed back together.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections import deque
from collections.abc import Callable

import trio

from shapestream.client.connector import Connector
from shapestream.client.inbox import Attend, Inbox, Withdraw, WithdrawAll, closing
from shapestream.client.link import LinkSettings
from shapestream.client.session import Session
from shapestream.client.tickets import AnyTicket, EndTicket, Owner, RequestTicket, hand_back
from shapestream.errors import ProtocolError, RequestError, TransportError
from shapestream.transport.interface import Connection, Message
from shapestream.wire.codec import Role, decode, encode, pack_messages
from shapestream.wire.messages import Entry, Request

__all__ = ["Core"]


class Core:
    """Runs one session. `deliver` gets the tickets that a turn has finished, in the core's thread."""

    def __init__(
        self,
        connector: Connector,
        *,
        software: str,
        settings: LinkSettings,
        clock: Callable[[], float],
        deliver: Callable[[list[AnyTicket]], None] = hand_back,
        is_abandoned: Callable[[], bool] = lambda: False,
    ) -> None:
        """`is_abandoned` is asked once a turn, so at least once a heartbeat; `run` ends when it says so."""
        self._connector = connector
        self.clock = clock
        self._deliver = deliver
        self._is_abandoned = is_abandoned
        self._rest_s = settings.rest_s
        self._session = Session(
            client=os.urandom(16), software=software, server=connector.name, settings=settings, now=clock()
        )
        self._inbox = Inbox(deliver)
        self.post = self._inbox.post
        self.post_from_thread = self._inbox.post_from_thread
        self.check_process = self._inbox.check_process
        self._streams: dict[int, Owner] = {}
        self._stopping = False
        self._asleep_until = math.inf
        self._connection: Connection | None = None
        self._connection_scope = trio.CancelScope()
        self._unsent: deque[Message] = deque()
        self._blocked = trio.Event()

    def stop(self) -> None:
        """Ask `run` to end, with a goodbye to the server. From any thread, any number of times."""
        self._stopping = True
        self._inbox.wake_from_thread()

    # ------------------------------------------------------------ the tasks

    @trio.lowlevel.enable_ki_protection
    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve the session until it is stopped or cancelled; either way nothing waits in vain afterwards."""
        self._inbox.open()
        try:
            connection = self._connector.open()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._keep_connected, connection)
                task_status.started()
                await self._take_turns()
                nursery.cancel_scope.cancel()
        finally:
            self._finish()

    @trio.lowlevel.enable_ki_protection
    async def _take_turns(self) -> None:
        while not self._stopping and not self._is_abandoned():
            self._asleep_until = self._session.next_wakeup()
            with trio.move_on_after(max(0.0, self._asleep_until - self.clock())):
                await self._inbox.wait()
            self._inbox.turn_begins()
            self._turn()

    @trio.lowlevel.enable_ki_protection
    async def _keep_connected(self, connection: Connection) -> None:
        while True:
            self._connection = connection
            self._session.refused(self._connector.refusal())
            with trio.CancelScope() as self._connection_scope:
                async with trio.open_nursery() as nursery:
                    await nursery.start(connection.run)
                    nursery.start_soon(self._send_blocked, connection)
                    self._session.connected(self.clock())
                    self._turn()
                    await self._receive(connection)
            connection.close()
            self._session.refused(self._connector.refusal())
            self._unsent.clear()
            connection = await self._open_again()

    @trio.lowlevel.enable_ki_protection
    async def _open_again(self) -> Connection:
        """The next connection. The first was made, so what is in its way now, such as a lack of descriptors, passes."""
        while True:
            try:
                return self._connector.open()
            except TransportError as error:
                self._session.refused(str(error))
                await trio.sleep(self._rest_s)

    @trio.lowlevel.enable_ki_protection
    async def _receive(self, connection: Connection) -> None:
        while True:
            messages = await connection.receive()
            now = self.clock()
            for frames in messages:
                try:
                    envelope = decode(frames, role=Role.CLIENT)
                except ProtocolError as error:
                    self._session.unreadable(str(error), now)
                    break
                self._session.receive(envelope.entries, now)
                for bad in envelope.bad:
                    self._session.unreadable_entry(bad.id, bad.message)
            self._turn()

    @trio.lowlevel.enable_ki_protection
    async def _send_blocked(self, connection: Connection) -> None:
        """Sends what the connection had no room for; until then the session keeps everything else."""
        while True:
            await self._blocked.wait()
            self._blocked = trio.Event()
            while self._unsent:
                await connection.send(self._unsent[0])
                self._unsent.popleft()
            self._turn()

    # ------------------------------------------------------------ one turn

    def _turn(self) -> None:
        now = self.clock()
        finished = self._take_inbox()
        turn = self._session.turn(now, may_send=not self._unsent)
        if turn.entries:
            self._send(turn.entries)
        finished += turn.finished
        if finished:
            self._deliver(finished)
        if turn.reconnect:
            self._connection_scope.cancel()
        if self._session.next_wakeup() < self._asleep_until:
            self._inbox.wake()

    def _take_inbox(self) -> list[AnyTicket]:
        """Submit what was posted; returns what needs no server, since it was refused before it came here."""
        answered: list[AnyTicket] = []
        for item in self._inbox.take():
            match item:
                case RequestTicket() if item.outcome is None:
                    if not item.owner.closed:
                        self._session.submit(item)
                case RequestTicket() | EndTicket():
                    answered.append(item)
                case Withdraw():
                    self._session.cancel(item.ticket)
                case Attend():
                    self._streams[id(item.owner)] = item.owner
                case WithdrawAll():
                    self._streams.pop(id(item.owner), None)
                    self._session.cancel_owner(item.owner)
                case _:
                    self._session.submit(item)
        return answered

    def _send(self, entries: list[Entry]) -> None:
        connection = self._connection
        assert connection is not None  # the session sends nothing before connected()
        for frames in self._pack(entries):
            if not self._unsent:
                try:
                    connection.send_nowait(frames)
                except trio.WouldBlock:
                    pass
                else:
                    continue
            self._unsent.append(frames)
            self._blocked.set()

    def _pack(self, entries: list[Entry]) -> list[Message]:
        try:
            return pack_messages(entries)
        except RequestError:
            return pack_messages([entry for entry in entries if self._fits(entry)])

    def _fits(self, entry: Entry) -> bool:
        """Whether an entry can be sent at all. A request that cannot fails alone."""
        try:
            encode([entry])
        except RequestError as error:
            if isinstance(entry, Request):
                self._session.unsendable(entry.sequence, error)
                self._inbox.wake()
            return False
        return True

    # ------------------------------------------------------------ the end

    def _finish(self) -> None:
        finished = self._take_inbox()
        turn = self._session.close()
        if self._connection is not None:
            with contextlib.suppress(trio.WouldBlock, trio.ClosedResourceError):
                for frames in pack_messages(turn.entries):
                    self._connection.send_nowait(frames)
            self._connection.close()
        finished += turn.finished
        finished += [closing(owner) for owner in self._streams.values()]
        self._deliver(finished)
        self._inbox.close()
