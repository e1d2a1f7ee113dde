"""The traffic of a port of the server: messages that arrived, served in fair turns, and entries that leave for its peers.

`Outgoing` is the last stop of everything that leaves through a port. The entries for one peer that became ready within one
turn of the event loop leave together, in as few messages as the protocol allows.

`Inbox` has the messages that arrived, by connection, and serves them by deficit round robin. A port reads all its
connections as fast as it can, and serves their messages in turns of bounded size. Each connection has a mailbox with a
balance of points. A mailbox that is served gets `QUANTUM` points more, and its entries are served while the balance is
positive. Each message and entry has a price in points, about in proportion to its time. The last entry may make the balance
negative: the connection pays that debt in its next turn.

    a message arrives, its mailbox was empty  ─▶ fresh: they are served in order, until `TURN` points of a turn are spent
    a turn ends within the quantum of a fresh one  ─▶ it is the first fresh one of the next turn, with what is left of it
    a mailbox is not empty after its quantum  ─▶ backlogged: one of them is served per turn, in rotation

So a connection with few messages never waits behind a flood of another one, and a turn takes at most about
TURN + QUANTUM points, plus two entries. A connection that sends far more than its credit allows is ended by the port.
Messages of one connection keep their order. Nothing is dropped but the messages of connections that were ended.

Sources: M. Shreedhar, G. Varghese, "Efficient fair queuing using deficit round-robin", SIGCOMM 1995; the precedence of
sparse flows is that of RFC 8290, section 4.2.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass
from itertools import chain
from typing import Protocol, TypeAlias

import trio

from shapestream.errors import OutboxFull, PeerGone, ProtocolError, RequestError
from shapestream.telemetry.counters import ServerStatistics
from shapestream.telemetry.logging import RateLimit, get_logger
from shapestream.transport.interface import Addressed, Message, PeerSocket
from shapestream.wire.codec import BadEntry, Codec, entries_announced
from shapestream.wire.messages import Entry, Failure, Heartbeat, ResultEntry, Unknown
from shapestream_engine.layout import Buffer

log = get_logger()

GONE = "gone"
"""The reason for a lost link whose connection has broken."""
REJOIN = "is to greet anew"
"""The reason for a link whose connection is sound, and whose session ends, since the scheduler has forgotten it."""
REJOIN_S = 1.0
"""Shortest time between two such ends of a worker's sessions, in seconds: a defect may come back whenever slots join."""


class PeerLink:
    """One peer. Sessions, workers and their slots are links; `outgoing` lives for one turn, so that it needs no bound."""

    __slots__ = ("heard_at", "outgoing", "peer", "spoken")

    def __init__(self, peer: bytes | None, now: float) -> None:
        self.peer = peer
        """The transport's routing id; None while there is no connection, and at the end: entries are dropped then."""
        self.heard_at = now
        self.outgoing: list[Entry] = []
        self.spoken = False
        """Whether anything was sent since the last round of heartbeats."""


