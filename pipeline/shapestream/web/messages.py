"""A request and its response, as the HTTP server and the protocol's handlers hand them to each other."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

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
Admission = Callable[[HttpRequest], str]
"""Returns the caller of a request whose body has not been read yet. Raises `HttpError` for what it refuses."""
