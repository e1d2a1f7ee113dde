"""Requests that killed workers, or servers. An equal request is refused for a while: by the server that saw workers die, and
by the client that saw servers vanish.

Digests are kept, never tensors. A request's digest, which takes about a microsecond per kilobyte, is computed only if its
fingerprint matches: the model, the layout, and a checksum of the first bytes of each tensor.
"""

from __future__ import annotations

from collections import Counter
from hashlib import blake2b
from typing import TypeAlias
from zlib import crc32

from shapestream_engine.layout import Layout, Tensors

KEEP_S = 600.0
"""Seconds that a digest is kept. An equal request that comes later ends as many processes again."""
MOST_REQUESTS = 1024
"""Digests that are kept, at most, each of 16 bytes."""
DIGEST_BYTES = 16
"""With a thousand kept digests, a different request matches one of them with a probability of 3e-36."""
FIRST_BYTES = 4096
"""Bytes of each tensor that enter the fingerprint; reading them takes about a microsecond."""

_Fingerprint: TypeAlias = tuple[str, Layout, int]
"""Model, layout, and a checksum of the first bytes of each tensor."""


class Quarantine:
    """The last `max_requests` requests, each kept for `keep_s` seconds. A new one replaces the oldest."""

    __slots__ = ("_fingerprints", "keep_s", "kept", "max_requests")

    def __init__(self, max_requests: int, keep_s: float) -> None:
        """With 0 requests, or 0 s, nothing is ever refused."""
        self.max_requests = max_requests
        self.keep_s = keep_s
        self.kept: dict[bytes, tuple[float, _Fingerprint]] = {}
        """Time of expiry, and fingerprint, by digest. The first one expires first."""
        self._fingerprints: Counter[_Fingerprint] = Counter()
        """Number of kept requests by fingerprint."""

    def __len__(self) -> int:
        return len(self.kept)

    def __repr__(self) -> str:
        return f"<quarantine: {len(self.kept)} of {self.max_requests} requests>"

    def keep(self, model: str, tensors: Tensors, now: float) -> str:
        """Keep a request, or renew its time. Returns its digest, for logs."""
        digest = digest_of(model, tensors)
        if digest in self.kept:
            self._drop(digest)
        while self.kept and len(self.kept) >= self.max_requests:
            self._drop(next(iter(self.kept)))
        if self.max_requests and self.keep_s:
            fingerprint = _fingerprint(model, tensors)
            self.kept[digest] = (now + self.keep_s, fingerprint)
            self._fingerprints[fingerprint] += 1
        return digest.hex()

    def holds(self, model: str, tensors: Tensors, now: float) -> bool:
        """Tell whether a request equals a kept one: the same model, and the same bytes in the same layout."""
        while self.kept and next(iter(self.kept.values()))[0] <= now:
            self._drop(next(iter(self.kept)))
        return _fingerprint(model, tensors) in self._fingerprints and digest_of(model, tensors) in self.kept

    def _drop(self, digest: bytes) -> None:
        _, fingerprint = self.kept.pop(digest)
        self._fingerprints -= Counter((fingerprint,))  # and removes entries of count 0


def digest_of(model: str, tensors: Tensors) -> bytes:
    """Return the digest of a request: equal for the same model and the same bytes in the same layout."""
    # The layout says the length of each tensor, so no separators are needed.
    digest = blake2b(repr((model, tensors.layout)).encode(), digest_size=DIGEST_BYTES)
    for buffer in tensors.buffers:
        digest.update(memoryview(buffer))
    return digest.digest()


def _fingerprint(model: str, tensors: Tensors) -> _Fingerprint:
    checksum = 0
    for buffer in tensors.buffers:
        checksum = crc32(memoryview(buffer).cast("B")[:FIRST_BYTES], checksum)
    return model, tensors.layout, checksum
