"""The worker's side of the protocol: entries and reports in, entries and started batches out. No socket, no clock.

A worker *drains* by saying so: it runs what the server sends before it has heard that, and leaves when the server,
which then has all answers, says goodbye. So nothing is lost on the way, and nothing has to run twice.

A batch goes to its slot as soon as it is here, also while the one before it runs there: the slot's thread takes it
up by itself.

A *session* begins with each greeting. The server forgets what ran before it, so batches of an earlier session
are orphans: they are cancelled, and their reports are swallowed (a new server counts batches from the start, and
would take them for its own). One that cannot be interrupted still has its slot, so the greeting waits for it: a batch
behind it would look to the server as one that hangs, and its requests would be blamed for that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import count

from shapestream.serving.batch_entries import entry_of_report, read_batch
from shapestream.serving.executor import Executor
from shapestream.serving.peer_clock import PeerClock
from shapestream.wire.messages import (
    BatchFailed,
    CancelBatch,
    Clock,
    Entry,
    Execute,
    Goodbye,
    Heartbeat,
    RecallBatch,
    Unknown,
    WorkerDraining,
    WorkerHello,
    WorkerRefused,
    WorkerWelcome,
)
from shapestream_engine.batch import BatchReport, ErrorCode
from shapestream_engine.errors import EngineError
from shapestream_engine.memo import Memo
from shapestream_engine.slot import MAX_WAITING

__all__ = ["WorkerSession"]

# The way from the server, at most: what a greeting took longer was the server's own start, not the way.
MAX_TRANSIT_S = 0.05
# Batches that a slot takes: one that runs, and those behind it. A server sends no more before it has an answer.
_MOST_AT_SLOT = MAX_WAITING + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class _Held:
    """A batch that waits for room at its slot."""

    execute: Execute
    sent_at: float
    """By our clock, without the least time that messages take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Running:
    """A batch that a slot has, running or behind another. `batch` is the server's number, None for an orphan."""

    batch: int | None
    slot: int
    orphaned_at: float | None = None
    """Since when nobody waits for it."""


