"""The sockets of the simulated world: those in memory, whose messages are delayed, held, doubled and lost on their way.

One connection keeps the order of what it delivers, as TCP does; two of them have nothing to do with each other, so what
travels on different connections overtakes at will. A connection that breaks loses what is on its way in both directions,
and heals by itself under a new peer id, as ZeroMQ's do; what the connecting side says meanwhile waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

import msgpack
import trio
from tests.entries import Clock
from tests.pipeline.protocol_simulation.agenda import Agenda

from shapestream.errors import OutboxFull, PeerGone
from shapestream.transport.interface import Message
from shapestream.transport.memory import MemoryConnection, MemoryEndpoint, MemoryServer
from shapestream.wire.peers import DRIFT
from shapestream_engine.layout import Buffer

# How long a connection takes to come back, at most.
RECONNECT_S = 0.2
# How much later the copy of a doubled message comes, at most.
COPY_LATER_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Fastest:
    """The fastest message so far that said when it was sent: who counts by such messages is off by its transit at most."""

    transit_s: float
    arrived: float


def _has_clock(message: Message) -> bool:
    return any(entry[0] == Clock.KIND for entry in msgpack.unpackb(message[0])[1])


class Way:
    """One direction of one connection: what is on its way arrives in order, and not while it is held."""

    def __init__(self, exchange: Exchange, arrive: Callable[[Message], None]) -> None:
        self._exchange = exchange
        self._arrive = arrive
        self._queue: deque[tuple[float, float, Message]] = deque()
        self._last = 0.0
        self._planned = False
        self.held_until = 0.0
        self.fastest: Fastest | None = None

    def __len__(self) -> int:
        return len(self._queue)

    def send(self, message: Message) -> None:
        """Puts a message on its way."""
        now = trio.current_time()
        self._last = max(self._last, now + self._exchange.transit_s())
        self._queue.append((self._last, now, message))
        self._plan()

    def lose(self) -> None:
        """What is on its way arrives never."""
        self._queue.clear()

    def _plan(self) -> None:
        if self._queue and not self._planned:
            self._planned = True
            self._exchange.agenda.at(max(self._queue[0][0], self.held_until), self._pump)

    def _pump(self) -> None:
        self._planned = False
        now = trio.current_time() + 1e-9
        while self._queue and max(self._queue[0][0], self.held_until) <= now:
            _, sent, message = self._queue.popleft()
            transit_s = trio.current_time() - sent
            if (self.fastest is None or transit_s < self.fastest.transit_s) and _has_clock(message):
                self.fastest = Fastest(transit_s=transit_s, arrived=trio.current_time())
            self._arrive(message)
        self._plan()


def error_of_clock_s(way: Way) -> float:
    """How far off the reader may be about when something was sent on this way; 0 before it knows anything."""
    fastest = way.fastest
    return 0.0 if fastest is None else fastest.transit_s + DRIFT * (trio.current_time() - fastest.arrived)


class Exchange(MemoryEndpoint):
    """One address: at most one port listens there, any number of lines lead there."""

    def __init__(
        self, agenda: Agenda, random: Random, *, delay_s: float, jitter_s: float, capacity: int
    ) -> None:
        """`delay_s` is each message's, plus up to `jitter_s`; a way takes `capacity` messages that were not read."""
        super().__init__(capacity_messages=capacity)
        self.server: Port | None = None
        self.agenda = agenda
        self.random = random
        self.lines: list[Line] = []
        self._delay_s, self._jitter_s = delay_s, jitter_s

    def transit_s(self) -> float:
        """How long the next message takes."""
        return self._delay_s + self._jitter_s * self.random.random()

    def bind(self) -> Port:
        """A new process listens; lines that lead here find it after a moment, each in its own time."""
        assert self.server is None, "two processes at one address"
        self.server = Port(self)
        for line in self.lines:
            line.come_back()
        return self.server

    def connect(self, owner: str) -> Line:
        """A new line, whether or not anybody listens."""
        line = Line(self, owner)
        self.lines.append(line)
        line.come_back()
        return line

    def next_peer(self) -> bytes:
        """The id of a line that comes to the port."""
        return self._next_peer()


