"""One HTTP/1.1 connection: reads a request, has it handled, writes the answer, and goes on with the next.

              first byte           head           last byte of the body        answer              written
    IDLE ───────────────▶ HEAD ─────────▶ BODY ─────────────────────▶ HANDLING ────────▶ WRITING ─────────▶ IDLE
     │ idle_s              │ head_s        │ body_s                      │ the peer hangs up    │ write_s
     ▼                     ▼               ▼                             ▼                      ▼
   closed             408, closed      408, closed            handler cancelled, closed       closed

Requests that a peer pipelines are answered in their order. While one is handled, nothing is read: besides it, at most
`READ_BYTES` of the next ones are held here, and the rest waits in the kernel and at the peer.

All waiting happens in one cancel scope for the whole connection. A hang-up, a stop of the server, a need for room and the
end of a phase's time cancel it in the phases that they are about, and then the connection is over. A phase notes when its
time ends, and the server looks each second: a deadline of the scope itself would take 2 us, twice in each request.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from enum import Enum, auto

import numpy as np
import structlog
import trio

from shapestream.gateway.content_coding import decoded
from shapestream.gateway.held_bytes import HeldBytes
from shapestream.gateway.http_answer import CONTINUE, answer_bytes, error_answer
from shapestream.gateway.http_limits import HttpLimits
from shapestream.gateway.http_messages import Buffer, Handler, HttpError, HttpRequest, HttpResponse
from shapestream.gateway.http_parser import ChunkedBodyParser, HeadParser
from shapestream.gateway.http_wire import READ_BYTES, Wire, drain

log = structlog.get_logger()

STEP_BYTES = 64 * 1024
"""Bytes of a body that must arrive within `HttpLimits.body_s`, so that a peer cannot hold a connection by single bytes."""
CHUNKED_READ_BYTES = 16 * 1024
"""Most bytes of a chunked body that are read at once. Where a body is all line ends, each four of them take 0.6 us:
2.5 ms in a turn of the event loop."""
LAST_WORDS_S = 5.0
"""Seconds for a last answer to leave, and for the peer to close. nginx waits as long (`lingering_timeout`)."""


class ConnectionPhase(Enum):
    """The phase of a connection, named by the thing that it waits for."""

    IDLE = auto()
    """The first byte of a request."""
    HEAD = auto()
    """The end of its head."""
    BODY = auto()
    """The end of its body."""
    HANDLING = auto()
    """The handler."""
    WRITING = auto()
    """The reader of the answer."""


class _Closed(Exception):
    """The peer has closed the connection."""


class HttpConnection:
    """One connection, from its first byte to its end."""

    __slots__ = (
        *(
            "_all_held",
            "_ends_at",
            "_handler",
            "_has_asked",
            "_held",
            "_hung_up",
            "_limits",
            "_peer",
            "_rest",
        ),
        *("_scope", "_stopping", "_wire", "phase"),
    )

    def __init__(
        self,
        wire: Wire,
        peer: str,
        handler: Handler,
        limits: HttpLimits,
        held: HeldBytes,
        stopping: Callable[[], bool],
    ) -> None:
        self._wire = wire
        self._all_held = held
        self._held = 0
        """Bytes of `held` that are this connection's."""
        self._peer = peer
        self._handler = handler
        self._limits = limits
        self._stopping = stopping
        self._scope = trio.CancelScope()
        self._rest = b""
        """Bytes of the next requests."""
        self._hung_up = False
        self._has_asked = False
        """Whether a request has begun to arrive."""
        self.phase = ConnectionPhase.IDLE
        self._ends_at = math.inf
        """When the time of the phase is over, on trio's clock."""

    # ---------------------------------------------------------------- decisions of others

    def hang_up(self) -> None:
        """Note that the peer is gone, and cancel the handler. Elsewhere, reading and writing notice it in their order."""
        self._hung_up = True
        if self.phase is ConnectionPhase.HANDLING:
            self._scope.cancel()

    def close_if_idle(self) -> bool:
        """Close the connection if it waits for a request, and is not being closed. Tell whether that is so."""
        if self.phase is not ConnectionPhase.IDLE or self._scope.cancel_called:
            return False
        self._scope.cancel()
        return True

    def stop(self, now: float) -> None:
        """Close the connection if it is idle after a request. A new one has just been accepted, and its peer may have
        sent its first request already: it has `LAST_WORDS_S` for it."""
        if self._has_asked:
            self.close_if_idle()
        else:
            self._ends_at = min(self._ends_at, now + LAST_WORDS_S)

    def end_if_overdue(self, now: float) -> None:
        """End the connection if the time of its phase is over."""
        if self._ends_at <= now:
            self._scope.cancel()

    # ----------------------------------------------------------------

    async def run(self) -> None:
        """Serve the connection until its end. The caller closes the socket."""
        try:
            with self._scope:
                await self._serve()
            if self.phase in (ConnectionPhase.HEAD, ConnectionPhase.BODY):
                await self._refuse(HttpError(408, "the request did not arrive in time"))
        except (OSError, trio.BrokenResourceError, _Closed):
            return  # the peer is gone

    async def refuse(self, error: HttpError) -> None:
        """Answer whatever comes with an error, and close."""
        try:
            await self._refuse(error)
        except (OSError, trio.BrokenResourceError):
            return

    async def _serve(self) -> None:
        try:
            while await self._serve_one():
                pass
        except HttpError as error:
            self._enter(ConnectionPhase.WRITING, math.inf)
            await self._refuse(error)
        else:
            with trio.move_on_after(LAST_WORDS_S):
                await drain(self._wire.socket)

    async def _serve_one(self) -> bool:
        """Read a request and answer it. Tell whether the connection goes on. An idle connection keeps nothing of it.

        Raises `HttpError` for a request that cannot be read, and `_Closed`.
        """
        head = await self._next_head()
        try:
            body = await self._body(head)
            self._enter(ConnectionPhase.HANDLING, math.inf)
            body = await decoded(body, head.headers, self._limits.max_body_bytes)
            if self._held < len(body) > READ_BYTES:
                self._hold(len(body) - self._held)
            if self._hung_up:
                raise _Closed
            request = HttpRequest(
                method=head.method,
                path=head.path,
                query=head.query,
                headers=head.headers,
                body=body,
                peer=self._peer,
            )
            return await self._answer(request, head)
        finally:
            if self._held:
                self._all_held.give_back(self._held)
                self._held = 0

    def _hold(self, nbytes: int) -> None:
        """Count bytes of the body; raises `HttpError` where all connections hold too many."""
        self._all_held.take(nbytes)
        self._held += nbytes

    def _enter(self, phase: ConnectionPhase, seconds: float) -> None:
        self.phase = phase
        self._ends_at = trio.current_time() + seconds

    # ---------------------------------------------------------------- reading

    async def _next_head(self) -> HeadParser:
        parser = HeadParser(self._limits)
        if self._rest:
            # Other connections have their turn between two requests that came together.
            await trio.lowlevel.checkpoint()
            data = self._rest
        else:
            self._enter(ConnectionPhase.IDLE, LAST_WORDS_S if self._stopping() else self._limits.idle_s)
            data = await self._more()
            self._has_asked = True
        rest = parser.feed(data)
        if rest is None:
            self._enter(ConnectionPhase.HEAD, self._limits.head_s)
            while rest is None:
                rest = parser.feed(await self._more())
        self._rest = rest
        return parser

    async def _more(self, most: int = READ_BYTES) -> bytes:
        data = await self._wire.read(most)
        if not data:
            raise _Closed
        return data

    async def _body(self, head: HeadParser) -> Buffer:
        """Read the body of a request, with its content coding."""
        length, limit, rest = head.content_length, self._limits.max_body_bytes, self._rest
        if length > limit:
            raise HttpError(413, f"the body has {length} bytes; at most {limit} are taken")
        if not head.chunked and length <= len(rest):
            self._rest = rest[length:]
            return rest[:length]
        if head.expects_continue and not rest:
            await self._write([CONTINUE])
        self._enter(ConnectionPhase.BODY, self._limits.body_s)
        return await self._chunked_body() if head.chunked else await self._long_body(length)

    async def _long_body(self, length: int) -> Buffer:
        # NumPy does not clear the array. So the system gives memory for the bytes that arrive, and not for those that a
        # head promises.
        body = np.empty(length, np.uint8).data
        received = len(self._rest)
        body[:received] = self._rest
        self._rest = b""
        due = received + STEP_BYTES
        while received < length:
            count = await self._wire.read_into(body[received:])
            if not count:
                raise _Closed
            self._hold(count)
            received += count
            if received >= due:
                self._enter(ConnectionPhase.BODY, self._limits.body_s)
                due = received + STEP_BYTES
        return body

    async def _chunked_body(self) -> Buffer:
        parser = ChunkedBodyParser(self._limits.max_body_bytes)
        rest = parser.feed(self._rest)
        due = parser.fed_bytes + STEP_BYTES
        while rest is None:
            rest = parser.feed(await self._more(CHUNKED_READ_BYTES))
            self._hold(len(parser.body) - self._held)
            if parser.fed_bytes >= due:
                self._enter(ConnectionPhase.BODY, self._limits.body_s)
                due = parser.fed_bytes + STEP_BYTES
        self._rest = rest
        return parser.body

    # ---------------------------------------------------------------- answering

    async def _answer(self, request: HttpRequest, head: HeadParser) -> bool:
        """Have a request handled, and write the answer. Tell whether the connection goes on."""
        try:
            response = await self._response(request)
            goes_on = head.keep_alive and not self._stopping()
            buffers = await answer_bytes(response, head, closes=not goes_on)
        except Exception:  # a defect of a handler costs its request
            log.exception("HTTP request failed", method=request.method, path=request.path, peer=self._peer)
            goes_on = head.keep_alive and not self._stopping()
            internal = error_answer(HttpError(500, "internal error"))
            buffers = await answer_bytes(internal, head, closes=not goes_on)
        await self._write(buffers)
        return goes_on

    async def _response(self, request: HttpRequest) -> HttpResponse:
        try:
            return await self._handler(request)
        except HttpError as error:
            return error_answer(error)

    async def _write(self, buffers: Sequence[Buffer]) -> None:
        rest = self._wire.write_now(buffers)
        while rest:
            self._enter(ConnectionPhase.WRITING, self._limits.write_s)
            rest = await self._wire.write_more(rest)

    async def _refuse(self, error: HttpError) -> None:
        with trio.move_on_after(LAST_WORDS_S):
            await self._write(await answer_bytes(error_answer(error), None, closes=True))
            await drain(self._wire.socket)