class WorkerSession:
    """What the server wants of this worker, and how far that has come."""

    def __init__(self, name: str, pid: int, executor: Executor) -> None:
        self._hello = WorkerHello(
            worker=name,
            pid=pid,
            slots=executor.slots,
            models={model: signature.to_dict() for model, signature in executor.models.items()},
            costs={model: table.to_dict() for model, table in executor.costs.items()},
            digests=dict(executor.digests),
        )
        self._executor = executor
        self._resolve = {model: Memo(signature.resolve) for model, signature in executor.models.items()}
        self._numbers = count(1)
        self._running: dict[int, _Running] = {}
        """By our own number, which is never used twice."""
        self._held: list[deque[_Held]] = [deque() for _ in range(executor.slots)]
        """By slot. Each is bounded by what a server may send; what exceeds that is refused."""
        self._at_slot = [0] * executor.slots
        """Batches that each slot has, as far as is reported."""
        self.greeting_waits = False
        """Whether the server is to be greeted once the slots are free of what an earlier session left there."""
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
        """Why this process is of no use to the server, whatever it says later: its models are of other bytes."""

    def greet(self, now: float) -> None:
        """Begins a session, on a new connection or with a server that does not know us: at once, or without orphans."""
        self._orphan_all(now)
        self.outgoing = []
        self.welcome = None
        self._clock = PeerClock()
        self.ended, self.ended_by_server = None, False
        self.greeting_waits = True
        self._greet_when_free(now)

    def _greet_when_free(self, now: float) -> None:
        if self.greeting_waits and not self._running:
            self.greeting_waits, self._greeted_at = False, now
            self.outgoing.append(self._hello)

    def sent(self, now: float) -> None:
        """Something that had to wait for the connection has left. If it was the greeting, its way begins only now: the
        server may just have been started."""
        if self.welcome is None:
            self._greeted_at = now

    def accept(self, entry: Entry, now: float) -> None:
        """Takes one entry from the server."""
        match entry:
            case Execute():
                self._execute(entry, now)
            case CancelBatch():
                self._take_back(entry.batch, ErrorCode.CANCELLED, self._executor.cancel_nowait)
            case RecallBatch():
                self._take_back(entry.batch, ErrorCode.RECALLED, self._executor.recall_nowait)
            case Clock():
                self._clock.heard(entry.sent_us, now)
            case WorkerWelcome():
                self.welcome = entry
                self._transit_s = min(self._transit_s, max(0.0, now - self._greeted_at) / 2)
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
            case Heartbeat() | Goodbye():
                pass
            case _:
                self.ended = f"the server sent an unexpected {type(entry).__name__}"

    def reported(self, reports: Iterable[BatchReport], now: float) -> None:
        """Takes what the slots report."""
        for report in reports:
            running = self._running.pop(report.batch)
            self._at_slot[running.slot] -= 1
            if running.batch is not None:
                self.outgoing.append(entry_of_report(report, number=running.batch))
            self._fill(running.slot, now)
        self._greet_when_free(now)

    def drain(self) -> None:
        """Asks for no more batches; the session ends with the server's goodbye, when it has been given all answers.

        Also before the welcome is here: the server may have sent it, and batches behind it.
        """
        if not self._draining:
            self._draining = True
            if self.ended is None:
                self.outgoing.append(WorkerDraining())

    def _execute(self, execute: Execute, now: float) -> None:
        if not 0 <= execute.slot < len(self._held):
            self._refuse(execute, f"there is no slot {execute.slot}")
        elif len(self._held[execute.slot]) >= _MOST_AT_SLOT:
            self._refuse(execute, f"slot {execute.slot} has {_MOST_AT_SLOT} batches already")
        else:
            self._held[execute.slot].append(_Held(execute=execute, sent_at=self._clock.sent_at(now)))
            self._fill(execute.slot, now)

    def _fill(self, slot: int, now: float) -> None:
        """Gives a slot what it has room for."""
        waiting = self._held[slot]
        while waiting and self._at_slot[slot] < _MOST_AT_SLOT:
            held = waiting.popleft()
            try:
                batch = read_batch(
                    held.execute,
                    self._resolve[held.execute.model],
                    number=next(self._numbers),
                    sent_at=held.sent_at - self._transit_s,
                )
            except (EngineError, LookupError) as error:
                self._refuse(held.execute, str(error))
                continue
            self._running[batch.batch] = _Running(batch=held.execute.batch, slot=slot)
            self._at_slot[slot] += 1
            self._executor.start_nowait(batch)

    def _refuse(self, execute: Execute, why: str) -> None:
        message = f"the server asked for what this worker cannot do: {why}"
        self.outgoing.append(BatchFailed(batch=execute.batch, code=ErrorCode.INTERNAL, message=message))

    def _take_back(self, batch: int, code: ErrorCode, ask: Callable[[int], None]) -> None:
        """Asks the slot that has this batch; what has no place at a slot yet is answered here."""
        for number, running in list(self._running.items()):
            if running.batch == batch:
                ask(number)
        for waiting in self._held:
            for held in [held for held in waiting if held.execute.batch == batch]:
                waiting.remove(held)
                self.outgoing.append(
                    BatchFailed(batch=batch, code=code, message="taken back before it began")
                )

    @property
    def oldest_orphan_at(self) -> float | None:
        """Since when some batch holds its slot though nobody waits for it; None if none does."""
        return min(
            (one.orphaned_at for one in self._running.values() if one.orphaned_at is not None), default=None
        )

    def _orphan_all(self, now: float) -> None:
        for waiting in self._held:
            waiting.clear()
        for number, running in list(self._running.items()):
            since = now if running.orphaned_at is None else running.orphaned_at
            self._running[number] = _Running(batch=None, slot=running.slot, orphaned_at=since)
            self._executor.cancel_nowait(number)

    def _leave(self) -> None:
        """For a server that does not know us, and so waits for nothing, as far as we know."""
        self.outgoing.append(Goodbye())
        self.ended = "drained"
