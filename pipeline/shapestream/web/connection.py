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
import os
import random
import socket
import struct
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import replace
from enum import Enum, auto
from fcntl import ioctl
from functools import partial
from termios import FIONREAD

import numpy as np
import trio

from shapestream.telemetry.logging import get_logger
from shapestream.web.answers import CONTINUE, answer_bytes, error_answer
from shapestream.web.content_coding import decoded
from shapestream.web.ending import ServerEnd
from shapestream.web.messages import (
    Admission,
    Buffer,
    Handler,
    HttpError,
    HttpLimits,
    HttpRequest,
    HttpResponse,
)
from shapestream.web.parser import ChunkedBodyParser, HeadParser
from shapestream.web.quotas import BeyondQuota, Quotas
from shapestream.web.turns import LoopTurns

log = get_logger()

READ_BYTES = 64 * 1024
"""Most bytes that are read of requests before they are looked at."""
TLS_PIECE_BYTES = 256 * 1024
"""Bytes that are encrypted and written at once. With 64 KiB, 4 MiB each way took 1.15 of the CPU."""
MOST_BUFFERS = os.sysconf("SC_IOV_MAX")
"""Most buffers of one `writev`."""
STEP_BYTES = 64 * 1024
"""Bytes of a body that must arrive within `HttpLimits.body_s`, so that a peer cannot hold a connection by single bytes."""
CHUNKED_READ_BYTES = 16 * 1024
"""Most bytes of a chunked body that are read at once. Where a body is all line ends, each four of them take 0.6 us:
2.5 ms in a turn of the event loop."""
LINGER_S = 0.5
"""Seconds that a connection which was closed without a request stays, for one that was on its way: its peer sees the end
of the connection, and no reset. A multiple of the time that a packet takes."""
RETRY_AFTER_S = "1"
"""Seconds after which a caller beyond its quota may try again. Mostly bodies are read, and answers written, in less."""
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
    STREAMING = auto()
    """The next piece of an answer without a length."""


_REQUESTED = (ConnectionPhase.HEAD, ConnectionPhase.BODY, ConnectionPhase.HANDLING)
"""The phases of a request without a byte of an answer."""
RETRY_SOON = (("Retry-After", "1"),)
"""Header of an answer to a request that another server, or this one soon, may take."""


class _Closed(Exception):
    """The peer has closed the connection."""