class Outgoing:
    """The entries of a port by link, sent at `flush` in few messages."""

    __slots__ = ("_limit", "_port", "codec", "lost", "ready", "socket", "statistics")

    def __init__(
        self,
        socket: PeerSocket,
        port: str,
        statistics: ServerStatistics,
        codec: Codec,
    ) -> None:
        """`port` is its name in logs and counters."""
        self.socket = socket
        self.statistics = statistics
        self.codec = codec
        self._port = port
        self.ready: list[PeerLink] = []
        """Links with entries that are not sent yet."""
        self._limit = RateLimit()
        self.lost: list[tuple[PeerLink, str]] = []
        """Links that could not be sent to, or are to end, with the reason, until the next `flush` returns them."""

    def say(self, link: PeerLink, entry: Entry) -> None:
        """Queue an entry until the end of this turn."""
        if link.peer is None:
            return
        if not link.outgoing:
            self.ready.append(link)
        link.outgoing.append(entry)

    def say_once(self, peer: bytes, entry: Entry) -> None:
        """Send one entry to a peer that has no link, at once, if it can be reached."""
        try:
            self.socket.send_nowait(peer, self.codec.pack([entry])[0])
        except (PeerGone, OutboxFull):
            self.socket.forget(peer)

    def flush(self) -> list[tuple[PeerLink, str]]:
        """Send what was queued. Returns the links that are lost, with the reason: gone, or their peers do not read."""
        ready, self.ready = self.ready, []
        pack = self.codec.pack
        for link in ready:
            entries, link.outgoing = link.outgoing, []
            if link.peer is None:
                continue
            link.spoken = True
            try:
                try:
                    messages = pack(entries)
                except RequestError as error:
                    messages = self._pack_singly(link, entries, error)
                for frames in messages:
                    self.socket.send_nowait(link.peer, frames)
            except PeerGone:
                self.lost.append((link, GONE))
            except OutboxFull:
                self.lost.append((link, "does not read"))
        lost, self.lost = self.lost, []
        return lost

    def _pack_singly(self, link: PeerLink, entries: list[Entry], why: RequestError) -> list[list[Buffer]]:
        """Pack each of these entries by itself, since one of them fits no message."""
        skipped = self._limit.admit("unsendable", trio.current_time())
        if skipped is not None:
            log.error("an entry cannot be sent", port=self._port, why=str(why), like_it_before=skipped)
        messages: list[list[Buffer]] = []
        for entry in entries:
            try:
                messages += self.codec.pack([entry])
            except RequestError as error:
                if isinstance(entry, ResultEntry):
                    messages += self.codec.pack([_instead_of(entry, str(error))])
                else:  # the peer would wait for it for ever
                    self.lost.append((link, "cannot be told what it must know"))
        return messages

    def keep_alive(self, link: PeerLink) -> None:
        """Queue a heartbeat if nothing was sent since the last call."""
        if not link.spoken:
            self.say(link, Heartbeat())
        link.spoken = False

    def tell_stranger(self, peer: bytes, now: float) -> None:
        """Answer a peer that has not greeted, or greeted another server; count it, and log it at a limited rate."""
        self.statistics.strangers[self._port] += 1
        skipped = self._limit.admit("stranger", now)
        if skipped is not None:
            log.warning("stranger", port=self._port, peer=peer.hex(), like_it_before=skipped)
        self.say_once(peer, Unknown())

    def count_handshakes(self, now: float) -> None:
        """Count connections that failed in their handshake, and log them at a limited rate."""
        failed = self.socket.failed_handshakes()
        if not failed:
            return
        self.statistics.failed_handshakes[self._port] += failed
        skipped = self._limit.admit("handshake", now)
        if skipped is not None:
            log.warning("handshakes failed", port=self._port, count=failed, like_it_before=skipped)

    def refuse(self, peer: bytes, why: str, now: float) -> None:
        """Count a message that could not be accepted, and log it at a limited rate."""
        self.statistics.bad_messages[self._port] += 1
        skipped = self._limit.admit(self._port, now)
        if skipped is not None:
            log.warning("message refused", port=self._port, peer=peer.hex(), why=why, like_it_before=skipped)


def _instead_of(result: ResultEntry, why: str) -> Failure:
    """Return the failure that replaces a result. A model may give outputs that no message can hold."""
    text = f"the result cannot be sent: {why}"
    return Failure(
        sequence=result.sequence, code="model_error", message=text, retryable=False, retry_after_ms=None
    )


Item: TypeAlias = Entry | BadEntry | ProtocolError
"""One entry of a connection. A `ProtocolError` stands for an unreadable message, the last one of its connection."""

QUANTUM = 64
"""Points that a connection gets per turn. An admitted request costs one: a usual stream has 64 in flight. Half as many cut
its batches in two: 17 % fewer tiny requests per second."""
DEAR = 4
"""Points of an entry that no credit limits: refused and repeated requests, and entries about a session.

Sixteen of them, the most of one connection in a turn, take 1 to 2 ms.
"""
TURN = QUANTUM
"""Points of all fresh connections together in a turn; as many again are for one of the others."""
FRAMES_PER_POINT = 32
"""Frames of a message per extra point; each message costs one point besides.

So a turn serves fewer messages and frames than the socket reads at once. A flood is queued here, where it is counted, and
not in libzmq.
"""

