"""The grammar of HTTP/1.1 requests: bytes in, head and chunked body out. No socket and no clock.

    bytes ──▶ HeadParser ──▶ method, path, headers, length of the body ──▶ (its bytes are read as they are)
                                                                    └────▶ ChunkedBodyParser, where it is chunked

llhttp (by httptools) decides what is valid; it is strict, and nothing here makes it lenient. So these are refused: a
Content-Length beside Transfer-Encoding, or twice; a chunk size that is no hexadecimal number; a continued header; NUL, or a
CR or LF by itself; a blank before the colon. What it admits and RFC 9112 does not, or what nobody can serve, is refused
here: HTTP/0.9 and 2.0, no Host or two, codings beside chunked, a fragment.

llhttp does not tell where a message ends, and would begin the next one of the same bytes. Both heads and chunked bodies end
in an empty line. So a parser gives llhttp the bytes up to the next empty line, and asks whether the end has come. Bytes of
the next request are handed back.

This is the only module that imports the extra `[http]`.
"""

from __future__ import annotations

import re
from functools import lru_cache
from urllib.parse import unquote_to_bytes

import httptools

from shapestream.web.messages import HttpError, HttpLimits

_EMPTY_LINE = b"\r\n\r\n"
_CHUNKED_HEAD = b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"
"""The head that makes a parser ready for chunks."""
_BAD_ESCAPE = re.compile(rb"%(?![0-9A-Fa-f]{2})")
CHUNK_OVERHEAD = 16
"""Bytes of sizes, extensions and trailers that a chunked body may have for each of its own. A chunk of one byte has 5."""


