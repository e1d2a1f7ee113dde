"""When a message was sent, by our own clock: so a deadline counts while it waits in a network or at a stopped process.

The peer says its own clock's time (`Clock`) with each message that has deadlines. Our time of reading less the peer's time
of sending is the difference of the clocks plus the way. The least one belongs to the fastest message; the excess of
another message is time that it lost (NTP's clock filter: RFC 5905, section 10). The fastest way itself does not show.

A peer whose clock stood still, as in a suspended laptop, seems late with everything from then on. A question corrects
this: a message that the peer sends after it has received our question was sent after the question. The server uses this
for its clients, and workers use it for the server.
"""

from __future__ import annotations

# Two clocks may drift apart by so much (crystals by 1e-4 at worst, while NTP may steer either by some more): the least
# difference grows by this per second, or a peer whose clock is slower would seem later and later.
DRIFT = 2e-4


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
        """Note that the peer has received the question: its next messages were sent after that."""
        self._answered = self._asked_at is not None

    def heard(self, sent_us: int, now: float) -> None:
        """Take the peer's time of sending, in microseconds, of what is being read now."""
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
        """Our clock less the peer's, and the fastest message's way; None before the peer has sent its time."""
        return self._difference_s

    def sent_at(self, now: float) -> float:
        """Return when the messages behind the last `Clock` were sent, late by the fastest message's way; at most `now`."""
        return now if self._difference_s is None else min(now, self._sent_at)