TENSORS_PER_POINT = 8
"""Tensors of a request per extra point: with 32 dimensions each, so many take as long as a whole small request."""
BYTES_PER_POINT = 1024
"""Bytes of an entry, on average over its message's header, per extra point."""
SHORTEST = 6
"""Bytes of the shortest header that holds an entry; a shorter one is empty or invalid."""

MORE_ENTRIES = 4096
"""Unserved entries of a connection beyond its credit: cancels of all its requests, heartbeats, mistakes."""
MORE_BYTES = 64 * 1024 * 1024
"""Unserved bytes of a connection beyond its credit. The first message of a mailbox is always accepted."""


class Receiver(Protocol):
    """The port that an inbox serves, in turns of the event loop."""

    def heard(self, peers: Set[bytes], now: float) -> None:
        """Begin a turn: something arrived from these connections."""

    def cut_off(self, peer: bytes, why: str, now: float) -> None:
        """End a connection that sends beyond its credit."""

    def serve(self, peer: bytes, item: Item, now: float) -> int:
        """Serve an item of a connection, and return its price in points.

        The negative of its price: a part was served, and the item is to be served again in a later turn.
        """

    def end_turn(self, now: float) -> None:
        """End a turn: nothing more is served in it."""

    def granted_bytes(self, peer: bytes) -> int:
        """Return the bytes that flow control allows a connection besides its window."""


@dataclass(slots=True, eq=False)
class _Mailbox:
    """The unserved messages of one connection, in their order, and its balance."""

    peer: bytes
    messages: deque[tuple[Message, int, int]]
    """Each with its numbers of announced entries and of bytes; the first message of an empty mailbox counts none."""
    entries: int = 0
    """Announced entries of `messages`."""
    nbytes: int = 0
    """Bytes of `messages`."""
    items: Iterator[Item] | None = None
    """The remaining items of the message that is being served; None between two messages."""
    price: int = 0
    """Points of each entry of that message for its unpacking, in addition to the price of its serving."""
    balance: int = 0
    """The debt in points from its last turn, as a negative number; 0 without one."""
    unspent: int = QUANTUM
    """Points of its first quantum that it has not spent: it is fresh as long as there are any."""


