"""The HTTP server of the gateway: accepts connections, limits their number, and ends them in good order.

    listeners ── accept ──▶ HttpConnection ── HttpRequest ──▶ handler (routes)
                              ▲    │    ▲                        │
    HangupWatch, ServerEnd ───┘    │    └────── HttpResponse ◀───┘
                                   ▼
       HeadParser, ChunkedBodyParser, content codings; PlainWire or TlsWire

Each connection is one task, which also calls the handler. Two more tasks watch all connections: one for peers that hang up,
one for limits of time.

The nursery of the listeners lies in that of the connections, which lies in that of the watch. So `stop` ends them in this
order: no new connections, then the running requests within their grace, then the watch.
"""

from __future__ import annotations

import select
import socket
import ssl
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from math import inf

import trio

from shapestream.telemetry.logging import get_logger
from shapestream.web.connection import LAST_WORDS_S, ConnectionPhase, HttpConnection, HttpStream, wire_of
from shapestream.web.ending import ServerEnd
from shapestream.web.messages import Admission, Admitted, Handler, HttpError, HttpLimits
from shapestream.web.quotas import Quotas
from shapestream.web.turns import LoopTurns

log = get_logger()

LOOK_S = 1.0
"""Seconds between two looks for connections whose time is over: so much later than said it ends at most."""
STOPPING_LOOK_S = 0.1
"""The same while the server ends, which waits for them."""
GIVING_WAY = (ConnectionPhase.IDLE, ConnectionPhase.HEAD, ConnectionPhase.STREAMING)
"""The phases whose oldest connection makes room for a new one, the first first. Heads of honest peers come at once."""

# Edge-triggered: a hang-up is told once, and not again in every turn of the loop until the connection is closed.
_EVENTS = select.EPOLLRDHUP | select.EPOLLET

HttpListener = trio.SocketListener | trio.SSLListener[trio.SocketStream]


def for_all(handler: Handler) -> Admission:
    """Return the admission of every request, for its address, to one handler."""
    return lambda request: Admitted(caller=request.peer, handler=handler)


