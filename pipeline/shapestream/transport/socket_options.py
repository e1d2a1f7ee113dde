"""What our sockets ask of libzmq."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import zmq

__all__ = ["SocketOptions"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SocketOptions:
    """Options of one socket. Flow control is the protocol's credit; the high-water mark is the last fence."""

    high_water_mark: int = 256
    """Messages that libzmq holds per peer and direction; it does not count their bytes, so it is kept low."""
    max_frame_bytes: int = 1024 * 1024 * 1024
    """A peer that announces a larger frame is disconnected."""
    linger_ms: int = 1000
    """How long a closed socket goes on sending what it was given."""
    heartbeat_interval_ms: int = 5000
    heartbeat_timeout_ms: int = 15000
    """A connection that answers no heartbeat of libzmq's for so long is closed: its host is gone, or has forgotten it.

    This only clears dead connections away. Who is alive is decided above, by heartbeats of the event loops, and sooner;
    libzmq's own thread answers for a process whose event loop stands still. Longer than those, since a message is read
    as a whole: while a large one is on a slow way nothing else is heard of its sender.
    """
    heartbeat_ttl_ms: int = 15000
    """The other side is asked to close the connection when it hears nothing of ours for so long."""
    reconnect_interval_ms: int = 50
    max_reconnect_interval_ms: int = 2000
    immediate: bool = False
    """Whether a DEALER takes messages only for a connection that exists. Else one that is closed and replaced while its
    server is away may reach that server after all, behind its replacement, with a greeting of long ago."""
    outbox_messages: int = 1024
    """Messages that wait for one peer behind the high-water mark; then the peer must be given up."""
    outbox_bytes: int = 256 * 1024 * 1024
    """The same, in bytes."""

    def apply(self, socket: zmq.Socket[Any]) -> None:
        """Sets them, before bind or connect."""
        socket.set(zmq.SNDHWM, self.high_water_mark)
        socket.set(zmq.RCVHWM, self.high_water_mark)
        socket.set(zmq.MAXMSGSIZE, self.max_frame_bytes)
        socket.set(zmq.LINGER, self.linger_ms)
        socket.set(zmq.HEARTBEAT_IVL, self.heartbeat_interval_ms)
        socket.set(zmq.HEARTBEAT_TIMEOUT, self.heartbeat_timeout_ms)
        socket.set(zmq.HEARTBEAT_TTL, self.heartbeat_ttl_ms)
        socket.set(zmq.RECONNECT_IVL, self.reconnect_interval_ms)
        socket.set(zmq.RECONNECT_IVL_MAX, self.max_reconnect_interval_ms)
        socket.set(zmq.IMMEDIATE, int(self.immediate))
        if socket.type == zmq.ROUTER:
            socket.set(zmq.ROUTER_MANDATORY, 1)
