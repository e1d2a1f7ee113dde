"""The worker's side of the control connection: entries and news of the slots in, entries out. No socket, no clock.

Batches and their reports use the slots' own connections; this one supervises.

Draining: the worker sends WorkerDraining. It still runs the batches that the server sent before it read that. When the
server has all answers it sends a goodbye, and the worker leaves. So no batch is lost, and none runs twice.

Sessions: each greeting begins one. The server forgets the batches before it, so the slots cancel them and drop their
reports. A batch that cannot be interrupted keeps its slot, and the greeting waits for it. Otherwise the next batch on
that slot would seem to hang, and its requests would be blamed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import structlog

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
from shapestream.wire.peers import PeerClock, silence_of
from shapestream_engine.batch import ErrorCode

log = structlog.get_logger()

ENTRY_ITEMS = 64
"""Values of a message besides the models of a greeting: the other fields, and the arrays around them."""
MAX_TRANSIT_S = 0.05
"""Upper limit, in seconds, of the estimated time of a message from the server. A greeting may take longer if the server
was just starting."""


def with_costs_that_fit(hello: WorkerHello, costs: Mapping[str, dict[str, Any]]) -> WorkerHello:
    """Return the greeting with as many of these cost tables as a message may hold, the smallest first.

    The server learns the costs of other models from their traffic. Those of the wide slot, which has no model without them,
    are all told, or none.
    """
    room = (
        MAX_WORKER_ITEMS
        - ENTRY_ITEMS
        - sum(
            items_of(value)
            for value in (hello.models, hello.digests, hello.once, hello.tolerances, hello.engines)
        )
    )
    if hello.wide and (wide := items_of(hello.wide)) > room:
        log.warning("costs are not told", models=sorted(hello.wide), why="the greeting has no room for them")
        hello = replace(hello, wide={})
    elif hello.wide:
        room -= wide
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
    """The state of a worker's control connection. It decides what to send, from entries, news and times."""

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
                engines=dict(slots.engines),
                wide={key: table.to_dict() for key, table in slots.wide_costs.items()},
            ),
            {key: table.to_dict() for key, table in slots.costs.items()},
        )
        if slots.wide_costs and not self._hello.wide:
            slots.give_up_wide()  # or its thread would greet a server that expects no such slot
        self.greeting_waits = False
        """True while the greeting waits for batches of an earlier session that still hold slots."""
        self.occupied_since: float | None = None
        """Time since when a batch of an ended session holds a slot; None if none does."""
        self._greeted_at = 0.0
        self._transit_s = MAX_TRANSIT_S
        self._clock = PeerClock()
        """The server's clock, by which its deadlines count."""
        self._draining = False
        self.outgoing: list[Entry] = []
        """Entries that the caller sends in order, and clears, after each turn. The number of slots bounds them."""
        self.welcome: WorkerWelcome | None = None
        """The server's answer to the greeting; None before it came."""
        self.ended: str | None = None
        """The reason for the session's end; None before. The caller then connects again, or stops."""
        self.ended_by_server = False
        """True if the server ended the session by a goodbye."""
        self.refused: WorkerRefused | None = None
        """The server's refusal of a model, while it has not welcomed this process with others."""

    def greet(self, now: float) -> None:
        """Begin a session, on a new connection or with a server that does not know this worker, once the slots are free."""
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
        """Note that a delayed message has left. If it was the greeting, its transit time counts from now."""
        if self.welcome is None:
            self._greeted_at = now

    def handle_entry(self, entry: Entry | BadEntry, now: float) -> None:
        """Handle one entry from the server."""
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
                self.welcome, self.refused = entry, None  # the other models are welcome
                self._transit_s = min(self._transit_s, max(0.0, now - self._greeted_at) / 2)
                self._slots.begin(
                    SlotSession(
                        number=entry.session,
                        token=entry.token,
                        silence_s=silence_of(entry.heartbeat_ms / 1000),
                    )
                )
            case SetLogLevel() if entry.level in LEVELS:
                change(entry.level)
            case WorkerRefused():
                self.refused = entry
                log.error("worker refused", worker=self._hello.worker, model=entry.model, why=entry.message)
            case Unknown():
                # One comes for each message that the server got before the greeting: greet once.
                if self._draining:
                    self._leave()
                elif self.welcome is not None:
                    self.greet(now)
            case Goodbye():
                self.ended = "drained" if self._draining else "the server said goodbye"
                self.ended_by_server = True
                self._slots.end()  # no server waits for the batches that still run
            case Heartbeat():
                pass
            case _:
                self.ended = f"the server sent an unexpected {type(entry).__name__}"

    def handle_news(self, news: News, now: float) -> None:
        """Handle news of the slots. News of an earlier session are ignored."""
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
        """Ask for no more batches. The session ends with the server's goodbye, when it has all answers.

        This holds before the welcome, too: the server may have sent it, and batches may follow.
        """
        if not self._draining:
            self._draining = True
            if self.ended is None:
                self.outgoing.append(WorkerDraining())

    def _leave(self) -> None:
        """Leave a server that does not know this worker, and so waits for no answer."""
        self.outgoing.append(Goodbye())
        self.ended = "drained"