class HttpConnection:
    """One connection, from its first byte to its end."""

    __slots__ = (
        *(
            "_admission",
            "_aged_at",
            "_all_held",
            "_caller",
            "_end",
            "_ends_at",
            "_grace_is_over",
            "_has_asked",
            "_held",
            "_hung_up",
            "_idle_since",
            "_limits",
            "_peer",
            "_rest",
        ),
        *("_scope", "_turns", "_unanswered", "_unfinished", "_wire", "phase"),
    )

    def __init__(
        self,
        wire: Wire,
        peer: str,
        admission: Admission,
        limits: HttpLimits,
        held: Quotas,
        unfinished: Quotas,
        end: ServerEnd,
        turns: LoopTurns | None,
    ) -> None:
        self._wire = wire
        self._all_held = held
        self._unfinished = unfinished
        self._held = 0
        """Bytes of `held` that are this connection's."""
        self._peer = peer
        self._admission = admission
        self._caller = peer
        """Of the request that is read or handled."""
        self._limits = limits
        self._end = end
        self._turns = turns
        self._idle_since = trio.current_time()
        """When it began to wait for its present request."""
        self._aged_at = end.aged_at(self._idle_since, random.random())
        """When it is too old to go on after an answer."""
        self._scope = trio.CancelScope()
        self._rest = b""
        """Bytes of the next requests."""
        self._hung_up = False
        self._unanswered = False
        """Whether it was closed to make room."""
        self._grace_is_over = False
        self._has_asked = False
        """Whether a request has begun to arrive."""
        self.phase = ConnectionPhase.IDLE
        self._ends_at = math.inf
        """When the time of the phase is over, on trio's clock. `ServerEnd` says it of IDLE."""

    # ---------------------------------------------------------------- decisions of others

    def hang_up(self) -> None:
        """Note that the peer is gone, and cancel the handler. Elsewhere, reading and writing notice it in their order."""
        self._hung_up = True
        if self.phase in (ConnectionPhase.HANDLING, ConnectionPhase.STREAMING):
            self._scope.cancel()

    def close_if(self, phase: ConnectionPhase) -> bool:
        """Close the connection without an answer if it is in this phase, and not being closed. Tell whether that is so."""
        if self.phase is not phase or self._scope.cancel_called:
            return False
        self._unanswered = True
        self._scope.cancel()
        return True

    def end_if_overdue(self, now: float) -> None:
        """End the connection if the time of its phase is over. One whose next request is there already goes on."""
        if self.phase is not ConnectionPhase.IDLE:
            if self._ends_at <= now:
                self._scope.cancel()
        elif self._idle_until() <= now and not self._wire.has_unread():
            self._scope.cancel()

    def _idle_until(self) -> float:
        return self._end.idle_until(self._idle_since, self._aged_at, has_asked=self._has_asked)

    def end_grace(self) -> None:
        """End the connection: the server waits no longer for the answer of its request."""
        self._grace_is_over = True
        self._scope.cancel()

    # ----------------------------------------------------------------

    async def run(self) -> None:
        """Serve the connection until its end. The caller closes the socket."""
        try:
            with self._scope:
                await self._serve()
            if (error := self._why_unanswered()) is not None:
                await self._refuse(error)
            elif self.phase is ConnectionPhase.IDLE and not self._unanswered:
                with trio.move_on_after(LINGER_S):
                    await drain(self._wire.socket)
        except (OSError, trio.BrokenResourceError, _Closed):
            return  # the peer is gone

    def _why_unanswered(self) -> HttpError | None:
        """Return the answer to a request that was cut off; None where there is none, or no room for an answer."""
        if self._unanswered or not self._scope.cancelled_caught:
            return None
        if self._grace_is_over and not self._hung_up and self.phase in _REQUESTED:
            return HttpError(503, "the server ends, and did not wait longer for this request", RETRY_SOON)
        if self.phase in (ConnectionPhase.HEAD, ConnectionPhase.BODY):
            return HttpError(408, "the request did not arrive in time")
        return None

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
            # Its frames would hold what has come of the body, which is counted no more, until the peer has read the answer.
            error.__traceback__ = error.__context__ = None
            await self._refuse(error)
        else:
            self._enter(ConnectionPhase.WRITING, math.inf)
            with trio.move_on_after(LAST_WORDS_S):
                await drain(self._wire.socket)

    async def _serve_one(self) -> bool:
        """Read a request and answer it. Tell whether the connection goes on. An idle connection keeps nothing of it.

        Raises `HttpError` for a request that cannot be read, and `_Closed`.
        """
        head = await self._next_head()
        request = HttpRequest(
            method=head.method,
            path=head.path,
            query=head.query,
            headers=head.headers,
            body=b"",
            peer=self._peer,
        )
        try:
            admitted = self._admission(request)
            self._caller = admitted.caller
        except HttpError as error:
            self._caller = self._peer
            await self._turn()
            if not self._has_come(head):
                raise
            self._rest = self._rest[head.content_length :]
            return await self._answer(partial(_raise, error), request, head)
        await self._turn()
        try:
            body = await self._body(head)
            self._enter(ConnectionPhase.HANDLING, math.inf)
            most = min(admitted.most_decoded_bytes, self._limits.max_body_bytes)
            body = await decoded(body, head.headers, int(most))
            if self._held < len(body) > READ_BYTES:
                self._hold(len(body))
            if self._hung_up:
                raise _Closed
            answer = self._answer(admitted.handler, replace(request, body=body, peer=self._caller), head)
            del body  # the answer is counted in its place
            return await answer
        finally:
            if self._held:
                self._all_held.give_back(self._caller, self._held)
                self._held = 0

    async def _turn(self) -> None:
        """Wait until the request is its caller's next one, where the turn of the event loop has many."""
        if self._turns is not None and self._turns.is_full():
            self._enter(ConnectionPhase.HANDLING, math.inf)
            await self._turns.wait(self._caller)

    def _has_come(self, head: HeadParser) -> bool:
        """Tell whether the body of a request, if it has one, has come with its head."""
        return not head.chunked and head.content_length <= len(self._rest)

    def _hold(self, nbytes: int) -> None:
        """Count so many bytes of the request, or of its answer, instead of those before.

        Raises `HttpError` where its caller would hold more than its quota.
        """
        if nbytes != self._held:
            with _told():
                self._all_held.change(self._caller, self._held, nbytes)
            self._held = nbytes

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
            self.phase, self._idle_since = ConnectionPhase.IDLE, trio.current_time()
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
        if self._has_come(head):
            self._rest = rest[length:]
            return rest[:length]
        with _told(), self._unfinished.one(self._caller):
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
            self._hold(self._held + count)
            received += count
            if received >= due:
                self._enter(ConnectionPhase.BODY, self._limits.body_s)
                due = received + STEP_BYTES
        return body

    async def _chunked_body(self) -> Buffer:
        parser = ChunkedBodyParser(self._limits.max_body_bytes)
        rest = parser.feed(self._rest)
        due = len(parser.body) + STEP_BYTES
        while rest is None:
            rest = parser.feed(await self._more(CHUNKED_READ_BYTES))
            self._hold(len(parser.body))
            if len(parser.body) >= due:
                self._enter(ConnectionPhase.BODY, self._limits.body_s)
                due = len(parser.body) + STEP_BYTES
        self._rest = rest
        return parser.body

    # ---------------------------------------------------------------- answering

    async def _answer(self, handler: Handler, request: HttpRequest, head: HeadParser) -> bool:
        """Have a request handled, and write the answer. Tell whether the connection goes on."""
        method, path = request.method, request.path
        try:
            response = await _response(handler, request)
            del request
            goes_on = self._goes_on_after(head) and response.stream is None
            buffers = await answer_bytes(response, head, closes=not goes_on)
            nbytes = sum(map(len, buffers))
            self._hold(nbytes if nbytes > READ_BYTES else 0)
        except HttpError as error:  # the peer, or its caller's other ones, do not read
            goes_on = self._goes_on_after(head)
            response = error_answer(error)
            buffers = await answer_bytes(response, head, closes=not goes_on)
        except Exception:  # a defect of a handler costs its request
            log.exception("HTTP request failed", method=method, path=path, peer=self._peer)
            goes_on = self._goes_on_after(head)
            internal = error_answer(HttpError(500, "internal error"))
            response, buffers = internal, await answer_bytes(internal, head, closes=not goes_on)
        await self._write(buffers)
        if response.stream is not None:
            async with aclosing(response.stream) as pieces:
                if head.method != "HEAD":
                    await self._stream(pieces)
        return goes_on

    def _goes_on_after(self, head: HeadParser) -> bool:
        return head.keep_alive and self._end.keeps_open(self._aged_at, trio.current_time())

    async def _stream(self, pieces: AsyncGenerator[Buffer, None]) -> None:
        """Write pieces as they come."""
        self._enter(ConnectionPhase.STREAMING, math.inf)
        async for piece in pieces:
            await self._write([piece])
            self._enter(ConnectionPhase.STREAMING, math.inf)
            if self._hung_up:
                raise _Closed

    async def _write(self, buffers: Sequence[Buffer]) -> None:
        rest = self._wire.write_now(buffers)
        while rest:
            self._enter(ConnectionPhase.WRITING, self._limits.write_s)
            rest = await self._wire.write_more(rest)

    async def _refuse(self, error: HttpError) -> None:
        with trio.move_on_after(LAST_WORDS_S):
            await self._write(await answer_bytes(error_answer(error), None, closes=True))
            await drain(self._wire.socket)


