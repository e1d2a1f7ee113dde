"""How long the way to the server is, and what of a deadline is left when a request arrives there. Pure.

The server counts a request's time from its arrival, by its own clock. What the way takes has to be taken off before it
is sent: half of the round trip, as each reply tells it anew, being the time from sending to reply less what the server
had it for.
"""

from __future__ import annotations

__all__ = ["Transit"]

MAX_GREETING_S = 0.05
"""Of a greeting's time no more counts as the way: the rest was the server's own start, or a connection being made."""
SHARE = 0.125
"""Of each new measurement in the estimate, as in TCP's (RFC 6298): one late turn of an event loop changes little."""


class Transit:
    """The way from the client to the server, in seconds."""

    __slots__ = ("_greeted_at", "seconds")

    def __init__(self) -> None:
        self.seconds = 0.0
        self._greeted_at = 0.0

    def greeted(self, now: float) -> None:
        """`Hello` is sent."""
        self._greeted_at = now

    def welcomed(self, now: float) -> None:
        """`Welcome` has come: the first measurement on this connection."""
        self.seconds = min(max(0.0, (now - self._greeted_at) / 2), MAX_GREETING_S)

    def answered(self, elapsed_s: float, served_us: int) -> None:
        """A reply has come so long after its request was sent; the server had it for `served_us`.

        A reply that was given again was served in another connection's time, and tells nothing.
        """
        round_trip_s = elapsed_s - served_us * 1e-6
        if round_trip_s >= 0.0:
            self.seconds += (round_trip_s / 2 - self.seconds) * SHARE

    def remaining_ms(self, left_s: float) -> int:
        """What of `left_s` is left on arrival, rounded down; 0: it cannot be in time.

        Never less than half of it: a wrong estimate must not end requests that would be in time, and would then never be
        corrected by their replies.
        """
        return int(max(left_s - self.seconds, left_s / 2) * 1000)
