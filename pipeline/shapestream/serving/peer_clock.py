"""When was this sent, by our own clock? So a deadline counts while a message waits in a network or at a stopped process.

The peer says its own clock's time (`Clock`) with each message that has deadlines. What our clock shows when that is read,
less what the peer's showed, is the difference between the two clocks and the time on the way. The difference is constant, so
the least ever seen belongs to the fastest message, and whatever another one shows above it is time that it lost on its
way, or here, before it was read. (The way of the fastest does not show in one direction: who knows the round trip takes
half of it off.) NTP's clock filter trusts the sample of the least delay for the same reason: RFC 5905, section 10.

A peer whose clock stood still, as in a suspended laptop, seems late with everything from then on. The server tells this from
a slow way by cause and effect: what a client sends after it has heard us was sent after we spoke.

Used for clients by the server, and for the server by its workers.
"""

from __future__ import annotations

__all__ = ["PeerClock"]

# Two clocks may drift apart by so much (crystals by 1e-4 at worst, while NTP may steer either by some more): the least
# difference grows by this per second, or a peer whose clock is slower would seem later and later.
DRIFT = 2e-4


class PeerClock:
    """A peer's clock as seen from here; one that never says what it shows is taken to send in no time."""

    __slots__ = ("_asked_at", "_difference_s", "_heard_at", "_peer_s", "_repeated")

    def __init__(self) -> None:
        self._peer_s: float | None = None
        self._difference_s = 0.0
        self._heard_at = 0.0
        self._asked_at: float | None = None
        """When we last said what the peer is to repeat; None: it has done so, or was not asked."""
        self._repeated = False

    def ask(self, now: float) -> bool:
        """Whether the peer is to be asked now to repeat something. Until it has, it is not asked again."""
        if self._asked_at is not None:
            return False
        self._asked_at = now
        return True

    def repeated(self) -> None:
        """The peer has heard what it was asked: what it sends from here on was sent after that."""
        self._repeated = self._asked_at is not None

    def reconnected(self) -> None:
        """What the peer was asked may be lost with its connection."""
        self._asked_at, self._repeated = None, False

    def heard(self, sent_us: int, now: float) -> None:
        """Takes what the peer's clock showed when it sent what is being read now."""
        peer_s = sent_us * 1e-6
        difference_s = now - peer_s
        if self._peer_s is not None:
            drift_s = DRIFT * max(0.0, now - self._heard_at)
            difference_s = min(difference_s, self._difference_s + drift_s)
        if self._repeated and self._asked_at is not None:
            difference_s = max(difference_s, self._asked_at - peer_s)
            self.reconnected()
        self._peer_s, self._difference_s, self._heard_at = peer_s, difference_s, now

    def sent_at(self, now: float) -> float:
        """When what follows the last `Clock` was sent, by our clock, late by the fastest message's way; at most `now`."""
        return now if self._peer_s is None else min(now, self._peer_s + self._difference_s)
