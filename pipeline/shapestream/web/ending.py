"""The end of connections and of their server: who is told to go, and what may be closed. Times in, decisions out.

    SERVING ── leave ──▶ LEAVING ── stop ──▶ STOPPING
       └─────────────────── stop ───────────────▲

SERVING: a connection stays open between two requests, until it is idle for too long or too old.
LEAVING: requests are taken, also on new connections, but each answer ends its connection (`Connection: close`). So peers go
elsewhere one by one, and lose nothing. This is the *lame duck* of a server whose balancers see that it is not ready.
STOPPING: no new connections. What has begun is answered.

A connection that is closed while a request is on its way costs its peer that request, and the peer cannot know whether it
ran. Only an answer that says `Connection: close` is safe. So a connection that is too old ends with its next answer; and one
without a request is closed only after `QUIET_S` without one, when a request is unlikely to be on its way at that instant.
(The peer of an idle connection still may send at that very time. Nothing in HTTP/1.1 prevents it.)

Times are seconds of one monotonic clock, which the caller reads.
"""

from __future__ import annotations

import signal
from enum import Enum, auto
from math import inf

from shapestream_engine.layout import value

LEAVE = signal.SIGUSR1
"""The signal by which a server's process tells its gateways to leave: the server itself is not ready any more."""
QUIET_S = 1.0
"""Seconds without a request after which a connection may be closed. A client that is busy sends the next one sooner."""
FIRST_REQUEST_S = 5.0
"""Seconds for the first request of a connection, once the server stops: it may have been accepted just before."""
JITTER = 0.1
"""Largest part by which the age of a connection's end differs from the setting, so that they do not end together."""


class EndState(Enum):
    """The state of a server."""

    SERVING = auto()
    LEAVING = auto()
    STOPPING = auto()


class ServerEnd:
    """The state of one server, and what follows for its connections."""

    def __init__(self, *, idle_s: float, max_connection_s: float = inf) -> None:
        """`idle_s`: seconds that a connection may be without a request. `max_connection_s`: its age, at most."""
        self._idle_s = idle_s
        self._max_connection_s = max_connection_s
        self._stopped_at = inf
        self.state = EndState.SERVING

    def leave(self) -> None:
        """End each connection with its next answer from now on."""
        if self.state is EndState.SERVING:
            self.state = EndState.LEAVING

    def stop(self, now: float) -> None:
        """Close connections without a request from now on."""
        if self.state is not EndState.STOPPING:
            self.state, self._stopped_at = EndState.STOPPING, now

    def aged_at(self, began: float, chance: float) -> float:
        """Return the time at which a connection is too old. `chance`: drawn from [0, 1)."""
        return began + self._max_connection_s * (1.0 - JITTER + 2.0 * JITTER * chance)

    def keeps_open(self, aged_at: float, now: float) -> bool:
        """Tell whether a connection goes on after an answer that is written now."""
        return self.state is EndState.SERVING and now < aged_at

    def idle_until(self, since: float, aged_at: float, *, has_asked: bool) -> float:
        """Return the time at which a connection that waits for a request since then is closed."""
        until = min(since + self._idle_s, max(aged_at, since + QUIET_S))
        if self.state is not EndState.STOPPING:
            return until
        if has_asked:
            return min(until, max(self._stopped_at, since + QUIET_S))
        return min(until, max(self._stopped_at, since) + FIRST_REQUEST_S)


class Asked(Enum):
    """The end that signals have asked of a gateway so far."""

    NOTHING = auto()
    LEAVE = auto()
    """The lame duck, and then the end."""
    STOP = auto()
    """The end, once requests are answered."""
    END_NOW = auto()


class AskedToEnd:
    """What the signals of a gateway ask for.

    One that a server started `is_told` when to leave (LEAVE) and then when to stop (SIGTERM). SIGTERM alone is for one that
    another process replaces. A gateway that stands alone leaves by SIGTERM. SIGINT, of a terminal, stops it. A signal after
    these two ends it at once.
    """

    def __init__(self, *, is_told: bool) -> None:
        self._is_told = is_told
        self.state = Asked.NOTHING

    def take(self, number: int) -> bool:
        """Note a signal. Tell whether it asks for anything new."""
        if number == LEAVE and (self.state is not Asked.NOTHING or not self._is_told):
            return False
        leaves_by = LEAVE if self._is_told else signal.SIGTERM
        match self.state:
            case Asked.NOTHING:
                self.state = Asked.LEAVE if number == leaves_by else Asked.STOP
            case Asked.LEAVE if self._is_told:
                self.state = Asked.STOP
            case _:
                self.state = Asked.END_NOW
        return True


@value
class LameDuck:
    """The time for which a server that leaves takes requests all the same, while it says that it is not ready."""

    began: float
    seconds: float
    ends_by_itself: bool
    """Else the server's process tells when it is over. It goes on while requests of the server's drain are refused."""

    @property
    def goaway_at(self) -> float:
        """The time to tell peers over gRPC to go. By then balancers have seen that the server is not ready.

        gRPC cancels the calls that meet this message, so it comes when balancers send none any more.
        """
        return self.began + self.seconds / 2

    def is_over(self, now: float, empty_since: float | None) -> bool:
        """Tell whether to stop. `empty_since`: since when there is no connection; None while there are some.

        A port without any for half of the time has nobody to wait for. A shorter pause proves nothing: callers, and the
        checks of balancers, may open a connection for each request.
        """
        ends_at = self.began + self.seconds
        if empty_since is not None and max(self.began, empty_since + self.seconds / 2) <= now < ends_at:
            return True
        return self.ends_by_itself and now >= ends_at
