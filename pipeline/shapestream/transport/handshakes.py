"""Connections that ended before they began, as libzmq's monitor tells of them.

A handshake fails without a word to the program on either side: the server sees no message, the client waits. The
monitor says that it failed, and roughly why; to whom, it does not say.
"""

from __future__ import annotations

from enum import Enum
from itertools import count
from typing import Any

import zmq

from shapestream.transport.interface import RECEIVE_BURST
from shapestream.transport.socket_options import SocketOptions
from shapestream.transport.watched_socket import NOBLOCK, WatchedSocket

__all__ = ["HandshakeFailure", "HandshakeMonitor"]

_names = count()


class HandshakeFailure(Enum):
    """Why a handshake failed, as far as libzmq can tell. The values are its event numbers."""

    REFUSED = int(zmq.EVENT_HANDSHAKE_FAILED_AUTH)
    """The server's ZAP handler said no."""
    MISMATCH = int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)
    """One side asks for a key and the other has none, the keys do not fit, or it is not ZeroMQ at all."""
    BROKEN = int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)
    """The connection ended in the middle."""


class HandshakeMonitor(WatchedSocket):
    """Tells of the failed handshakes of one socket, from its construction on. libzmq keeps up to 1000, and drops more.

    `run` is needed only by those who wait in `receive`.
    """

    def __init__(self, socket: zmq.Socket[Any], context: zmq.Context[Any]) -> None:
        self._monitored = socket
        address = f"inproc://shapestream-handshakes-{next(_names)}"
        socket.monitor(address, sum(failure.value for failure in HandshakeFailure))
        super().__init__(zmq.PAIR, SocketOptions(linger_ms=0, receive_high_water_mark=1000), context)
        self._socket.connect(address)

    async def receive(self) -> list[HandshakeFailure]:
        """What failed, at least one; raises `trio.ClosedResourceError` once this is closed."""
        return await self._receive(self.receive_nowait)

    def receive_nowait(self) -> list[HandshakeFailure]:
        """What failed since the last call, perhaps nothing."""
        self._check_open()
        taken: list[HandshakeFailure] = []
        self._drained = False
        try:
            for _ in range(RECEIVE_BURST):
                event = self._socket.recv_multipart(NOBLOCK)[0]
                number = int.from_bytes(event[:2], "little")
                taken += [failure for failure in HandshakeFailure if failure.value == number]
        except zmq.Again:
            self._drained = True
        return taken

    def close(self) -> None:
        """Stops listening. Before the end of the socket that it tells of."""
        if not self._closed:
            self._monitored.disable_monitor()
        super().close()
