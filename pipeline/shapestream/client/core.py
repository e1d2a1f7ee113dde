"""The client's core: it moves tickets and messages between the faces, the session and one connection.

How it works. A face posts a ticket to the `SubmissionQueue`, from any thread. A *turn* of the core takes all posted tickets
to the session, asks it what is due, sends the entries in as few messages as the limits allow, and hands finished tickets
back. A turn runs when a ticket was posted, when messages have come that need one, and at the session's next wake-up.

One of two drivers runs the turns:

    driver   entered by         used by             waits for messages and time in       hands tickets back in
    trio     `run`              the trio face       tasks of `run`'s nursery             the caller's event loop
    thread   `run_in_thread`    asyncio, blocking   `Connection.wait`, no event loop     that thread (`CoreThread`)

A heading in `Core` says which driver runs the methods below it. What both run never waits.

The core promises that each posted ticket ends, also where `run` is cancelled, and that messages leave in the session's
order. It does not look into tickets: what is sent when, and how a ticket ends, is the session's decision.
"""

from __future__ import annotations

import contextlib
import math
import os
import platform
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Protocol, TypeAlias, cast

import trio

from shapestream.client.connector import Connector
from shapestream.client.opened_models import Model
from shapestream.client.session import LinkSettings, Session
from shapestream.client.tickets import AnyTicket, EndTicket, Owner, Question, RequestTicket, hand_back
from shapestream.errors import Cancelled, InternalError, ProtocolError, RequestError, TransportError
from shapestream.transport.interface import Connection, Message, Wake
from shapestream.wire.codec import decode, encode, pack_messages
from shapestream.wire.messages import Entry, RequestEntry, Role

CLOSED = "the client is closed"
WITHDRAWN = "the request was withdrawn"


@dataclass(frozen=True, slots=True)
class Attend:
    """A stream begins: when the client closes, it is told."""

    owner: Owner


@dataclass(frozen=True, slots=True)
class Withdraw:
    """The caller of this ticket has left; or, where the owner is not closed, it waits to be told that it may leave."""

    ticket: Question


@dataclass(frozen=True, slots=True)
class WithdrawAll:
    """A stream ends, early or not, and its tickets with it. It is closed already."""

    owner: Owner


Posted: TypeAlias = AnyTicket | Attend | Withdraw | WithdrawAll


class SubmissionQueue:
    """The queue from the faces to the core, from any thread: each item reaches a turn, or is refused after the end.

    There is no lock. Appending to a deque and taking from it are atomic, and an item that is posted late is refused by the
    thread that notices: the poster, if it finds the queue closed, or the core, which looks once more after closing it.
    The queue needs no bound: a call posts one ticket and waits, and a stream posts no more tickets than it has permits.
    """

    def __init__(self, deliver: Callable[[list[AnyTicket]], None], take_turn: Callable[[], None]) -> None:
        """`deliver` gets the tickets that are refused; `take_turn` is called in the core's event loop after posts."""
        self._deliver = deliver
        self._take_turn = take_turn
        self.items: deque[Posted] = deque()
        self.awake = False
        """Whether a turn is due that has not begun: items posted until then need no further wake-up."""
        self._closed = False
        self._wake: Callable[[], object] | None = None
        self._process = os.getpid()

    # ------------------------------------------------------------ faces

    def check_process(self) -> None:
        """Raise RuntimeError in a forked child: the core's thread, which answers, exists in the parent only."""
        if os.getpid() != self._process:
            raise RuntimeError(
                "this client was connected before the process forked; in the child, connect anew"
            )

    def post(self, item: Posted) -> None:
        """Hand an item to the core. All items that are posted before its next turn share that turn."""
        self.items.append(item)
        # Two threads may see False; then the core is woken twice. If a Ctrl-C strikes between the next two
        # lines, the core sleeps on: withdrawals therefore always wake it, and so does every heartbeat.
        if not self.awake or type(item) is Withdraw or type(item) is WithdrawAll:
            self.awake = True
            self.wake()
        if self._closed:
            self._refuse_leftovers()

    def wake(self) -> None:
        """Make the core take a turn soon; before it runs, it will take one anyway."""
        # A forked child would wake its parent, or wait for a lock that a thread of the parent held.
        if self._wake is not None and os.getpid() == self._process:
            try:  # noqa: SIM105 - once per request; `suppress` takes longer than the call
                self._wake()
            except trio.RunFinishedError:
                pass

    # ------------------------------------------------------------ the core

    def open(self, wake: Callable[[], object] | None = None) -> None:
        """Wake the core by `wake` from now on; None: it runs in this trio run."""
        self._wake = wake or partial(trio.lowlevel.current_trio_token().run_sync_soon, self._woken)

    def _woken(self) -> None:
        self.has_items()
        if not self._closed:
            self._take_turn()

    def has_items(self) -> bool:
        """Tell whether there is anything to take. If not, the next post wakes the core again."""
        if not self.items:
            self.awake = False
        return bool(self.items)  # again: it may have been posted in between, without a wake-up

    def close(self) -> None:
        """Refuse the items that are here, and those that will come."""
        # In this order: an item posted from now on either finds the queue closed, or is found in it.
        self._closed = True
        self._refuse_leftovers()

    def _refuse_leftovers(self) -> None:
        """Refuse all items, in the thread that notices; of two such threads, each refuses the items that it gets."""
        refused: list[AnyTicket] = []
        with contextlib.suppress(IndexError):
            while True:
                item = self.items.popleft()
                match item:
                    case Withdraw() | WithdrawAll():
                        continue
                    case Attend():
                        refused.append(closing(item.owner))
                        continue
                    case _ if item.outcome is None:
                        item.outcome = Cancelled(CLOSED)
                refused.append(item)
        if refused:
            self._deliver(refused)


