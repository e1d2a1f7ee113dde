"""The workers' port: it reads what workers send, and notices those that hang, are silent, or cannot be reached.

A worker greets on the connection of its control, and is given a token; each of its slots greets with that on a connection
of its own. Batches and their reports travel on the slots' connections, all else on the control's, so there is no order
between the two. `connected_workers.py` begins, keeps and ends sessions, `workers.py` has their
states. The slots of the server's own process have a port of their own (`local_port.py`).

A worker is half-trusted: its messages are read as strictly as a client's, and a report that contradicts the model's
signature ends the worker, not the server; its batches are run again elsewhere.

The news of a worker's end comes to `process_ended`, `lost`, `beat` or `cut_off`. All of them call `ConnectedWorkers.leave`,
which tells the scheduler through `Dispatcher.worker_left`; scheduling/recovery.py decides about its batches.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass

import trio

from shapestream.errors import ProtocolError
from shapestream.serving.connected_workers import (
    MOST_UNREAD,
    MOST_UNREAD_BYTES,
    Availability,
    ConnectedWorkers,
    Greetings,
    OwnProcesses,
)
from shapestream.serving.dispatcher import Dispatcher
from shapestream.serving.port_traffic import DEAR, GONE, REJOIN, REJOIN_S, Inbox, Item, Outgoing, PeerLink
from shapestream.serving.served_models import ServedModel, ServedModels
from shapestream.serving.workers import ConnectedWorker, Offer, ReportRefused, SlotRecord, WorkerState
from shapestream.settings import ServerSettings
from shapestream.telemetry.logging import get_logger
from shapestream.wire.codec import BadEntry
from shapestream.wire.messages import (
    BatchDone,
    BatchFailedEntry,
    Clock,
    Entry,
    Goodbye,
    Heartbeat,
    SetLogLevel,
    SlotEnded,
    SlotHello,
    Unknown,
    WorkerDraining,
    WorkerHello,
    WorkerWelcome,
)

log = get_logger()

READ_BURSTS = 8
# Between the end of a process and its leaving: libzmq's thread reads what it said last, so that a batch which it had
# answered is not taken for one that it died of.
LAST_WORDS_S = 0.05
# Seconds to wait for the exit status of a process that cannot be reached: it tells whether its batch ended it. And for the
# reports of a worker that has said goodbye: they may be unread on its slots' connections.
EXIT_NEWS_S = 1.0


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
    """Reads the port that workers dial."""

    def __init__(
        self,
        outgoing: Outgoing,
        dispatcher: Dispatcher,
        models: ServedModels,
        availability: Availability,
        settings: ServerSettings,
        *,
        epoch: bytes,
    ) -> None:
        self.outgoing = outgoing
        self._inbox = Inbox(
            outgoing.socket,
            outgoing.codec,
            self,
            window_entries=MOST_UNREAD,
            window_bytes=MOST_UNREAD_BYTES,
        )
        self._dispatcher = dispatcher
        self._availability = availability
        self._settings = settings
        self._epoch = epoch
        self.processes = OwnProcesses(settings.worker_silence_s)
        self._workers = ConnectedWorkers(
            outgoing, self._inbox.cut_off, dispatcher, availability, self.processes
        )
        self._greetings = Greetings(
            self._workers, outgoing, dispatcher, models, availability, self.processes, self._welcome
        )
        self._log_level: str | None = None
        """That of the server's own processes, where it was changed while they ran."""

    @property
    def dialled_in(self) -> int:
        """The workers that are here and were started elsewhere."""
        return sum(worker.dialled_in for worker in self._workers.controls.values())

    def is_needed(self, name: str) -> bool:
        """Tell whether requests wait for what only this worker has, or may do so as soon as another one has joined."""
        worker = self._workers.named(name)
        if worker is None or not worker.is_serving:
            return False
        joining = any(
            other.state is WorkerState.GREETING and not self.processes.holds(other)
            for other in self._workers.controls.values()
        )
        return joining or self._availability.is_needed(worker, self.processes.leaves)

    def move_traffic(self, now: float) -> None:
        """Let the workers join that were held and are held no more."""
        self._workers.join([*self._workers.controls.values()], now)

    def give_no_more(self, name: str) -> None:
        """Give no more batches to a worker whose process is about to be asked to end."""
        if (worker := self._workers.named(name)) is not None:
            self._dispatcher.worker_closing(worker, trio.current_time())

    async def run(self) -> None:
        """Serve the port until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._greetings.run)
            await self._inbox.run()

    # ---------------------------------------------------------------- what workers send

    def heard(self, peers: Set[bytes], now: float) -> None:
        """Begin a turn: something arrived from these connections."""
        for peer in peers:
            if (worker := self._workers.of(peer)) is not None:
                worker.heard_at = now

    def serve(self, peer: bytes, item: Item, now: float) -> int:
        """Serve what a connection sent; returns its price in points."""
        slot = self._workers.slots.get(peer)
        if isinstance(item, ProtocolError | BadEntry):
            self.cut_off(peer, str(item), now)
        elif slot is not None:
            self._serve_slot(peer, slot, item, now)
        elif (worker := self._workers.controls.get(peer)) is not None and type(item) is not WorkerHello:
            self._serve_control(peer, worker, item, now)
        else:
            self._serve_newcomer(peer, worker, item, now)
            return DEAR + (item.slots if type(item) is WorkerHello else 0)
        return 1

    def granted_bytes(self, peer: bytes) -> int:
        """Return 0: reports are not granted."""
        return 0

    def end_turn(self, now: float) -> None:
        """Hand on the reports of this turn together, and send what became ready."""
        self._workers.hand_on_reports(now)
        self._dispatcher.end_turn()

    def _serve_slot(self, peer: bytes, slot: SlotRecord, entry: Entry, now: float) -> None:
        match entry:
            case BatchDone() | BatchFailedEntry():
                self._reported(peer, slot, entry, now)
            case Heartbeat():
                pass
            case _:
                self.cut_off(peer, f"unexpected {type(entry).__name__} of a slot", now)

    def _serve_control(self, peer: bytes, worker: ConnectedWorker, entry: Entry, now: float) -> None:
        workers = self._workers
        match entry:
            case BatchFailedEntry():
                slot = next((slot for slot in worker.slots if entry.batch in slot.running), None)
                self._reported(peer, slot or worker.slots[0], entry, now)
            case SlotEnded() if entry.session == worker.session and entry.slot < len(worker.slots):
                workers.slot_ended(worker.slots[entry.slot], entry.batch, now)
                self._availability.workers_changed(now)
                workers.dismiss_if_idle(worker, now)
            case WorkerDraining():
                workers.close(worker, "drain", now)
                workers.dismiss_if_idle(worker, now)
            case Goodbye():
                workers.close(worker, "say goodbye", now)
                workers.dismiss_if_idle(worker, now)
            case Heartbeat() | SlotEnded():
                pass
            case _:
                self.cut_off(peer, f"unexpected {type(entry).__name__}", now)

    def _serve_newcomer(self, peer: bytes, worker: ConnectedWorker | None, entry: Entry, now: float) -> None:
        """Serve a greeting, or an entry of a connection that has not greeted."""
        if type(entry) is WorkerHello:
            self._greetings.register(peer, worker, entry, now)
        elif type(entry) is SlotHello:
            self._workers.greet_slot(peer, entry, now)
        elif not self._greetings.reads(peer):
            self.outgoing.tell_stranger(peer, now)
        elif type(entry) is Goodbye:
            self._greetings.drop(peer)

    def _reported(
        self, peer: bytes, slot: SlotRecord, entry: BatchDone | BatchFailedEntry, now: float
    ) -> None:
        try:
            self._workers.reported(slot, entry, now)
        except ReportRefused as error:
            self.cut_off(peer, f"worker {slot.worker.name!r}: batch {entry.batch}: {error}", now)

    # ---------------------------------------------------------------- what workers are told

    def _welcome(self, peer: bytes, offer: Offer, serves: Mapping[str, ServedModel], now: float) -> None:
        """Begin a worker's session; that of another connection with the same name ends."""
        while (other := self._workers.named(offer.name)) is not None:
            self._workers.leave(other, "came back on another connection", now)
        worker = ConnectedWorker(
            peer,
            offer,
            serves,
            self.outgoing,
            now,
            session=next(self._workers.sessions),
            dialled_in=not self.processes.own(offer.name),
        )
        self._workers.add(worker)
        self.outgoing.say(
            worker,
            WorkerWelcome(
                epoch=self._epoch,
                token=worker.token,
                session=worker.session,
                heartbeat_ms=round(self._settings.heartbeat_s * 1000),
            ),
        )
        self._send_time(worker, now)
        self._send_log_level(worker)
        log.info(
            "worker joined",
            worker=worker.name,
            pid=worker.pid,
            slots=offer.slots,
            models=list(offer.models),
            digests=offer.digests,
            engines=offer.engines,
        )

    def _send_time(self, worker: ConnectedWorker, now: float) -> None:
        self.outgoing.say(worker, Clock(sent_us=round(now * 1e6)))

    def set_log_level(self, level: str) -> None:
        """Let the processes of this server log at this level, also those that join later."""
        self._log_level = level
        for worker in self._workers.controls.values():
            self._send_log_level(worker)

    def _send_log_level(self, worker: ConnectedWorker) -> None:
        if self._log_level is not None and not worker.dialled_in:
            self.outgoing.say(worker, SetLogLevel(level=self._log_level))

    def say_goodbye(self) -> None:
        """Tell all workers, at the end of this turn, that the server leaves."""
        for worker in self._workers.controls.values():
            self.outgoing.say(worker, Goodbye())

    # ---------------------------------------------------------------- workers that are lost

    def cut_off(self, peer: bytes, why: str, now: float) -> None:
        """End a connection whose messages cannot be accepted, and the worker that it belongs to."""
        self.outgoing.refuse(peer, why, now)
        worker = self._workers.of(peer)
        control = None if worker is None else worker.peer
        if worker is not None:
            self._workers.leave(worker, "sent what cannot be accepted", now)
        self._greetings.drop(peer)
        self._workers.turn_away(peer)
        if control is not None and control != peer:
            self._workers.turn_away(control)

    def lost(self, link: PeerLink, why: str, now: float) -> None:
        """End a worker's session: a message to it could not be sent, one of its slots hangs, or it is to greet anew."""
        worker = link.worker if isinstance(link, SlotRecord) else link
        if not isinstance(worker, ConnectedWorker) or link.peer is None or worker.peer is None:
            return
        if why == REJOIN:
            peer, joined_at = worker.peer, worker.since
            self._workers.leave(worker, why, now)
            if now > joined_at + REJOIN_S:  # else its next heartbeat is answered so
                self.outgoing.say_once(peer, Unknown())
        elif worker.state is WorkerState.CONDEMNED:
            self._end_hanging(worker, worker.peer, now)
        elif why == GONE and (worker.state in AWAITED or not worker.dialled_in):
            self._workers.close(worker, "lose touch", now)  # how its process ended will be told
        else:
            peer = worker.peer
            self._workers.leave(worker, why, now)
            self._inbox.cut_off(peer)

    def _end_hanging(self, worker: ConnectedWorker, peer: bytes, now: float) -> None:
        """Kill a worker that hangs, if it is a process of this server; else cut it off, and refuse its greetings."""
        if self.processes.owner is not None and not worker.dialled_in:
            self._workers.close(worker, "condemn", now)
            self.processes.owner.kill(worker.name, worker.condemned_for)
            return
        advice = "it is cut off; end it and start it again"
        log.error("worker hangs", worker=worker.name, pid=worker.pid, why=worker.condemned_for, what=advice)
        self._greetings.refuse_from_now_on(worker.name)
        self._workers.leave(worker, "hangs", now, died=True)
        self._workers.turn_away(peer)

    async def process_ended(self, name: str, *, died: bool) -> LastState:
        """Let a worker leave whose process has ended, as soon as its last messages are read.

        `died`: by a signal, or with an error. Returns what is known of it.
        """
        self._greetings.drop_all_of(name)
        worker = self._workers.named(name)
        if worker is not None:
            self._workers.close(worker, "lose touch", trio.current_time())
            self._dispatcher.end_turn()
        await trio.sleep(LAST_WORDS_S)
        for _ in range(READ_BURSTS):
            self._inbox.serve_arrived()
            if self.outgoing.socket.drained:
                break
        if worker is not None:
            for link in (*worker.slots, worker):
                if link.peer is not None:
                    self._inbox.serve_all_of(link.peer)
        worker = self._workers.named(name) or worker
        refused = self.processes.ended(name)
        if worker is None:
            return LastState(refused=refused)
        state = LastState(busy=bool(worker.running), answered_at=worker.answered_at)
        why = "its process died" if died else "its process ended"
        self._workers.leave(worker, why, trio.current_time(), died=died)
        self._dispatcher.end_turn()
        return state

    def beat(self, now: float) -> None:
        """End the sessions of silent workers and of outdated ones, and send the time to the others."""
        # While messages are unread, the next of them may be of a worker that seems silent.
        read_empty, silence_s = self.outgoing.socket.drained, self._settings.worker_silence_s
        for worker in list(self._workers.controls.values()):
            if worker.state in AWAITED and now - worker.since > EXIT_NEWS_S:
                # Its process has not ended either: only the connection broke.
                self._workers.leave(worker, "goodbye" if worker.state is WorkerState.LEAVING else GONE, now)
            elif read_empty and now - worker.heard_at > silence_s:
                self.processes.silent(worker.name, now)
                self._workers.leave(worker, "silent", now)
            elif worker.dialled_in and worker.is_serving and self._availability.is_outdated(worker):
                what = "it gets nothing more, and greets anew when it has answered"
                log.info("worker is outdated", worker=worker.name, pid=worker.pid, what=what)
                worker.greets_anew = True
                self._workers.close(worker, "drain", now)
                self._workers.dismiss_if_idle(worker, now)
        self.processes.kill_silent(now)
        for worker in self._workers.controls.values():
            self._send_time(worker, now)
            for slot in worker.slots:
                self.outgoing.keep_alive(slot)
        self.outgoing.count_handshakes(now)


AWAITED = (WorkerState.LEAVING, WorkerState.UNREACHABLE)
"""States in which a worker's last reports, or the news how its process ended, are waited for."""
