"""The workers that are connected to one port: their sessions from begin to end, their slots, and what these report.

A worker leaves this register once, whatever ends it: a goodbye, silence, a broken connection, the end of its process, or a
message that cannot be accepted. Its reports are handed to the dispatcher before that, and its other batches run elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

import structlog

from shapestream.serving.availability import Availability
from shapestream.serving.dispatcher import Dispatcher
from shapestream.serving.outgoing import Outgoing
from shapestream.serving.workers import ConnectedWorker, SlotRecord, WorkerState
from shapestream.wire.messages import BatchDone, BatchFailedEntry, Goodbye, SlotHello
from shapestream_engine.batch import BatchReport

log = structlog.get_logger()

# What one connection may have unserved: a slot reports a bundle at most, whatever the bytes of its outputs.
MOST_UNREAD = 4096
MOST_UNREAD_BYTES = 2 << 30


class ConnectedWorkers:
    """The workers of one port, by the routing ids of their connections."""

    def __init__(
        self,
        outgoing: Outgoing,
        cut_off: Callable[[bytes], None],
        dispatcher: Dispatcher,
        availability: Availability,
    ) -> None:
        """`cut_off`: ignores a connection from now on, and what it has sent."""
        self._outgoing = outgoing
        self._cut_off = cut_off
        self._dispatcher = dispatcher
        self._availability = availability
        self._statistics = outgoing.statistics
        self.sessions = count(1)
        """Numbers of sessions; none is used twice."""
        self.controls: dict[bytes, ConnectedWorker] = {}
        """Workers by the routing id of their control."""
        self.slots: dict[bytes, SlotRecord] = {}
        """The slots that have greeted, by routing id."""
        self._tokens: dict[bytes, ConnectedWorker] = {}
        """Workers by the token that their slots greet with."""
        self._reports: list[BatchReport] = []
        """The reports of this turn."""

    def of(self, peer: bytes) -> ConnectedWorker | None:
        """Return the worker whose control, or one of whose slots, this connection is."""
        slot = self.slots.get(peer)
        return self.controls.get(peer) if slot is None else slot.worker

    def named(self, name: str) -> ConnectedWorker | None:
        """Return the worker of this name."""
        return next((worker for worker in self.controls.values() if worker.name == name), None)

    # ---------------------------------------------------------------- begin

    def add(self, worker: ConnectedWorker) -> None:
        """Begin a worker's session."""
        if worker.peer is not None:
            self.controls[worker.peer] = worker
        self._tokens[worker.token] = worker

    def greet_slot(self, peer: bytes, hello: SlotHello, now: float) -> None:
        """Let a slot in, by its worker's token and key. With the last of its slots the worker joins."""
        worker, socket = self._tokens.get(hello.token), self._outgoing.socket
        if worker is None:  # its session is over, or is another server's
            self._outgoing.tell_stranger(peer, now)
            return
        control = worker.peer
        if control is not None and socket.key_of(control) != socket.key_of(peer):
            why = "a slot with the token of a worker that has another key"
        elif hello.slot >= len(worker.slots) or worker.slots[hello.slot].has_greeted:
            why = f"slot {hello.slot} of {worker.name!r} is none, or has greeted already"
        else:
            slot = worker.slots[hello.slot]
            slot.peer = peer
            self.slots[peer] = slot
            if worker.has_greeted and worker.state is WorkerState.GREETING:
                worker.change("serve", now)
                self._dispatcher.worker_joined(worker, now)
                self._availability.workers_changed(now)
            return
        self._outgoing.refuse(peer, why, now)
        self.turn_away(peer)

    # ---------------------------------------------------------------- reports

    def reported(self, slot: SlotRecord, entry: BatchDone | BatchFailedEntry, now: float) -> None:
        """Take a report, for the end of this turn. Raises ReportRefused for one that cannot be believed."""
        worker = slot.worker
        if entry.session != worker.session:
            self._statistics.late_reports += 1
            return
        self._reports.append(slot.report(entry, now))
        self.dismiss_if_idle(worker, now)

    def hand_on_reports(self, now: float) -> None:
        """Hand the reports of this turn to the dispatcher, together."""
        if self._reports:
            reports, self._reports = self._reports, []
            self._dispatcher.batches_reported(reports, now)

    def slot_ended(self, slot: SlotRecord, batch: int | None, now: float) -> None:
        """Take a slot out of the books whose thread has ended. Its connection is gone, and what was unread there is late."""
        self.hand_on_reports(now)
        if slot.peer is not None:
            self.slots.pop(slot.peer, None)
            slot.peer = None
        self._dispatcher.slot_ended(slot, batch, now)

    # ---------------------------------------------------------------- end

    def close(self, worker: ConnectedWorker, change: str, now: float) -> None:
        """Give a worker no more batches, since it drains, says goodbye, or cannot be reached."""
        worker.change(change, now)
        self._dispatcher.worker_closing(worker, now)

    def dismiss_if_idle(self, worker: ConnectedWorker, now: float) -> None:
        """Let a worker go that drains, or has said goodbye, and has answered everything."""
        if worker.running:
            return
        if worker.state is WorkerState.LEAVING:
            self.leave(worker, "goodbye", now)
        elif worker.state is WorkerState.DRAINING and worker.peer is not None:
            log.info("worker drained", worker=worker.name, pid=worker.pid)
            self._outgoing.say_once(worker.peer, Goodbye())
            self._forget(worker, now)

    def leave(self, worker: ConnectedWorker, why: str, now: float, *, died: bool = False) -> None:
        """End a worker's session, if it has not ended; its batches run again elsewhere. `died`: perhaps of one of them."""
        if worker.state is WorkerState.GONE:
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

    def _forget(self, worker: ConnectedWorker, now: float, *, died: bool = False) -> None:
        # Before its last reports are taken: for what it has answered it is given nothing more.
        self._dispatcher.worker_closing(worker, now)
        self.hand_on_reports(now)
        if worker.dialled_in:
            drained = worker.state in (WorkerState.DRAINING, WorkerState.LEAVING)
            self._statistics.dialled_in_ends["drained" if drained else "lost"] += 1
        del self._tokens[worker.token]
        if worker.peer is not None:
            del self.controls[worker.peer]
        for slot in worker.slots:
            if slot.peer is not None:
                self.slots.pop(slot.peer, None)
        self._dispatcher.worker_left(worker, now, died=died)
        worker.left(now)
        self._availability.workers_changed(now)

    def turn_away(self, peer: bytes) -> None:
        """Tell a connection to end, and ignore it from now on."""
        self._outgoing.say_once(peer, Goodbye())
        self._cut_off(peer)