@contextmanager
def _told() -> Iterator[None]:
    """Turn a quota that is full into the answer that its caller gets."""
    try:
        yield
    except BeyondQuota as error:
        # It would keep the frames in which it was raised, and these the body: from CPython 3.13 on until a collection.
        error.__traceback__ = None
        raise HttpError(429, error.message, (("Retry-After", RETRY_AFTER_S),)) from None


async def _response(handler: Handler, request: HttpRequest) -> HttpResponse:
    try:
        return await handler(request)
    except HttpError as error:
        return error_answer(error)


async def _raise(error: HttpError, request: HttpRequest) -> HttpResponse:
    raise error


# ---------------------------------------------------------------- the bytes, in and out
#
# A plain socket is used by system calls on its descriptor: an answer of many pieces is one `writev`, and a body is read into
# the array that keeps it. trio's streams offer neither, and take a turn of the event loop for each write.


class PlainWire:
    """A TCP socket."""

    __slots__ = ("_descriptor", "socket")

    def __init__(self, stream: trio.SocketStream) -> None:
        self.socket = stream.socket
        self._descriptor = stream.socket.fileno()
        _let_the_system_buffer(self.socket)

    async def read(self, most: int = READ_BYTES) -> bytes:
        """Wait for bytes, and return at most `most` of them; none after the peer's last."""
        while True:
            # Waiting comes first: mostly there is nothing yet. It is also where other connections have their turn.
            await trio.lowlevel.wait_readable(self._descriptor)
            try:
                return os.read(self._descriptor, most)
            except BlockingIOError:
                continue

    def has_unread(self) -> bool:
        """Tell whether the system has bytes of the peer."""
        return has_unread(self._descriptor)

    async def read_into(self, room: memoryview) -> int:
        """Wait for bytes, write them into `room`, and return their number; 0 after the peer's last."""
        while True:
            await trio.lowlevel.wait_readable(self._descriptor)
            try:
                return os.readv(self._descriptor, [room])
            except BlockingIOError:
                continue

    def write_now(self, buffers: Sequence[Buffer]) -> Sequence[Buffer]:
        """Write what the system takes at once. Return the rest."""
        while buffers:
            try:
                written = os.writev(self._descriptor, buffers[:MOST_BUFFERS])
            except BlockingIOError:
                break
            buffers = _after(buffers, written)
        return buffers

    async def write_more(self, buffers: Sequence[Buffer]) -> Sequence[Buffer]:
        """Wait until the system takes more, and write it. Return the rest."""
        await trio.lowlevel.wait_writable(self._descriptor)
        return self.write_now(buffers)


