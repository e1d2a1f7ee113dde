"""The workers' port: which workers there are, what they report, and how they end.

A worker greets on the connection of its control, and is given a token; each of its slots greets with that on a connection
of its own. Batches and their reports travel on the slots' connections, all else on the control's, so there is no order
between the two. The slots of the server's own process have a port of their own, and no control: a call does.

A worker is half-trusted: its messages are read as strictly as a client's, and a report that contradicts the model's
signature ends the worker, not the server; its batches are run again elsewhere. Of a worker that dialled in the server knows
only what it says. The owner of processes that were started beside the server tells how they ended, and can kill them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Set
from dataclasses import dataclass
from itertools import count
from typing import Protocol, assert_never

import structlog
import trio

from shapestream.errors import ConfigurationError, ProtocolError
from shapestream.serving.availability import Availability
from shapestream.serving.dispatcher import Dispatcher
from shapestream.serving.inbox import DEAR, Inbox, Item
from shapestream.serving.outgoing import GONE, Outgoing, PeerLink
from shapestream.serving.report_check import ReportRefused
from shapestream.serving.served_models import ServedModels
from shapestream.serving.slot_threads import (
    BatchWithdrawn,
    News,
    SessionBroken,
    SlotIdle,
    SlotSession,
    SlotThreads,
    ThreadEnded,
)
from shapestream.serving.workers import ConnectedWorker, LocalWorker, Offer, SlotRecord, read_tolerances
from shapestream.settings import ServerSettings
from shapestream.slices import SlicedWork, Slices, at_once
from shapestream.telemetry.roll import WorkerPresence
from shapestream.wire.codec import BadEntry
from shapestream.wire.messages import (
    WORKER_PROTOCOL,
    BatchDone,
    BatchFailedEntry,
    Clock,
    Entry,
    Goodbye,
    Heartbeat,
    SetLogLevel,
    SlotEnded,
    SlotHello,
    WorkerDraining,
    WorkerHello,
    WorkerRefused,
    WorkerWelcome,
)
from shapestream_engine.batch import BatchReport, ErrorCode
from shapestream_engine.cost_table import CostTable
from shapestream_engine.errors import EngineError
from shapestream_engine.machine import MAX_SLOTS
from shapestream_engine.signature import ModelSignature

log = structlog.get_logger()

READ_BURSTS = 8
# Clients are told the name with every result, and people read it in logs.
MAX_NAME = 200
# Models of one worker, and the same times its slots: for each pair the scheduler takes 2 us when the worker joins.
MOST_OFFERED = 256
MOST_PAIRS = 2048
# Slots that may join at once, and per second after that. A worker with 256 takes about 20 ms to come and go, so that endless
# greetings take a fiftieth of the event loop's time.
MOST_JOINS = 8192
JOINS_PER_S = 256
# What one connection may have unserved: a slot reports two batches at most, whatever the bytes of their outputs.
MOST_UNREAD = 4096
MOST_UNREAD_BYTES = 2 << 30
# Between the end of a process and its leaving: libzmq's thread reads what it said last, so that a batch which it had
# answered is not taken for one that it died of.
LAST_WORDS_S = 0.05
# How long the end of a process is waited for once it cannot be reached: how it ended says whether it was what it ran.
# And how long the reports of a worker that has said goodbye: they may be unread on its slots' connections.
EXIT_NEWS_S = 1.0
# A process of our own that was silent for so many times `worker_silence_s` is killed, and so replaced: it is lost
# already, and its batches were run elsewhere. One that was only stopped for a while may come back before that.
SILENCES_TO_KILL = 10
# Workers that dialled in and hung, remembered so that they are not welcomed with a slot that is still held.
MAX_HUNG = 256

_DIGEST = re.compile("[0-9a-f]{64}")
_OTHER_FILES = "it has read other bytes of the model's files than those that are served"
_ADVICE = (
    "to serve the files as they are now, send the server SIGHUP or restart it; else put the old ones back"
)


class ProcessOwner(Protocol):
    """The starter of worker processes for this server. Its calls return at once."""

    def owns(self, worker: str) -> bool:
        """Whether the process that greets by this name is one of its own, and its end has not been told yet."""

    def kill(self, worker: str, reason: str) -> None:
        """Kill that process; its end is told like any other."""

    @property
    def presences(self) -> Mapping[str, WorkerPresence]:
        """The presence of each worker that it keeps running, by name."""

    def memory_bytes(self) -> Mapping[str, int]:
        """Memory in RAM of their processes, by the same names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LastState:
    """The server's knowledge of a worker whose process has ended."""

    busy: bool = False
    """Whether it had batches that it had not answered."""
    answered_at: float | None = None
    """When it last reported a batch that had run, if it ever did: seconds of trio's clock."""
    refused: str = ""
    """Why its greeting was refused, where it was."""


