"""The messages that arrived at a port and were not served yet, by connection: a flood on one delays no other.

A port reads all its connections as fast as it can and serves them in turns of bounded size. In a turn, connections that
had nothing waiting come first; of the others, one gets its quantum. This is deficit round robin (M. Shreedhar,
G. Varghese, "Efficient fair queuing using deficit round-robin", SIGCOMM 1995) with the precedence of sparse flows of
RFC 8290, section 4.2. A connection that sends far more than its credit allows, unread, is ended by the port.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import TypeAlias

import trio

from shapestream.errors import ProtocolError
from shapestream.transport.interface import Message, PeerSocket
from shapestream.wire.codec import BadEntry, Envelope, entries_announced
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

MORE_ENTRIES = 4096
"""What one connection may have unserved beyond its credit: cancels of all its requests, heartbeats, mistakes."""
MORE_BYTES = 64 * 1024 * 1024
"""The same in bytes; the next message is always taken."""


class _Line:
    """One connection's messages, in their order."""

    __slots__ = ("balance", "entries", "items", "messages", "nbytes", "peer")

    def __init__(self, peer: bytes) -> None:
        self.peer = peer
        self.messages: deque[tuple[Message, int, int]] = deque()
        """Each with the entries that it announces, and its bytes."""
        self.items: deque[Item] = deque()
        """What is left of the message that is being served."""
        self.entries = 0
        """Announced by `messages`."""
        self.nbytes = 0
        """Of `messages`."""
        self.balance = 0


class Inbox:
    """Reads a port's socket, and deals out its messages in turns. A turn runs to its end before another begins."""

    def __init__(
        self,
        socket: PeerSocket,
        decode: Callable[[Message], Envelope],
        *,
        window_entries: int,
        window_bytes: int,
    ) -> None:
        """`window_entries`, `window_bytes`: what the flow control lets one connection have unanswered."""
        self._socket = socket
        self._decode = decode
        self._max_entries = window_entries + MORE_ENTRIES
        self._max_bytes = window_bytes + MORE_BYTES
        self._lines: dict[bytes, _Line] = {}
        self._fresh: deque[_Line] = deque()
        """Connections that had nothing waiting when this arrived."""
        self._backlogged: deque[_Line] = deque()
        self._serving: _Line | None = None
        self.messages = 0
        """Messages read so far."""

    def __repr__(self) -> str:
        return f"<inbox: {len(self._fresh)} fresh connections, {len(self._backlogged)} backlogged>"

    @property
    def read_empty(self) -> bool:
        """Whether everything that had arrived was read: only then can silence be told from a long queue."""
        return self._socket.drained

    @property
    def is_empty(self) -> bool:
        """Whether everything that was read is served."""
        return not self._lines

    async def read(self) -> tuple[set[bytes], dict[bytes, str]]:
        """Read what has arrived; wait only while nothing is left to serve.

        Returns the connections that were heard, and those that exceed the bounds, with the reason: the caller ends them.
        """
        if not self._lines:
            return self._keep(await self._socket.receive())
        await trio.lowlevel.checkpoint()
        return self.read_nowait()

    def read_nowait(self) -> tuple[set[bytes], dict[bytes, str]]:
        """The same without waiting."""
        return self._keep(self._socket.receive_nowait())

    def _keep(self, messages: list[tuple[bytes, Message]]) -> tuple[set[bytes], dict[bytes, str]]:
        self.messages += len(messages)
        heard: set[bytes] = set()
        beyond: dict[bytes, str] = {}
        for peer, message in messages:
            heard.add(peer)
            line = self._lines.get(peer)
            if line is None:
                line = self._lines[peer] = _Line(peer)
                self._fresh.append(line)
            elif line.entries > self._max_entries or line.nbytes > self._max_bytes:
                beyond[peer] = (
                    f"{line.entries} entries of {line.nbytes} bytes unread; it sends beyond its credit"
                )
                continue
            entries, nbytes = entries_announced(message[0]), sum(map(len, message))
            line.messages.append((message, entries, nbytes))
            line.entries += entries
            line.nbytes += nbytes
        return heard, beyond

    def turn(self) -> Iterator[tuple[bytes, Item]]:
        """What to serve now, each with its connection. Tell the price of each with `charge` before taking the next."""
        left = TURN
        while self._fresh and left > 0:
            line = self._fresh.popleft()
            before = line.balance
            yield from self._serve(line)
            left -= QUANTUM + before - line.balance
        if self._backlogged:
            yield from self._serve(self._backlogged.popleft())

    def all_of(self, peer: bytes) -> Iterator[tuple[bytes, Item]]:
        """Everything that is left of one connection, at once."""
        line = self._lines.get(peer)
        if line is not None:
            line.balance = 1 << 62
            (self._fresh if line in self._fresh else self._backlogged).remove(line)
            yield from self._serve(line)

    def charge(self, points: int) -> None:
        """The price of what `turn` gave last, in points."""
        if self._serving is not None:
            self._serving.balance -= points

    def cut_off(self, peer: bytes) -> None:
        """Forget what a connection sent, and ignore it from now on."""
        self._socket.cut_off(peer)
        line = self._lines.pop(peer, None)
        if line is None:
            return
        line.messages.clear()
        line.items.clear()
        line.entries = line.nbytes = 0
        for queue in (self._fresh, self._backlogged):
            if line in queue:
                queue.remove(line)

    def _serve(self, line: _Line) -> Iterator[tuple[bytes, Item]]:
        """A connection's items until its quantum is spent; then it waits for another turn, with what it has left."""
        line.balance += QUANTUM
        while line.balance > 0 and self._open_next(line):
            self._serving = line
            yield line.peer, line.items.popleft()
        self._serving = None
        if self._lines.get(line.peer) is not line:
            return  # cut off
        if line.items or line.messages:
            self._backlogged.append(line)
        else:
            del self._lines[line.peer]

    def _open_next(self, line: _Line) -> bool:
        """Whether there is an item; reads the next message where one is needed."""
        while not line.items:
            if not line.messages:
                return False
            message, entries, nbytes = line.messages.popleft()
            line.entries -= entries
            line.nbytes -= nbytes
            try:
                envelope = self._decode(message)
            except ProtocolError as error:
                line.items.append(error)
            else:
                line.items.extend(envelope.entries)
                line.items.extend(envelope.bad)
            line.balance -= 1 + len(message) // FRAMES_PER_POINT
            if not line.items:
                line.balance -= 1  # it costs as much as the smallest entry
                if line.balance <= 0:
                    return False
        return True
