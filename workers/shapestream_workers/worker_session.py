"""The worker's side of the protocol: entries and news of the slots in, entries out. No socket, no clock.

This is the worker's control. It supervises: the batches and their reports travel on the slots' own connections.

A worker *drains* by saying so: it runs what the server sends before it has heard that, and leaves when the server,
which then has all answers, says goodbye. So nothing is lost on the way, and nothing has to run twice.

A *session* begins with each greeting. The server forgets what ran before it, so the slots cancel that, and drop its
reports. A batch that cannot be interrupted still has its slot, so the greeting waits for it: a batch behind it would
look to the server as one that hangs, and its requests would be blamed for that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import structlog

from shapestream.serving.peer_clock import PeerClock
from shapestream.serving.slot_threads import (
    BatchWithdrawn,
    News,
    SessionBroken,
    SlotIdle,
    SlotSession,
    SlotThreads,
    ThreadEnded,
)
from shapestream.telemetry.logging import LEVELS, change
from shapestream.wire.codec import BadEntry, items_of
from shapestream.wire.limits import MAX_WORKER_ITEMS
from shapestream.wire.messages import (
    WORKER_PROTOCOL,
    BatchFailedEntry,
    CancelBatchEntry,
    Clock,
    Entry,
    Goodbye,
    Heartbeat,
    RecallBatchEntry,
    SetLogLevel,
    SlotEnded,
    Unknown,
    WorkerDraining,
    WorkerHello,
    WorkerRefused,
    WorkerWelcome,
)
from shapestream_engine.batch import ErrorCode

log = structlog.get_logger()

# What a message counts beside the models of a greeting: the other fields, and the arrays around them.
ENTRY_ITEMS = 64
# The way from the server, at most: what a greeting took longer was the server's own start, not the way.
MAX_TRANSIT_S = 0.05
# However often the server asks for beats: beats without a pause would be all that this process does.
MIN_HEARTBEAT_S = 0.01
# So many of the server's heartbeats may be missing before it counts as gone, but at least so long: an interval of a few
# milliseconds is no reason to take a busy machine for a dead server.
MISSED_HEARTBEATS = 3
MIN_SILENCE_S = 3.0


def silence_s(heartbeat_s: float) -> float:
    """Seconds of silence after which a server that beats in this interval counts as gone."""
    return max(MISSED_HEARTBEATS * max(MIN_HEARTBEAT_S, heartbeat_s), MIN_SILENCE_S)


def with_costs_that_fit(hello: WorkerHello, costs: Mapping[str, dict[str, Any]]) -> WorkerHello:
    """The greeting with as many of these cost tables as a message may hold, the smallest first.

    The server learns the costs of other models from their traffic.
    """
    room = (
        MAX_WORKER_ITEMS
        - ENTRY_ITEMS
        - sum(items_of(value) for value in (hello.models, hello.digests, hello.once, hello.tolerances))
    )
    fitting: dict[str, dict[str, Any]] = {}
    for name, table in sorted(costs.items(), key=lambda item: items_of(item[1])):
        room -= items_of({name: table})
        if room < 0:
            left_out = sorted(costs.keys() - fitting.keys())
            log.warning("costs are not told", models=left_out, why="the greeting has no room for them")
            break
        fitting[name] = table
    return replace(hello, costs=fitting)


class WorkerSession:
    """What a worker says and does, decided from entries, news and times."""

    def __init__(self, name: str, pid: int, slots: SlotThreads, once: tuple[str, ...] = ()) -> None:
        """`once`: the models whose requests must not run twice."""
        self._slots = slots
        self._hello = with_costs_that_fit(
            WorkerHello(
                worker=name,
                pid=pid,
                slots=slots.slots,
                models={key: signature.to_dict() for key, signature in slots.models.items()},
                digests=dict(slots.digests),
                protocol=WORKER_PROTOCOL,
                once=once,
                tolerances={key: dict(found) for key, found in slots.tolerances.items()},
            ),
            {key: table.to_dict() for key, table in slots.costs.items()},
        )
        self.greeting_waits = False
        """Whether the server is to be greeted once the slots are free of what an earlier session left there."""
        self.occupied_since: float | None = None
        """Time since when some batch holds its slot though its session is over; None if none does."""
        self._greeted_at = 0.0
        self._transit_s = MAX_TRANSIT_S
        self._clock = PeerClock()
        """The server's, which its deadlines count by."""
        self._draining = False
        self.outgoing: list[Entry] = []
        """To be sent, in order, and then cleared, by the caller after each turn. Bounded by the slots."""
        self.welcome: WorkerWelcome | None = None
        """The server's answer to the greeting, once it came."""
        self.ended: str | None = None
        """Why this session is over, once it is: the caller then connects anew, or stops."""
        self.ended_by_server = False
        """Whether the server ended it, by a goodbye."""
        self.refused: WorkerRefused | None = None
        """Why this process is of no use to the server, whatever it says later."""

    def greet(self, now: float) -> None:
        """Begins a session, on a new connection or with a server that does not know us: at once, or with free slots."""
        self._slots.end()
        self.occupied_since = (self.occupied_since or now) if self._slots.occupied else None
        self.outgoing = []
        self.welcome = None
        self._clock = PeerClock()
        self.ended, self.ended_by_server = None, False
        self.greeting_waits = True
        self._greet_when_free(now)

    def _greet_when_free(self, now: float) -> None:
        if self.greeting_waits and not self._slots.occupied:
            self.greeting_waits, self._greeted_at = False, now
            self.occupied_since = None
            self.outgoing.append(self._hello)

    def sent(self, now: float) -> None:
        """Something that had to wait for the connection has left. If it was the greeting, its way begins only now: the
        server may just have been started."""
        if self.welcome is None:
            self._greeted_at = now

    def accept(self, entry: Entry | BadEntry, now: float) -> None:
        """Takes one entry from the server."""
        match entry:
            case CancelBatchEntry():
                self._slots.withdraw(entry.slot, entry.batch, ErrorCode.CANCELLED)
            case RecallBatchEntry():
                self._slots.withdraw(entry.slot, entry.batch, ErrorCode.RECALLED)
            case Clock():
                self._clock.heard(entry.sent_us, now)
                if (difference_s := self._clock.difference_s) is not None:
                    self._slots.set_clock(difference_s - self._transit_s)
            case WorkerWelcome():
                self.welcome = entry
                self._transit_s = min(self._transit_s, max(0.0, now - self._greeted_at) / 2)
                self._slots.begin(
                    SlotSession(
                        number=entry.session,
                        token=entry.token,
                        silence_s=silence_s(entry.heartbeat_ms / 1000),
                    )
                )
            case SetLogLevel() if entry.level in LEVELS:
                change(entry.level)
            case WorkerRefused():
                self.refused = self.refused or entry
                self.ended = "the server refuses this worker"
            case Unknown():
                # One comes for each message that was on its way to the server before it knew us: greet once.
                if self._draining:
                    self._leave()
                elif self.welcome is not None:
                    self.greet(now)
            case Goodbye() if self.refused is None:
                self.ended = "drained" if self._draining else "the server said goodbye"
                self.ended_by_server = True
                self._slots.end()  # what still runs there is of no use to any server
            case Heartbeat() | Goodbye():
                pass
            case _:
                self.ended = f"the server sent an unexpected {type(entry).__name__}"

    def heed(self, news: News, now: float) -> None:
        """Takes news of the slots; those of an earlier session concern nobody."""
        session = None if self.welcome is None else self.welcome.session
        match news:
            case BatchWithdrawn() if news.session == session:
                self.outgoing.append(
                    BatchFailedEntry(
                        batch=news.batch,
                        session=news.session,
                        code=ErrorCode.RECALLED,
                        message="withdrawn before it began",
                    )
                )
            case ThreadEnded() if news.session is not None and news.session == session:
                self.outgoing.append(SlotEnded(slot=news.slot, session=news.session, batch=news.batch))
            case SessionBroken() if news.session == session and self.ended is None:
                self.ended = f"a slot has lost the server: {news.why}"
            case SlotIdle() | BatchWithdrawn() | ThreadEnded() | SessionBroken():
                pass
        self._greet_when_free(now)

    def drain(self) -> None:
        """Asks for no more batches; the session ends with the server's goodbye, when it has been given all answers.

        Also before the welcome is here: the server may have sent it, and batches may follow.
        """
        if not self._draining:
            self._draining = True
            if self.ended is None:
                self.outgoing.append(WorkerDraining())

    def _leave(self) -> None:
        """For a server that does not know us, and so waits for nothing, as far as we know."""
        self.outgoing.append(Goodbye())
        self.ended = "drained"
