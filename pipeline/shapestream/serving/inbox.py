"""The messages that arrived at a port and were not served yet, by connection: a flood on one delays no other.

A port reads all its connections as fast as it can and serves them in turns of bounded size. In a turn, connections that
had nothing waiting come first; of the others, one gets its quantum. This is deficit round robin (M. Shreedhar,
G. Varghese, "Efficient fair queuing using deficit round-robin", SIGCOMM 1995) with the precedence of sparse flows of
RFC 8290, section 4.2. A connection that sends far more than its credit allows, unread, is ended by the port.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Set
from typing import Protocol, TypeAlias

import trio

from shapestream.errors import ProtocolError
from shapestream.transport.interface import Addressed, Message, PeerSocket
from shapestream.wire.codec import BadEntry, Codec, entries_announced
from shapestream.wire.messages import Entry

Item: TypeAlias = Entry | BadEntry | ProtocolError
"""What a connection sent; a `ProtocolError` stands for a message that cannot be read, and is the last of its connection."""

QUANTUM = 64
"""Points that one connection may spend in a turn. An admitted request costs one: a usual stream has 64 in flight."""
DEAR = 4
"""Points of an entry that no credit limits: what is refused, repeated, or about a session. Sixteen of them, the most of one
connection in a turn, take 1 to 2 ms."""
TURN = 2 * QUANTUM
"""Points after which no further connection is begun in a turn."""
FRAMES_PER_POINT = 32
"""Each message costs a point, and one more for so many frames. So a turn serves less than the socket reads at once, of
messages and of frames: a flood lies here, where it is counted, and not in libzmq."""

TENSORS_PER_POINT = 8
"""A request costs one more for so many tensors: with 32 dimensions each they take as long as a request with one."""
BYTES_PER_POINT = 1024
"""Each entry costs one more for so many bytes of its message's header / its entries."""
SHORTEST = 6
"""Bytes of the shortest header that holds an entry; a shorter one is empty, or no message."""

MORE_ENTRIES = 4096
"""What one connection may have unserved beyond its credit: cancels of all its requests, heartbeats, mistakes."""
MORE_BYTES = 64 * 1024 * 1024
"""The same in bytes; the next message is always taken."""


class Receiver(Protocol):
    """The port that an inbox serves, in turns of the event loop."""

    def heard(self, peers: Set[bytes], now: float) -> None:
        """Begin a turn: something arrived from these connections."""

    def cut_off(self, peer: bytes, why: str, now: float) -> None:
        """End a connection that sends beyond its credit."""

    def serve(self, peer: bytes, item: Item, now: float) -> int:
        """Serve an item of a connection; returns its price in points."""

    def end_turn(self, now: float) -> None:
        """Take note that this turn serves nothing more."""


class _Mailbox:
    """One connection's messages, in their order."""

    __slots__ = ("balance", "behind", "entries", "items", "nbytes", "next", "peer", "price")

    def __init__(self, peer: bytes, message: Message) -> None:
        self.peer = peer
        self.items: Iterator[Item] | None = None
        """What is left of the message that is being served; None between two."""
        self.price = 0
        """Points of each entry of that message beside its own: what unpacking it takes."""
        self.next: Message | None = message
        self.behind: deque[tuple[Message, int, int]] = deque()
        """Messages behind the next one, each with the entries that it announces, and its bytes."""
        self.entries = 0
        """Announced by `behind`."""
        self.nbytes = 0
        """Of `behind`."""
        self.balance = 0

    def put(self, message: Message) -> None:
        """Append a message."""
        entries, nbytes = entries_announced(message[0]), sum(map(len, message))
        self.behind.append((message, entries, nbytes))
        self.entries += entries
        self.nbytes += nbytes

    def take(self) -> Message | None:
        """Remove the next message; None if there is none."""
        message, self.next = self.next, None
        if message is None and self.behind:
            message, entries, nbytes = self.behind.popleft()
            self.entries -= entries
            self.nbytes -= nbytes
        return message

    def clear(self) -> None:
        """Drop everything."""
        self.items = self.next = None
        self.behind.clear()
        self.entries = self.nbytes = 0