class WorkerPort:
    """Reads the workers' port, or that of the server's own slots."""

    def __init__(
        self,
        outgoing: Outgoing,
        dispatcher: Dispatcher,
        models: ServedModels,
        availability: Availability,
        settings: ServerSettings,
        *,
        epoch: bytes,
        own: SlotThreads | None = None,
    ) -> None:
        """`own`: the slots of this process, whose port this is."""
        self.outgoing = outgoing
        self._socket = outgoing.socket
        self._inbox = Inbox(
            outgoing.socket,
            outgoing.codec,
            self,
            window_entries=MOST_UNREAD,
            window_bytes=MOST_UNREAD_BYTES,
        )
        self._dispatcher = dispatcher
        self._models = models
        self._availability = availability
        self._settings = settings
        self._statistics = outgoing.statistics
        self._epoch = epoch
        self._own = own
        self.own_greeted = trio.Event()
        """Set when the slots of this process have greeted, or never will."""
        self._sessions = count(1)
        self.workers: dict[bytes, ConnectedWorker] = {}
        """By the routing id of their control."""
        self._slots: dict[bytes, SlotRecord] = {}
        """Those that have greeted, by routing id."""
        self._tokens: dict[bytes, ConnectedWorker] = {}
        """Workers by the token that their slots greet with."""
        self.owner: ProcessOwner | None = None
        """The starter of the workers' processes, if this server has one."""
        self._log_level: str | None = None
        """That of the processes of our own, where it was changed while they ran."""
        self._silent: dict[str, float] = {}
        """Processes of our own that were given up for their silence, and when."""
        self._refused: dict[str, str] = {}
        """Processes of our own whose greeting was refused and that have not ended yet, and why."""
        self._hung: dict[str, None] = {}
        self._join_room = float(MOST_JOINS)
        """Slots that may join now; negative after a large worker."""
        self._joined_at = trio.current_time()
        self._reports: list[BatchReport] = []
        self._greetings = SlicedWork()
        self._greeting: dict[bytes, WorkerHello] = {}
        """Greetings that are read, by the routing id of the control; `_take_join_room` bounds them."""

    # ---------------------------------------------------------------- turns

    async def run(self) -> None:
        """Serve the port until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._greetings.run, self._dispatcher.end_turn)
            await self._inbox.run()

    def heard(self, peers: Set[bytes], now: float) -> None:
        """Begin a turn: something arrived from these connections."""
        for peer in peers:
            slot = self._slots.get(peer)
            if (worker := self.workers.get(peer) if slot is None else slot.worker) is not None:
                worker.heard_at = now

    def serve(self, peer: bytes, item: Item, now: float) -> int:
        """Serve what a connection sent; returns its price in points."""
        slot = self._slots.get(peer)
        if isinstance(item, ProtocolError | BadEntry):
            self.cut_off(peer, str(item), now)
        elif slot is not None:
            self._obey_slot(peer, slot, item, now)
        else:
            worker = self.workers.get(peer)
            self._obey(peer, worker, item, now)
            if type(item) is WorkerHello:
                return DEAR + item.slots
            if worker is None:
                return DEAR
        return 1

    def end_turn(self, now: float) -> None:
        """Hand on the reports of this turn together, and send what became ready."""
        self._hand_on_reports(now)
        self._dispatcher.end_turn()

    def _hand_on_reports(self, now: float) -> None:
        if self._reports:
            reports, self._reports = self._reports, []
            self._dispatcher.batches_reported(reports, now)

    def _obey_slot(self, peer: bytes, slot: SlotRecord, entry: Entry, now: float) -> None:
        """Carry out one entry of a slot."""
        match entry:
            case BatchDone() | BatchFailedEntry():
                self._reported(slot, entry, now)
            case Heartbeat():
                pass
            case _:
                self.cut_off(peer, f"unexpected {type(entry).__name__} of a slot", now)

    def _obey(self, peer: bytes, worker: ConnectedWorker | None, entry: Entry, now: float) -> None:
        """Carry out one entry of a control, or of a connection that is none yet."""
        if type(entry) is WorkerHello:
            self._register(peer, worker, entry, now)
            return
        if type(entry) is SlotHello and worker is None:
            self._greet_slot(peer, entry, now)
            return
        if worker is None and peer in self._greeting:
            if type(entry) is Goodbye:
                del self._greeting[peer]
            return
        if worker is None:
            self.outgoing.tell_stranger(peer, now)
            return
        match entry:
            case BatchFailedEntry():
                slot = next((slot for slot in worker.slots if entry.batch in slot.running), None)
                self._reported(slot or worker.slots[0], entry, now)
            case SlotEnded() if entry.session == worker.session and entry.slot < len(worker.slots):
                self._slot_ended(worker.slots[entry.slot], entry.batch, now)
                self._availability.workers_changed(now)
                self._dismiss_if_idle(worker, now)
            case WorkerDraining():
                worker.draining = True
                self._dispatcher.worker_closing(worker, now)
                self._dismiss_if_idle(worker, now)
            case Goodbye() if worker.running:
                worker.farewell_said = True  # its reports may be unread on other connections
                self._part(worker, now)
            case Goodbye():
                self._leave(worker, "goodbye", now)
            case Heartbeat() | SlotEnded():
                pass
            case _:
                self.cut_off(peer, f"unexpected {type(entry).__name__}", now)

    def _reported(self, slot: SlotRecord, entry: BatchDone | BatchFailedEntry, now: float) -> None:
        worker = slot.worker
        if entry.session != worker.session:
            self._statistics.late_reports += 1
            return
        try:
            self._reports.append(slot.report(entry, now))
        except ReportRefused as error:
            self._end(worker, f"worker {worker.name!r}: batch {entry.batch}: {error}", now)
            return
        self._dismiss_if_idle(worker, now)

    def _slot_ended(self, slot: SlotRecord, batch: int | None, now: float) -> None:
        """Take a slot out of the books whose thread has ended. Its connection is gone, and what was unread there is late."""
        self._hand_on_reports(now)
        if slot.peer is not None:
            self._slots.pop(slot.peer, None)
            slot.peer = None
        self._dispatcher.slot_ended(slot, batch, now)

    def _end(self, worker: ConnectedWorker, why: str, now: float) -> None:
        """Cut off a worker by its control, whichever of its connections gave the reason."""
        peer = worker.peer
        if peer is not None:
            self.cut_off(peer, why, now)
        else:  # slots of this process: a defect
            log.error("own slots end", why=why)
            self._leave(worker, "sent what cannot be accepted", now)
            self._availability.own_slots_ended(now)

    # ---------------------------------------------------------------- the server's own slots

    def start_own(self) -> None:
        """Start the slots of this process; they join when they have greeted."""
        own, now = self._own, trio.current_time()
        assert own is not None, "this port is for workers"
        added = at_once(self._models.add_all(own.models, own.digests))
        worker = LocalWorker(own, self.outgoing, now, session=next(self._sessions))
        self._tokens[worker.token] = worker
        self._availability.models_added(added, now)
        own.start(self._heed)
        own.set_clock(0.0)
        own.begin(SlotSession(number=worker.session, token=worker.token))

    def _heed(self, news: News) -> None:
        """Take news of the slots of this process."""
        now = trio.current_time()
        worker = next(iter(self._tokens.values()), None)
        if worker is None:
            return
        match news:
            case BatchWithdrawn():
                entry = BatchFailedEntry(
                    batch=news.batch,
                    session=news.session,
                    code=ErrorCode.RECALLED,
                    message="withdrawn before it began",
                )
                self._reported(worker.slots[news.slot], entry, now)
                self._hand_on_reports(now)
            case ThreadEnded():
                self.own_greeted.set()
                slot = worker.slots[news.slot]
                advice = "restart the server, or use worker processes"
                log.error("slot ended", slot=slot.label, why="its thread has ended", advice=advice)
                self._slot_ended(slot, news.batch, now)
                if not any(slot.number in self._dispatcher.slots for slot in worker.slots):
                    self._availability.own_slots_ended(now)
            case SessionBroken():
                self.own_greeted.set()
                self._end(worker, news.why, now)
            case SlotIdle():
                pass
            case _:
                assert_never(news)
        self._dispatcher.end_turn()

    # ---------------------------------------------------------------- greetings

    def _register(self, peer: bytes, worker: ConnectedWorker | None, hello: WorkerHello, now: float) -> None:
        """Register a worker. One that greets again, on this connection or another, has forgotten its batches."""
        if hello.protocol != WORKER_PROTOCOL:
            self._refuse_version(peer, worker, hello, now)
            return
        try:
            if self._own is not None:
                raise GreetingRefused("this port is for the server's own slots")
            check_form(hello)
            self._take_join_room(hello, now)
        except GreetingRefused as error:
            self._refuse(peer, worker, hello, error, now)
            return
        if worker is not None:
            self._leave(worker, "greets again", now)
        self._greeting[peer] = hello
        self._greetings.add(self._welcome(peer, hello))

    def _welcome(self, peer: bytes, hello: WorkerHello) -> Slices[None]:
        """Read what a worker offers, and welcome it. Without effect where it has gone or greeted again meanwhile."""
        try:
            offer = yield from read_offer(hello)
            if self._greeting.get(peer) is not hello:
                return
            self._check_identity(peer, hello)
            if served := self._models.other_files(offer.models, offer.digests):
                del self._greeting[peer]
                self._refuse_other_files(peer, hello, served, offer, trio.current_time())
                return
            added = yield from self._models.add_all(offer.models, offer.digests, hello.once)
        except (GreetingRefused, ConfigurationError) as error:
            if self._greeting.get(peer) is hello:
                del self._greeting[peer]
                self._refuse(peer, None, hello, error, trio.current_time())
            return
        for model in added:
            self._availability.models_added([model], trio.current_time())
            yield
        for name, table in offer.costs.items():
            self._dispatcher.costs_told(name, table, trio.current_time())
            yield
        if self._greeting.get(peer) is hello:
            del self._greeting[peer]
            self._let_in(peer, offer, trio.current_time())

    def _let_in(self, peer: bytes, offer: Offer, now: float) -> None:
        """Begin a worker's session."""
        for other in list(self.workers.values()):
            if other.name == offer.name:
                self._leave(other, "came back on another connection", now)
        worker = ConnectedWorker(peer, offer, self.outgoing, now, session=next(self._sessions))
        self.workers[peer] = worker
        self._tokens[worker.token] = worker
        self.outgoing.say(
            worker,
            WorkerWelcome(
                epoch=self._epoch,
                token=worker.token,
                session=worker.session,
                heartbeat_ms=round(self._settings.heartbeat_s * 1000),
            ),
        )
        self._tell_time(worker, now)
        self._tell_log_level(worker)
        log.info(
            "worker joined",
            worker=worker.name,
            pid=worker.pid,
            slots=offer.slots,
            models=list(offer.models),
            digests=offer.digests,
        )

    def _greet_slot(self, peer: bytes, hello: SlotHello, now: float) -> None:
        """Let a slot in, by its worker's token and key. With the last of its slots the worker joins."""
        worker = self._tokens.get(hello.token)
        if worker is None:  # its session is over, or is another server's
            self.outgoing.tell_stranger(peer, now)
            return
        control = worker.peer
        if control is not None and self._socket.key_of(control) != self._socket.key_of(peer):
            why = "a slot with the token of a worker that has another key"
        elif hello.slot >= len(worker.slots) or worker.slots[hello.slot].has_greeted:
            why = f"slot {hello.slot} of {worker.name!r} is none, or has greeted already"
        else:
            slot = worker.slots[hello.slot]
            slot.peer = peer
            self._slots[peer] = slot
            if worker.has_greeted and not worker.draining and worker.parting_since is None:
                self._dispatcher.worker_joined(worker, now)
                self._availability.workers_changed(now)
                if self._own is not None:
                    self.own_greeted.set()
            return
        self.outgoing.refuse(peer, why, now)
        self._turn_away(peer)

    def set_log_level(self, level: str) -> None:
        """Let the processes of this server log at this level, also those that join later."""
        self._log_level = level
        for worker in self.workers.values():
            self._tell_log_level(worker)

    def _tell_log_level(self, worker: ConnectedWorker) -> None:
        if self._log_level is not None and self._owns(worker.name):
            self.outgoing.say(worker, SetLogLevel(level=self._log_level))

    def _tell_time(self, worker: ConnectedWorker, now: float) -> None:
        self.outgoing.say(worker, Clock(sent_us=round(now * 1e6)))

    def _take_join_room(self, hello: WorkerHello, now: float) -> None:
        """Raises GreetingRefused where slots join faster than the event loop has time for, or with too many models.

        Not for processes of our own.
        """
        refilled = self._join_room + JOINS_PER_S * (now - self._joined_at)
        self._join_room, self._joined_at = min(float(MOST_JOINS), refilled), now
        if not self._owns(hello.worker):
            check_number(hello)
            if self._join_room <= 0.0:
                raise GreetingRefused("too many slots join at a time; it may greet again in a few seconds")
        self._join_room -= hello.slots

    def _check_identity(self, peer: bytes, hello: WorkerHello) -> None:
        """Raises GreetingRefused for a worker that hangs, and for one that has another's name."""
        name, key = hello.worker, self._socket.key_of(peer)
        self._silent.pop(name, None)
        if name in self._hung:  # it holds a slot, whatever it says
            raise GreetingRefused("it hangs; end its process and start it again")
        namesakes = [routing_id for routing_id, other in self.workers.items() if other.name == name]
        if any(self._socket.key_of(routing_id) != key for routing_id in namesakes):
            raise GreetingRefused("it has the name of a worker with another key")
        if key is not None and self._owns(name):
            # Ours come over a private socket. This one's end would be taken for that of ours, and ours be killed for it.
            raise GreetingRefused("it has the name of a process of this server")

    def _refuse(
        self, peer: bytes, worker: ConnectedWorker | None, hello: WorkerHello, error: Exception, now: float
    ) -> None:
        # Without its quotes, but with its escapes: a name may try to be a line of its own.
        name = repr(hello.worker[:MAX_NAME])[1:-1]
        self._statistics.bad_messages["workers"] += 1
        log.error("worker refused", worker=name, pid=hello.pid, why=str(error))
        if self._owns(hello.worker):
            self._refused[hello.worker] = f"it is refused: {error}"
        if worker is not None:
            self._leave(worker, "sent what cannot be accepted", now)
        self._turn_away(peer)

    def _refuse_version(
        self, peer: bytes, worker: ConnectedWorker | None, hello: WorkerHello, now: float
    ) -> None:
        """Tell a worker to end that speaks another version: it is of another release than this server."""
        why = (
            f"it speaks version {hello.protocol} of the workers' protocol, and this server version {WORKER_PROTOCOL}: "
            "install the same release of shapestream on both sides"
        )
        self.outgoing.say_once(peer, WorkerRefused(model="", message=why))
        self._refuse(peer, worker, hello, GreetingRefused(why), now)

    def _refuse_other_files(
        self, peer: bytes, hello: WorkerHello, served: Mapping[str, str], offer: Offer, now: float
    ) -> None:
        """Tell a worker to end that has read other files: a model is served from the same bytes everywhere."""
        for model, digest in served.items():
            offered = offer.digests.get(model)
            log.error(
                "worker refused",
                worker=hello.worker,
                pid=hello.pid,
                model=model,
                serves=digest,
                offers=offered,
                why=_OTHER_FILES,
                advice=_ADVICE,
            )
            why = f"{_OTHER_FILES}: sha256 {offered or 'unknown'} of {model!r}, and {digest} is served ({_ADVICE})"
            self.outgoing.say_once(peer, WorkerRefused(model=model, message=why))
        self._statistics.peers_lost["worker: other files"] += 1
        self._turn_away(peer)

    # ---------------------------------------------------------------- the ways to leave

    def _leave(self, worker: ConnectedWorker, why: str, now: float, *, died: bool = False) -> None:
        """Take a worker out of the books; its batches are run again elsewhere. `died`: perhaps of one of them."""
        if worker.token not in self._tokens:
            return
        self._statistics.peers_lost[f"worker: {why}"] += 1
        log.warning(
            "worker left",
            worker=worker.name,
            pid=worker.pid,
            why=why,
            batches=worker.running,
        )
        self._forget(worker, now, died=died)

    def _dismiss_if_idle(self, worker: ConnectedWorker, now: float) -> None:
        """Let a worker go that drains and has answered everything."""
        if not (worker.draining or worker.farewell_said) or worker.running or worker.peer is None:
            return
        if worker.farewell_said:
            self._leave(worker, "goodbye", now)
        if not worker.draining or worker.peer is None:
            return
        log.info("worker drained", worker=worker.name, pid=worker.pid)
        self.outgoing.say_once(worker.peer, Goodbye())
        self._forget(worker, now)

    def _forget(self, worker: ConnectedWorker, now: float, *, died: bool = False) -> None:
        # Before its last reports are taken: for what it has answered it is given nothing more.
        self._dispatcher.worker_closing(worker, now)
        self._hand_on_reports(now)
        self._tokens.pop(worker.token, None)
        if self._own is None and not self._owns(worker.name):
            how = "drained" if worker.draining or worker.farewell_said else "lost"
            self._statistics.dialled_in_ends[how] += 1
        if worker.peer is not None:
            self.workers.pop(worker.peer, None)
        for slot in worker.slots:
            if slot.peer is not None:
                self._slots.pop(slot.peer, None)
        self._dispatcher.worker_left(worker, now, died=died)
        worker.left()
        self._availability.workers_changed(now)

    def cut_off(self, peer: bytes, why: str, now: float) -> None:
        """End a connection whose messages cannot be accepted."""
        self.outgoing.refuse(peer, why, now)
        slot = self._slots.get(peer)
        worker = self.workers.get(peer) if slot is None else slot.worker
        control = None if worker is None else worker.peer
        if worker is not None:
            self._leave(worker, "sent what cannot be accepted", now)
        self._turn_away(peer)
        if control is not None and control != peer:
            self._turn_away(control)

    def _turn_away(self, peer: bytes) -> None:
        self._greeting.pop(peer, None)
        self.outgoing.say_once(peer, Goodbye())
        self._inbox.cut_off(peer)

    def lost(self, link: PeerLink, why: str, now: float) -> None:
        """Take note that what was ready for this worker could not be sent, or that it hangs and is to be ended."""
        worker = link.worker if isinstance(link, SlotRecord) else link
        if not isinstance(worker, ConnectedWorker) or link.peer is None or worker.token not in self._tokens:
            return
        peer = worker.peer
        if peer is None and why == GONE:
            return  # a thread has closed its connection: the news of it is on its way
        if peer is None:
            self._end(worker, f"its slots cannot be reached: {why}", now)
        elif worker.killed_for is not None:
            self._end_hanging(worker, peer, worker.killed_for, now)
        elif why == GONE and (worker.parting_since is not None or self._owns(worker.name)):
            self._part(worker, now)  # how its process ended will be told
        else:
            self._leave(worker, why, now)
            self._inbox.cut_off(peer)

    def _end_hanging(self, worker: ConnectedWorker, peer: bytes, why: str, now: float) -> None:
        """Kill a worker that hangs, if its process is our own; else cut it off, and do not let it in again."""
        if self.owner is not None and self._owns(worker.name):
            self._part(worker, now)
            self.owner.kill(worker.name, why)
            return
        advice = "it is cut off; end it and start it again"
        log.error("worker hangs", worker=worker.name, pid=worker.pid, why=why, what=advice)
        self._hung[worker.name] = None
        if len(self._hung) > MAX_HUNG:
            del self._hung[next(iter(self._hung))]
        self._leave(worker, "hangs", now, died=True)
        self._turn_away(peer)

    def _part(self, worker: ConnectedWorker, now: float) -> None:
        """Give a worker nothing more; the answers and the end of its process are waited for, for a moment."""
        if worker.parting_since is None:
            worker.parting_since = now
            self._dispatcher.worker_closing(worker, now)

    async def process_ended(self, name: str, *, died: bool) -> LastState:
        """Let a worker leave whose process has ended, as soon as its last messages are read.

        `died`: by a signal, or with an error. Returns what is known of it.
        """
        for peer, hello in list(self._greeting.items()):
            if hello.worker == name:
                del self._greeting[peer]
        worker = self._named(name)
        if worker is not None:
            self._part(worker, trio.current_time())
            self._dispatcher.end_turn()
        await trio.sleep(LAST_WORDS_S)
        for _ in range(READ_BURSTS):
            self._inbox.serve_arrived()
            if self._inbox.read_empty:
                break
        if worker is not None:
            for link in (*worker.slots, worker):
                if link.peer is not None:
                    self._inbox.serve_all_of(link.peer)
        worker = self._named(name) or worker
        self._silent.pop(name, None)
        refused = self._refused.pop(name, "")
        if worker is None:
            return LastState(refused=refused)
        state = LastState(busy=bool(worker.running), answered_at=worker.answered_at)
        why = "its process died" if died else "its process ended"
        self._leave(worker, why, trio.current_time(), died=died)
        self._dispatcher.end_turn()
        return state

    def beat(self, now: float) -> None:
        """Once per heartbeat interval: give up silent workers, tell the others that this loop is alive."""
        # While messages are unread, a worker that seems silent may be heard in a moment.
        read_empty, silence_s = self._inbox.read_empty, self._settings.worker_silence_s
        for worker in list(self.workers.values()):
            parting = worker.parting_since if worker.killed_for is None else None
            if parting is not None and now - parting > EXIT_NEWS_S:
                # Its process has not ended either: only the connection broke.
                self._leave(worker, "goodbye" if worker.farewell_said else GONE, now)
            elif read_empty and now - worker.heard_at > silence_s:
                if self._owns(worker.name):
                    self._silent[worker.name] = now
                self._leave(worker, "silent", now)
        for name, since in list(self._silent.items()):
            if self.owner is None or not self.owner.owns(name):
                del self._silent[name]
            elif now - since > SILENCES_TO_KILL * silence_s:
                del self._silent[name]
                self.owner.kill(name, f"it was silent for {now - since:.0f} s")
        for worker in self.workers.values():
            self._tell_time(worker, now)
            for slot in worker.slots:
                self.outgoing.keep_alive(slot)
        self.outgoing.count_handshakes(now)

    def say_goodbye(self) -> None:
        """Say to all workers, at the end of this turn, that the server leaves."""
        for worker in self.workers.values():
            self.outgoing.say(worker, Goodbye())

    @property
    def dialled_in(self) -> int:
        """The workers that are here and were started elsewhere."""
        return sum(not self._owns(worker.name) for worker in self.workers.values())

    def _owns(self, name: str) -> bool:
        """Whether this is a process of our own."""
        return self.owner is not None and self.owner.owns(name)

    def _named(self, name: str) -> ConnectedWorker | None:
        return next((one for one in self.workers.values() if one.name == name), None)


