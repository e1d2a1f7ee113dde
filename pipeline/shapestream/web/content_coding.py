"""Content codings of bodies: gzip and deflate, undone within a limit, and done where a client asks for one.

Long bodies are coded in a thread, so that the event loop serves others meanwhile: zlib releases the interpreter's lock.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from functools import partial

import trio

from shapestream.web.messages import Buffer, HttpError
from shapestream_engine.machine import available_cpus

INLINE_BYTES = 64 * 1024
"""Longest data, in bytes, that is coded on the event loop: zlib takes about 1 ms for it."""
STEP_BYTES = 256 * 1024
"""Bytes, coded or not, that a thread decodes in one step."""
FASTEST = 1
"""Level of zlib. Tensors of floats shrink little at any level, and the highest takes several times as long."""
MAX_WISHES_BYTES = 1024
"""Longest header `Accept-Encoding` that is read; an answer to more is not coded. 58 KB of wishes took 43 ms."""
CODINGS = {"gzip": 31, "x-gzip": 31, "deflate": 15}
"""zlib's `wbits` by the name of a coding."""
_THREADS = trio.CapacityLimiter(available_cpus())
"""More threads than CPUs would take memory only. Bodies wait here for one."""
_in_thread = partial(trio.to_thread.run_sync, limiter=_THREADS)
_ACCEPTED = (("Accept-Encoding", "gzip, deflate"),)


def coding_asked_for(accept_encoding: str) -> str | None:
    """Return the coding that a client likes best of gzip and deflate; None where it asks for neither (RFC 9110, 12.5.3)."""
    if len(accept_encoding) > MAX_WISHES_BYTES:
        return None
    wishes: dict[str, float] = {}
    for wish in accept_encoding.lower().split(","):
        name, *parameters = (part.strip() for part in wish.split(";"))
        wishes[name] = min((_quality(parameter) for parameter in parameters), default=1.0)
    others = wishes.get("*", 0.0)
    best = max(("gzip", "deflate"), key=lambda name: wishes.get(name, others))
    liking = wishes.get(best, others)
    return best if liking > 0 and liking >= wishes.get("identity", 0.0) else None


def _quality(parameter: str) -> float:
    name, _, value = parameter.partition("=")
    if name.strip() != "q":
        return 1.0
    try:
        return float(value)
    except ValueError:
        return 0.0


async def decoded(body: Buffer, headers: Mapping[str, str], max_bytes: int) -> Buffer:
    """Undo the Content-Encoding of a body. Raises `HttpError`: 415, 400 for damaged data, 413 beyond `max_bytes`."""
    coding = headers.get("content-encoding", "").lower()
    if coding in ("", "identity") or not len(body):
        return body
    if coding not in CODINGS:
        raise HttpError(
            415, f"Content-Encoding {coding!r} is not served here: use gzip or deflate", _ACCEPTED
        )
    wbits = CODINGS[coding] if _has_header(coding, body) else -15
    try:
        found: Buffer | None = None if len(body) > INLINE_BYTES else _short_decoded(body, wbits)
        if found is None:
            found = await _in_thread(_decoded, body, wbits, max_bytes)
    except zlib.error as error:
        raise HttpError(400, f"the body is no {coding}: {error}") from None
    if len(found) > max_bytes:
        raise HttpError(413, f"the body has more than {max_bytes} bytes after {coding} is undone")
    return found


def _short_decoded(body: Buffer, wbits: int) -> bytes | None:
    """Decode a body that is not long. None if its end does not come."""
    inflater = zlib.decompressobj(wbits)
    found = inflater.decompress(body, INLINE_BYTES)
    return found if inflater.eof and not inflater.unused_data else None


def _decoded(body: Buffer, wbits: int, max_bytes: int) -> bytearray:
    """Decode a body, or as much of it as is more than `max_bytes`. Raises zlib's error.

    It is done in small steps: a thread keeps the interpreter's lock while it copies what zlib has found.
    """
    inflater = zlib.decompressobj(wbits)
    found = bytearray()
    for start in range(0, len(body), STEP_BYTES):
        step: Buffer = memoryview(body)[start : start + STEP_BYTES]
        full = True
        while full and not inflater.eof:
            piece = inflater.decompress(step, STEP_BYTES)
            found += piece
            if len(found) > max_bytes:
                return found
            step, full = inflater.unconsumed_tail, len(piece) == STEP_BYTES
        if inflater.eof:
            if inflater.unused_data or start + STEP_BYTES < len(body):
                raise zlib.error("bytes follow its end")
            return found
    raise zlib.error("it is cut off")


def _has_header(coding: str, body: Buffer) -> bool:
    """Tell whether zlib's header is there. Some clients send `deflate` without it (RFC 9110, 8.4.1.2)."""
    if coding != "deflate":
        return True
    return body[0] & 0x0F == zlib.DEFLATED and int.from_bytes(body[:2], "big") % 31 == 0


async def encoded(pieces: Sequence[Buffer], coding: str) -> bytes:
    """Code a body as `gzip` or `deflate`."""
    if sum(len(piece) for piece in pieces) > INLINE_BYTES:
        return await _in_thread(_encoded, pieces, coding)
    return _encoded(pieces, coding)


def _encoded(pieces: Sequence[Buffer], coding: str) -> bytes:
    deflater = zlib.compressobj(FASTEST, zlib.DEFLATED, CODINGS[coding])
    return b"".join([*map(deflater.compress, pieces), deflater.flush()])
