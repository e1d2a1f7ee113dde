"""The bytes of bodies that all connections of an HTTP server hold together, and their limit.

A body counts from its first bytes until its answer is written. A request that would pass the limit is refused: to leave it
unread until there is room would let slow bodies, which end late or never, hold up all others.
"""

from __future__ import annotations

from shapestream.gateway.http_messages import HttpError


class HeldBytes:
    """The bytes that are held, of at most `most`."""

    __slots__ = ("_most", "held")

    def __init__(self, most: int) -> None:
        self._most = most
        self.held = 0

    def take(self, nbytes: int) -> None:
        """Count more bytes. Raises `HttpError` 503, and counts none, where that would pass the limit."""
        if self.held + nbytes > self._most:
            raise HttpError(
                503, f"all requests together hold {self._most} bytes, the most here", (("Retry-After", "1"),)
            )
        self.held += nbytes

    def give_back(self, nbytes: int) -> None:
        """Count so many bytes no more."""
        self.held -= nbytes
