"""The worker's side of the protocol: entries and reports in, entries and started batches out. No socket, no clock.

A worker *drains* by saying so: it runs what the server sends before it has heard that, and leaves when the server,
which then has all answers, says goodbye. So nothing is lost on the way, and nothing has to run twice.

A *session* begins with each greeting. The server forgets what ran before it, so batches of an earlier session
are orphans: they are cancelled, their reports are swallowed (a new server counts batches from the start, and
would take them for its own), and a slot that is still busy with one holds back its next batch until it is free.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import count

from shapestream.serving.batches import Batch, BatchReport, Executor
from shapestream.wire.messages import (
    BatchDone,
    BatchFailed,
    CancelBatch,
    Entry,
    Execute,
    Goodbye,
    Heartbeat,
    Unknown,
    WorkerDraining,
    WorkerHello,
    WorkerWelcome,
)
from shapestream_engine.errors import EngineError

__all__ = ["WorkerSession"]

# The way from the server, at most: what a greeting took longer was the server's own start, not the way.
MAX_TRANSIT_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class _Held:
    """A batch that waits for its slot. At most one per slot: the server runs one batch at a time on each."""

    execute: Execute
    received_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Running:
    """A batch that a slot has. `batch` is the server's number, None for an orphan."""

    batch: int | None
    slot: int


class WorkerSession:
    """What the server wants of this worker, and how far that has come."""

    def __init__(self, name: str, pid: int, executor: Executor) -> None:
        self._hello = WorkerHello(
            worker=name,
            pid=pid,
            slots=executor.slots,
            models={model: signature.to_dict() for model, signature in executor.models.items()},
        )
        self._executor = executor
        self._numbers = count(1)
        self._running: dict[int, _Running] = {}
        """By our own number, which is never used twice."""
        self._held: dict[int, _Held] = {}
        """By slot."""
        self._greeted_at = 0.0
        self._transit_s = MAX_TRANSIT_S
        self._draining = False
        self.outgoing: list[Entry] = []
        """To be sent, in order, and then cleared, by the caller after each turn. Bounded by the slots."""
        self.welcome: WorkerWelcome | None = None
        """The server's answer to the greeting, once it came."""
        self.ended: str | None = None
        """Why this session is over, once it is: the caller then connects anew, or stops."""
        self.ended_by_server = False
        """Whether the server ended it, by a goodbye."""

    def greet(self, now: float) -> None:
        """Begins a session, on a new connection or with a server that does not know us."""
        self._orphan_all()
        self.outgoing = [self._hello]
        self.welcome, self._greeted_at = None, now
        self.ended, self.ended_by_server = None, False

    def accept(self, entry: Entry, now: float) -> None:
        """Takes one entry from the server."""
        match entry:
            case Execute():
                self._execute(_Held(execute=entry, received_at=now), now)
            case CancelBatch():
                self._cancel(entry.batch)
            case WorkerWelcome():
                self.welcome = entry
                self._transit_s = min(self._transit_s, max(0.0, now - self._greeted_at) / 2)
            case Unknown():
                # One comes for each message that was on its way to the server before it knew us: greet once.
                if self._draining:
                    self._leave()
                elif self.welcome is not None:
                    self.greet(now)
            case Goodbye():
                self.ended = "drained" if self._draining else "the server said goodbye"
                self.ended_by_server = True
            case Heartbeat():
                pass
            case _:
                self.ended = f"the server sent an unexpected {type(entry).__name__}"

    def reported(self, reports: Iterable[BatchReport], now: float) -> None:
        """Takes what the slots report."""
        for report in reports:
            running = self._running.pop(report.batch)
            if running.batch is not None:
                self.outgoing.append(_answer(running.batch, report))
            held = self._held.pop(running.slot, None)
            if held is not None:
                self._execute(held, now)

    def drain(self) -> None:
        """Asks for no more batches; the session ends with the server's goodbye, when it has been given all answers."""
        if self._draining:
            return
        self._draining = True
        if self.ended is None and self.welcome is not None:
            self.outgoing.append(WorkerDraining())
        elif self.ended is None:
            self._leave()

    def _execute(self, held: _Held, now: float) -> None:
        execute = held.execute
        busy = any(running.slot == execute.slot for running in self._running.values())
        if busy:
            self._held[execute.slot] = held
            return
        try:
            batch = self._batch(execute, now - held.received_at + self._transit_s)
        except (EngineError, LookupError) as error:
            message = f"the server asked for what this worker cannot do: {error}"
            self.outgoing.append(BatchFailed(batch=execute.batch, code="internal", message=message))
            return
        self._running[batch.batch] = _Running(batch=execute.batch, slot=execute.slot)
        self._executor.start_nowait(batch)

    def _batch(self, execute: Execute, elapsed_s: float) -> Batch:
        """The batch as slots take it; deadlines count from when the server sent it."""
        signature = self._executor.models[execute.model]
        if not 0 <= execute.slot < self._executor.slots:
            raise LookupError(f"there is no slot {execute.slot}")
        within_s = tuple(
            [
                None if member.remaining_ms is None else member.remaining_ms / 1000 - elapsed_s
                for member in execute.members
            ]
        )
        return Batch(
            batch=next(self._numbers),
            slot=execute.slot,
            model=execute.model,
            sizes=execute.sizes,
            members=tuple([member.tensors for member in execute.members]),
            shapes=tuple([signature.resolve(member.tensors.layout) for member in execute.members]),
            start_within_s=None if within_s.count(None) == len(within_s) else within_s,
        )

    def _cancel(self, batch: int) -> None:
        for number, running in self._running.items():
            if running.batch == batch:
                self._executor.cancel_nowait(number)
        for slot, held in list(self._held.items()):
            if held.execute.batch == batch:
                del self._held[slot]
                message = "cancelled before its start"
                self.outgoing.append(BatchFailed(batch=batch, code="cancelled", message=message))

    def _orphan_all(self) -> None:
        self._held.clear()
        for number, running in self._running.items():
            self._running[number] = _Running(batch=None, slot=running.slot)
            self._executor.cancel_nowait(number)

    def _leave(self) -> None:
        """For a server that does not know us, and so waits for nothing, as far as we know."""
        self.outgoing.append(Goodbye())
        self.ended = "drained"


def _answer(batch: int, report: BatchReport) -> BatchDone | BatchFailed:
    if report.code is not None or report.outputs is None:
        return BatchFailed(batch=batch, code=report.code or "internal", message=report.message)
    return BatchDone(
        batch=batch,
        run_us=round(report.run_s * 1e6),
        reallocations=report.reallocations,
        preparations=report.preparations,
        calls=report.calls,
        outputs=report.outputs,
    )
