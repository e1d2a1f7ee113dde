"""The server: the tree of its tasks, what its caller may ask of it, and its end.

    serve
    ├── clients' socket, workers' socket      one watcher task each
    ├── Ingress.run, WorkerPort.run           one task each, per turn: read, decide, act, send
    ├── Dispatcher.run_alarm                  deadlines and batching delays
    ├── _beat                                 heartbeats and silence
    └── _drain                                waits for `Server.drain`, then ends the others

A turn never awaits between reading and sending, so the parts call each other as plain methods and share no
lock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import structlog
import trio

from shapestream.serving.allocator import give_back_what_is_too_much
from shapestream.serving.executor import InProcessExecutor, SlotSource
from shapestream.serving.listening import listen
from shapestream.serving.models import ModelOptions
from shapestream.serving.options import ServerOptions
from shapestream.serving.parts import Parts
from shapestream.serving.process_owner import LastState, ProcessOwner
from shapestream.transport.curve import KeyRing, KeyRole
from shapestream.transport.interface import PeerSocket
from shapestream.transport.zeromq import OutboxRoom
from shapestream.wire.limits import CLIENT_LIMITS, WORKER_LIMITS
from shapestream_engine.batch import BatchReport

__all__ = ["Server", "serve"]

log = structlog.get_logger()

# Between the last word and the end of the connections. A worker's libzmq (ZMQ_IMMEDIATE) drops with a connection what was
# not read by then; a worker that missed the goodbye waits for 3 s before it calls the server gone.
FAREWELL_S = 0.05

# A beat that comes later than this after its time says that this process itself stood still: it was stopped, or busy.
STALL_S = 0.5


class Server:
    """A running server, as `serve` hands it to its caller."""

    def __init__(self, options: ServerOptions, clients: PeerSocket, workers: PeerSocket | None) -> None:
        self._options = options
        self._drain_asked = trio.Event()
        self._ended = False
        self._grace_s = options.grace_s
        self._addresses = clients.addresses
        self._worker_addresses = () if workers is None else workers.addresses
        self._parts = Parts(options, clients, workers)

    # ---------------------------------------------------------------- for the caller

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where clients can connect."""
        return self._addresses

    @property
    def worker_addresses(self) -> tuple[str, ...]:
        """Where workers can connect."""
        return self._worker_addresses

    def drain(self, *, grace_s: float | None = None) -> None:
        """Begins the end: new requests are refused, admitted ones get the grace to finish; `serve` returns.

        `grace_s` replaces that of the options, for a caller who knows that waiting is of no use.
        """
        if grace_s is not None:
            self._grace_s = grace_s
        self._drain_asked.set()

    def own_processes(self, owner: ProcessOwner) -> None:
        """From now on `owner` is asked to kill workers that hang, and tells by `worker_ended` when one has ended."""
        if self._parts.worker_ends is not None:
            self._parts.worker_ends.owner = owner

    async def worker_ended(self, worker: str, pid: int, *, died: bool) -> LastState:
        """A worker's process has ended: what it had not answered runs again elsewhere, nobody waits for its silence.

        `died`: by a signal, or with an error, so that it may have died of what it ran.
        """
        ends = self._parts.worker_ends
        if ends is None or self._ended:
            return LastState()
        try:
            return await ends.process_ended(worker, pid, died=died)
        except trio.ClosedResourceError:
            return LastState()  # the server has ended meanwhile: nothing is left to be run again

    def model_given_up(self, name: str, why: str) -> None:
        """No worker will be started for this model any more: its requests end as `unavailable`, unless one dials in."""
        if not self._ended:
            self._parts.availability.give_up(name, why, trio.current_time())
            self._parts.dispatcher.end_turn()

    def model_expected(self, name: str, options: ModelOptions) -> None:
        """A worker with this model will come: requests wait for it. `options` are for a model that is new here."""
        self._parts.models.expect(name, options)
        self.model_awaited(name)

    def model_awaited(self, name: str) -> None:
        """Its workers are started again after all: requests wait for them."""
        if not self._ended:
            self._parts.availability.hope_again(name)

    def serve_files(self, digests: Mapping[str, str]) -> None:
        """From now on the models are served from files of these digests: workers that have read others are refused.

        Workers that are here stay. Of a model that is left out the first worker that joins says it.
        """
        for name, digest in digests.items():
            before = self._parts.models.digests.get(name)
            if before is not None and before != digest:
                log.info("model has other files", model=name, digest=digest, before=before)
        self._parts.models.serve_files(digests)

    def let_in(self, ring: KeyRing) -> None:
        """Replaces the keys that are let in; who has another one is cut off. Without effect where none is asked for."""
        self._parts.ports.let_in(ring)

    def refuse_new_shapes(self, why: str | None) -> None:
        """From now on, or no longer (None): a request of a shape that no other had lately is answered `unavailable`.

        For a server whose own memory grows with each shape that its models meet. Models that round shapes to a
        few are not concerned.
        """
        self._parts.models.refuse_new_shapes(why)

    def statistics(self) -> dict[str, Any]:
        """The counters, as plain data: what `Statistics` carries."""
        return self._parts.describe()

    # ---------------------------------------------------------------- its tasks

    async def _run(self, local: SlotSource | None, task_status: trio.TaskStatus[Server]) -> None:
        executor = None if local is None else local.start(self._local_reports)
        cost_keeper = self._parts.cost_keeper
        try:
            async with trio.open_nursery() as nursery:
                for port in self._parts.ports:
                    await nursery.start(port.socket.run)
                    nursery.start_soon(port.serve)
                nursery.start_soon(self._parts.dispatcher.run_alarm)
                nursery.start_soon(self._beat)
                if cost_keeper is not None:
                    nursery.start_soon(cost_keeper.run, self._parts.scheduler.learned_costs)
                if executor is not None:
                    self._add_local(executor)
                log.info(
                    "server ready",
                    listen=self.addresses,
                    workers=self.worker_addresses,
                    models=self._parts.models.names,
                )
                task_status.started(self)
                await self._drain()
                if cost_keeper is not None:
                    await cost_keeper.aclose()
                nursery.cancel_scope.cancel()
        finally:
            self._ended = True
            self._parts.journal.close()
            if executor is not None:
                await executor.aclose()

    def _add_local(self, executor: InProcessExecutor) -> None:
        now, dispatcher = trio.current_time(), self._parts.dispatcher
        for model in self._parts.models.add_all(executor.models, executor.digests):
            dispatcher.model_added(model, now)
            self._parts.reception.model_added(model)
        dispatcher.executor_joined(executor, now)
        dispatcher.end_turn()

    def _local_reports(self, reports: Sequence[BatchReport]) -> None:
        self._parts.dispatcher.batches_reported(reports)
        if any(report.slot_ended for report in reports):
            self._give_up_lost_models()
        self._parts.dispatcher.end_turn()

    def _give_up_lost_models(self) -> None:
        """The models that no slot is left for: nothing brings one back, where no worker can come."""
        if self._worker_addresses:
            return
        why = "the threads of all slots in the server's process have ended; restart the server"
        for model in self._parts.models.names:
            if not self._parts.is_served(model):
                self._parts.availability.give_up(model, why, trio.current_time())

    async def _beat(self) -> None:
        while True:
            due = trio.current_time() + self._options.heartbeat_s
            await trio.sleep_until(due)
            now = trio.current_time()  # once: it may stand still between two looks, too
            if now > due + STALL_S:
                log.warning("the server stood still", seconds=round(now - due, 1))
                await trio.sleep(STALL_S)  # what came meanwhile is to be read before anybody is called silent
                now += STALL_S
            self._parts.ports.beat(now)
            self._parts.dispatcher.end_turn()
            if not self._parts.dispatcher.unfinished:
                give_back_what_is_too_much()

    async def _drain(self) -> None:
        await self._drain_asked.wait()
        dispatcher, counters = self._parts.dispatcher, self._parts.counters
        log.info("server drains", unfinished=dispatcher.unfinished, grace_s=self._grace_s)
        dispatcher.drain(trio.current_time())
        dispatcher.end_turn()
        with trio.move_on_after(self._grace_s):
            await dispatcher.wait_idle()
        if dispatcher.unfinished:
            log.warning("grace is over", handed_back=dispatcher.unfinished)
            dispatcher.hand_back(f"the server stopped first; the grace was {self._grace_s} s")
        self._parts.ports.say_goodbye()
        dispatcher.end_turn()
        await trio.sleep(FAREWELL_S)
        log.info(
            "server stopped",
            results=counters.results,
            failures=dict(counters.failures),
            scheduling_s=round(counters.scheduling_s, 3),
            scheduling_us_per_request=counters.scheduling_us_per_request,
        )


async def serve(
    options: ServerOptions,
    *,
    local: SlotSource | None = None,
    clients: PeerSocket | None = None,
    workers: PeerSocket | None = None,
    task_status: trio.TaskStatus[Server] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serves until drained or cancelled; hands a `Server` to `nursery.start`.

    The sockets are made from `options.listen` and `options.worker_listen` unless given; either way they are
    closed at the end. Raises AddressInUse when another process listens there, ConfigurationError for an address that
    other machines reach without `security`.
    """
    client_socket, worker_socket = clients, workers
    room = OutboxRoom(options.max_outbox_bytes)
    try:
        if client_socket is None:
            client_socket = listen(
                options.listen, options, "clients", (KeyRole.CLIENT, KeyRole.ADMIN), room, CLIENT_LIMITS
            )
        dial_in = [
            address for address in (options.worker_listen, options.dial_in_listen) if address is not None
        ]
        if worker_socket is None and dial_in:
            worker_socket = listen(dial_in, options, "workers", (KeyRole.WORKER,), room, WORKER_LIMITS)
        server = Server(options, client_socket, worker_socket)
        await server._run(local, task_status)
    finally:
        for socket in (client_socket, worker_socket):
            if socket is not None:
                socket.close()