class Inbox:
    """Reads a port's socket, and deals out its messages in turns. A turn runs to its end before another begins."""

    def __init__(
        self,
        socket: PeerSocket,
        codec: Codec,
        receiver: Receiver,
        *,
        window_entries: int,
        window_bytes: int,
    ) -> None:
        """`window_entries`, `window_bytes`: what the flow control lets one connection have unanswered."""
        self._socket = socket
        self._read = codec.read
        self._receiver = receiver
        self._max_entries = window_entries + MORE_ENTRIES
        self._max_bytes = window_bytes + MORE_BYTES
        self._lines: dict[bytes, _Mailbox] = {}
        self._fresh: deque[_Mailbox] = deque()
        """Connections that had nothing waiting when this arrived."""
        self._backlogged: deque[_Mailbox] = deque()
        self.messages = 0
        """Messages read so far."""

    def __repr__(self) -> str:
        return f"<inbox: {len(self._fresh)} fresh connections, {len(self._backlogged)} backlogged>"

    @property
    def read_empty(self) -> bool:
        """Whether everything that had arrived was read: only then can silence be told from a long queue."""
        return self._socket.drained

    async def run(self) -> None:
        """Serve until cancelled: here what the socket's watcher does not find."""
        self._socket.on_messages = self._watched
        while True:
            if self._lines:
                await trio.lowlevel.checkpoint()
                self.serve_arrived()
            else:
                self._turn(await self._socket.receive())

    def _watched(self) -> bool:
        """Serve a turn in the watcher of the socket, with no hand-over to another task. True: there is more to serve."""
        messages = self._socket.receive_nowait()
        if messages or self._lines:
            self._turn(messages)
        return bool(self._lines)

    def serve_arrived(self) -> None:
        """Read what has arrived, without waiting, and serve a turn."""
        self._turn(self._socket.receive_nowait())

    def serve_all_of(self, peer: bytes) -> None:
        """Serve everything that is left of one connection, at once."""
        line = self._lines.get(peer)
        if line is not None:
            line.balance = 1 << 62
            (self._fresh if line in self._fresh else self._backlogged).remove(line)
            now = trio.current_time()
            self._serve(line, now)
            self._receiver.end_turn(now)

    def cut_off(self, peer: bytes) -> None:
        """Forget what a connection sent, and ignore it from now on."""
        self._socket.cut_off(peer)
        line = self._lines.pop(peer, None)
        if line is None:
            return
        line.clear()
        for queue in (self._fresh, self._backlogged):
            if line in queue:
                queue.remove(line)

    def _turn(self, messages: list[Addressed]) -> None:
        """Keep these messages, and serve what a turn has room for."""
        now = trio.current_time()
        self._keep(messages, now)
        left = TURN
        while self._fresh and left > 0:
            left -= self._serve(self._fresh.popleft(), now)
        if self._backlogged:
            self._serve(self._backlogged.popleft(), now)
        self._receiver.end_turn(now)

    def _keep(self, messages: list[Addressed], now: float) -> None:
        """Line these messages up; the receiver ends the connections that exceed the bounds."""
        self.messages += len(messages)
        beyond: dict[bytes, str] = {}
        for peer, message in messages:
            line = self._lines.get(peer)
            if line is None:
                line = self._lines[peer] = _Mailbox(peer, message)
                self._fresh.append(line)
            elif line.entries > self._max_entries or line.nbytes > self._max_bytes:
                beyond[peer] = (
                    f"{line.entries} entries of {line.nbytes} bytes unread; it sends beyond its credit"
                )
            else:
                line.put(message)
        self._receiver.heard({peer for peer, _ in messages}, now)
        for peer, why in beyond.items():
            self._receiver.cut_off(peer, why, now)

    def _serve(self, line: _Mailbox, now: float) -> int:
        """Serve a connection until its quantum is spent; with what is left it waits for another turn.

        Returns the points that it spent.
        """
        serve, peer = self._receiver.serve, line.peer
        balance = full = line.balance + QUANTUM
        while balance > 0:
            if line.items is not None:
                item: Item | None
                try:
                    item = next(line.items, None)
                except ProtocolError as error:
                    item = error
                if item is None:
                    line.items = None
                else:
                    balance -= line.price + serve(peer, item, now)
            elif (message := line.take()) is not None:
                line.items = iter(self._read(message))
                entries = entries_announced(message[0])
                line.price = len(message[0]) // entries // BYTES_PER_POINT
                # An empty message costs as much as the smallest entry.
                balance -= 1 + len(message) // FRAMES_PER_POINT + (len(message[0]) < SHORTEST)
            else:
                break
        line.balance = balance
        if self._lines.get(peer) is line:  # else it was cut off
            if line.items is not None or line.next is not None or line.behind:
                self._backlogged.append(line)
            else:
                del self._lines[peer]
        return full - balance