class Inbox:
    """Reads a port's socket, and serves its messages in turns. A turn ends before another begins."""

    __slots__ = (
        "_backlogged",
        "_fresh",
        "_mailboxes",
        "_max_bytes",
        "_max_entries",
        "_now",
        "_read",
        "_receiver",
        "_socket",
        "messages",
    )

    def __init__(
        self,
        socket: PeerSocket,
        codec: Codec,
        receiver: Receiver,
        *,
        window_entries: int,
        window_bytes: int,
    ) -> None:
        """`window_entries`, `window_bytes`: unanswered entries, and bytes of them, that flow control allows a connection."""
        self._socket = socket
        self._read = codec.read
        self._receiver = receiver
        self._max_entries = window_entries + MORE_ENTRIES
        self._max_bytes = window_bytes + MORE_BYTES
        self._mailboxes: dict[bytes, _Mailbox] = {}
        self._fresh: deque[_Mailbox] = deque()
        """Mailboxes that were empty before this turn, or have not spent their first quantum."""
        self._backlogged: deque[_Mailbox] = deque()
        self.messages = 0
        """Messages read so far."""
        self._now: Callable[[], float] = trio.current_time

    def __repr__(self) -> str:
        return f"<inbox: {len(self._fresh)} fresh connections, {len(self._backlogged)} backlogged>"

    async def run(self) -> None:
        """Serve until cancelled. This task serves the messages that the socket's watcher does not find."""
        self._now = trio.lowlevel.current_clock().current_time  # three calls less each time
        self._socket.on_messages = self._watched
        while True:
            if self._mailboxes:
                await trio.lowlevel.checkpoint()
                self.serve_arrived()
            else:
                self._turn(await self._socket.receive())

    def _watched(self) -> bool:
        """Serve a turn in the task of the socket's watcher. Returns whether there is more to serve."""
        messages = self._socket.receive_nowait()
        if messages or self._mailboxes:
            self._turn(messages)
        return bool(self._mailboxes)

    def serve_arrived(self) -> None:
        """Read the arrived messages, without waiting, and serve a turn."""
        self._turn(self._socket.receive_nowait())

    def serve_all_of(self, peer: bytes) -> None:
        """Serve all remaining messages of one connection, at once."""
        mailbox = self._mailboxes.get(peer)
        if mailbox is not None:
            mailbox.balance = 1 << 62
            (self._fresh if mailbox in self._fresh else self._backlogged).remove(mailbox)
            now = trio.current_time()
            self._serve(mailbox, now)
            self._receiver.end_turn(now)

    def cut_off(self, peer: bytes) -> None:
        """Drop the messages of a connection, and ignore it from now on."""
        self._socket.cut_off(peer)
        mailbox = self._mailboxes.pop(peer, None)
        if mailbox is None:
            return
        mailbox.items = None
        mailbox.messages.clear()
        for queue in (self._fresh, self._backlogged):
            if mailbox in queue:
                queue.remove(mailbox)

    def _turn(self, messages: list[Addressed]) -> None:
        """Put these messages into their mailboxes, and serve one turn.

        The receiver ends the connections that exceed the limits.
        """
        clock = self._now  # an attribute, not a method: looked up as one, it is not found at once
        now = clock()
        self.messages += len(messages)
        mailboxes, fresh = self._mailboxes, self._fresh
        heard: set[bytes] = set()
        beyond: dict[bytes, str] = {}
        for peer, message in messages:
            heard.add(peer)
            mailbox = mailboxes.get(peer)
            if mailbox is None:
                mailbox = mailboxes[peer] = _Mailbox(peer, deque(((message, 0, 0),)))
                fresh.append(mailbox)
            elif mailbox.entries > self._max_entries or (
                mailbox.nbytes > self._max_bytes
                and mailbox.nbytes > self._max_bytes + self._receiver.granted_bytes(peer)
            ):
                beyond[peer] = (
                    f"{mailbox.entries} entries of {mailbox.nbytes} bytes unread; it sends beyond its credit"
                )
            else:
                entries, nbytes = entries_announced(message[0]), sum(map(len, message))
                mailbox.messages.append((message, entries, nbytes))
                mailbox.entries += entries
                mailbox.nbytes += nbytes
        self._receiver.heard(heard, now)
        if beyond:
            for peer, why in beyond.items():
                self._receiver.cut_off(peer, why, now)
        left = TURN
        while fresh and left > 0:
            mailbox = fresh.popleft()
            left -= self._serve(mailbox, now, min(left, mailbox.unspent))
        if self._backlogged:
            self._serve(self._backlogged.popleft(), now)
        self._receiver.end_turn(now)

    def _serve(self, mailbox: _Mailbox, now: float, most: int = QUANTUM) -> int:
        """Serve a connection until its balance is spent; what remains waits for another turn. `most`: points that it gets.

        Returns the points that were spent.
        """
        read, peer = self._read, mailbox.peer
        balance = full = mailbox.balance + most
        while balance > 0:
            items = mailbox.items
            if items is None:
                if not mailbox.messages:
                    break
                message, entries, nbytes = mailbox.messages.popleft()
                mailbox.entries -= entries
                mailbox.nbytes -= nbytes
                items = mailbox.items = iter(read(message))
                header, mailbox.price = len(message[0]), 0
                if header >= BYTES_PER_POINT:
                    mailbox.price = header // entries_announced(message[0]) // BYTES_PER_POINT
                # An empty message costs as much as one with the smallest entry.
                balance -= 1 + len(message) // FRAMES_PER_POINT + (header < SHORTEST)
                if balance <= 0:
                    break
            item: Item | None
            try:
                item = next(items, None)
            except ProtocolError as error:
                item = error
            if item is None:
                mailbox.items = None
            elif (price := self._receiver.serve(peer, item, now)) >= 0:
                balance -= mailbox.price + price
            else:
                mailbox.items = chain((item,), items)
                balance += price
        spent = full - balance
        mailbox.balance = balance
        mailbox.unspent -= spent
        if self._mailboxes.get(peer) is mailbox:  # otherwise it was cut off meanwhile
            if mailbox.items is None and not mailbox.messages:
                del self._mailboxes[peer]
            elif mailbox.unspent > 0:
                mailbox.balance = 0  # a debt is in what is unspent
                self._fresh.appendleft(mailbox)
            else:
                self._backlogged.append(mailbox)
        return spent
