"""The state of the connection to a server: greeting, heartbeats, silence, and the next attempt. Pure.

    DOWN ──connected──> GREETING ──Welcome──> OPEN
     ^                    │  ^                 │ │
     │<──no Welcome───────┘  └────Unknown──────┘ │
     │<──silence, unreadable answer──────────────┤
     └<──a rest──── LEFT <────────Goodbye────────┘

How it works. Entering DOWN asks the core for a new connection: messages that are still queued in the old one would only
arrive late. A connection that is merely interrupted heals inside ZeroMQ. A server that was restarted answers the next
heartbeat with `Unknown`, so the session is usually back within one heartbeat.

A greeting without an answer is given up after `greeting_s`; the time doubles with each attempt, up to `silence_s`. A server
that said goodbye is looked for after `rest_s`; where other servers are left to try, at once.

The link also estimates the seconds of the way to the server (`one_way_s`), which the client takes off deadlines. The server
counts a request's time from its arrival. The estimate is half of the shortest round trip, less the time that the server had
the request; a greeting gives the first guess.

What it promises: a server that is silent is given up, and hears from an idle client once per heartbeat (wire/liveness.py).

What it does not do: it sends nothing and holds no requests. `session.py` asks it what is due.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from shapestream.wire.liveness import Liveness

# At most so much of a greeting's time counts as the way: the rest was the server's start, or the connection being made.
MAX_GREETING_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSettings:
    """The timeouts of a client, in seconds."""

    greeting_s: float = 1.0
    """Time that a `Hello` may go unanswered before a new connection is tried; doubles up to `silence_s`."""
    silence_s: float = 10.0
    """A server that has said nothing for so long counts as gone."""
    rest_s: float = 0.5
    """Wait before looking for a server that said goodbye."""
    unavailable_after_s: float = 60.0
    """With no server for so long, waiting requests fail with `unavailable`."""
    others: int = 0
    """Servers besides the present one. While none has answered since, the next is looked for without a rest."""

    def __post_init__(self) -> None:
        """Raise ValueError for a time that is not above 0."""
        for name in ("greeting_s", "silence_s", "rest_s", "unavailable_after_s"):
            seconds = getattr(self, name)
            if not seconds > 0:
                raise ValueError(f"{name.removesuffix('_s')} is a number of seconds above 0, not {seconds!r}")


class LinkState(Enum):
    """The state of a connection. The head of this file draws the changes."""

    DOWN = "down"
    GREETING = "greeting"
    OPEN = "open"
    LEFT = "left"


class Link(Liveness):
    """The state of one connection after another, and the time at which the next step is due."""

    def __init__(self, settings: LinkSettings, now: float) -> None:
        super().__init__(settings.silence_s, now)
        self._settings = settings
        self.state = LinkState.DOWN
        self.lost_at: float | None = now
        """The time since which there has been no server; None while there is one."""
        self._hello_due = False
        self._attempts = 0
        self._left = 0
        """Servers left since the last answer to a request."""
        self._act_at = math.inf
        self.one_way_s = 0.0
        """The way to the server, at its fastest on this connection."""
        self._greeted_at = 0.0
        self._one_way_measured = False

    @property
    def is_open(self) -> bool:
        """Whether requests may be sent."""
        return self.state is LinkState.OPEN

    def connected(self, now: float) -> None:
        """Begin a greeting: on a new connection, or again on this one."""
        self.state = LinkState.GREETING
        self._hello_due = True
        self.heard_at = now
        patience = self._settings.greeting_s * 2.0 ** min(self._attempts, 16)
        self._attempts += 1
        self._act_at = now + min(patience, self._settings.silence_s)

    def welcomed(self, heartbeat_s: float) -> None:
        """Open the session: `Welcome` has arrived. `heartbeat_s` is how often the server wants to hear of this client."""
        self.state = LinkState.OPEN
        self.beat_every(heartbeat_s)
        self._act_at = math.inf
        self._attempts = 0
        self._hello_due = False
        self.lost_at = None

    def forgotten(self, now: float) -> None:
        """Greet again on this connection: `Unknown` has arrived. Further ones change nothing."""
        if self.state is LinkState.OPEN:
            self._lose(now)
            self.connected(now)

    def left(self, now: float) -> None:
        """Rest, then look for a server: `Goodbye` has arrived, or a message that cannot be read."""
        if self.state is LinkState.LEFT:
            return
        self._lose(now)
        self.state = LinkState.LEFT
        self._act_at = now if self._left < self._settings.others else now + self._settings.rest_s
        self._left += 1

    def take_hello(self, now: float) -> bool:
        """Tell whether `Hello` must be sent now; True once per greeting."""
        due, self._hello_due = self._hello_due, False
        if due:
            self._greeted_at = now
        return due

    def must_reconnect(self, now: float) -> bool:
        """Tell whether this connection is to be given up now. True once; the link is then DOWN."""
        silent = self.state is LinkState.OPEN and self.is_silent(now)
        if not silent and now < self._act_at:
            return False
        if silent:
            self._lose(now)
        self.state = LinkState.DOWN
        self._hello_due = False
        self._act_at = math.inf
        return True

    def guess_one_way(self, now: float) -> None:
        """Take half of the greeting's time as the first guess of `one_way_s`, until a reply tells better."""
        self.one_way_s = min(max(0.0, (now - self._greeted_at) / 2), MAX_GREETING_S)
        self._one_way_measured = False

    def answered(self, elapsed_s: float, served_us: int) -> None:
        """Learn `one_way_s` from a result that came `elapsed_s` after its request was sent.

        The server had the request for `served_us`. A reply from an earlier connection's time gives a negative rest, and is
        not used.
        """
        self._left = 0
        one_way_s = (elapsed_s - served_us * 1e-6) / 2
        if one_way_s >= 0.0 and not (self._one_way_measured and one_way_s >= self.one_way_s):
            self.one_way_s = one_way_s
            self._one_way_measured = True

    def refused(self, elapsed_s: float) -> None:
        """Bound `one_way_s` by an error that came `elapsed_s` after its request was sent: the way is at most half of that.

        An error does not say how long the server had the request. But a guess that is too high has more requests refused,
        whose replies would never correct it.
        """
        self.one_way_s = min(self.one_way_s, max(0.0, elapsed_s / 2))

    def next_wakeup(self) -> float:
        """Return the time at which something may become due."""
        return super().next_wakeup() if self.state is LinkState.OPEN else self._act_at

    def _lose(self, now: float) -> None:
        self.beat_every(math.inf)
        if self.lost_at is None:
            self.lost_at = now