# -------------------------------------------------------------------- what a worker says of itself


class GreetingRefused(Exception):
    """A worker cannot be welcomed; the text says why, about "it"."""


def check_form(hello: WorkerHello) -> None:
    """Raises GreetingRefused for a name that cannot be shown, and for a number of slots that cannot be."""
    if len(hello.worker) > MAX_NAME or not hello.worker.isprintable():
        raise GreetingRefused(f"a worker's name is printable, of at most {MAX_NAME} characters")
    if not 1 <= hello.slots <= MAX_SLOTS:
        raise GreetingRefused(f"it has {hello.slots} slots; 1 to {MAX_SLOTS} it may have")


def check_number(hello: WorkerHello) -> None:
    """Raises GreetingRefused for more models than the event loop has time for."""
    number = max(len(hello.models), len(hello.costs))
    if number > MOST_OFFERED:
        raise GreetingRefused(f"it has {number} models; {MOST_OFFERED} it may have at most")
    if number * hello.slots > MOST_PAIRS:
        text = f"it has {number} models in {hello.slots} slots; models x slots may be {MOST_PAIRS} at most"
        raise GreetingRefused(text)


def read_offer(hello: WorkerHello) -> Slices[Offer]:
    """Raises GreetingRefused for what is no signature, or no table of costs of a model that it serves."""
    models, costs = {}, {}
    try:
        for name, plain in hello.models.items():
            models[name] = ModelSignature.from_dict(plain)
            yield
        for name, plain in hello.costs.items():
            costs[name] = CostTable.from_dict(plain)
            yield
        tolerances = read_tolerances(hello.tolerances, models)
    except EngineError as error:
        raise GreetingRefused(str(error)) from None
    for name, table in costs.items():
        if name not in models or table.dimensions != models[name].dimensions:
            raise GreetingRefused(f"its costs of {name!r} are not those of a model that it serves")
    for name, digest in hello.digests.items():
        if name not in models or not _DIGEST.fullmatch(digest):
            raise GreetingRefused(f"its digest of {name!r} is not that of a model that it serves")
    return Offer(
        name=hello.worker,
        pid=hello.pid,
        slots=hello.slots,
        models=models,
        costs=costs,
        digests=hello.digests,
        tolerances=tolerances,
    )
