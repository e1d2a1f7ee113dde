"""What one end of a connection knows of the other: whether it still speaks, and how its clock differs. Pure.

Each end of a connection sends a heartbeat where it has nothing else to say; any message is a sign of life. Clients and
workers keep a `Liveness` of their server. What it promises:

- A peer that says nothing for `silence_s` is silent, unless this process itself stood still meanwhile. Silence that is
  noticed late may be this process's own: the messages that came meanwhile are read first, for `STALL_S`.
- The peer hears of this end once per heartbeat, and no more often than every `MIN_HEARTBEAT_S`, whatever it asks for.

What it does not do: it sends nothing and reads no clock. Slots' threads wait for a message and for silence by one call of
their socket, so they need none (`serving/slot_threads.py`); their `silence_s` is `silence_of` a heartbeat, too.

The clock of a peer tells when its messages were sent, so that deadlines count while a message is delayed (`PeerClock`). The
peer sends the time of its own clock (`Clock`) with each message that has deadlines. Our time of reading minus the peer's
time of sending is the difference of the clocks plus the time on the way. The smallest such value belongs to the fastest
message. A larger value means that the message was delayed by the excess (NTP's clock filter: RFC 5905, section 10). The
time of the fastest message on its way stays unknown.

If the peer's clock stood still, as in a suspended laptop, all its later messages seem delayed. A question corrects this:
a message that the peer sends after it received our question was sent after the question. Answers look alike, so whatever
a peer answers in this way is a question (`Credit`, which a client repeats), and only one is on its way at a time. The
server uses this for its clients, and workers use it for the server.
"""

from __future__ import annotations

import math

STALL_S = 0.5
"""Seconds by which something due may come late before this process counts as having stood still. Also the time to read the
messages that came meanwhile."""
MIN_HEARTBEAT_S = 0.01
"""Shortest interval of heartbeats, in seconds, whatever the peer asks for: at 0 a process would do nothing else."""
MISSED_HEARTBEATS = 3
"""Missing heartbeats after which a server counts as gone, for its workers."""
MIN_SILENCE_S = 3.0
"""Least silence in seconds after which a server counts as gone for its workers, however short its interval is."""


def silence_of(heartbeat_s: float) -> float:
    """Return the seconds of silence after which a server with this heartbeat interval counts as gone for its workers."""
    return max(MISSED_HEARTBEATS * max(MIN_HEARTBEAT_S, heartbeat_s), MIN_SILENCE_S)


class Liveness:
    """When a peer was heard, when it heard of this end, and what follows from that. Times are seconds of one clock."""

    __slots__ = ("_heartbeat_s", "heard_at", "sent_at", "silence_s")

    def __init__(self, silence_s: float, now: float, heartbeat_s: float = math.inf) -> None:
        self.silence_s = silence_s
        """A peer that has said nothing for so long is silent."""
        self.heard_at = now
        """The time when anything at all arrived last."""
        self.sent_at = now
        """The time when anything at all was sent last."""
        self._heartbeat_s = heartbeat_s

    def beat_every(self, heartbeat_s: float) -> None:
        """Send heartbeats as often as the peer asks for."""
        self._heartbeat_s = max(MIN_HEARTBEAT_S, heartbeat_s)

    def is_silent(self, now: float) -> bool:
        """Tell whether the peer has been silent for too long; after a standstill of this process, a later call tells."""
        silent_at = self.heard_at + self.silence_s
        if now > silent_at + STALL_S:
            # This process stood still, or it would have asked before.
            self.heard_at += now + STALL_S - silent_at
            return False
        return now >= silent_at

    def heartbeat_due(self, now: float) -> bool:
        """Tell whether the peer has not heard of this end for a heartbeat's time."""
        return now >= self.sent_at + self._heartbeat_s

    def next_wakeup(self) -> float:
        """Return the time at which one of these becomes true."""
        return min(self.heard_at + self.silence_s, self.sent_at + self._heartbeat_s)


DRIFT = 2e-4
"""Seconds per second that two clocks may drift apart: crystals by 1e-4 at worst, and NTP may steer either by some more.

The smallest difference grows by this, or the messages of a slower clock would seem more and more delayed.
"""


class PeerClock:
    """A peer's clock as seen from here. Messages of a peer that never sends its time are taken as sent when read."""

    __slots__ = ("_answered_from", "_asked_at", "_difference_s", "_heard_at", "_sent_at")

    def __init__(self) -> None:
        self._difference_s: float | None = None
        self._heard_at = 0.0
        self._sent_at = 0.0
        """When the last `Clock` was sent, by our clock."""
        self.reconnected()

    def reconnected(self) -> None:
        """Forget the question: it may be lost with the connection."""
        self._asked_at: float | None = None
        self._answered_from: float | None = None

    def ask(self, now: float) -> bool:
        """Tell whether to ask the peer now, by something that it repeats. Until it has, it is not asked again."""
        if self._asked_at is not None:
            return False
        self._asked_at = now
        return True

    def repeated(self) -> bool:
        """Note that the peer has received the question: its next messages were sent after it. False if none was asked."""
        if self._asked_at is None:
            return False
        self._answered_from, self._asked_at = self._asked_at, None
        return True

    def heard(self, sent_us: int, now: float) -> None:
        """Note the peer's time of sending, in microseconds, of the message that is being read."""
        peer_s = sent_us * 1e-6
        difference_s = now - peer_s
        if self._difference_s is not None:
            drift_s = DRIFT * max(0.0, now - self._heard_at)
            difference_s = min(difference_s, self._difference_s + drift_s)
        if self._answered_from is not None:
            difference_s = max(difference_s, self._answered_from - peer_s)
            self._answered_from = None
        self._difference_s, self._heard_at, self._sent_at = difference_s, now, peer_s + difference_s

    @property
    def difference_s(self) -> float | None:
        """Return our clock minus the peer's, plus the fastest way; None before the peer has sent its time."""
        return self._difference_s

    def sent_at(self, now: float) -> float:
        """Return when the entries after the last `Clock` were sent, plus the fastest way; never later than `now`."""
        return now if self._difference_s is None else min(now, self._sent_at)
