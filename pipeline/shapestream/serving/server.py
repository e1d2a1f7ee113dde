"""The server: its parts, the tree of their tasks, and what its caller may ask of it.

    serve                                     opens the sockets, makes the Server, closes the sockets
    ├── sockets of clients, workers, slots    one watcher task each; per turn: read, decide, act, send
    ├── ClientPort.run, WorkerPort.run        one task each, for messages that no watcher finds
    ├── Dispatcher.run_alarm                  deadlines and batching delays
    ├── _beat                                 heartbeats and silence
    ├── Auditor.run                           runs answered requests again, alone
    ├── CostKeeper.run                        writes learned costs to disk
    └── _drain                                waits for `Server.drain`, then ends the others

A turn never awaits between reading and sending. So the parts call each other as plain methods and share no lock.
The admin port reads the server on this loop, too: what takes long is read in slices, one per turn (slices.py).
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog
import trio

from shapestream.scheduling.hang_watch import HangLimits
from shapestream.scheduling.scheduler import Scheduler
from shapestream.serving.allocator import IDLE_BYTES, give_back_freed_memory
from shapestream.serving.auditor import Auditor, kept_in
from shapestream.serving.audits import AuditBook
from shapestream.serving.availability import Availability
from shapestream.serving.client_port import ClientPort
from shapestream.serving.cost_keeper import CostKeeper
from shapestream.serving.dispatcher import Dispatcher
from shapestream.serving.egress import Egress
from shapestream.serving.end_counter import EndCounter
from shapestream.serving.ends import Ends, Observer
from shapestream.serving.event_stream import MOST_BATCHES
from shapestream.serving.journal import Journal
from shapestream.serving.kept_replies import ClientId, KeptReplies
from shapestream.serving.listening import listen
from shapestream.serving.local_port import LocalPort
from shapestream.serving.outgoing import Outgoing
from shapestream.serving.own_processes import ProcessOwner
from shapestream.serving.quarantine import Quarantine
from shapestream.serving.served_models import ServedModels
from shapestream.serving.slot_threads import SlotThreads
from shapestream.serving.stories import MOST_SLOWEST, Stories, nothing_of, story_of
from shapestream.serving.worker_port import LastState, WorkerPort
from shapestream.serving.worker_states import WorkerState
from shapestream.settings import ModelSettings, ServerSettings
from shapestream.slices import Slices, at_once
from shapestream.telemetry.counters import ServerStatistics
from shapestream.telemetry.last_minute import LastMinute
from shapestream.telemetry.logging import LogFormat, LogLevel, change
from shapestream.telemetry.metrics import ServerSnapshot
from shapestream.telemetry.presence import ConfiguredWorker, Presence
from shapestream.telemetry.trace import TraceRecorder
from shapestream.transport.curve import KeyRing, KeyRole, ProtectedRouter, ServerSecurity
from shapestream.transport.interface import PeerSocket
from shapestream.transport.zeromq import OutboxRoom
from shapestream.wire.codec import codec_of
from shapestream.wire.limits import CLIENT_LIMITS, WORKER_LIMITS
from shapestream.wire.messages import Role
from shapestream_engine.calibration_cache import CostCache

if TYPE_CHECKING:
    from shapestream.serving.tracing import RequestTracer

log = structlog.get_logger()

FAREWELL_S = 0.05
"""Seconds between the goodbyes and the end of the connections.

