"""The sockets of the simulated world: connections that delay, hold, double and lose what travels, and that break.

One connection keeps the order of what it delivers, as TCP does; two of them have nothing to do with each other, so what
travels on different connections overtakes at will. A connection that breaks loses what is on its way in both directions,
and heals by itself under a new peer id, as ZeroMQ's do; what the connecting side says meanwhile waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from random import Random

import msgpack
import trio
from tests.pipeline.protocol_simulation.agenda import Agenda

from shapestream.errors import OutboxFull, PeerGone
from shapestream.serving.peer_clock import DRIFT
from shapestream.transport.interface import Addressed, Message
from shapestream.wire.messages import Clock
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


class Inbox:
    """What has arrived, for one reader."""

    def __init__(self) -> None:
        self.messages: deque[object] = deque()
        self.closed = trio.Event()
        self.changed = trio.Event()

    def put(self, message: object) -> None:
        """Something arrives; a closed inbox takes nothing."""
        if not self.closed.is_set():
            self.messages.append(message)
            self.changed.set()

    def take(self) -> list[object]:
        """Everything that is there."""
        if self.closed.is_set():
            raise trio.ClosedResourceError
        taken = list(self.messages)
        self.messages.clear()
        return taken

    async def receive(self) -> list[object]:
        """The same, once there is something."""
        await trio.lowlevel.checkpoint()
        while not (taken := self.take()):
            self.changed = trio.Event()
            await self.changed.wait()
        return taken

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Until it is closed."""
        task_status.started()
        await self.closed.wait()

    def close(self) -> None:
        """Nothing comes any more."""
        self.closed.set()
        self.messages.clear()
        self.changed.set()


def error_of_clock_s(way: Way) -> float:
    """How far off the reader may be about when something was sent on this way; 0 before it knows anything."""
    fastest = way.fastest
    return 0.0 if fastest is None else fastest.transit_s + DRIFT * (trio.current_time() - fastest.arrived)


class Exchange:
    """One address: at most one port listens there, any number of lines lead there."""

    def __init__(
        self, agenda: Agenda, random: Random, *, delay_s: float, jitter_s: float, capacity: int
    ) -> None:
        """`delay_s` is each message's, plus up to `jitter_s`; a way takes `capacity` messages that were not read."""
        self.agenda = agenda
        self.random = random
        self.capacity = capacity
        self.port: Port | None = None
        self.lines: list[Line] = []
        self._delay_s, self._jitter_s = delay_s, jitter_s
        self._peers = count(1)

    def transit_s(self) -> float:
        """How long the next message takes."""
        return self._delay_s + self._jitter_s * self.random.random()

    def bind(self) -> Port:
        """A new process listens; lines that lead here find it after a moment, each in its own time."""
        assert self.port is None, "two processes at one address"
        self.port = Port(self)
        for line in self.lines:
            line.come_back()
        return self.port

    def connect(self, owner: str) -> Line:
        """A new line, whether or not anybody listens."""
        line = Line(self, owner)
        self.lines.append(line)
        line.come_back()
        return line

    def next_peer(self) -> bytes:
        """A routing id that was never used."""
        return b"\x00%04d" % next(self._peers)