class HttpServer:
    """An HTTP/1.1 server on trio that hands complete requests to their handlers."""

    def __init__(
        self, admission: Admission, limits: HttpLimits | None = None, turns: LoopTurns | None = None
    ) -> None:
        """`admission` names the caller and the handler of each request before its body is read.

        `turns` share the event loop between callers; None: there are few connections.
        """
        self._admission = admission
        self._limits = HttpLimits() if limits is None else limits
        self._turns = turns
        self._connections: dict[HttpConnection, None] = {}
        """In order of their beginning, the oldest first. The values have no meaning."""
        self._end = ServerEnd(idle_s=self._limits.idle_s, max_connection_s=self._limits.max_connection_s)
        self.empty_since: float | None = -inf
        """The time since when there is no connection; None while there are some."""
        self._held = Quotas(lambda: self._limits.max_held_bytes, "bytes")
        self._unfinished = Quotas(lambda: self._limits.max_connections, "unfinished bodies")
        """The connections that wait for a body: they make no room for new ones."""
        self._refusals = 0
        self._accepting = trio.CancelScope()
        self._grace_s = 0.0

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

        Return after `stop` as soon as all connections have ended, or after its grace and `LAST_WORDS_S`.
        """
        watch = HangupWatch()
        try:
            async with trio.open_nursery() as watching:
                watching.start_soon(watch.run)
                watching.start_soon(self._end_overdue, LOOK_S)
                if self._turns is not None:
                    watching.start_soon(self._turns.run)
                async with trio.open_nursery() as serving:
                    with self._accepting:
                        task_status.started()
                        await trio.serve_listeners(
                            partial(self._converse, watch),
                            [_KeptOpen(listener) for listener in listeners],
                            handler_nursery=serving,
                        )
                    # Closed with their listeners, connections that wait there would be reset.
                    for stream in await _waiting(listeners):
                        serving.start_soon(self._converse_and_close, watch, stream)
                    for listener in listeners:
                        await trio.aclose_forcefully(listener)
                    watching.start_soon(self._end_overdue, STOPPING_LOOK_S)
                    watching.start_soon(self._end_grace)
                    serving.cancel_scope.deadline = trio.current_time() + self._grace_s + LAST_WORDS_S
                watching.cancel_scope.cancel()
        finally:
            watch.close()
            for listener in listeners:
                await trio.aclose_forcefully(listener)

    def leave(self) -> None:
        """End each connection with its next answer. New ones are accepted."""
        self._end.leave()

    def stop(self, grace_s: float) -> None:
        """End in good order: no new connections, idle ones closed, requests that have begun are answered.

        `ServerEnd` says when idle ones are closed. Requests without an answer after `grace_s` seconds get 503.
        """
        self._grace_s = grace_s
        self._end.stop(trio.current_time())
        self._accepting.cancel()

    async def _end_overdue(self, every_s: float) -> None:
        while True:
            await trio.sleep(every_s)
            now = trio.current_time()
            for connection in self._connections:
                connection.end_if_overdue(now)

    async def _end_grace(self) -> None:
        await trio.sleep(self._grace_s)
        for connection in self._connections:
            connection.end_grace()

    async def _converse(self, watch: HangupWatch, stream: HttpStream) -> None:
        try:
            wire = wire_of(stream)
            peer = wire.socket.getpeername()[0]
        except OSError:
            return  # it is gone already
        connection = HttpConnection(
            wire,
            peer,
            self._admission,
            self._limits,
            self._held,
            self._unfinished,
            self._end,
            self._turns,
        )
        if not self._has_room():
            await self._refuse(connection)
            return
        self._connections[connection] = None
        self.empty_since = None
        try:
            with watch.watching(wire.socket.fileno(), connection.hang_up):
                await connection.run()
        except Exception:  # a defect of the server itself costs one connection
            log.exception("HTTP connection failed", peer=peer)
        finally:
            del self._connections[connection]
            if not self._connections:
                self.empty_since = trio.current_time()

    async def _converse_and_close(self, watch: HangupWatch, stream: HttpStream) -> None:
        try:
            await self._converse(watch, stream)
        finally:
            await trio.aclose_forcefully(stream)

    def _has_room(self) -> bool:
        """Tell whether one more connection is served, if need be in the place of another one."""
        if len(self._connections) < self._limits.max_connections:
            return True
        return any(connection.close_if(phase) for phase in GIVING_WAY for connection in self._connections)

    async def _refuse(self, connection: HttpConnection) -> None:
        if self._refusals >= self._limits.most_refusals:
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


class _KeptOpen(trio.abc.Listener[HttpStream]):
    """A listener that is still open after trio has ended to accept from it."""

    def __init__(self, listener: HttpListener) -> None:
        self._listener = listener

    async def accept(self) -> HttpStream:
        """Wait for a connection."""
        return await self._listener.accept()

    async def aclose(self) -> None:
        """Leave it open."""
        await trio.lowlevel.checkpoint()


async def _waiting(listeners: Sequence[HttpListener]) -> list[HttpStream]:
    """Return the connections that the system has accepted, and this process has not."""
    found: list[HttpStream] = []
    for listener in listeners:
        plain = listener if isinstance(listener, trio.SocketListener) else listener.transport_listener
        assert isinstance(plain, trio.SocketListener), "what TLS is spoken over"
        readable = select.poll()
        readable.register(plain.socket, select.POLLIN)
        while readable.poll(0):
            # Another gateway may have taken it in between.
            with trio.move_on_after(STOPPING_LOOK_S), suppress(OSError):
                found.append(await listener.accept())
    return found


class HangupWatch:
    """The watch for peers that close their connection while their request is being answered.

    A task that answers a request does not read, and a peer may have sent more requests before it closed: reading would find
    those first. The kernel tells of a closed peer whatever is unread (EPOLLRDHUP). One epoll object and one task watch all
    connections: each is registered once, and a request costs nothing.

    A peer that has closed its connection, and one that has only shut down its writing side and waits, look the same (FIN).
    Both are taken for closed, as nginx (status 499), uvicorn and Go's net/http do: a gateway that computed answers for the
    closed ones would work for nobody, and hardly any client does the other.
    """

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._calls: dict[int, Callable[[], None]] = {}

    @contextmanager
    def watching(self, descriptor: int, hung_up: Callable[[], None]) -> Iterator[None]:
        """Call `hung_up` if the peer of the socket closes during the block, or has closed before."""
        self._epoll.register(descriptor, _EVENTS)
        self._calls[descriptor] = hung_up
        try:
            yield
        finally:
            del self._calls[descriptor]
            self._epoll.unregister(descriptor)

    async def run(self) -> None:
        """Watch until cancelled."""
        while True:
            await trio.lowlevel.wait_readable(self._epoll.fileno())
            for descriptor, _ in self._epoll.poll(0):
                self._calls[descriptor]()

    def close(self) -> None:
        """Give the descriptor back. No connection is watched any more."""
        self._epoll.close()