class KnownModels(Protocol):
    """The opened models by name, for any thread."""

    def get(self, name: str, /) -> Model | None:
        """Return a model, or None."""


class AnyCore(Protocol):
    """A core as the faces see it: that of one session, or the router of several (`spreading.SpreadCore`)."""

    client: str
    clock: Callable[[], float]
    submissions: SubmissionQueue

    @property
    def models(self) -> KnownModels:
        """The opened models."""

    @property
    def window_requests(self) -> int:
        """Requests that the server takes without an answer."""

    def ask(self, question: Question) -> None:
        """Post a question from the core's own event loop."""

    def stop(self) -> None:
        """Make the driver end."""

    def run_in_thread(self) -> None:
        """Serve in this thread until it is stopped."""


def closing(owner: Owner) -> EndTicket:
    """Return the ticket that ends a stream whose client is closed."""
    return EndTicket(owner, place=-1, outcome=Cancelled(CLOSED))


class Core:
    """The turns of one session, and the two drivers that run them: see the top of this file."""

    def __init__(
        self,
        connector: Connector,
        *,
        software: str,
        settings: LinkSettings,
        clock: Callable[[], float],
        deliver: Callable[[list[AnyTicket]], None] = hand_back,
        is_abandoned: Callable[[], bool] | None = None,
        turned: Callable[[], None] | None = None,
    ) -> None:
        """`deliver` gets the tickets that a turn has finished, in the driver's thread; `turned` is called after each turn.

        `is_abandoned` is asked once a turn, so at least once a heartbeat; the driver ends when it says so.
        """
        self._connector = connector
        self.clock = clock
        self._deliver = deliver
        self._is_abandoned = is_abandoned
        self._turned = turned
        self._asks_for_breaks = bool(connector.others) or settings.gives_up
        self._rest_s = settings.rest_s
        client = os.urandom(16)
        self.client = client.hex()
        """The beginning of its requests' ids."""
        self._session = Session(
            client=client,
            software=software,
            server=connector.name,
            settings=replace(settings, others=connector.others),
            now=clock(),
            new_model=Model,
        )
        self.submissions = SubmissionQueue(deliver, self._turn_or_end)
        self.models: Mapping[str, Model] = cast("dict[str, Model]", self._session.models)
        """Opened models by name; faces read it, in any thread."""
        self._one_by_one = False
        """True while the last request was alone in its turn, and the core has not ended."""
        self._streams: dict[int, Owner] = {}
        self._stopping = False
        self._lost = False
        """True where the connection is to be given up; the thread driver reads it."""
        self._asleep_until = math.inf
        """The time of the next turn that no message and no submission asks for."""
        self._connection: Connection | None = None
        self._unsent: deque[Message] = deque()
        """Messages that the connection had no room for; the session keeps all later ones."""
        # The trio driver waits for these; the thread driver does not.
        self._timer = trio.CancelScope()
        self._connection_scope = trio.CancelScope()
        self._blocked = trio.Event()

    # ------------------------------------------------------------ any thread

    @property
    def window_requests(self) -> int:
        """Requests that the server, or the last one, takes without an answer. It may be read in any thread."""
        return self._session.in_flight.window_requests

    @property
    def window_bytes(self) -> int:
        """The same in bytes."""
        return self._session.in_flight.window_bytes

    @property
    def takes_requests(self) -> bool:
        """True where a server is there that takes new requests. It may be read in any thread."""
        return self._session.takes_requests

    @property
    def epoch(self) -> bytes | None:
        """The bytes of the last server's life; None before the first welcome. It may be read in any thread."""
        return self._session.epoch

    def stop(self) -> None:
        """Make the driver end, with a goodbye to the server. From any thread, any number of times."""
        self._stopping = True
        self.submissions.wake()

    # ------------------------------------------------------------ the trio driver

    @trio.lowlevel.enable_ki_protection
    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve the session until it is stopped or cancelled; either way every ticket ends."""
        self.submissions.open()
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
        """Take the turns that are due by time."""
        while not self._must_end():
            # One scope for many turns: traffic moves the next wake-up away, and a timer that fires early costs a turn.
            with trio.CancelScope() as self._timer:
                self._asleep_until = math.inf
                self._turn()
                await trio.sleep_forever()

    def _turn_or_end(self) -> None:
        if self._must_end():
            self._timer.cancel()
        else:
            self._turn()

    @trio.lowlevel.enable_ki_protection
    async def _keep_connected(self, connection: Connection) -> None:
        while True:
            self._connection = connection
            with trio.CancelScope() as self._connection_scope:
                async with trio.open_nursery() as nursery:
                    connection.on_messages = partial(self._watched, connection)
                    await nursery.start(connection.run)
                    nursery.start_soon(self._send_blocked, connection)
                    self._connected(connection)
                    while True:
                        self._received(await connection.receive())
            self._disconnected(connection)
            connection = await self._open_again()

    @trio.lowlevel.enable_ki_protection
    def _watched(self, connection: Connection) -> None:
        """Take the messages that wait, in the task that watches the connection."""
        self._received(connection.receive_nowait())

    @trio.lowlevel.enable_ki_protection
    async def _open_again(self) -> Connection:
        """Return the next connection. The first was made, so an obstacle now, such as a lack of descriptors, will pass."""
        while True:
            try:
                return self._connector.open()
            except TransportError as error:
                self._session.refused(str(error))
                await trio.sleep(self._rest_s)

    @trio.lowlevel.enable_ki_protection
    async def _send_blocked(self, connection: Connection) -> None:
        """Send the messages that the connection had no room for; until then the session keeps all other entries."""
        while True:
            await self._blocked.wait()
            self._blocked = trio.Event()
            while self._unsent:
                await connection.send(self._unsent[0])
                self._unsent.popleft()
            self._turn()

    def ask(self, question: Question) -> None:
        """Post a question from the core's own event loop. A request that is likely to be alone in its turn is sent at once.

        That is so where no other is at the server, and the last one was alone.
        """
        if (
            not self._one_by_one
            or type(question) is not RequestTicket
            or self._session.in_flight.outstanding_requests
            or self.submissions.items
        ):
            self.submissions.post(question)
        else:
            self._session.submit(question)
            self._turn()

    # ------------------------------------------------------------ the thread driver

    def run_in_thread(self) -> None:
        """Serve the session in this thread, without an event loop: a turn of one costs more than the work in it.

        The clock is then `time.monotonic`.
        """
        try:
            wake = Wake()
            # Not closed at the end of this thread: another may be about to set it, when its number is another file's.
            weakref.finalize(self, wake.close).atexit = False
            self.submissions.open(wake.set)
            connection, open_at = self._connector.open(), math.inf
            self._connected(connection)
            while not self._must_end():
                until = min(self._asleep_until, open_at)
                if connection.wait(wake, until - self.clock(), for_room=bool(self._unsent)):
                    self._received(connection.receive_nowait())
                if self._unsent:
                    self._send_unsent()
                now = self.clock()
                if now >= self._asleep_until:
                    self._asleep_until = math.inf
                    self._turn()
                elif self.submissions.has_items():
                    self._turn()
                if self._lost:
                    self._lost, open_at = False, now
                    self._disconnected(connection)
                if now >= open_at:
                    try:
                        connection, open_at = self._connector.open(), math.inf
                    except TransportError as error:
                        self._session.refused(str(error))
                        open_at = now + self._rest_s
                    else:
                        self._connected(connection)
        finally:
            self._finish()

    def _send_unsent(self) -> None:
        """Offer the connection again the messages that it had no room for."""
        unsent, self._unsent = self._unsent, deque()
        self._offer(unsent)
        if not self._unsent:
            self._turn()

    # ------------------------------------------------------------ both drivers: the connection

    def _connected(self, connection: Connection) -> None:
        """Greet the server on a new connection."""
        self._connection = connection
        self._session.refused(self._connector.refusal())
        self._session.connected(self.clock(), self._connector.place)
        self._turn()

    def _disconnected(self, connection: Connection) -> None:
        """Give up a connection, and the messages that it did not take."""
        connection.close()
        self._session.refused(self._connector.refusal())
        self._unsent.clear()

    @trio.lowlevel.enable_ki_protection
    def _received(self, messages: list[Message]) -> None:
        """Take messages. Where they only end tickets, and nothing else is due, these are handed back without a turn."""
        now = self.clock()
        for frames in messages:
            try:
                envelope = decode(frames, role=Role.CLIENT)
            except ProtocolError as error:
                self._session.unreadable(str(error), now)
                break
            self._session.receive(envelope.entries, now)
            for bad in envelope.bad:
                if bad.id is not None:
                    reason = f"the server's answer could not be read: {bad.message}"
                    self._session.fail(bad.id, InternalError(reason))
        if self.submissions.items or self._session.turn_is_due:
            self._turn()
        elif finished := self._session.in_flight.take_finished():
            self._deliver(finished)

    # ------------------------------------------------------------ both drivers: one turn

    @trio.lowlevel.enable_ki_protection
    def _turn(self) -> None:
        now = self.clock()
        finished = self._take_submissions() if self.submissions.items else []
        if self._asks_for_breaks and self._connector.broke():
            self._session.broke(now)
        turn = self._session.turn(now, may_send=not self._unsent)
        if turn.entries:
            self._offer(self._pack(turn.entries))
        finished += turn.finished
        if finished:
            self._deliver(finished)
        if turn.reconnect:
            self._lost = True
            self._connection_scope.cancel()
        wakeup_at = self._session.next_wakeup()
        if wakeup_at < self._asleep_until:
            self._asleep_until = wakeup_at
            self._timer.deadline = max(wakeup_at, now)
        if self._turned is not None:
            self._turned()

    def _take_submissions(self) -> list[AnyTicket]:
        """Submit the posted tickets, and return those that were refused before: they need no server."""
        answered: list[AnyTicket] = []
        requests = 0
        self.submissions.awake = False
        posted = self.submissions.items  # also those that are posted meanwhile
        while posted:
            match item := posted.popleft():
                case RequestTicket() if item.outcome is None:
                    requests += 1
                    if not item.owner.closed:
                        self._session.submit(item)
                case RequestTicket() | EndTicket():
                    answered.append(item)
                case Withdraw():
                    self._session.cancel(item.ticket)
                    if not item.ticket.owner.closed and item.ticket.outcome is None:
                        item.ticket.outcome = Cancelled(WITHDRAWN)
                        answered.append(item.ticket)
                case Attend():
                    self._streams[id(item.owner)] = item.owner
                case WithdrawAll():
                    self._streams.pop(id(item.owner), None)
                    self._session.cancel_owner(item.owner)
                case _:
                    self._session.submit(item)
        if requests:
            self._one_by_one = requests == 1
        return answered

    def _offer(self, messages: Iterable[Message]) -> None:
        """Send messages in order, and keep those that the connection has no room for."""
        connection = self._connection
        assert connection is not None  # the session sends nothing before connected()
        for frames in messages:
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
        """Tell whether an entry fits any message. A request that does not fails alone."""
        try:
            encode([entry])
        except RequestError as error:
            if isinstance(entry, RequestEntry):
                self._session.fail(entry.sequence, error)
                self.submissions.wake()
            return False
        return True

    # ------------------------------------------------------------ both drivers: the end

    def _must_end(self) -> bool:
        return self._stopping or (self._is_abandoned is not None and self._is_abandoned())

    def _finish(self) -> None:
        finished = self._take_submissions()
        self._one_by_one = False
        turn = self._session.close()
        if self._connection is not None:
            with contextlib.suppress(trio.WouldBlock, trio.ClosedResourceError):
                for frames in pack_messages(turn.entries):
                    self._connection.send_nowait(frames)
            self._connection.close()
        finished += turn.finished
        finished += [closing(owner) for owner in self._streams.values()]
        self._deliver(finished)
        self.submissions.close()


class CoreThread(threading.Thread):
    """The thread that runs a core. It is a daemon: an unclosed client keeps no process alive."""

    def __init__(self, core: AnyCore, *, ended: Callable[[], None] = lambda: None) -> None:
        """Call `ended` at its end, in this thread."""
        super().__init__(name="shapestream-client", daemon=True)
        self._core = core
        self._ended = ended
        self._error: Exception | None = None

    def run(self) -> None:
        """Run the core until it is stopped. Its first turn takes the tickets that were posted before."""
        try:
            self._core.run_in_thread()
        except Exception as error:  # noqa: BLE001 - the thread's edge; `check` raises it for the caller
            self._error = error
        finally:
            self._ended()

    def check(self) -> None:
        """Raise the error that ended the core, if it was not `stop`."""
        if self._error is not None:
            raise self._error


def software(face: str) -> str:
    """Return the name and version of a client, for the server's logs."""
    try:
        own = version("shapestream")
    except PackageNotFoundError:  # run from a source tree that is not installed
        own = "unknown"
    return f"shapestream/{own} {face} python/{platform.python_version()}"
