"""The HTTP server of the gateway: accepts connections, limits their number, and ends them in good order.

    listeners ── accept ──▶ HttpConnection ── HttpRequest ──▶ handler (routes)
                              ▲    │    ▲                        │
                HangupWatch ──┘    │    └────── HttpResponse ◀───┘
                                   ▼
       HeadParser, ChunkedBodyParser, content codings; PlainWire or TlsWire

Each connection is one task, which also calls the handler. Two more tasks watch all connections: one for peers that hang up,
one for limits of time.

The nursery of the listeners lies in that of the connections, which lies in that of the watch. So `stop` ends them in this
order: no new connections, then the running requests within their grace, then the watch.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Sequence
from functools import partial

import structlog
import trio

from shapestream.gateway.hangup_watch import HangupWatch
from shapestream.gateway.held_bytes import HeldBytes
from shapestream.gateway.http_connection import ConnectionPhase, HttpConnection
from shapestream.gateway.http_limits import HttpLimits
from shapestream.gateway.http_messages import Handler, HttpError
from shapestream.gateway.http_wire import HttpStream, wire_of

log = structlog.get_logger()

LOOK_S = 1.0
"""Seconds between two looks for connections whose time is over: so much later than said it ends at most."""
MOST_REFUSALS = 64
"""Connections beyond the limit that are told so at once. More are closed without an answer."""

HttpListener = trio.SocketListener | trio.SSLListener[trio.SocketStream]


class HttpServer:
    """An HTTP/1.1 server on trio that hands complete requests to one handler."""

    def __init__(self, handler: Handler, limits: HttpLimits | None = None) -> None:
        self._handler = handler
        self._limits = HttpLimits() if limits is None else limits
        self._connections: dict[HttpConnection, None] = {}
        """In order of their beginning, the oldest first. The values have no meaning."""
        self._held = HeldBytes(self._limits.max_held_bytes)
        self._refusals = 0
        self._accepting = trio.CancelScope()
        self._stopping = False

    @property
    def open_connections(self) -> int:
        """Connections that are served now."""
        return len(self._connections)

    @property
    def held_bytes(self) -> int:
        """Bytes of bodies that are held for requests without an answer."""
        return self._held.held

    @property
    def handled_requests(self) -> int:
        """Requests whose handler runs now."""
        return sum(connection.phase is ConnectionPhase.HANDLING for connection in self._connections)

    async def run(
        self,
        listeners: Sequence[HttpListener],
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Serve until `stop`, or until cancelled. Close the listeners.

        Return after `stop` as soon as all connections have ended, or after `HttpLimits.grace_s`.
        """
        watch = HangupWatch()
        try:
            async with trio.open_nursery() as watching:
                watching.start_soon(watch.run)
                watching.start_soon(self._end_overdue)
                async with trio.open_nursery() as serving:
                    with self._accepting:
                        task_status.started()
                        await trio.serve_listeners(
                            partial(self._converse, watch),
                            list(listeners),
                            handler_nursery=serving,
                        )
                    serving.cancel_scope.deadline = trio.current_time() + self._limits.grace_s
                watching.cancel_scope.cancel()
        finally:
            watch.close()

    def stop(self) -> None:
        """End in good order: no new connections, idle ones closed, requests that have begun are answered.

        A connection without a request yet has seconds for its first one.
        """
        self._stopping = True
        self._accepting.cancel()
        now = trio.current_time()
        for connection in self._connections:
            connection.stop(now)

    async def _end_overdue(self) -> None:
        while True:
            await trio.sleep(LOOK_S)
            now = trio.current_time()
            for connection in self._connections:
                connection.end_if_overdue(now)

    async def _converse(self, watch: HangupWatch, stream: HttpStream) -> None:
        try:
            wire = wire_of(stream)
            peer = wire.socket.getpeername()[0]
        except OSError:
            return  # it is gone already
        connection = HttpConnection(
            wire, peer, self._handler, self._limits, self._held, lambda: self._stopping
        )
        if not self._has_room():
            await self._refuse(connection)
            return
        self._connections[connection] = None
        try:
            with watch.watching(wire.socket.fileno(), connection.hang_up):
                await connection.run()
        except Exception:  # a defect of the server itself costs one connection
            log.exception("HTTP connection failed", peer=peer)
        finally:
            del self._connections[connection]

    def _has_room(self) -> bool:
        """Tell whether one more connection is served, if need be in the place of the oldest idle one."""
        if len(self._connections) < self._limits.max_connections:
            return True
        return any(connection.close_if_idle() for connection in self._connections)

    async def _refuse(self, connection: HttpConnection) -> None:
        if self._refusals >= MOST_REFUSALS:
            return
        self._refusals += 1
        try:
            await connection.refuse(HttpError(503, "there are too many connections", (("Retry-After", "1"),)))
        finally:
            self._refusals -= 1


def listeners_of(listening: socket.socket, tls: ssl.SSLContext | None = None) -> list[HttpListener]:
    """Return what accepts connections from a listening socket: with TLS, or plain ones."""
    listening.setblocking(False)
    plain = trio.SocketListener(trio.socket.from_stdlib_socket(listening))
    return [plain if tls is None else trio.SSLListener(plain, tls)]
