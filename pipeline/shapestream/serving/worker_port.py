"""The workers' port: who they are, what they report, and when they are gone.

A worker is half-trusted: what it sends is read as strictly as a client's messages, and a report that
contradicts the model's signature ends the worker, not the server; what it ran is run again elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import structlog

from shapestream.errors import ConfigurationError, ProtocolError
from shapestream.serving.batches import BatchReport
from shapestream.serving.dispatcher import Dispatcher
from shapestream.serving.links import Link, Outgoing
from shapestream.serving.models import ServedModel, ServedModels
from shapestream.serving.options import ServerOptions
from shapestream.serving.remote_executor import RemoteExecutor
from shapestream.serving.report_check import ReportRefused
from shapestream.serving.worker_ends import WorkerEnds
from shapestream.serving.worker_greeting import MAX_NAME, GreetingRefused, check_form, read_offer
from shapestream.serving.worker_reports import report_of_done, report_of_failed
from shapestream.telemetry.statistics import ServerStatistics
from shapestream.transport.interface import PeerSocket
from shapestream.wire.codec import Role, decode
from shapestream.wire.limits import WORKER_LIMITS
from shapestream.wire.messages import (
    BatchDone,
    BatchFailed,
    Clock,
    Entry,
    Goodbye,
    Heartbeat,
    WorkerDraining,
    WorkerHello,
    WorkerWelcome,
)
from shapestream_engine.layout import Buffer

__all__ = ["WorkerPort"]

log = structlog.get_logger()

READ_BURSTS = 8


class WorkerPort:
    """Reads the workers' port; each registered worker is a `RemoteExecutor` of the dispatcher."""

    def __init__(
        self,
        socket: PeerSocket,
        outgoing: Outgoing,
        dispatcher: Dispatcher,
        models: ServedModels,
        options: ServerOptions,
        statistics: ServerStatistics,
        *,
        epoch: bytes,
        clock: Callable[[], float],
        model_added: Callable[[ServedModel], None],
        workers_changed: Callable[[float], None] = lambda now: None,
    ) -> None:
        """`workers_changed` is called, with the time, after one has joined or left."""
        self._socket = socket
        self._outgoing = outgoing
        self._dispatcher = dispatcher
        self._models = models
        self._options = options
        self._statistics = statistics
        self._clock = clock
        self._model_added = model_added
        self._workers_changed = workers_changed
        self._welcome = WorkerWelcome(epoch=epoch, heartbeat_ms=round(options.heartbeat_s * 1000))
        self.workers: dict[bytes, RemoteExecutor] = {}
        """By routing id."""
        self.ends = WorkerEnds(
            self.workers,
            dispatcher,
            self.worker_left,
            read_now=self._read_now,
            clock=clock,
            silence_s=options.worker_silence_s,
        )
        self._reports: list[BatchReport] = []
        self._turned_away: set[bytes] = set()
        """Peers whose connection ended in this turn: what they sent behind that is not heard."""

    async def run(self) -> None:
        """Serves the port until cancelled."""
        while True:
            self.accept(await self._socket.receive())

    def _read_now(self) -> None:
        """What `run` has not come to yet; a few bursts at most, since clients are to be served, too."""
        for _ in range(READ_BURSTS):
            messages = self._socket.receive_nowait()
            if not messages:
                return
            self.accept(messages)

    def accept(self, messages: Sequence[tuple[bytes, list[Buffer]]]) -> None:
        """Takes everything that arrived in one turn; all reports in it become one call of the dispatcher."""
        now = self._clock()
        self._turned_away.clear()
        for peer, frames in messages:
            if peer in self._turned_away:
                continue  # this one came behind the message that ended its connection
            worker = self.workers.get(peer)
            try:
                envelope = decode(frames, role=Role.SERVER_OF_WORKERS, limits=WORKER_LIMITS)
                if envelope.bad:
                    raise ProtocolError(envelope.bad[0].message)
            except ProtocolError as error:
                self._cut_off(peer, str(error), now)
                continue
            if worker is not None:
                worker.heard_at = now
            for entry in envelope.entries:
                worker = self._obey(peer, worker, entry, now)
                if peer in self._turned_away:
                    break
        self._report()
        self._dispatcher.end_turn()

    def _report(self) -> None:
        if self._reports:
            reports, self._reports = self._reports, []
            self._dispatcher.batches_reported(reports)

    def _obey(
        self, peer: bytes, worker: RemoteExecutor | None, entry: Entry, now: float
    ) -> RemoteExecutor | None:
        """Carries out one entry. Returns the peer's worker as it is afterwards."""
        if type(entry) is WorkerHello:
            return self._register(peer, worker, entry, now)
        if worker is None:
            self._outgoing.tell_stranger(peer, now)
            return None
        match entry:
            case BatchDone() | BatchFailed():
                return self._reported(worker, entry, now)
            case WorkerDraining():
                worker.draining = True
                self._dispatcher.executor_closing(worker, now)
                return self._dismiss_if_idle(worker, now)
            case Goodbye():
                self.worker_left(worker, "goodbye", now)
                return None
            case Heartbeat():
                pass
            case _:
                self._outgoing.refuse(peer, f"unexpected {type(entry).__name__}", now)
        return worker

    # ---------------------------------------------------------------- who they are

    def _register(
        self, peer: bytes, worker: RemoteExecutor | None, hello: WorkerHello, now: float
    ) -> RemoteExecutor | None:
        """A worker that greets again, on this connection or another, has forgotten what it ran."""
        if worker is not None:
            self.worker_left(worker, "greets again", now)
        try:
            check_form(hello)
            self._check_identity(peer, hello)
            offer = read_offer(hello)
            added = self._models.add_all(offer.models)
        except (GreetingRefused, ConfigurationError) as error:
            self._cut_off(peer, f"worker {hello.worker[:MAX_NAME]!r}: {error}", now)
            return None
        for other in list(self.workers.values()):
            if other.name == hello.worker:
                self.worker_left(other, "came back on another connection", now)
        worker = RemoteExecutor(
            peer,
            hello.worker,
            hello.pid,
            hello.slots,
            offer.models,
            self._outgoing,
            now,
            offer.costs,
            clock=self._clock,
        )
        self.workers[peer] = worker
        self._outgoing.say(worker, self._welcome)
        self._outgoing.say(worker, Clock(sent_us=round(now * 1e6)))
        log.info(
            "worker joined", worker=worker.name, pid=worker.pid, slots=worker.slots, models=list(offer.models)
        )
        for model in added:
            self._dispatcher.model_added(model, now)
            self._model_added(model)
        self._dispatcher.executor_joined(worker, now)
        self._workers_changed(now)
        return worker

    def _check_identity(self, peer: bytes, hello: WorkerHello) -> None:
        """Raises GreetingRefused for a worker that hangs, and for one that has another's name."""
        name, key, owner = hello.worker, self._socket.key_of(peer), self.ends.owner
        if not self.ends.may_join(name, hello.pid):
            raise GreetingRefused("it hangs; end its process and start it again")
        namesakes = [routing_id for routing_id, other in self.workers.items() if other.name == name]
        if any(self._socket.key_of(routing_id) != key for routing_id in namesakes):
            raise GreetingRefused("it has the name of a worker with another key")
        if key is not None and owner is not None and owner.owns(name, hello.pid):
            # Ours come over a private socket. This one's end would be taken for that of ours, and ours be killed for it.
            raise GreetingRefused("it has the name of a process of this server")

    def worker_left(self, worker: RemoteExecutor, why: str, now: float, died: bool = False) -> None:
        """It is gone; its batches are run again elsewhere. `died`: perhaps of one of them."""
        if worker.peer is None:
            return
        self._statistics.peers_lost[f"worker: {why}"] += 1
        log.warning("worker left", worker=worker.name, pid=worker.pid, why=why, batches=list(worker.running))
        self._forget(worker, worker.peer, now, died=died)

    def _dismiss_if_idle(self, worker: RemoteExecutor, now: float) -> RemoteExecutor | None:
        """Lets a worker go that wants to and has answered everything; returns it if it stays."""
        if not worker.draining or worker.running or worker.peer is None:
            return worker
        log.info("worker drained", worker=worker.name, pid=worker.pid)
        self._outgoing.say_once(worker.peer, Goodbye())
        self._forget(worker, worker.peer, now)
        return None

    def _forget(self, worker: RemoteExecutor, peer: bytes, now: float, *, died: bool = False) -> None:
        # Before its last reports are taken: for what it has answered it is given nothing more.
        self._dispatcher.executor_closing(worker, now)
        self._report()
        self.workers.pop(peer, None)
        worker.left()
        self._dispatcher.executor_left(worker, now, died=died)
        self._workers_changed(now)

    def lost(self, link: Link, why: str, now: float) -> None:
        """What was ready for this worker could not be sent; or it hangs, and is to be ended."""
        peer = link.peer
        worker = None if peer is None else self.workers.get(peer)
        if peer is None or worker is None:
            return
        if worker.killed_for is not None:
            if self.ends.hangs(worker, worker.killed_for, now):
                self._outgoing.say_once(peer, Goodbye())
                self._socket.cut_off(peer)
        elif why != "gone" or not self.ends.unreachable(worker, now):
            self.worker_left(worker, why, now)
            self._socket.cut_off(peer)

    def _cut_off(self, peer: bytes, why: str, now: float) -> None:
        self._outgoing.refuse(peer, why, now)
        worker = self.workers.get(peer)
        if worker is not None:
            self.worker_left(worker, "sent what cannot be accepted", now)
        self._outgoing.say_once(peer, Goodbye())
        self._socket.cut_off(peer)
        self._turned_away.add(peer)

    def beat(self, now: float) -> None:
        """Once per heartbeat interval: gives up silent workers, tells the others that this loop is alive."""
        self.ends.beat(now)
        for worker in self.workers.values():
            self._outgoing.keep_alive(worker)

    # ---------------------------------------------------------------- what they report

    def _reported(
        self, worker: RemoteExecutor, entry: BatchDone | BatchFailed, now: float
    ) -> RemoteExecutor | None:
        try:
            report = (
                report_of_done(worker, entry, now)
                if isinstance(entry, BatchDone)
                else report_of_failed(worker, entry)
            )
        except ReportRefused as error:
            assert worker.peer is not None  # it has just been heard
            self._cut_off(worker.peer, f"worker {worker.name!r}: batch {entry.batch}: {error}", now)
            return None
        if report is None:
            self._statistics.late_reports += 1
            return worker
        self._reports.append(report)
        return self._dismiss_if_idle(worker, now)
