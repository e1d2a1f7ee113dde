"""An answer as the bytes of HTTP/1.1: status line, headers, and the pieces of the body."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from email.utils import formatdate
from functools import lru_cache
from http import HTTPStatus

from shapestream.web.content_coding import coding_asked_for, encoded
from shapestream.web.messages import Buffer, HttpError, HttpResponse
from shapestream.web.parser import HeadParser

JOINED_BYTES = 16 * 1024
"""Smaller pieces are joined with their neighbours, so that a body of very many is written in few calls."""
LEAST_CODED_BYTES = 1024
"""Bytes from which a body is compressed. Less fits a packet or two, with or without."""

_STATUS_LINES = {
    status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n"
    for status in HTTPStatus
    if status.value >= HTTPStatus.OK
}
_WITHOUT_BODY = (HTTPStatus.NO_CONTENT, HTTPStatus.NOT_MODIFIED)
_OWN_HEADERS = {"connection", "content-length", "date", "transfer-encoding", "vary"}
"""Headers that only this module writes."""

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


def error_answer(error: HttpError) -> HttpResponse:
    """Return `{"error": message}`, or the error's own content, with its status and headers."""
    content = {"error": error.message} if error.content is None else error.content
    text = json.dumps(content, ensure_ascii=False)
    return HttpResponse(
        status=error.status, body=(text.encode("utf-8", "replace"),), headers=tuple(error.headers)
    )


async def answer_bytes(response: HttpResponse, head: HeadParser | None, *, closes: bool) -> list[Buffer]:
    """Return the buffers of an answer, to be written one after another. Large ones are the response's own.

    `head` is that of the request; None where it could not be read. With `closes` the peer is told that the connection
    ends. Raises ValueError for a response that cannot be sent, such as one with a line break in a header.
    """
    pieces = [_as_bytes(piece) for piece in response.body]
    length = sum(map(len, pieces))
    lines = [_STATUS_LINES[response.status]]
    if response.status not in _WITHOUT_BODY:
        asked = "" if head is None else head.headers.get("accept-encoding", "")
        if asked and length >= LEAST_CODED_BYTES and response.stream is None:
            lines.append("Vary: Accept-Encoding\r\n")
            coding = coding_asked_for(asked)
            if coding is not None:
                pieces = [await encoded(pieces, coding)]
                length = len(pieces[0])
                lines.append(f"Content-Encoding: {coding}\r\n")
        lines.append(f"Content-Type: {response.content_type}\r\n")
        if response.stream is None:
            lines.append(f"Content-Length: {length}\r\n")
    lines.append(_date(int(time.time())))
    lines.extend(_checked(name, value) for name, value in response.headers)
    if closes:
        lines.append("Connection: close\r\n")
    elif head is not None and head.version == "1.0":
        lines.append("Connection: keep-alive\r\n")
    lines.append("\r\n")
    text = "".join(lines).encode("latin-1")
    if response.status in _WITHOUT_BODY or (head is not None and head.method == "HEAD"):
        return [text]
    return _joined(text, pieces)


def _joined(text: bytes, pieces: Sequence[Buffer]) -> list[Buffer]:
    """Join small buffers with their neighbours, so that millions of them are a few for the system."""
    found: list[Buffer] = []
    small: list[Buffer] = [text]
    for piece in pieces:
        if len(piece) < JOINED_BYTES:
            small.append(piece)
            continue
        if small:
            found.append(b"".join(small))
            small = []
        found.append(piece)
    if small:
        found.append(b"".join(small))
    return found


def _as_bytes(piece: Buffer) -> Buffer:
    """Return a view of single bytes, so that its length is the number of them."""
    if not isinstance(piece, memoryview) or (piece.itemsize == 1 and piece.ndim == 1):
        return piece
    return piece.cast("B") if piece.nbytes else b""


def _checked(name: str, value: str) -> str:
    line = f"{name}: {value}\r\n"
    if line.count("\r") != 1 or line.count("\n") != 1 or "\0" in line:
        raise ValueError(f"the header {name!r} of a response has a line break")
    if name.lower() in _OWN_HEADERS:
        raise ValueError(f"the header {name!r} of a response is the HTTP server's business")
    return line


@lru_cache(maxsize=1)
def _date(second: int) -> str:
    return f"Date: {formatdate(second, usegmt=True)}\r\n"