class _PartParser:
    """A parser for one part of a request, which ends in an empty line."""

    __slots__ = ("_parser", "_tail", "fed_bytes")

    ended: bool
    """True once llhttp has found the end of the part."""

    def __init__(self, parser: httptools.HttpRequestParser) -> None:
        self._parser = parser
        self._tail = b""
        """The last bytes that were fed, in which an empty line may have begun."""
        self.fed_bytes = 0

    def feed(self, data: bytes) -> bytes | None:
        """Take more bytes. Return those after the end of the part, or None while it has not ended.

        Raises `HttpError` for bytes that are no part of a request.
        """
        start = 0
        while start < len(data):
            end = self._empty_line_end(data, start)
            self._execute(data[start:end])
            self.fed_bytes += end - start
            if self.ended:
                return data[end:]
            start = end
        return None

    def _empty_line_end(self, data: bytes, start: int) -> int:
        """Return the position after the next empty line, or the length of `data`."""
        if start == 0 and self._tail:
            at = (self._tail + data[:3]).find(_EMPTY_LINE)
            if at >= 0:
                return at + len(_EMPTY_LINE) - len(self._tail)
        at = data.find(_EMPTY_LINE, start)
        if at >= 0:
            self._tail = b""
            return at + len(_EMPTY_LINE)
        self._tail = (self._tail + data)[-3:] if len(data) < 3 else data[-3:]
        return len(data)

    def _execute(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            pass  # an offer of another protocol, which a server may ignore (RFC 9110, 7.8)
        except httptools.HttpParserError as error:
            raise HttpError(400, f"this is no valid HTTP request: {error}") from None


class HeadParser(_PartParser):
    """The parser of a request's head. The attributes are those of the request, once `feed` returned bytes."""

    __slots__ = (
        *(
            "_limits",
            "_repeated",
            "_target",
            "_two_hosts",
            "version",
            "chunked",
            "content_length",
            "ended",
            "headers",
        ),
        *("keep_alive", "method", "path", "query"),
    )

    def __init__(self, limits: HttpLimits) -> None:
        super().__init__(httptools.HttpRequestParser(self))
        self.ended = False
        self._limits = limits
        self._target = b""
        self._two_hosts = False
        self.version = ""
        self._repeated = 0
        self.method = ""
        self.path = ""
        self.query = ""
        self.headers: dict[str, str] = {}
        """By lower-case name. The values of a repeated header are joined by ", "."""
        self.keep_alive = False
        self.content_length = 0
        self.chunked = False

    @property
    def expects_continue(self) -> bool:
        """True if the peer waits for `100 Continue` before it sends the body."""
        return "expect" in self.headers and self.version == "1.1"

    def feed(self, data: bytes) -> bytes | None:
        """Take more bytes. Return those after the head, or None while it has not ended. Raises `HttpError`."""
        rest = super().feed(data)
        limits = self._limits
        if self.fed_bytes > limits.max_head_bytes:
            raise HttpError(431, f"the head of the request has more than {limits.max_head_bytes} bytes")
        if len(self.headers) + self._repeated > limits.max_headers:
            raise HttpError(431, f"the request has more than {limits.max_headers} headers")
        if rest is not None:
            # It refers to this object and this to it: together they would stay until the next search for cycles.
            del self._parser
            self._complete()
        return rest

    # ---------------------------------------------------------------- called by llhttp

    def on_url(self, piece: bytes) -> None:
        """Take a piece of the request's target."""
        self._target += piece

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header."""
        key, text = _header_name(name), value.decode("latin-1").rstrip(" \t")
        if key not in self.headers:
            self.headers[key] = text
            return
        self._repeated += 1
        if self._repeated > self._limits.max_headers:
            return  # it is refused; thousands of values are not joined first
        self._two_hosts = self._two_hosts or key == "host"
        self.headers[key] += f", {text}"

    def on_headers_complete(self) -> None:
        """Take what llhttp knows only now."""
        parser = self._parser
        self.ended = True
        self.method = parser.get_method().decode("ascii")
        self.version = parser.get_http_version()
        self.keep_alive = parser.should_keep_alive()

    # ----------------------------------------------------------------

    def _complete(self) -> None:
        headers = self.headers
        if self.version not in ("1.1", "1.0"):
            raise HttpError(400, f"HTTP/{self.version} is not served here: use HTTP/1.1")
        if self._two_hosts or ("host" not in headers and self.version == "1.1"):
            raise HttpError(400, "the request needs one header Host")
        if "transfer-encoding" in headers:
            if headers["transfer-encoding"].lower() != "chunked" or self.version == "1.0":
                raise HttpError(400, "the only transfer coding served here is chunked, in HTTP/1.1")
            self.chunked = True
        elif "content-length" in headers:
            self.content_length = int(headers["content-length"])  # llhttp admits digits only
        if headers.get("expect", "100-continue").lower() != "100-continue":
            raise HttpError(417, "the only expectation met here is 100-continue")
        self.path, self.query = _path_and_query(self._target)


@lru_cache(maxsize=256)
def _header_name(name: bytes) -> str:
    """Return a header's name in lower case. Peers send few different ones."""
    return name.decode("latin-1").lower()


def _path_and_query(target: bytes) -> tuple[str, str]:
    """Return the percent-decoded path, and the query as it is. Raises `HttpError`."""
    if b"#" in target:
        raise HttpError(400, "the target of a request has no fragment")
    if not target.startswith(b"/"):
        target = _origin_form(target)
    raw, _, query = target.partition(b"?")
    if b"%" in raw:
        if _BAD_ESCAPE.search(raw):
            raise HttpError(400, "a % in the path is not followed by two hexadecimal digits")
        raw = unquote_to_bytes(raw)
    try:
        return raw.decode("utf-8"), query.decode("latin-1")
    except UnicodeDecodeError:
        raise HttpError(400, "the path is not UTF-8") from None


def _origin_form(target: bytes) -> bytes:
    """Return the path and query of a target that names more, or less: `http://HOST/PATH`, or `*`. Raises `HttpError`."""
    if target == b"*":
        return target
    scheme, separator, rest = target.partition(b"://")
    if not separator or scheme.lower() not in (b"http", b"https"):
        raise HttpError(400, "the target of the request is no path and no http:// address")
    authority = re.match(rb"[^/?]*", rest)
    after = rest[authority.end() :] if authority else rest
    return after if after.startswith(b"/") else b"/" + after


class _Chunks:
    """The parts that llhttp has found of a chunked body."""

    __slots__ = ("body", "ended", "on_body")

    def __init__(self) -> None:
        # One array, not a list of chunks: a chunk of two bytes would take 40.
        self.body = bytearray()
        self.on_body = self.body.extend
        self.ended = False

    def on_message_complete(self) -> None:
        """Note the end."""
        self.ended = True


class ChunkedBodyParser(_PartParser):
    """The parser of a chunked body. Extensions and trailers are read and dropped."""

    __slots__ = ("_chunks", "_max_body_bytes")

    def __init__(self, max_body_bytes: int) -> None:
        # An object of its own, which does not refer to the parser: the body goes as soon as nobody needs it.
        self._chunks = _Chunks()
        super().__init__(httptools.HttpRequestParser(self._chunks))
        self._parser.feed_data(_CHUNKED_HEAD)
        self._max_body_bytes = max_body_bytes

    @property
    def ended(self) -> bool:  # type: ignore[override] # only read
        """True once llhttp has found the end of the body."""
        return self._chunks.ended

    @property
    def body(self) -> bytearray:
        """The data of the chunks."""
        return self._chunks.body

    def feed(self, data: bytes) -> bytes | None:
        """Take more bytes. Return those after the body, or None while it has not ended. Raises `HttpError`."""
        rest = super().feed(data)
        if len(self.body) > self._max_body_bytes:
            raise HttpError(413, f"the body has more than {self._max_body_bytes} bytes")
        if self.fed_bytes > CHUNK_OVERHEAD * (len(self.body) + 1024):
            raise HttpError(400, "the chunks have too much beside their data")
        return rest