class Port:
    """The listening side: a `PeerSocket`."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._inbox = Inbox()
        self.lines: dict[bytes, Line] = {}
        self.ignored: set[bytes] = set()
        self.run = self._inbox.run
        self.on_messages: Callable[[], bool | None] | None = None
        self.killed = False

    @property
    def addresses(self) -> tuple[str, ...]:
        """For logs."""
        return ("simulated://",)

    @property
    def drained(self) -> bool:
        """See `PeerSocket`."""
        return True

    async def receive(self) -> list[Addressed]:
        """See `PeerSocket`."""
        return await self._inbox.receive()  # type: ignore[return-value]  # one inbox for both sides

    def receive_nowait(self) -> list[Addressed]:
        """See `PeerSocket`."""
        return self._inbox.take()  # type: ignore[return-value]

    def send_nowait(self, peer: bytes, frames: Sequence[Buffer]) -> None:
        """See `PeerSocket`. What a dead process says nobody hears."""
        if self.killed:
            return
        line = self.lines.get(peer)
        if line is None:
            raise PeerGone(f"no peer {peer!r} here")
        if len(line.down) >= self._exchange.capacity:
            raise OutboxFull(f"peer {peer!r} does not read")
        line.hear_later([bytes(frame) for frame in frames])

    def forget(self, peer: bytes) -> None:
        """See `PeerSocket`."""

    def cut_off(self, peer: bytes) -> None:
        """See `PeerSocket`."""
        self.lines.pop(peer, None)
        self.ignored.add(peer)
        self._inbox.messages = deque(item for item in self._inbox.messages if item[0] != peer)  # type: ignore[index]

    def failed_handshakes(self) -> int:
        """None: there is no handshake here."""
        return 0

    def key_of(self, peer: bytes) -> str | None:
        """See `PeerSocket`."""
        return None

    def is_admin(self, peer: bytes) -> bool:
        """See `PeerSocket`."""
        return True

    def arrive(self, peer: bytes, message: Message) -> None:
        """Something has come from this peer."""
        if peer not in self.ignored:
            self._inbox.put((peer, message))

    def close(self) -> None:
        """The process ends; what it has said before still arrives."""
        self._leave()
        self._inbox.close()

    def kill(self) -> None:
        """The process is gone in the middle of a word; its tasks are to be cancelled, and hear nothing of this."""
        self.killed = True
        for line in self.lines.values():
            if self._exchange.random.random() < 0.5:
                line.down.lose()
        self._leave()

    def _leave(self) -> None:
        if self._exchange.port is self:
            self._exchange.port = None
        for line in self.lines.values():
            line.up.lose()
            line.peer = None
        self.lines.clear()


class Line:
    """The connecting side: a `Connection`, which comes back by itself when it broke."""

    def __init__(self, exchange: Exchange, owner: str) -> None:
        self._exchange = exchange
        self.owner = owner
        self.peer: bytes | None = None
        """The id by which the present port knows it; None while nobody listens, or it is broken."""
        self._inbox = Inbox()
        self._unsent: deque[Message] = deque()
        self._room = trio.Event()
        self.run = self._inbox.run
        self.on_messages: Callable[[], bool | None] | None = None
        self.up = self.down = Way(exchange, self._inbox.put)
        self._held_until = 0.0
        self._doubling_until = 0.0
        self._doubles_down = True
        self._swallows = False
        self.killed = False

    # ------------------------------------------------------------ what its process does

    async def receive(self) -> list[Message]:
        """See `Connection`."""
        return await self._inbox.receive()  # type: ignore[return-value]

    def receive_nowait(self) -> list[Message]:
        """See `Connection`."""
        return self._inbox.take()  # type: ignore[return-value]

    def send_nowait(self, frames: Sequence[Buffer]) -> None:
        """See `Connection`."""
        if self.killed:
            return
        if self._inbox.closed.is_set():
            raise trio.ClosedResourceError
        if len(self._unsent) + len(self.up) >= self._exchange.capacity:
            raise trio.WouldBlock
        self._unsent.append([bytes(frame) for frame in frames])
        self._flush()

    async def send(self, frames: Sequence[Buffer]) -> None:
        """See `Connection`."""
        await trio.lowlevel.checkpoint()
        while True:
            try:
                self.send_nowait(frames)
            except trio.WouldBlock:
                self._room = trio.Event()
                await self._room.wait()
            else:
                return

    def close(self) -> None:
        """The process gives it up; what it has said before still arrives."""
        self._leave()
        self._inbox.close()
        self._room.set()

    def kill(self) -> None:
        """The process is gone in the middle of a word; its tasks are to be cancelled, and hear nothing of this."""
        self.killed = True
        if self._exchange.random.random() < 0.5:
            self.up.lose()
        self._leave()

    def _leave(self) -> None:
        if self in self._exchange.lines:
            self._exchange.lines.remove(self)
        if self.peer is not None and self._exchange.port is not None:
            self._exchange.port.lines.pop(self.peer, None)
        self.peer = None
        self.down.lose()

    # ------------------------------------------------------------ what happens to it

    def cut(self) -> None:
        """It breaks: what is on its way is lost, both sides are told nothing, and it comes back as another peer."""
        if self.peer is not None:
            self.up.lose()
            self.down.lose()
            if self._exchange.port is not None:
                self._exchange.port.lines.pop(self.peer, None)
            self.peer = None
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
        self._exchange.agenda.after(RECONNECT_S * self._exchange.random.random(), self._attach)

    def hear_later(self, message: Message) -> None:
        """The port sends."""
        if not self._swallows:
            self.down.send(message)
            if self._doubles_down:
                self._copy(self.down, message)

    def _attach(self) -> None:
        port = self._exchange.port
        if port is None or self.peer is not None or self not in self._exchange.lines:
            return
        peer = self.peer = self._exchange.next_peer()
        self.up = Way(self._exchange, lambda message: self._arrived(port, peer, message))
        self.down = Way(self._exchange, self._inbox.put)
        self.up.held_until = self.down.held_until = self._held_until
        port.lines[peer] = self
        self._flush()

    def _arrived(self, port: Port, peer: bytes, message: Message) -> None:
        port.arrive(peer, message)
        self._room.set()

    def _flush(self) -> None:
        while self.peer is not None and self._unsent:
            message = self._unsent.popleft()
            if not self._swallows:
                self.up.send(message)
                self._copy(self.up, message)
        self._room.set()

    def _copy(self, way: Way, message: Message) -> None:
        if trio.current_time() < self._doubling_until:
            random = self._exchange.random

            def again() -> None:
                # Only while this connection lasts: a copy of what an earlier one carried comes nowhere.
                if way in (self.up, self.down):
                    way.send(message)

            self._exchange.agenda.after(COPY_LATER_S * random.random(), again)
