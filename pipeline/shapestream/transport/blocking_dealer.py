"""The ZeroMQ socket of a slot: a DEALER that blocks its thread, with no event loop between message and work.

One thread makes it, uses it and closes it. `Wake` is what other threads have: it ends that thread's wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import zmq

from shapestream.addresses import is_ipv6
from shapestream.errors import TransportError
from shapestream.transport.curve import CallerKeys
from shapestream.transport.interface import Message
from shapestream.transport.socket_options import SocketOptions
from shapestream.transport.wake import Wake
from shapestream.transport.watched_socket import (
    POLLIN,
    POLLOUT,
    no_more_sockets,
    ready_to_send,
    receive_frames,
    send_frames,
)
from shapestream_engine.layout import Buffer


class BlockingDealer:
    """One connection of one thread. libzmq connects, and connects again, by itself."""

    def __init__(
        self,
        address: str,
        wake: Wake,
        *,
        keys: CallerKeys | None = None,
        options: SocketOptions | None = None,
    ) -> None:
        """Start to connect. Raises `TransportError` for an impossible address, and where there are no more sockets."""
        self._wake = wake
        try:
            self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        except zmq.ZMQError as error:
            raise no_more_sockets(error) from error
        (options or SocketOptions()).apply(self._socket)
        if keys is not None:
            keys.apply(self._socket)
        try:
            self._socket.set(zmq.IPV6, int(is_ipv6(address)))
            self._socket.connect(address)
        except zmq.ZMQError as error:
            self._socket.close()
            raise TransportError(f"{address}: cannot connect: {error.strerror}") from error
        self._readable = [(self._socket, POLLIN), (wake.fileno(), POLLIN)]
        self._writable = [(self._socket, POLLOUT), (wake.fileno(), POLLIN)]

    def receive(self, timeout_s: float | None = None) -> Message | None:
        """Return the next message; None after `timeout_s` seconds without one, and when the thread is woken."""
        if not self._ready(self._readable, timeout_s):
            return None
        try:
            return receive_frames(self._socket.recv)
        except zmq.Again:  # what was there came over a connection that is gone
            return None

    def send(self, frames: Sequence[Buffer], timeout_s: float | None = None) -> bool:
        """Send. Return False, with nothing sent, where there was no room for `timeout_s` seconds, or the thread is woken."""
        ready = ready_to_send(frames)
        while not send_frames(self._socket.send, ready):
            if not self._ready(self._writable, timeout_s):
                return False
        return True

    def close(self) -> None:
        """Close the connection; messages that libzmq has taken linger."""
        self._socket.close()

    def _ready(self, wanted: list[Any], timeout_s: float | None) -> bool:
        ready = zmq.zmq_poll(wanted, -1 if timeout_s is None else max(0, round(timeout_s * 1000)))
        if len(ready) == 1 and ready[0][0] is self._socket:
            return True
        if ready:
            self._wake.clear()
        return False
