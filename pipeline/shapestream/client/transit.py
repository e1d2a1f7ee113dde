"""How long the way to the server is, and what of a deadline is left when a request arrives there. Pure.

The server counts a request's time from its arrival, or from when the fastest message sent at the same time would have
arrived (`PeerClock`). The way of the fastest has to be taken off before it is sent: half of the shortest round trip, which
each reply measures anew, being the time from sending to reply less what the server had it for.
"""

from __future__ import annotations

__all__ = ["Transit"]

MAX_GREETING_S = 0.05
"""Of a greeting's time no more counts as the way: the rest was the server's own start, or a connection being made."""


class Transit:
    """The way from the client to the server, at its fastest on this connection, in seconds."""

    __slots__ = ("_greeted_at", "_measured", "seconds")

    def __init__(self) -> None:
        self.seconds = 0.0
        self._greeted_at = 0.0
        self._measured = False

    def greeted(self, now: float) -> None:
        """`Hello` is sent."""
        self._greeted_at = now

    def welcomed(self, now: float) -> None:
        """`Welcome` has come: a first guess for this connection, until a reply tells better."""
        self.seconds = min(max(0.0, (now - self._greeted_at) / 2), MAX_GREETING_S)
        self._measured = False

    def answered(self, elapsed_s: float, served_us: int) -> None:
        """A reply has come so long after its request was sent; the server had it for `served_us`.

        A reply that was given again was served in another connection's time, and tells nothing.
        """
        way_s = (elapsed_s - served_us * 1e-6) / 2
        if way_s >= 0.0 and not (self._measured and way_s >= self.seconds):
            self.seconds = way_s
            self._measured = True

    def refused(self, elapsed_s: float) -> None:
        """An error has come so long after its request was sent. It does not say how long the server had that, but the way
        is no longer than half of it: a guess that was too high would have more requests refused, and never be corrected.
        """
        self.seconds = min(self.seconds, max(0.0, elapsed_s / 2))

    def remaining_ms(self, left_s: float) -> int:
        """What of `left_s` is left on arrival, rounded down; 0: it cannot be in time.

        Never less than half of it: a wrong estimate must not end requests that would be in time, and would then never be
        corrected by their replies.
        """
        return int(max(left_s - self.seconds, left_s / 2) * 1000)
