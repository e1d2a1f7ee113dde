"""The workers' port: who they are, what they report, and when they are gone.

A worker is half-trusted: what it sends is read as strictly as a client's messages, and a report that
contradicts the model's signature ends the worker, not the server; what it ran is run again elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import structlog

from shapestream.errors import ConfigurationError, ProtocolError
from shapestream.serving.dispatcher import Dispatcher
from shapestream.serving.inbox import DEAR, Inbox, Item
from shapestream.serving.links import Link, Outgoing
from shapestream.serving.models import ServedModel, ServedModels
from shapestream.serving.options import ServerOptions
from shapestream.serving.remote_executor import RemoteExecutor
from shapestream.serving.report_check import ReportRefused
from shapestream.serving.worker_ends import WorkerEnds
from shapestream.serving.worker_greeting import MAX_NAME, GreetingRefused, Offer, check_form, read_offer
from shapestream.serving.worker_reports import report_of_done, report_of_failed
from shapestream.telemetry.logging import LineBudget
from shapestream.telemetry.statistics import ServerStatistics
from shapestream.transport.interface import Message, PeerSocket
from shapestream.wire.codec import BadEntry, Envelope, Role, decode
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
    WorkerRefused,
    WorkerWelcome,
)
from shapestream_engine.batch import BatchReport

__all__ = ["WorkerPort"]

log = structlog.get_logger()

READ_BURSTS = 8
# Slots that may join at once, and per second after that. A worker with 256 takes about 20 ms to come and go, so that endless
# greetings take a fiftieth of the event loop's time.
MOST_JOINS = 8192
JOINS_PER_S = 256
# What one worker may have unserved: each of its slots reports two batches at most, whatever the bytes of their outputs.
MOST_UNREAD = 4096
MOST_UNREAD_BYTES = 2 << 30
_OTHER_FILES = "it has read other bytes of the model's files than those that are served"
_ADVICE = (
    "to serve the files as they are now, send the server SIGHUP or restart it; else put the old ones back"
)


def _decode(frames: Message) -> Envelope:
    """A worker's message; one bad entry makes all of it unreadable."""
    envelope = decode(frames, role=Role.SERVER_OF_WORKERS, limits=WORKER_LIMITS)
    if envelope.bad:
        raise ProtocolError(envelope.bad[0].message)
    return envelope


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
        self._inbox = Inbox(socket, _decode, window_entries=MOST_UNREAD, window_bytes=MOST_UNREAD_BYTES)
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
        self._lines = LineBudget()
        self._join_room = float(MOST_JOINS)
        """Slots that may join now; negative after a large worker."""
        self._joined_at = clock()
        self._reports: list[BatchReport] = []

    async def run(self) -> None:
        """Serves the port until cancelled."""
        while True:
            self._heard(*await self._inbox.read())
            self._serve(self._inbox.turn())

    def _heard(self, heard: set[bytes], beyond: Mapping[bytes, str]) -> None:
        now = self._clock()
        for peer in heard:
            if (worker := self.workers.get(peer)) is not None:
                worker.heard_at = now
        for peer, why in beyond.items():
            self._cut_off(peer, why, now)

    def _read_now(self, worker: RemoteExecutor | None) -> None:
        """Reads a few bursts, serves a turn of each, and then all that one worker said."""
        for _ in range(READ_BURSTS):
            self._heard(*self._inbox.read_nowait())
            self._serve(self._inbox.turn())
            if self._inbox.read_empty:
                break
        if worker is not None and worker.peer is not None:
            self._serve(self._inbox.all_of(worker.peer))

    def _serve(self, items: Iterable[tuple[bytes, Item]]) -> None:
        """Takes what is served in one turn; all reports in it become one call of the dispatcher."""
        now = self._clock()
        for peer, item in items:
            worker = self.workers.get(peer)
            if isinstance(item, ProtocolError | BadEntry):
                self._cut_off(peer, str(item), now)
            else:
                self._obey(peer, worker, item, now)
            if type(item) is WorkerHello:
                self._inbox.charge(DEAR + item.slots)
            else:
                self._inbox.charge(DEAR if worker is None else 1)
        self._report()
        self._dispatcher.end_turn()

    def _report(self) -> None:
        if self._reports:
            reports, self._reports = self._reports, []
            self._dispatcher.batches_reported(reports)

    def _obey(self, peer: bytes, worker: RemoteExecutor | None, entry: Entry, now: float) -> None:
        """Carries out one entry."""
        if type(entry) is WorkerHello:
            self._register(peer, worker, entry, now)
            return
        if worker is None:
            self._outgoing.tell_stranger(peer, now)
            return
        match entry:
            case BatchDone() | BatchFailed():
                self._reported(worker, entry, now)
            case WorkerDraining():
                worker.draining = True
                self._dispatcher.executor_closing(worker, now)
                self._dismiss_if_idle(worker, now)
            case Goodbye():
                self.worker_left(worker, "goodbye", now)
            case Heartbeat():
                pass
            case _:
                self._outgoing.refuse(peer, f"unexpected {type(entry).__name__}", now)

    # ---------------------------------------------------------------- who they are

    def _register(self, peer: bytes, worker: RemoteExecutor | None, hello: WorkerHello, now: float) -> None:
        """A worker that greets again, on this connection or another, has forgotten what it ran."""
        try:
            check_form(hello)
            self._take_join_room(hello, now)
        except GreetingRefused as error:
            self._refuse(peer, worker, hello, error, now)
            return
        if worker is not None:
            self.worker_left(worker, "greets again", now)
        try:
            self._check_identity(peer, hello)
            offer = read_offer(hello)
            if served := self._models.other_files(offer.models, offer.digests):
                self._refuse_other_files(peer, hello, served, offer, now)
                return
            added = self._models.add_all(offer.models, offer.digests)
        except (GreetingRefused, ConfigurationError) as error:
            self._refuse(peer, None, hello, error, now)
            return
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
            offer.digests,
            clock=self._clock,
        )
        self.workers[peer] = worker
        self._outgoing.say(worker, self._welcome)
        self._outgoing.say(worker, Clock(sent_us=round(now * 1e6)))
        self._lines.write(
            log,
            "info",
            "worker joined",
            now,
            worker=worker.name,
            pid=worker.pid,
            slots=worker.slots,
            models=list(offer.models),
            digests=offer.digests,
        )
        for model in added:
            self._dispatcher.model_added(model, now)
            self._model_added(model)
        self._dispatcher.executor_joined(worker, now)
        self._workers_changed(now)

    def _take_join_room(self, hello: WorkerHello, now: float) -> None:
        """Raises GreetingRefused where slots join faster than the event loop has time for; not for processes of our own."""
        refilled = self._join_room + JOINS_PER_S * (now - self._joined_at)
        self._join_room, self._joined_at = min(float(MOST_JOINS), refilled), now
        owner = self.ends.owner
        if self._join_room <= 0.0 and not (owner is not None and owner.owns(hello.worker, hello.pid)):
            raise GreetingRefused("too many slots join at a time; it may greet again in a few seconds")
        self._join_room -= hello.slots

    def _refuse(
        self, peer: bytes, worker: RemoteExecutor | None, hello: WorkerHello, error: Exception, now: float
    ) -> None:
        # Without its quotes, but with its escapes: a name may try to be a line of its own.
        name = repr(hello.worker[:MAX_NAME])[1:-1]
        self._statistics.bad_messages["workers"] += 1
        self._lines.write(log, "error", "worker refused", now, worker=name, pid=hello.pid, why=str(error))
        if worker is not None:
            self.worker_left(worker, "sent what cannot be accepted", now)
        self._turn_away(peer)

    def _refuse_other_files(
        self, peer: bytes, hello: WorkerHello, served: Mapping[str, str], offer: Offer, now: float
    ) -> None:
        """A model is served from the same bytes everywhere: this worker has read others, and is told to end."""
        for model, digest in served.items():
            offered = offer.digests.get(model)
            self._lines.write(
                log,
                "error",
                "worker refused",
                now,
                worker=hello.worker,
                pid=hello.pid,
                model=model,
                serves=digest,
                offers=offered,
                why=_OTHER_FILES,
                advice=_ADVICE,
            )
            why = f"{_OTHER_FILES}: sha256 {offered or 'unknown'} of {model!r}, and {digest} is served ({_ADVICE})"
            self._outgoing.say_once(peer, WorkerRefused(model=model, message=why))
        self._statistics.peers_lost["worker: other files"] += 1
        self._turn_away(peer)

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
        self._lines.write(
            log,
            "warning",
            "worker left",
            now,
            worker=worker.name,
            pid=worker.pid,
            why=why,
            batches=list(worker.running),
        )
        self._forget(worker, worker.peer, now, died=died)

    def _dismiss_if_idle(self, worker: RemoteExecutor, now: float) -> None:
        """Lets a worker go that wants to and has answered everything."""
        if not worker.draining or worker.running or worker.peer is None:
            return
        self._lines.write(log, "info", "worker drained", now, worker=worker.name, pid=worker.pid)
        self._outgoing.say_once(worker.peer, Goodbye())
        self._forget(worker, worker.peer, now)

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
                self._inbox.cut_off(peer)
        elif why != "gone" or not self.ends.unreachable(worker, now):
            self.worker_left(worker, why, now)
            self._inbox.cut_off(peer)

    def _cut_off(self, peer: bytes, why: str, now: float) -> None:
        self._outgoing.refuse(peer, why, now)
        worker = self.workers.get(peer)
        if worker is not None:
            self.worker_left(worker, "sent what cannot be accepted", now)
        self._turn_away(peer)

    def _turn_away(self, peer: bytes) -> None:
        self._outgoing.say_once(peer, Goodbye())
        self._inbox.cut_off(peer)

    def beat(self, now: float) -> None:
        """Once per heartbeat interval: gives up silent workers, tells the others that this loop is alive."""
        self.ends.beat(now, read_empty=self._inbox.read_empty)
        for worker in self.workers.values():
            self._outgoing.keep_alive(worker)

    # ---------------------------------------------------------------- what they report

    def _reported(self, worker: RemoteExecutor, entry: BatchDone | BatchFailed, now: float) -> None:
        try:
            report = (
                report_of_done(worker, entry, now)
                if isinstance(entry, BatchDone)
                else report_of_failed(worker, entry)
            )
        except ReportRefused as error:
            assert worker.peer is not None  # it has just been heard
            self._cut_off(worker.peer, f"worker {worker.name!r}: batch {entry.batch}: {error}", now)
            return
        if report is None:
            self._statistics.late_reports += 1
            return
        self._reports.append(report)
        self._dismiss_if_idle(worker, now)