class TlsWire:
    """TLS over a TCP socket."""

    __slots__ = ("_stream", "socket")

    def __init__(self, stream: trio.SSLStream[trio.SocketStream]) -> None:
        self._stream = stream
        self.socket = stream.transport_stream.socket
        _let_the_system_buffer(self.socket)

    async def read(self, most: int = READ_BYTES) -> bytes:
        """Wait for bytes, and return at most `most` of them; none after the peer's last."""
        return bytes(await self._stream.receive_some(most))

    def has_unread(self) -> bool:
        """Tell whether the system has bytes of the peer."""
        return has_unread(self.socket.fileno())

    async def read_into(self, room: memoryview) -> int:
        """Wait for bytes, write them into `room`, and return their number; 0 after the peer's last."""
        data = await self._stream.receive_some(min(len(room), READ_BYTES))
        room[: len(data)] = data
        return len(data)

    def write_now(self, buffers: Sequence[Buffer]) -> Sequence[Buffer]:
        """Write nothing: TLS may have to wait first. Return all."""
        return buffers

    async def write_more(self, buffers: Sequence[Buffer]) -> Sequence[Buffer]:
        """Write the next piece, as soon as the system takes it. Return the rest."""
        piece = memoryview(buffers[0])[:TLS_PIECE_BYTES]
        await self._stream.send_all(piece)
        return _after(buffers, len(piece))


Wire = PlainWire | TlsWire
HttpStream = trio.SocketStream | trio.SSLStream[trio.SocketStream]


def wire_of(stream: HttpStream) -> Wire:
    """Return the form of a connection's bytes."""
    return PlainWire(stream) if isinstance(stream, trio.SocketStream) else TlsWire(stream)


def _let_the_system_buffer(own: trio.socket.SocketType) -> None:
    """Set the system's own bound on unsent bytes, which is up to the 4 MiB of `tcp_wmem`.

    trio lets the system take more only when less than 16 KiB are unsent: 4 MiB would be written in 13 turns of the event
    loop instead of two.
    """
    own.setsockopt(trio.socket.IPPROTO_TCP, trio.socket.TCP_NOTSENT_LOWAT, 0)


def has_unread(descriptor: int) -> bool:
    """Tell whether a socket has bytes that were not read."""
    (nbytes,) = struct.unpack("i", ioctl(descriptor, FIONREAD, bytes(4)))
    return bool(nbytes > 0)


async def drain(own: trio.socket.SocketType) -> None:
    """Tell the peer that nothing more comes, and drop what it still sends, until it closes too.

    A socket that is closed with unread bytes resets the connection, and the peer may lose the last answer.
    """
    try:
        own.shutdown(socket.SHUT_WR)
        while await own.recv(READ_BYTES):
            pass
    except OSError:
        return  # the peer has reset the connection


def _after(buffers: Sequence[Buffer], written: int) -> Sequence[Buffer]:
    """Return what follows the first `written` bytes."""
    for index, buffer in enumerate(buffers):
        if written < len(buffer):
            return [memoryview(buffer)[written:], *buffers[index + 1 :]]
        written -= len(buffer)
    return ()