class Port(MemoryServer):
    """The listening side."""

    killed = False

    def greet(self, peer: bytes, line: Line) -> None:
        """A line is there."""
        self._peers[peer] = line

    def part(self, peer: bytes) -> None:
        """A line is gone."""
        self._peers.pop(peer, None)

    def hear(self, peer: bytes, message: Message) -> None:
        """A message has arrived."""
        self._put((peer, message))

    def send_nowait(self, peer: bytes, frames: Sequence[Buffer]) -> None:
        """See `PeerSocket`. What a dead process says nobody hears."""
        if self.killed:
            return
        line = self._peers.get(peer)
        if line is None:
            raise PeerGone(f"no peer {peer!r} here")
        if len(line.down) >= self.endpoint.capacity_messages:
            raise OutboxFull(f"peer {peer!r} does not read")
        line.hear_later([bytes(frame) for frame in frames])

    def close(self) -> None:
        """The process ends; what it has said before still arrives."""
        self._leave()
        self._end()

    def kill(self) -> None:
        """The process is gone in the middle of a word; its tasks are to be cancelled, and hear nothing of this."""
        self.killed = True
        for line in self._peers.values():
            if self.endpoint.random.random() < 0.5:
                line.down.lose()
        self._leave()

    def _leave(self) -> None:
        if self.endpoint.server is self:
            self.endpoint.server = None
        for line in self._peers.values():
            line.up.lose()
            line.peer = None
        self._peers.clear()


class Line(MemoryConnection):
    """The connecting side, which comes back by itself when it broke."""

    def __init__(self, exchange: Exchange, owner: str) -> None:
        super().__init__(exchange)
        self._exchange = exchange
        self.owner = owner
        self.peer: bytes | None = None
        """The id by which the present port knows it; None while nobody listens, or it is broken."""
        self.up = self.down = Way(exchange, self._put)
        self._held_until = 0.0
        self._doubling_until = 0.0
        self._doubles_down = True
        self._swallows = False
        self.killed = False

    # ------------------------------------------------------------ what its process does

    def send_nowait(self, frames: Sequence[Buffer]) -> None:
        """See `Connection`."""
        if self.killed:
            return
        self._check_open()
        if len(self._unsent) + len(self.up) >= self._exchange.capacity_messages:
            raise trio.WouldBlock
        self._unsent.append([bytes(frame) for frame in frames])
        self._flush()

    def close(self) -> None:
        """The process gives it up; what it has said before still arrives."""
        self._leave()
        self._end()
        self._senders.unpark_all()

    def kill(self) -> None:
        """The process is gone in the middle of a word; its tasks are to be cancelled, and hear nothing of this."""
        self.killed = True
        if self._exchange.random.random() < 0.5:
            self.up.lose()
        self._leave()

    def _leave(self) -> None:
        if self in self._exchange.lines:
            self._exchange.lines.remove(self)
        self._lose_peer()
        self.down.lose()

    def _lose_peer(self) -> None:
        if self.peer is not None and self._exchange.server is not None:
            self._exchange.server.part(self.peer)
        self.peer = None

    # ------------------------------------------------------------ what happens to it

    def cut(self) -> None:
        """It breaks: what is on its way is lost, both sides are told nothing, and it comes back as another peer."""
        if self.peer is not None:
            self.up.lose()
            self.down.lose()
            self._lose_peer()
            self.come_back()

    def hold(self, seconds: float) -> None:
        """Nothing arrives for so long, in either direction; then all of it."""
        self._held_until = max(self._held_until, trio.current_time() + seconds)
        self.up.held_until = self.down.held_until = self._held_until

    def swallow(self) -> None:
        """Half open: from now on everything vanishes, and neither side is told, until its process gives it up."""
        self._swallows = True

    def double(self, seconds: float, *, both: bool = True) -> None:
        """For so long a copy of each message follows it, sometimes behind later ones. Not `both`: only on the way up."""
        self._doubling_until = trio.current_time() + seconds
        self._doubles_down = both

    def come_back(self) -> None:
        """Looks for a port, a moment later."""
        self._exchange.agenda.after(RECONNECT_S * self._exchange.random.random(), self._come_to_port)

    def hear_later(self, message: Message) -> None:
        """The port sends."""
        if not self._swallows:
            self.down.send(message)
            if self._doubles_down:
                self._copy(self.down, message)

    def _come_to_port(self) -> None:
        port = self._exchange.server
        if port is None or self.peer is not None or self not in self._exchange.lines:
            return
        peer = self.peer = self._exchange.next_peer()
        self.up = Way(self._exchange, lambda message: self._arrived(port, peer, message))
        self.down = Way(self._exchange, self._put)
        self.up.held_until = self.down.held_until = self._held_until
        self._ignored = False
        port.greet(peer, self)
        self._flush()

    def _arrived(self, port: Port, peer: bytes, message: Message) -> None:
        if not self._ignored:
            port.hear(peer, message)
        self._senders.unpark_all()

    def _flush(self) -> None:
        while self.peer is not None and self._unsent:
            message = self._unsent.popleft()
            if not self._swallows:
                self.up.send(message)
                self._copy(self.up, message)
        self._senders.unpark_all()

    def _copy(self, way: Way, message: Message) -> None:
        if trio.current_time() < self._doubling_until:
            random = self._exchange.random

            def again() -> None:
                # Only while this connection lasts: a copy of what an earlier one carried comes nowhere.
                if way in (self.up, self.down):
                    way.send(message)

            self._exchange.agenda.after(COPY_LATER_S * random.random(), again)
