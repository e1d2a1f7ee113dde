"""Requests that killed workers: a request that equals one of them is not run again for a while.

Digests are kept, never tensors. While the quarantine is empty, asking it costs nothing; otherwise a request's bytes are
digested only where its layout and the beginnings of its tensors are those of one that is kept.
"""

from __future__ import annotations

from collections import Counter
from hashlib import blake2b
from typing import TypeAlias
from zlib import crc32

from shapestream_engine.layout import Layout, Tensors

DIGEST_BYTES = 16
"""A request that equals none of a thousand others passes for one of them with a probability of 3e-36."""
BEGINNING_BYTES = 4096
"""Of each tensor; reading them takes about a microsecond, where a digest takes one per kilobyte."""

_Kind: TypeAlias = tuple[str, Layout, int]
"""Model, layout, and a checksum of the beginnings."""


class Quarantine:
    """The last `max_requests`, each for `keep_s` seconds. A new one replaces the oldest."""

    __slots__ = ("_kept", "_kinds", "keep_s", "max_requests")

    def __init__(self, max_requests: int, keep_s: float) -> None:
        """With 0 requests, or 0 s, nothing is ever refused."""
        if max_requests < 0 or keep_s < 0.0:
            raise ValueError("a quarantine takes no less than 0 requests for 0 s")
        self.max_requests = max_requests
        self.keep_s = keep_s
        self._kept: dict[bytes, tuple[float, _Kind]] = {}
        """By digest, the one that expires first in front: until when, and its kind."""
        self._kinds: Counter[_Kind] = Counter()
        """Number of those that are kept, by kind."""

    def __len__(self) -> int:
        return len(self._kept)

    def __repr__(self) -> str:
        return f"<quarantine: {len(self._kept)} of {self.max_requests} requests>"

    def keep(self, model: str, tensors: Tensors, now: float) -> str:
        """Keep a request, or let its time begin anew. Returns its digest, for logs."""
        digest = digest_of(model, tensors)
        if digest in self._kept:
            self._drop(digest)
        while self._kept and len(self._kept) >= self.max_requests:
            self._drop(next(iter(self._kept)))
        if self.max_requests and self.keep_s:
            kind = _kind(model, tensors)
            self._kept[digest] = (now + self.keep_s, kind)
            self._kinds[kind] += 1
        return digest.hex()

    def holds(self, model: str, tensors: Tensors, now: float) -> bool:
        """Whether a request is equal to one that is kept: the same model, and the same bytes in the same layout."""
        while self._kept and next(iter(self._kept.values()))[0] <= now:
            self._drop(next(iter(self._kept)))
        return _kind(model, tensors) in self._kinds and digest_of(model, tensors) in self._kept

    def _drop(self, digest: bytes) -> None:
        _, kind = self._kept.pop(digest)
        self._kinds -= Counter((kind,))  # and forgets a kind of which none is left


def digest_of(model: str, tensors: Tensors) -> bytes:
    """The digest of a request: equal for the same bytes in the same layout."""
    # The layout says how long each tensor is, so its bytes need no marks between them.
    digest = blake2b(repr((model, tensors.layout)).encode(), digest_size=DIGEST_BYTES)
    for buffer in tensors.buffers:
        digest.update(memoryview(buffer))
    return digest.digest()


def _kind(model: str, tensors: Tensors) -> _Kind:
    checksum = 0
    for buffer in tensors.buffers:
        checksum = crc32(memoryview(buffer).cast("B")[:BEGINNING_BYTES], checksum)
    return model, tensors.layout, checksum
