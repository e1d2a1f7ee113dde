"""The liveness of a connection: whether the other end still speaks, and when this end has to. Pure.

Each end of a connection sends a heartbeat where it has nothing else to say; any message is a sign of life. Clients and
workers keep a `Liveness` of their server. What it promises:

- A peer that says nothing for `silence_s` is silent, unless this process itself stood still meanwhile. Silence that is
  noticed late may be this process's own: the messages that came meanwhile are read first, for `STALL_S`.
- The peer hears of this end once per heartbeat, and no more often than every `MIN_HEARTBEAT_S`, whatever it asks for.

What it does not do: it sends nothing and reads no clock. Slots' threads wait for a message and for silence by one call of
their socket, so they need none (`serving/slot_threads.py`); their `silence_s` is `silence_of` a heartbeat, too.
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
