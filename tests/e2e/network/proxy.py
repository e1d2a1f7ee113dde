"""A TCP proxy that treats the bytes between two processes as bad networks do, on loopback.

It knows nothing of what passes: bytes come in pieces, each piece waits for its time, and leaves in order. A *passage* is
one connection through it; the two directions are `UP`, from whoever connected, and `DOWN`, back to them.

    caller ──▶ [reader]──bounded queue──▶[writer] ──▶ target        one pair of tasks per direction
"""

from __future__ import annotations

import random
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import trio

Direction: TypeAlias = Literal["up", "down"]
UP: Direction = "up"
DOWN: Direction = "down"

# What the proxy itself holds per direction: so many pieces. Beyond that, the sender's own buffers fill.
_PIECES = 64
_PIECE_BYTES = 64 * 1024


@dataclass(slots=True)
class Conditions:
    """What happens to the bytes of one direction, in all passages."""

    delay_s: float = 0.0
    jitter_s: float = 0.0
    """Up to so much more, by chance; the order of the bytes stays."""
    piece_bytes: int | None = None
    """Forwarded in pieces of this size, each a packet of its own."""
    chance: random.Random = field(default_factory=lambda: random.Random(0))

    def due(self, now: float) -> float:
        """When a piece that comes now may leave."""
        return now + self.delay_s + (self.jitter_s * self.chance.random() if self.jitter_s else 0.0)


class Passage:
    """One connection through the proxy."""

    def __init__(self, caller: trio.SocketStream, target: trio.SocketStream) -> None:
        self._streams = {UP: (caller, target), DOWN: (target, caller)}
        self.scope = trio.CancelScope()
        self.packets = {UP: 0, DOWN: 0}
        """Pieces that left."""
        self._swallows = {UP: False, DOWN: False}
        self._breaks: dict[Direction, tuple[int, Callable[[], None]]] = {}

    def close(self) -> None:
        """Both ends see an orderly end (FIN), wherever a message was."""
        self.scope.cancel()

    def reset(self) -> None:
        """Both ends see the connection reset (RST)."""
        for stream, _ in self._streams.values():
            stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.scope.cancel()

    def swallow(self, *directions: Direction) -> None:
        """From now on these directions lead nowhere, and nobody is told: half-open, as behind a lost route."""
        for direction in directions:
            self._swallows[direction] = True

    def break_after(self, direction: Direction, nbytes: int, how: Literal["close", "reset"]) -> None:
        """Ends the passage when so many more bytes have gone in this direction, be that in the middle of a message."""
        self._breaks[direction] = (nbytes, self.close if how == "close" else self.reset)

    async def relay(self, direction: Direction, proxy: Proxy) -> None:
        """Forwards one direction until it ends."""
        source, sink = self._streams[direction]
        conditions = proxy.conditions[direction]
        send, receive = trio.open_memory_channel[tuple[float, bytes]](_PIECES)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._write, direction, sink, receive, proxy)
            while True:
                try:
                    data = await source.receive_some(_PIECE_BYTES)
                except trio.BrokenResourceError:
                    self.reset()
                    return
                if not data:
                    break
                await send.send((conditions.due(trio.current_time()), bytes(data)))
            send.close()
        if not self._swallows[direction]:
            # libzmq does not use a connection whose other half has ended.
            self.close()

    async def _write(
        self,
        direction: Direction,
        sink: trio.SocketStream,
        pieces: trio.MemoryReceiveChannel[tuple[float, bytes]],
        proxy: Proxy,
    ) -> None:
        conditions = proxy.conditions[direction]
        async for due, data in pieces:
            await trio.sleep_until(due)
            size = conditions.piece_bytes or len(data)
            for start in range(0, len(data), size):
                await proxy.flows[direction].wait()
                piece = self._up_to_the_break(direction, data[start : start + size])
                if piece and not self._swallows[direction]:
                    try:
                        await sink.send_all(piece)
                        self.packets[direction] += 1
                    except trio.BrokenResourceError:
                        self.reset()
                        return

    def _up_to_the_break(self, direction: Direction, piece: bytes) -> bytes:
        if direction not in self._breaks:
            return piece
        left, end = self._breaks[direction]
        if len(piece) < left:
            self._breaks[direction] = (left - len(piece), end)
            return piece
        end()  # takes effect at the next checkpoint: the scope is cancelled
        return b""


class Proxy:
    """Listens at a port of loopback's own choosing, and connects each caller to `target_port`."""

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self.port = 0
        self.conditions = {UP: Conditions(), DOWN: Conditions()}
        self.flows = {UP: trio.Event(), DOWN: trio.Event()}
        for flow in self.flows.values():
            flow.set()
        self.passages: list[Passage] = []
        """Those that are open now."""
        self.accepted = 0
        """Callers ever."""
        self._refuses = False

    @property
    def address(self) -> str:
        """Where callers connect to."""
        return f"tcp://127.0.0.1:{self.port}"

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Relays until cancelled."""
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        self.port = listener.socket.getsockname()[1]
        await trio.serve_listeners(self._serve, [listener], task_status=_Started(task_status))

    def stall(self, *directions: Direction) -> None:
        """Nothing leaves in these directions until `resume`; nothing is lost."""
        for direction in directions:
            if self.flows[direction].is_set():
                self.flows[direction] = trio.Event()

    def resume(self) -> None:
        """What was stalled leaves, late and in order."""
        for flow in self.flows.values():
            flow.set()

    def refuse(self, refuses: bool) -> None:
        """Whether callers are turned away from now on: connected, and reset at once."""
        self._refuses = refuses

    async def _serve(self, caller: trio.SocketStream) -> None:
        self.accepted += 1
        if self._refuses:
            caller.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            caller.socket.close()
            return
        try:
            target = await trio.open_tcp_stream("127.0.0.1", self._target_port)
        except OSError:
            caller.socket.close()
            return
        target.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        caller.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        passage = Passage(caller, target)
        self.passages.append(passage)
        try:
            with passage.scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(passage.relay, UP, self)
                    nursery.start_soon(passage.relay, DOWN, self)
        finally:
            self.passages.remove(passage)
            caller.socket.close()
            target.socket.close()


@dataclass(slots=True)
class _Started:
    """`serve_listeners` hands over its listeners; whoever started the proxy has no use for them."""

    status: trio.TaskStatus[None]

    def started(self, _: object = None) -> None:
        """Passes the news on."""
        self.status.started()
