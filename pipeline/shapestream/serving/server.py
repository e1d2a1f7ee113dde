"""The server: its parts put together, the tree of its tasks, and its end.

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

import os
from collections.abc import Sequence
from typing import Any

import structlog
import trio

from shapestream.addresses import is_beyond_loopback, is_protectable
from shapestream.errors import ConfigurationError
from shapestream.scheduling.hang_watch import HangLimits
from shapestream.scheduling.scheduler import Scheduler
from shapestream.serving.availability import Availability
from shapestream.serving.batches import BatchReport, InProcessExecutor, SlotSource
from shapestream.serving.cost_keeper import CostKeeper
from shapestream.serving.dispatcher import Dispatcher
from shapestream.serving.egress import Egress
from shapestream.serving.ingress import Ingress
from shapestream.serving.journal import Journal
from shapestream.serving.kept_replies import KeptReplies
from shapestream.serving.links import Outgoing
from shapestream.serving.models import ServedModels
from shapestream.serving.options import ServerOptions
from shapestream.serving.process_owner import LastState, ProcessOwner
from shapestream.serving.quarantine import Quarantine
from shapestream.serving.reception import Reception
from shapestream.serving.worker_port import WorkerPort
from shapestream.simulation.trace_recorder import TraceRecorder
from shapestream.telemetry.statistics import ServerStatistics
from shapestream.transport.curve import ProtectedRouter
from shapestream.transport.interface import PeerSocket
from shapestream.transport.zap import KeyRing, KeyRole
from shapestream.transport.zeromq import RouterSocket
from shapestream.wire.limits import WORKER_LIMITS
from shapestream.wire.messages import Goodbye

__all__ = ["Server", "serve"]

log = structlog.get_logger()

# A beat that comes later than this after its time says that this process itself stood still: it was stopped, or busy.
STALL_S = 0.5


class Server:
    """A running server, as `serve` hands it to its caller."""

    def __init__(self, options: ServerOptions, clients: PeerSocket, workers: PeerSocket | None) -> None:
        self._options = options
        self._client_socket = clients
        self._worker_socket = workers
        self._drain_asked = trio.Event()
        self._ended = False
        self._grace_s = options.grace_s
        self._started = trio.current_time()
        self.epoch = os.urandom(16)
        """Tells this server process from every other."""
        self._statistics = ServerStatistics()
        self._models = ServedModels(options.models)
        self._cost_keeper = None if options.cost_cache is None else CostKeeper(options.cost_cache)
        self._scheduler = Scheduler(
            max_queued_requests=options.max_queued_requests,
            max_queued_bytes=options.max_queued_bytes,
            max_queued_s=options.max_queued_s,
            hangs=HangLimits(min_s=options.hang_min_s, grace_s=options.hang_grace_s),
            learned={} if self._cost_keeper is None else self._cost_keeper.read(),
        )
        self._to_clients = Outgoing(clients, "clients", self._statistics)
        self._kept = KeptReplies(
            max_bytes=options.kept_bytes,
            max_age_s=options.kept_s,
            max_replies=options.window_requests,
            now=self._started,
        )
        egress = Egress(self._to_clients, self._statistics, self._kept)
        trace = None if options.record_trace is None else TraceRecorder(options.record_trace)
        self._journal = Journal(self._statistics, trio.current_time, trace)
        self._dispatcher = Dispatcher(
            self._scheduler,
            egress,
            self._journal,
            clock=trio.current_time,
            flush=self._flush,
            prefetch=options.prefetch,
            quarantine=Quarantine(options.quarantine_requests, options.quarantine_s),
        )
        self._reception = Reception(
            clients,
            self._to_clients,
            self._dispatcher,
            self._models,
            options,
            self._statistics,
            self._kept,
            epoch=self.epoch,
        )
        self._ingress = Ingress(
            clients,
            self._reception,
            self._to_clients,
            egress,
            self._dispatcher,
            self._models,
            options,
            self._statistics,
            clock=trio.current_time,
            describe=self.statistics,
        )
        self._availability = Availability(self._models, self._dispatcher, self._reception, self._is_served)
        self._to_workers: Outgoing | None = None
        self._worker_port: WorkerPort | None = None
        if workers is not None:
            self._to_workers = Outgoing(workers, "workers", self._statistics, WORKER_LIMITS)
            self._worker_port = WorkerPort(
                workers,
                self._to_workers,
                self._dispatcher,
                self._models,
                options,
                self._statistics,
                epoch=self.epoch,
                clock=trio.current_time,
                model_added=self._reception.model_added,
                workers_changed=self._availability.workers_changed,
            )

    # ---------------------------------------------------------------- for the caller

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where clients can connect."""
        return self._client_socket.addresses

    @property
    def worker_addresses(self) -> tuple[str, ...]:
        """Where workers can connect."""
        return () if self._worker_socket is None else self._worker_socket.addresses

    def drain(self, *, grace_s: float | None = None) -> None:
        """Begins the end: new requests are refused, admitted ones get the grace to finish; `serve` returns.

        `grace_s` replaces that of the options, for a caller who knows that waiting is of no use.
        """
        if grace_s is not None:
            self._grace_s = grace_s
        self._drain_asked.set()

    def own_processes(self, owner: ProcessOwner) -> None:
        """From now on `owner` is asked to kill workers that hang, and tells by `worker_ended` when one has ended."""
        if self._worker_port is not None:
            self._worker_port.ends.owner = owner

    async def worker_ended(self, worker: str, pid: int, *, died: bool) -> LastState:
        """A worker's process has ended: what it had not answered runs again elsewhere, nobody waits for its silence.

        `died`: by a signal, or with an error, so that it may have died of what it ran.
        """
        if self._worker_port is None or self._ended:
            return LastState()
        try:
            return await self._worker_port.ends.process_ended(worker, pid, died=died)
        except trio.ClosedResourceError:
            return LastState()  # the server has ended meanwhile: nothing is left to be run again

    def model_given_up(self, name: str, why: str) -> None:
        """No worker will be started for this model any more: its requests end as `unavailable`, unless one dials in."""
        if not self._ended:
            self._availability.give_up(name, why, trio.current_time())
            self._dispatcher.end_turn()

    def model_awaited(self, name: str) -> None:
        """Its workers are started again after all: requests wait for them."""
        if not self._ended:
            self._availability.hope_again(name)

    def let_in(self, ring: KeyRing) -> None:
        """Replaces the keys that are let in; who has another one is cut off. Without effect where none is asked for."""
        for socket in (self._client_socket, self._worker_socket):
            if isinstance(socket, ProtectedRouter):
                socket.let_in(ring)

    def refuse_new_shapes(self, why: str | None) -> None:
        """From now on, or no longer (None): a request of a shape that no other had lately is answered `unavailable`.

        For a server whose own memory grows with each shape that its models meet. Models that round shapes to a
        few are not concerned.
        """
        self._models.refuse_new_shapes(why)

    def statistics(self) -> dict[str, Any]:
        """The counters, as plain data: what `Statistics` carries."""
        scheduler = self._scheduler.statistics()
        return {
            "uptime_s": round(trio.current_time() - self._started, 3),
            "pid": os.getpid(),
            "draining": self._drain_asked.is_set(),
            "clients": len(self._reception.sessions),
            "models": self._models.names,
            "unavailable": dict(self._models.unavailable),
            "unfinished": self._dispatcher.unfinished,
            "suspects": scheduler.suspects,
            "quarantined": len(self._dispatcher.quarantine),
            "kept_replies": len(self._kept),
            "kept_bytes": self._kept.nbytes,
            "scheduler": repr(scheduler),
            "slots": {
                slot.label: {"batches": slot.batches, "busy_s": round(slot.busy_s, 6)}
                for slot in self._dispatcher.slots.values()
            },
            "peers_refused": {
                socket.port: dict(socket.refused)
                for socket in (self._client_socket, self._worker_socket)
                if isinstance(socket, ProtectedRouter)
            },
            **self._statistics.to_dict(),
        }

    def _is_served(self, model: str) -> bool:
        return any(model in slot.executor.models for slot in self._dispatcher.slots.values())

    # ---------------------------------------------------------------- its tasks

    async def _run(self, local: SlotSource | None, task_status: trio.TaskStatus[Server]) -> None:
        executor = None if local is None else local.start(self._local_reports)
        try:
            async with trio.open_nursery() as nursery:
                await nursery.start(self._client_socket.run)
                nursery.start_soon(self._ingress.run)
                if self._worker_socket is not None and self._worker_port is not None:
                    await nursery.start(self._worker_socket.run)
                    nursery.start_soon(self._worker_port.run)
                nursery.start_soon(self._dispatcher.run_alarm)
                nursery.start_soon(self._beat)
                if self._cost_keeper is not None:
                    nursery.start_soon(self._cost_keeper.run, self._scheduler.learned_costs)
                if executor is not None:
                    self._add_local(executor)
                log.info(
                    "server ready",
                    listen=self.addresses,
                    workers=self.worker_addresses,
                    models=self._models.names,
                )
                task_status.started(self)
                await self._drain()
                if self._cost_keeper is not None:
                    await self._cost_keeper.aclose()
                nursery.cancel_scope.cancel()
        finally:
            self._ended = True
            self._journal.close()
            if executor is not None:
                await executor.aclose()

    def _add_local(self, executor: InProcessExecutor) -> None:
        now = trio.current_time()
        for model in self._models.add_all(executor.models):
            self._dispatcher.model_added(model, now)
            self._reception.model_added(model)
        self._dispatcher.executor_joined(executor, now)
        self._dispatcher.end_turn()

    def _local_reports(self, reports: Sequence[BatchReport]) -> None:
        self._dispatcher.batches_reported(reports)
        self._dispatcher.end_turn()

    def _flush(self) -> None:
        """Sends what became ready, and ends the links that could not be sent to; that may make more ready."""
        while True:
            self._to_clients.flush()
            if self._to_workers is not None:
                self._to_workers.flush()
            if not self._end_lost_links():
                return

    def _end_lost_links(self) -> bool:
        """Whether there were any."""
        lost_clients, self._to_clients.lost = self._to_clients.lost, []
        lost_workers: list[Any] = []
        if self._to_workers is not None:
            lost_workers, self._to_workers.lost = self._to_workers.lost, []
        if not lost_clients and not lost_workers:
            return False
        now = trio.current_time()
        for link, why in lost_clients:
            self._reception.lost(link, why, now)
        for link, why in lost_workers:
            assert self._worker_port is not None  # only it has links to workers
            self._worker_port.lost(link, why, now)
        return True

    async def _beat(self) -> None:
        while True:
            due = trio.current_time() + self._options.heartbeat_s
            await trio.sleep_until(due)
            if trio.current_time() > due + STALL_S:
                log.warning("the server stood still", seconds=round(trio.current_time() - due, 1))
                await trio.sleep(STALL_S)  # what came meanwhile is to be read before anybody is called silent
            now = trio.current_time()
            self._reception.beat(now)
            self._to_clients.count_handshakes(now)
            if self._worker_port is not None:
                self._worker_port.beat(now)
            if self._to_workers is not None:
                self._to_workers.count_handshakes(now)
            self._dispatcher.end_turn()

    async def _drain(self) -> None:
        await self._drain_asked.wait()
        log.info("server drains", unfinished=self._dispatcher.unfinished, grace_s=self._grace_s)
        self._dispatcher.drain(trio.current_time())
        self._dispatcher.end_turn()
        with trio.move_on_after(self._grace_s):
            await self._dispatcher.wait_idle()
        if self._dispatcher.unfinished:
            log.warning("grace is over", handed_back=self._dispatcher.unfinished)
            self._dispatcher.hand_back(f"the server stopped first; the grace was {self._grace_s} s")
        for session in self._reception.sessions:
            self._to_clients.say(session, Goodbye())
        if self._to_workers is not None and self._worker_port is not None:
            for worker in self._worker_port.workers.values():
                self._to_workers.say(worker, Goodbye())
        self._dispatcher.end_turn()
        log.info(
            "server stopped",
            results=self._statistics.results,
            failures=dict(self._statistics.failures),
            scheduling_s=round(self._statistics.scheduling_s, 3),
            scheduling_us_per_request=self._statistics.scheduling_us_per_request,
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
    try:
        if client_socket is None:
            client_socket = _bound(options.listen, options, "clients", (KeyRole.CLIENT, KeyRole.ADMIN))
        dial_in = [
            address for address in (options.worker_listen, options.dial_in_listen) if address is not None
        ]
        if worker_socket is None and dial_in:
            worker_socket = _bound(dial_in, options, "workers", (KeyRole.WORKER,))
        server = Server(options, client_socket, worker_socket)
        await server._run(local, task_status)
    finally:
        for socket in (client_socket, worker_socket):
            if socket is not None:
                socket.close()


def _bound(
    addresses: Sequence[str], options: ServerOptions, port: str, roles: Sequence[KeyRole]
) -> RouterSocket:
    open_to_all = [address for address in addresses if is_beyond_loopback(address)]
    if open_to_all and options.security is None and not options.network_is_safe:
        raise ConfigurationError(
            [f"{address}: other machines reach it (security is needed)" for address in open_to_all]
        )
    if open_to_all and options.security is None:
        log.warning("anybody who reaches these addresses is let in", port=port, listen=open_to_all)
    # Where nothing but ipc is listened at there is nobody to ask.
    asks = options.security is not None and any(map(is_protectable, addresses))
    socket = (
        ProtectedRouter(options.security, roles, port=port) if asks and options.security else RouterSocket()
    )
    try:
        for address in addresses:
            socket.bind(address)
    except BaseException:
        socket.close()
        raise
    return socket
