"""A request and its response, as the HTTP server and its handlers hand them to each other; and what a peer may use."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

from shapestream.web.quotas import held_at_most
from shapestream_engine.layout import value

Buffer = bytes | bytearray | memoryview


@value
class HttpRequest:
    """One complete request.

    `path` is percent-decoded and has no query; `query` is as it was sent. `headers` have lower-case names; the values of a
    repeated header are joined by ", ". `body` is whole, without transfer or content encoding. `peer` is the address that the
    connection comes from, without the port; or the name of the caller, once its token is known.
    """

    method: str
    path: str
    query: str
    headers: Mapping[str, str]
    body: Buffer
    peer: str


@value
class HttpResponse:
    """One response. `body` is written piece by piece; Content-Length, Date and encodings are the HTTP server's business.

    With `stream` the body has no length: its pieces follow `body` as they come, until the stream ends or the peer leaves.
    Then the connection ends. A piece must leave within `HttpLimits.write_s`.
    """

    status: int = 200
    body: Sequence[Buffer] = ()
    headers: Sequence[tuple[str, str]] = ()
    content_type: str = "application/json"
    stream: AsyncGenerator[Buffer, None] | None = None


@dataclass(eq=False)
class HttpError(Exception):
    """A request that is answered by a status of 400 or more, and `{"error": message}`, or by `content` instead."""

    status: int
    message: str
    headers: Sequence[tuple[str, str]] = field(default=())
    content: Mapping[str, Any] | None = None
    """The JSON of the answer, for clients of protocols with errors of another form."""

    def __str__(self) -> str:
        return f"{self.status}: {self.message}"


Handler = Callable[[HttpRequest], Awaitable[HttpResponse]]
"""Answers one request; cancelled when its connection is closed. Raises `HttpError` for what it refuses."""


@value
class Admitted:
    """A request that is worth reading, by its head."""

    caller: str
    handler: Handler
    most_decoded_bytes: float = inf
    """Bytes of its body after the content coding is undone (413), where that is less than any body may have."""


Admission = Callable[[HttpRequest], Admitted]
"""Decides about a request whose body has not been read yet. Raises `HttpError`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpLimits:
    """Limits of connections and requests. Beyond one, a request gets the status named there, and its connection ends.

    Times end up to a second late.
    """

    max_connections: int = 4096
    """Connections at once. One more ends the oldest idle connection; where none is idle, the oldest whose head has not come
    yet, or the oldest stream; else the new one gets 503. A caller may wait for the bodies of as many as it leaves free."""
    most_refusals: int = 64
    """Connections beyond the limit that get 503 at once. More are closed without an answer."""
    max_head_bytes: int = 64 * 1024
    """Bytes of the request line and the headers (431). Twice what nginx admits: traces and tokens travel in headers."""
    max_headers: int = 100
    """Number of headers (431), as in Python's http.client and in Apache."""
    max_body_bytes: int = 64 * 1024 * 1024
    """Bytes of a body, before and after its content coding is undone (413)."""
    most_bodies: int = 8
    """All connections hold at most the bytes of so many of the largest bodies, in bodies and in answers that are not written
    yet: by default 512 MiB, what a client of the server may have unanswered, or an eighth of the memory if that is less and
    has room for one body. `Quotas` says what a caller may hold of them
    (429). Bodies that arrive with their head, and answers, of less than 64 KiB do not count, nor do streams."""
    max_connection_s: float = inf
    """Age of a connection, a tenth more or less, from which its next answer is its last. Then its peer may find another
    server; nothing else ends a connection that is in use."""
    idle_s: float = 75.0
    """Seconds without a request, after which a connection is closed without an answer. nginx's default."""
    head_s: float = 15.0
    """Seconds from the first byte of a request to the end of its headers (408)."""
    body_s: float = 30.0
    """Seconds in which the next 64 KiB of a body, or its rest, must arrive (408). Of chunks only their data counts."""
    write_s: float = 60.0
    """Seconds in which a reader must make room for more of an answer, or it is cut off. nginx's default."""

    @property
    def max_held_bytes(self) -> int:
        """Return the most bytes of bodies and answers that all connections hold together."""
        return held_at_most(self.most_bodies, self.max_body_bytes)