A worker's libzmq (ZMQ_IMMEDIATE) drops unread messages with a connection. A worker that missed the goodbye waits for 3 s
before it counts the server as gone.
"""
STALL_S = 0.5
"""Delay of a heartbeat, in seconds, beyond which this process itself stood still: it was stopped, or busy."""
MOST_SLOTS = 1024
"""Slots that the counters name, the first that joined: a message holds 1 MiB, and its maps 4096 keys."""
MOST_SLOTS_SHOWN = 128
"""Slots on the page, which has a row for each."""
SLOWEST_SHOWN = 12
"""Stories on the page; each takes about 50 us to make."""

_NO_GROUPS: Mapping[str, int] = {}


class Server:
    """A running server, as `serve` hands it to its caller. It must be made inside trio."""

    def __init__(
        self,
        settings: ServerSettings,
        models: ServedModels,
        clients: PeerSocket,
        workers: PeerSocket | None,
        *,
        cost_cache: CostCache | None = None,
        local: SlotThreads | None = None,
        tracer: RequestTracer | None = None,
    ) -> None:
        self._settings = settings
        self._started = trio.current_time()
        self._drain_asked = trio.Event()
        self._ended = False
        self._grace_s = settings.grace_s
        self.addresses = clients.addresses
        """Where clients can connect."""
        self.worker_addresses: tuple[str, ...] = () if workers is None else workers.addresses
        """Where workers can connect."""
        self._epoch = os.urandom(16)
        self._groups = _NO_GROUPS
        """The configured workers by name, each with the number of its entry of `workers`."""
        self._counters = ServerStatistics()
        self._last_minute = LastMinute(self._counters, self._started)
        self._models = models
        self._cost_keeper = None if cost_cache is None else CostKeeper(cost_cache)
        self._scheduler = _scheduler_of(settings, self._cost_keeper)
        trace = None if settings.record_trace is None else TraceRecorder(Path(settings.record_trace))
        self._stories = Stories(self._scheduler.troubles, lambda: self._dispatcher.batches, self._labels_of)
        self._tracer = tracer
        self._journal = Journal(self._counters, trace)
        folder = None if cost_cache is None else cost_cache.folder
        self._audits = AuditBook(models, kept_in(folder))
        # Every end is told to these, in this order, once its answer has left. Spans use what the stories have kept.
        observers: list[Observer] = [EndCounter(self._counters), self._stories, self._journal]
        if tracer is not None:
            tracer.follow(self._stories)
            observers.append(tracer)
        observers.append(self._audits)
        self._kept = KeptReplies.of_settings(settings, self._started)
        outgoing = Outgoing(clients, "clients", self._counters, codec_of(Role.SERVER_OF_CLIENTS))
        egress = Egress(outgoing, self._kept, Ends(*observers))
        self._dispatcher = Dispatcher(
            self._scheduler,
            egress,
            self._journal,
            clock=trio.current_time,
            flush=self._flush,
            prefetch=settings.prefetch,
            quarantine=Quarantine(settings.quarantine_requests, settings.quarantine_s),
            audits=self._audits,
        )
        self._auditor = Auditor(self._audits, self._dispatcher, folder)
        self._client_port = ClientPort(
            egress,
            self._dispatcher,
            self._models,
            settings,
            epoch=self._epoch,
            describe=self.statistics_in_slices,
            acknowledge=self._auditor.acknowledge,
            explain=self.explain,
        )
        self._availability = Availability(
            self._models, self._dispatcher, self._client_port, workers_may_come=workers is not None
        )
        self._sockets = [clients]
        self._ports: list[ClientPort | WorkerPort | LocalPort] = [self._client_port]
        """By the sockets that they read."""
        self._remote_ports: list[ClientPort | WorkerPort] = [self._client_port]
        """Those of them whose peers are other processes."""
        self._worker_port: WorkerPort | None = None
        if workers is not None:
            self._worker_port = WorkerPort(
                Outgoing(workers, "workers", self._counters, codec_of(Role.SERVER_OF_WORKERS)),
                self._dispatcher,
                self._models,
                self._availability,
                settings,
                epoch=self._epoch,
            )
            self._sockets.append(workers)
            self._ports.append(self._worker_port)
            self._remote_ports.append(self._worker_port)
        self._local = local
        self._local_port: LocalPort | None = None
        if local is not None:
            socket, codec = local.listen()
            self._local_port = LocalPort(
                Outgoing(socket, "slots", self._counters, codec),
                self._dispatcher,
                self._models,
                self._availability,
                local,
            )
            self._sockets.append(socket)
            self._ports.append(self._local_port)

    # ---------------------------------------------------------------- for the caller

    def drain(self, *, grace_s: float | None = None) -> None:
        """Refuse new requests from now on. `serve` returns when the admitted ones have ended, or after the grace.

        `grace_s` replaces the setting, where waiting is useless.
        """
        if grace_s is not None:
            self._grace_s = grace_s
        self._drain_asked.set()

    def own_processes(self, owner: ProcessOwner, groups: Mapping[str, int] = _NO_GROUPS) -> None:
        """Let `owner` kill workers that hang. It calls `worker_ended` when a process has ended.

        `groups`: the workers that it keeps running, by name, each with the number of its entry of `workers`.
        """
        self._groups = groups
        self._counters.worker_ends.update(
            {(group, how): 0 for group in groups.values() for how in ("died", "ended")}
        )
        if self._worker_port is not None:
            self._worker_port.owner = owner

    async def worker_ended(self, worker: str, *, died: bool, group: int = 0) -> LastState:
        """Run the batches of a worker whose process has ended on other slots, without waiting for `worker_silence_s`.

        `died`: by a signal, or with an error, so that a request may have killed it. `group`: its entry of `workers`.
        """
        self._counters.worker_ends[group, "died" if died else "ended"] += 1
        if self._worker_port is None or self._ended:
            return LastState()
        try:
            return await self._worker_port.process_ended(worker, died=died)
        except trio.ClosedResourceError:
            return LastState()  # the server has ended meanwhile, and nothing is left to run

    def model_given_up(self, name: str, why: str) -> None:
        """End the requests of a model as `unavailable`: no worker process is left for it. A worker may still dial in."""
        if not self._ended:
            self._availability.give_up(name, why, trio.current_time())
            self._dispatcher.end_turn()

    def model_withdrawn(self, name: str, why: str) -> None:
        """Give up a model that was removed from the configuration: the server is ready without it."""
        self._models.withdraw(name)
        self.model_given_up(name, why)

    def model_expected(self, name: str, settings: ModelSettings) -> None:
        """Let requests wait for a model whose worker will come. `settings` are used if the model is new here."""
        self._models.expect(name, settings)
        self.model_awaited(name)

    def model_awaited(self, name: str) -> None:
        """Let requests wait again for a model whose workers are started after all."""
        if not self._ended:
            self._availability.hope_again(name)

    def settings_of(self, name: str) -> ModelSettings | None:
        """Return the settings by which this server batches a model, which never change; None before a worker serves it."""
        model = self._models.get(name)
        return None if model is None else model.settings

    def was_never_served(self, name: str) -> bool:
        """Tell whether a model was added while the server ran, and no worker has served it since."""
        return name in self._models.new

    def count_reloads(self, results: Iterable[str]) -> None:
        """Set the counters of reloads to 0, one for each result."""
        self._counters.reloads.update(dict.fromkeys(results, 0))

    def reload_ended(self, result: str, seconds: float, *, ok: bool) -> None:
        """Count a reload that has ended, and remember the last one that was `ok`."""
        self._counters.reloads[result] += 1
        if ok:
            self._counters.reloaded_at, self._counters.reload_s = time.time(), seconds

    def serve_files(self, digests: Mapping[str, str]) -> None:
        """Serve the models from files of these digests from now on. Workers that have read other files are refused.

        Connected workers stay. For a model without a digest, the first worker that joins names it.
        """
        for name, digest in digests.items():
            before = self._models.digests.get(name)
            if before is not None and before != digest:
                log.info("model has other files", model=name, digest=digest, before=before)
        self._models.serve_files(digests)
        self._auditor.files_changed()

    def let_in(self, ring: KeyRing) -> None:
        """Replace the list of keys, and cut off peers with other keys. Does nothing where no keys are required."""
        for socket in self._sockets:
            if isinstance(socket, ProtectedRouter):
                socket.let_in(ring)

    def change_logging(self, level: LogLevel, format: LogFormat | None = None) -> None:  # noqa: A002 - the YAML's word
        """Change the log of this process, and the log level of the workers that it starts or has started."""
        change(level, format)
        if self._worker_port is not None and not self._ended:
            self._worker_port.set_log_level(level)
            self._dispatcher.end_turn()

    def standstill(self) -> str | None:
        """Return the reason why only a restart helps: the calls of all slots hang, and none could be ended. None without
        one."""
        scheduler = self._scheduler.statistics()
        if scheduler.slots and scheduler.slots_lost == scheduler.slots:
            return "the calls of all slots hang"
        return None

    def not_ready(self, model: str | None = None) -> list[str]:
        """Return the reasons why this server should get no requests now. There is none if each model has a slot.

        A slot joins after its model was proved and its costs were measured. A model that was added while the server ran
        counts from its first slot on. `model`: only the reasons that concern this model.
        """
        offered = self._offered()
        reasons = ["the server drains"] if self._drain_asked.is_set() else []
        if model is not None:
            reasons += [self._models.unavailable[model]] if model in self._models.unavailable else []
            return reasons or ([] if model in offered else [_no_slot_for(model)])
        counted = (name for name in self._models.promised if name not in self._models.new)
        reasons += [_no_slot_for(name) for name in counted if name not in offered]
        return reasons or ([] if offered else ["no slot"])

    def knows(self, model: str) -> bool:
        """Tell whether this server has, expects or had a model of this name."""
        return model in self._models.names

    def _offered(self) -> set[str]:
        """Return the names of the models that have a slot which takes batches."""
        workers = {slot.worker for slot in self._dispatcher.slots.values()}
        return {name for worker in workers if worker.state is WorkerState.SERVING for name in worker.models}

    def audit(self) -> dict[str, dict[str, Any]]:
        """Return the findings of audits, by model, as plain data."""
        return self._audits.to_dict()

    def snapshot(self) -> ServerSnapshot:
        """Return the state from which metrics are computed."""
        settings, sessions, now = self._settings, list(self._client_port.sessions), trio.current_time()
        for model in self._models:
            self._counters.of(model.name)  # its series begin with 0
        workers = {slot.worker for slot in self._dispatcher.slots.values()}
        serving = sum(worker.state is WorkerState.SERVING for worker in workers)
        return ServerSnapshot(
            ready=not self.not_ready(),
            counters=self._counters,
            scheduler=self._scheduler.statistics(now),
            settings=settings,
            slots_busy_s=self._dispatcher.busy_s(now),
            configured_workers=self._configured_workers(),
            clients=len(sessions),
            pending=self._dispatcher.unfinished,
            pending_bytes=sum(session.held_bytes for session in sessions),
            credit_used=max(
                [
                    share
                    for session in sessions
                    for share in (
                        len(session.running) / settings.window_requests,
                        session.held_bytes / settings.window_bytes,
                    )
                ],
                default=0.0,
            ),
            workers={"serving": serving, "leaving": len(workers) - serving},
            quarantined=len(self._dispatcher.quarantine),
            kept_replies=len(self._kept),
            kept_bytes=self._kept.nbytes,
            peers_refused=self._peers_refused(),
            audit=self.audit(),
        )

    def _configured_workers(self) -> list[ConfiguredWorker]:
        owner = None if self._worker_port is None else self._worker_port.owner
        if owner is None:
            return []
        memory = owner.memory_bytes()
        return [
            ConfiguredWorker(name, self._groups[name], state, memory[name])
            for name, state in owner.presences.items()
            if name in self._groups
        ]

    def _peers_refused(self) -> dict[str, dict[str, int]]:
        return {
            socket.port: dict(socket.refused)
            for socket in self._sockets
            if isinstance(socket, ProtectedRouter)
        }

    def statistics(self) -> dict[str, Any]:
        """Return the counters, as plain data (`StatisticsEntry`)."""
        return at_once(self.statistics_in_slices())

    def statistics_in_slices(self) -> Slices[dict[str, Any]]:
        """Return the counters, read in slices: some numbers are a few turns older than others."""
        dispatcher, now = self._dispatcher, trio.current_time()
        last_minute = yield from self._last_minute.to_dict(now, self._models.names)
        counters = yield from self._counters.to_dict()
        scheduler = self._scheduler.statistics(now)
        in_scheduler = scheduler.to_dict(last_minute["models"])
        yield
        return {
            "uptime_s": round(now - self._started, 3),
            "pid": os.getpid(),
            "draining": scheduler.draining,
            "clients": len(self._client_port.sessions),
            "models": self._models.names,
            "unavailable": dict(self._models.unavailable),
            "digests": dict(self._models.digests),
            "unfinished": dispatcher.unfinished,
            "suspects": scheduler.suspects,
            "quarantined": len(dispatcher.quarantine),
            "kept_replies": len(self._kept),
            "kept_bytes": self._kept.nbytes,
            "scheduler": in_scheduler,
            "last_minute": last_minute,
            "slots": {
                slot.label: {"batches": slot.batches, "busy_s": round(slot.busy_s, 6)}
                for slot in islice(dispatcher.slots.values(), MOST_SLOTS)
            },
            "slots_in_all": len(dispatcher.slots),
            "peers_refused": self._peers_refused(),
            "audit": self.audit(),
            **counters,
        }

    def explain(self, request: str, slowest: int, asker: ClientId | None = None) -> Slices[dict[str, Any]]:
        """Return the `stories` of the requests with this id, as plain data. If there are none, `unknown` says why.

        Without an id: the stories of the slowest requests. Only requests of the `asker` are read; None: an admin, all.
        """
        if not request:
            return {"stories": (yield from self._slowest_stories(slowest, asker))}
        now = trio.current_time()
        stories = []
        for past in (yield from self._stories.of(request, self._dispatcher.requests, now, asker)):
            stories.append(story_of(past, now, asker))
            yield
        unknown = {} if stories else {"unknown": nothing_of(request, self._stories.reach_s(now))}
        return {"stories": stories, **unknown}

    def _slowest_stories(self, count: int, asker: ClientId | None = None) -> Slices[list[dict[str, Any]]]:
        """Return the slowest requests of the last ten minutes that the asker may see: one of each batch, the slowest
        first."""
        now = trio.current_time()
        stories = []
        for past in islice(self._stories.slowest(now, asker), min(count, MOST_SLOWEST)):
            stories.append(story_of(past, now, asker))
            yield
        return stories

    def _labels_of(self, model: str) -> list[str]:
        """Return the labels of the slots that serve a model."""
        return [slot.label for slot in self._dispatcher.slots.values() if model in slot.worker.models]

    def live(self, batches: int) -> Slices[dict[str, Any]]:
        """Return the page's data: counters, queue by size, slots, errors, and the batches after the first `batches` ones.

        Times are those of this process's monotonic clock, in seconds, beside `now`.
        """
        statistics = yield from self.statistics_in_slices()
        slowest = yield from self._slowest_stories(SLOWEST_SHOWN)
        standstill = self.standstill()
        workers = self._configured_workers()
        return {
            "now": trio.current_time(),
            "addresses": list(self.addresses),
            "notices": [
                *self.not_ready(),
                *map(_no_slot_for, sorted(self._models.new)),
                *([] if standstill is None else [standstill]),
                *[
                    f"worker {name} of entry {group} is {state.presence}"
                    for name, group, state, _ in workers
                    if state.presence in (Presence.MISSING, Presence.GIVEN_UP)
                ],
                *[
                    f"{name} shares no calls: audits found answers that differ (see shapestream audit)"
                    for name, audit in self.audit().items()
                    if audit["stopped"]
                ],
            ],
            "statistics": statistics,
            "queues": {
                name: [
                    queue.waiting,
                    queue.dimensions,
                    [[*bins, count] for bins, count in queue.cells.items()],
                ]
                for name, queue in self._scheduler.sizes_waiting().items()
            },
            "dialled_in": 0 if self._worker_port is None else self._worker_port.dialled_in,
            "workers": [
                {"worker": name, "entry": group, **asdict(state), "memory_bytes": memory_bytes}
                for name, group, state, memory_bytes in workers
            ],
            "slots": [
                {
                    "slot": slot.label,
                    "worker": slot.worker.name,
                    "pid": slot.worker.pid,
                    "state": self._scheduler.standing(slot.number),
                    "batches": slot.batches,
                    "busy_s": slot.busy_s,
                    "running": [[batch.model, batch.began] for batch in slot.running.values()],
                }
                for slot in islice(self._dispatcher.slots.values(), MOST_SLOTS_SHOWN)
            ],
            "errors": [
                [error.time, error.model, error.code, error.message, error.request_id]
                for error in self._stories.errors
            ],
            "slowest": slowest,
            "batches_in_all": self._stories.ran,
            "batches": self._stories.since(batches, MOST_BATCHES),
        }

    # ---------------------------------------------------------------- its tasks

    async def _run(self, task_status: trio.TaskStatus[Server]) -> None:
        cost_keeper = self._cost_keeper
        try:
            async with trio.open_nursery() as nursery:
                for socket, port in zip(self._sockets, self._ports, strict=True):
                    await nursery.start(socket.run)
                    nursery.start_soon(port.run)
                nursery.start_soon(self._dispatcher.run_alarm)
                nursery.start_soon(self._beat)
                nursery.start_soon(self._auditor.run)
                if cost_keeper is not None:
                    nursery.start_soon(cost_keeper.run, self._scheduler.learned_costs)
                if self._local_port is not None:
                    self._local_port.start()
                    await self._local_port.greeted.wait()
                log.info(
                    "server ready",
                    listen=self.addresses,
                    workers=self.worker_addresses,
                    models=self._models.names,
                )
                task_status.started(self)
                await self._drain()
                if cost_keeper is not None:
                    await cost_keeper.aclose()
                if self._tracer is not None:
                    await self._tracer.aclose()
                nursery.cancel_scope.cancel()
        finally:
            self._ended = True
            self._journal.close()
            if self._tracer is not None:
                self._tracer.stop()
            if self._local is not None:
                await self._local.aclose()
                self._sockets[-1].close()

    def _flush(self) -> None:
        """Send all ready messages, and end the links that could not be sent to. That may make more messages ready."""
        lost = True
        while lost:
            lost = False
            for port in self._ports:
                for link, why in port.outgoing.flush():
                    lost = True
                    port.lost(link, why, trio.current_time())

    async def _beat(self) -> None:
        requests = 0
        while True:
            due = trio.current_time() + self._settings.heartbeat_s
            await trio.sleep_until(due)
            now = trio.current_time()  # read once: the process may stop between two readings, too
            self._counters.lag_us.record(round((now - due) * 1e6))
            self._stories.look(now)
            if now > due + STALL_S:
                log.warning("the server stood still", seconds=round(now - due, 1))
                await trio.sleep(STALL_S)  # unread messages are read before a peer can count as silent
                now += STALL_S
            for port in self._remote_ports:
                port.beat(now)
            self._dispatcher.end_turn()
            # This takes the event loop 20 to 30 ms after a peak: a server with one request per beat is not idle.
            if not self._dispatcher.unfinished and requests == self._counters.requests:
                give_back_freed_memory(above_bytes=IDLE_BYTES)
            requests = self._counters.requests
            for _ in self._last_minute.take(now):
                await trio.lowlevel.checkpoint()

    async def _drain(self) -> None:
        await self._drain_asked.wait()
        dispatcher, counters = self._dispatcher, self._counters
        log.info("server drains", unfinished=dispatcher.unfinished, grace_s=self._grace_s)
        dispatcher.drain(trio.current_time())
        dispatcher.end_turn()
        with trio.move_on_after(self._grace_s):
            await dispatcher.wait_idle()
        if dispatcher.unfinished:
            log.warning("grace is over", handed_back=dispatcher.unfinished)
            dispatcher.hand_back(f"the server stopped first; the grace was {self._grace_s} s")
        for port in self._remote_ports:
            port.say_goodbye()
        dispatcher.end_turn()
        await trio.sleep(FAREWELL_S)
        log.info(
            "server stopped",
            results=counters.results,
            failures=dict(counters.failures),
            scheduling_s=round(counters.scheduling_s, 3),
            scheduling_us_per_request=counters.scheduling_us_per_request,
        )


def _scheduler_of(settings: ServerSettings, cost_keeper: CostKeeper | None) -> Scheduler:
    return Scheduler(
        max_queued_requests=settings.max_queued_requests,
        max_queued_bytes=settings.max_queued_bytes,
        max_queued_s=settings.max_queued_s,
        hangs=HangLimits(min_s=settings.effective_hang_min_s, grace_s=settings.hang_grace_s),
        learned={} if cost_keeper is None else cost_keeper.read(),
    )


def _no_slot_for(model: str) -> str:
    return f"no slot for model {model!r}"


async def serve(
    settings: ServerSettings,
    *,
    models: Mapping[str, ModelSettings] | None = None,
    digests: Mapping[str, str] | None = None,
    keys: ServerSecurity | None = None,
    cost_cache: CostCache | None = None,
    own_workers: str | None = None,
    local: SlotThreads | None = None,
    tracer: RequestTracer | None = None,
    clients: PeerSocket | None = None,
    workers: PeerSocket | None = None,
    task_status: trio.TaskStatus[Server] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve until drained or cancelled; hand a `Server` to `nursery.start`.

    models: settings by name; clients may ask for these models before a worker serves them.
    digests: sha256 of the models' files, by name. The first worker of a model without one names it.
    keys: the keys of `settings.security`, read from its files.
    cost_cache: keeps the costs that are learned from traffic, for the next server.
    own_workers: a private address for the workers that this server's process starts.
    local: slots in this process.
    tracer: makes spans of requests; the server closes it at its end.
    clients, workers: sockets to use instead of those made from the settings' addresses. All are closed at the end.

    Raises AddressInUse when another process listens at an address. Raises ConfigurationError for an address that other
    machines reach, without `keys` or `security: network`.
    """
    client_socket, worker_socket = clients, workers
    room = OutboxRoom(settings.max_outbox_bytes)
    try:
        if client_socket is None:
            roles = (KeyRole.CLIENT, KeyRole.ADMIN)
            client_socket = listen(settings.listen, settings, keys, "clients", roles, room, CLIENT_LIMITS)
        dial_in = [address for address in (own_workers, settings.worker_listen) if address is not None]
        if worker_socket is None and dial_in:
            roles_of_workers = (KeyRole.WORKER,)
            worker_socket = listen(dial_in, settings, keys, "workers", roles_of_workers, room, WORKER_LIMITS)
        served = ServedModels(models or {}, digests or {})
        server = Server(
            settings, served, client_socket, worker_socket, cost_cache=cost_cache, local=local, tracer=tracer
        )
        await server._run(task_status)
    finally:
        for socket in (client_socket, worker_socket):
            if socket is not None:
                socket.close()
