"""Options of our ZeroMQ sockets, with their reasons."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import zmq

MAX_FRAMES = 65_536 + 2
"""Above the frames of a valid message on any port (`wire/limits.py`, which this layer does not import): a frame's object
costs more memory than a small frame."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SocketOptions:
    """Options of one socket. Flow control is the protocol's credit; the high-water mark is the last fence."""

    high_water_mark: int = 256
    """Messages that libzmq queues for a peer that does not read; low, since libzmq does not count their bytes."""
    receive_high_water_mark: int = 0
    """Unread messages on this side. 0: no limit. Other values are for `inproc://` only; `apply` has the reason."""
    max_frame_bytes: int = 1024 * 1024 * 1024
    """Largest frame; a peer that announces a larger one is disconnected."""
    max_frames: int = MAX_FRAMES
    """Frames of a longer message that a ROUTER hands over; it drops the rest, and ends the connection."""
    linger_ms: int = 1000
    """Time that a closed socket goes on sending its queue."""
    handshake_ms: int = 5000
    """Time for a handshake, which takes three messages; then the connection is closed."""
    dead_after_ms: int = 15000
    """Time without acknowledgement after which the kernel closes a tcp connection. It only clears dead
    connections away: heartbeats of the event loops decide which peer is alive, and sooner."""
    reconnect_interval_ms: int = 50
    max_reconnect_interval_ms: int = 2000
    immediate: bool = False
    """A DEALER takes messages only for a connection that exists. Otherwise one that is closed and replaced while its
    server is away may reach that server later, behind its replacement, with an old greeting."""
    outbox_messages: int = 1024
    """Messages that wait for one peer behind the high-water mark; then the peer must be given up."""
    outbox_bytes: int = 256 * 1024 * 1024
    """Bytes that wait for one peer behind the high-water mark; then the peer must be given up."""
    farewell: bytes = b""
    """A message of one frame that a ROUTER sends before it hangs up: it says, again, that the connection is over."""

    def apply(self, socket: zmq.Socket[Any]) -> None:
        """Set the options of a socket, before bind or connect."""
        # libzmq 4.3.5 must never stop to read a connection, and has no timer that writes. Where a pipe is full
        # (ZMQ_RCVHWM) and the connection breaks, `stream_engine_base_t::in_event_internal` sets `_io_error`, and each
        # later `out_event` ends the process (`!_io_error`, stream_engine_base.cpp:310; issue 4841). `timer_event`
        # calls it for ZMQ_HEARTBEAT_IVL, `zmtp_engine_t::process_heartbeat_message` for a PING that was not decoded
        # before, whatever this side has set. So there is no ZMQ_RCVHWM: the server cuts off
        # a peer that sends beyond its credit (serving/inbox.py).
        # A timeout of a heartbeat at a full pipe ends a connecting process later, too (`_input_stopped` in
        # `restart_input`; issue 3937). The other timers only call `error` (handshake, time to live) or connect again
        # (`stream_connecter_base_t::timer_event`); neither asserts anything of the connection.
        socket.set(zmq.RCVHWM, self.receive_high_water_mark)
        socket.set(zmq.HEARTBEAT_IVL, 0)
        socket.set(zmq.SNDHWM, self.high_water_mark)
        socket.set(zmq.MAXMSGSIZE, self.max_frame_bytes)
        socket.set(zmq.LINGER, self.linger_ms)
        socket.set(zmq.HANDSHAKE_IVL, self.handshake_ms)
        socket.set(zmq.TCP_KEEPALIVE, 1)
        socket.set(zmq.TCP_KEEPALIVE_IDLE, self.dead_after_ms // 3000)
        socket.set(zmq.TCP_KEEPALIVE_INTVL, self.dead_after_ms // 3000)
        socket.set(zmq.TCP_KEEPALIVE_CNT, 2)
        socket.set(zmq.TCP_MAXRT, self.dead_after_ms)
        socket.set(zmq.RECONNECT_IVL, self.reconnect_interval_ms)
        socket.set(zmq.RECONNECT_IVL_MAX, self.max_reconnect_interval_ms)
        socket.set(zmq.IMMEDIATE, int(self.immediate))
        if socket.type == zmq.ROUTER:
            socket.set(zmq.ROUTER_MANDATORY, 1)
