"""The clock of a peer tells when its messages were sent, so that deadlines count while a message is delayed.

The peer sends the time of its own clock (`Clock`) with each message that has deadlines. Our time of reading minus the
peer's time of sending is the difference of the clocks plus the time on the way. The smallest such value belongs to the
fastest message. A larger value means that the message was delayed by the excess (NTP's clock filter: RFC 5905, section
10). The time of the fastest message on its way stays unknown.

If the peer's clock stood still, as in a suspended laptop, all its later messages seem delayed. A question corrects this:
a message that the peer sends after it received our question was sent after the question. The server uses this for its
clients, and workers use it for the server.
"""

from __future__ import annotations

DRIFT = 2e-4
"""Seconds per second that two clocks may drift apart: crystals by 1e-4 at worst, and NTP may steer either by some more.

The smallest difference grows by this, or the messages of a slower clock would seem more and more delayed.
"""


class PeerClock:
    """A peer's clock as seen from here. Messages of a peer that never sends its time are taken as sent when read."""

    __slots__ = ("_answered", "_asked_at", "_difference_s", "_heard_at", "_sent_at")

    def __init__(self) -> None:
        self._difference_s: float | None = None
        self._heard_at = 0.0
        self._sent_at = 0.0
        """When the last `Clock` was sent, by our clock."""
        self.reconnected()

    def reconnected(self) -> None:
        """Forget the question: it may be lost with the connection."""
        self._asked_at: float | None = None
        self._answered = False

    def ask(self, now: float) -> bool:
        """Tell whether to ask the peer now to repeat a message. Until it has, it is not asked again."""
        if self._asked_at is not None:
            return False
        self._asked_at = now
        return True

    def repeated(self) -> None:
        """Note that the peer has received the question, so that its next messages were sent after the question."""
        self._answered = self._asked_at is not None

    def heard(self, sent_us: int, now: float) -> None:
        """Note the peer's time of sending, in microseconds, of the message that is being read."""
        peer_s = sent_us * 1e-6
        difference_s = now - peer_s
        if self._difference_s is not None:
            drift_s = DRIFT * max(0.0, now - self._heard_at)
            difference_s = min(difference_s, self._difference_s + drift_s)
        if self._answered and self._asked_at is not None:
            difference_s = max(difference_s, self._asked_at - peer_s)
            self.reconnected()
        self._difference_s, self._heard_at, self._sent_at = difference_s, now, peer_s + difference_s

    @property
    def difference_s(self) -> float | None:
        """Return our clock minus the peer's, plus the fastest way; None before the peer has sent its time."""
        return self._difference_s

    def sent_at(self, now: float) -> float:
        """Return when the entries after the last `Clock` were sent, plus the fastest way; never later than `now`."""
        return now if self._difference_s is None else min(now, self._sent_at)
