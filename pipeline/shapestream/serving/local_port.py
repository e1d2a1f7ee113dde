"""The port of the slots in the server's own process.

These slots greet and report on connections as a worker's slots do. They have no control connection: the event loop calls
them, and they tell it what happens to them (`News`). They cannot be killed, and nothing that they send is refused but
by a defect. So no inbox counts what they send, or divides it into fair turns: all that has come is served at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import assert_never

import trio

from shapestream.errors import ProtocolError
from shapestream.serving.connected_workers import Availability, ConnectedWorkers
from shapestream.serving.dispatcher import Dispatcher
from shapestream.serving.port_traffic import GONE, REJOIN, REJOIN_S, Item, Outgoing, PeerLink
from shapestream.serving.served_models import ServedModel, ServedModels
from shapestream.serving.slot_threads import (
    BatchWithdrawn,
    News,
    SessionBroken,
    SlotIdle,
    SlotSession,
    SlotThreads,
    ThreadEnded,
)
from shapestream.serving.workers import LocalWorker, ReportRefused, SlotRecord, WorkerState
from shapestream.slices import at_once
from shapestream.telemetry.logging import get_logger
from shapestream.transport.interface import Addressed
from shapestream.wire.codec import BadEntry
from shapestream.wire.messages import BatchDone, BatchFailedEntry, SlotHello
from shapestream_engine.batch import ErrorCode

log = get_logger()


class LocalPort:
    """Reads the port of the server's own slots, and takes their news."""

    __slots__ = (
        "_availability",
        "_dispatcher",
        "_drained",
        "_models",
        "_name",
        "_now",
        "_serves",
        "_session_ended",
        "_thread_ended",
        "_threads",
        "_workers",
        "ended",
        "greeted",
        "outgoing",
        "worker",
    )

    def __init__(
        self,
        outgoing: Outgoing,
        dispatcher: Dispatcher,
        models: ServedModels,
        availability: Availability,
        threads: SlotThreads,
        name: str = "local",
    ) -> None:
        """`name`: of the slots as a worker, which no other worker has."""
        self.outgoing = outgoing
        self._dispatcher = dispatcher
        self._models = models
        self._availability = availability
        self._threads = threads
        self._name = name
        self._workers = ConnectedWorkers(outgoing, outgoing.socket.cut_off, dispatcher, availability)
        self.worker: LocalWorker | None = None
        """The slots as a worker, once they have started."""
        self.greeted = trio.Event()
        """Set when the slots have greeted, or never will."""
        self._session_ended = trio.Event()
        """Set when the slots are to greet anew."""
        self._thread_ended = False
        self._now: Callable[[], float] = trio.current_time
        self._drained = trio.Event()
        self.ended = trio.Event()
        """Set when `serve` has ended its slots."""
        self._serves: Mapping[str, ServedModel] = {}
        """The models of the slots, as the server has them."""

    @property
    def is_whole(self) -> bool:
        """True if every slot can run batches: none hangs, and no thread has ended."""
        worker = self.worker
        return worker is not None and worker.is_serving and not (self._thread_ended or worker.condemned_for)

    async def serve(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Start the slots, and serve them until cancelled or drained; then end them. Drained ones release their models."""
        try:
            async with trio.open_nursery() as nursery:
                await nursery.start(self.outgoing.socket.run)
                nursery.start_soon(self.run)
                self.start()
                await self.greeted.wait()
                task_status.started()
                await self._drained.wait()
                nursery.cancel_scope.cancel()
        finally:
            await self._threads.aclose()
            if self._drained.is_set():
                self._threads.release()
            self.outgoing.socket.close()
            self.ended.set()

    async def drain(self, grace_s: float) -> None:
        """Let the slots finish what they have, and what waits for models that only they have; `grace_s`: seconds for each.

        Others have joined in their place. Then `serve` ends.
        """
        worker = self.worker
        if worker is None or worker.state is WorkerState.GONE:
            self._drained.set()
            return
        with trio.move_on_after(grace_s):
            await self._dispatcher.until(lambda: not self._availability.is_needed(worker))
        self._workers.close(worker, "drain", trio.current_time())
        self._dispatcher.end_turn()
        with trio.move_on_after(grace_s):
            await self._dispatcher.until(lambda: not worker.running)
        self._workers.let_go(worker, trio.current_time())
        self._dispatcher.end_turn()
        self._drained.set()

    async def run(self) -> None:
        """Serve the port until cancelled. This task serves the messages that the socket's watcher does not find."""
        self._now = trio.lowlevel.current_clock().current_time  # three calls less each time
        socket = self.outgoing.socket
        socket.on_messages = self._serve_arrived
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._greet_anew)
            while True:
                self._serve_all(await socket.receive())

    async def _greet_anew(self) -> None:
        """Begin a session of the slots whenever one has ended by `REJOIN`."""
        while True:
            await self._session_ended.wait()
            self._session_ended = trio.Event()
            if self._thread_ended:
                self._end(
                    "they cannot all greet anew, since the thread of one has ended", trio.current_time()
                )
                self._dispatcher.end_turn()
                return
            self._begin(trio.current_time())
            await trio.sleep(REJOIN_S)

    def start(self) -> None:
        """Start the slots; they join when they have greeted."""
        threads, now = self._threads, trio.current_time()
        offered = at_once(self._models.add_all(threads.models, threads.digests, threads.engines))
        self._availability.models_added(offered.added, now)
        self._serves = offered.models
        threads.start(self._take)
        self._begin(now)

    def _begin(self, now: float) -> None:
        """Begin a session of the slots."""
        worker = LocalWorker(
            self._threads,
            self._serves,
            self.outgoing,
            now,
            session=next(self._workers.sessions),
            name=self._name,
        )
        self.worker = worker
        self._workers.add(worker)
        self._threads.set_clock(0.0)
        self._threads.begin(SlotSession(number=worker.session, token=worker.token))

    # ---------------------------------------------------------------- what the slots send

    def _serve_arrived(self) -> None:
        """Serve what has come, in the task of the socket's watcher."""
        self._serve_all(self.outgoing.socket.receive_nowait())

    def _serve_all(self, messages: list[Addressed]) -> None:
        """Serve what the slots have sent, hand on its reports together, and send what became ready."""
        clock, read = self._now, self.outgoing.codec.read
        now = clock()
        for peer, message in messages:
            try:
                for item in read(message):
                    self._serve(peer, item, now)
            except ProtocolError as error:
                self.cut_off(peer, str(error), now)
        self._workers.hand_on_reports(now)
        self._dispatcher.end_turn()

    def _serve(self, peer: bytes, item: Item, now: float) -> None:
        """Serve what a slot sent."""
        slot = self._workers.slots.get(peer)
        match item:
            case BatchDone() | BatchFailedEntry() if slot is not None:
                self._reported(slot, item, now)
            case BatchDone() | BatchFailedEntry():
                self.outgoing.statistics.late_reports += 1  # of a session that is over
            case SlotHello() if slot is None:
                self._workers.greet_slot(peer, item, now)
                if self.worker is not None and self.worker.state is WorkerState.SERVING:
                    self.greeted.set()
            case BadEntry():
                self.cut_off(peer, str(item), now)
            case _:
                self.cut_off(peer, f"unexpected {type(item).__name__} of a slot", now)

    def cut_off(self, peer: bytes, why: str, now: float) -> None:
        """End a connection whose messages cannot be accepted, and the slots."""
        self.outgoing.refuse(peer, why, now)
        if peer in self._workers.slots:
            self._end(why, now)
        self._workers.turn_away(peer)

    def lost(self, link: PeerLink, why: str, now: float) -> None:
        """End the session, since a message to a slot could not be sent, or since the slots are to greet anew.

        A call that runs goes on to its end, and its report is dropped; then its slot greets.
        """
        if why == REJOIN:
            if self.worker is not None and self.worker.state is not WorkerState.GONE:
                self._workers.leave(self.worker, why, now)
                self._threads.end()
                self._session_ended.set()
        elif (
            why != GONE and link.peer is not None
        ):  # where a thread has closed its connection, news of it follow
            self._end(f"its slots cannot be reached: {why}", now)

    # ---------------------------------------------------------------- what happens to them

    def _take(self, news: News) -> None:
        """Take news of the slots."""
        worker, now = self.worker, trio.current_time()
        self._thread_ended = self._thread_ended or isinstance(news, ThreadEnded)
        if worker is None or worker.state is WorkerState.GONE:
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
                self._workers.hand_on_reports(now)
            case ThreadEnded():
                self.greeted.set()
                slot = worker.slots[news.slot]
                advice = "reload or restart the server, or use worker processes"
                log.error("slot ended", slot=slot.label, why="its thread has ended", advice=advice)
                self._workers.slot_ended(slot, news.batch, now)
                if not any(slot.number in self._dispatcher.slots for slot in worker.slots):
                    self._availability.own_slots_ended(now)
            case SessionBroken() if news.session == worker.session:
                self.greeted.set()
                self._end(news.why, now)
            case SlotIdle() | SessionBroken():
                pass
            case _:
                assert_never(news)
        self._dispatcher.end_turn()

    def _reported(self, slot: SlotRecord, entry: BatchDone | BatchFailedEntry, now: float) -> None:
        try:
            self._workers.reported(slot, entry, now)
        except ReportRefused as error:
            self._end(f"batch {entry.batch}: {error}", now)

    def _end(self, why: str, now: float) -> None:
        """End the slots: a defect of the server."""
        assert self.worker is not None, "the slots were started"
        log.error("own slots end", why=why)
        self._workers.leave(self.worker, "sent what cannot be accepted", now)
        self._availability.own_slots_ended(now)
