"""The server: its parts, the tree of their tasks, and the commands of its caller.

    serve                                     opens the sockets, makes the Server, closes the sockets
    ├── sockets of clients, workers, slots    one watcher task each; per turn: read, decide, act, send
    ├── ClientPort.run, WorkerPort.run        one task each, for messages that no watcher finds
    ├── Dispatcher.run_alarm                  deadlines and batching delays
    ├── _beat                                 heartbeats and silence
    ├── Auditor.run                           runs answered requests again, alone
    ├── CostKeeper.run                        writes learned costs to disk
    └── _drain                                waits for `Server.drain`, then ends the others

A turn never awaits between reading and sending. So the parts call each other as plain methods and share no lock.
The admin port reads the server on this loop, too (readings.py).

Costs that were learned from traffic are kept on disk for the next server, beside the measured tables (docs/scheduling.md):
once a minute, and at the end. Each writing replaces the last one as a whole. It runs in a thread, since the event loop must
not wait for a slow disk.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import trio

from shapestream.addresses import is_beyond_loopback, is_protectable
from shapestream.chains.spec import ChainSpec
from shapestream.errors import ConfigurationError
from shapestream.known_costs import KnownCosts
from shapestream.quarantine import Quarantine
from shapestream.scheduling.hang_watch import HangLimits
from shapestream.scheduling.scheduler import Scheduler
from shapestream.serving.allocator import IDLE_BYTES, give_back_freed_memory
from shapestream.serving.auditor import Auditor, kept_in
from shapestream.serving.audits import AuditBook
from shapestream.serving.chain_desk import ChainDesk
from shapestream.serving.client_port import ClientPort
from shapestream.serving.connected_workers import Availability, ProcessOwner
from shapestream.serving.dispatcher import Dispatcher
from shapestream.serving.ends import Egress, Ends, Observer
from shapestream.serving.grants import RequestRoom, room_of
from shapestream.serving.journal import Journal
from shapestream.serving.kept_replies import KeptReplies
from shapestream.serving.local_port import LocalPort
from shapestream.serving.port_traffic import Outgoing
from shapestream.serving.readings import Readings
from shapestream.serving.served_models import ServedModels
from shapestream.serving.sessions import Sessions
from shapestream.serving.shadows import Shadows
from shapestream.serving.slot_threads import SlotThreads
from shapestream.serving.stories import Stories
from shapestream.serving.worker_port import LastState, WorkerPort
from shapestream.settings import ModelSettings, ServerSettings
from shapestream.slices import at_once
from shapestream.telemetry.counters import LastMinute, ServerStatistics
from shapestream.telemetry.logging import LogFormat, LogLevel, change, get_logger
from shapestream.telemetry.trace import TraceRecorder
from shapestream.transport.curve import KeyRing, KeyRole, ProtectedRouter, ServerSecurity
from shapestream.transport.interface import PeerSocket
from shapestream.transport.router import OutboxRoom, RouterSocket
from shapestream.transport.zeromq import SocketOptions
from shapestream.versions import Versions
from shapestream.wire.codec import codec_of, encode
from shapestream.wire.limits import CLIENT_LIMITS, MAX_FRAME_BYTES, WORKER_LIMITS, Limits
from shapestream.wire.messages import Goodbye, Role
from shapestream.wire.peers import STALL_S
from shapestream_engine.calibration import CostCache
from shapestream_engine.cost_table import LearnedCosts
from shapestream_engine.machine import memory_bytes

if TYPE_CHECKING:
    from shapestream.serving.tracing import RequestTracer

log = get_logger()

FAREWELL_S = 0.05
"""Seconds between the goodbyes and the end of the connections.

A worker's libzmq (ZMQ_IMMEDIATE) drops unread messages with a connection. A worker that missed the goodbye waits for 3 s
before it counts the server as gone.
"""


class Server:
    """A running server, as `serve` hands it to its caller. It must be made inside trio."""

    def __init__(
        self,
        settings: ServerSettings,
        models: ServedModels,
        clients: PeerSocket,
        workers: PeerSocket | None,
        requests: RequestRoom,
        *,
        cost_cache: CostCache | None = None,
        local: SlotThreads | None = None,
        tracer: RequestTracer | None = None,
        idle_bytes: int | None = IDLE_BYTES,
    ) -> None:
        self._settings = settings
        self._idle_bytes = idle_bytes
        self._leaves = trio.Event()
        self._drain_asked = trio.Event()
        self._ended = False
        self._grace_s = settings.grace_s
        self._models = models
        self._tracer = tracer
        self.addresses = clients.addresses
        """Where clients can connect."""
        self.worker_addresses: tuple[str, ...] = () if workers is None else workers.addresses
        """Where workers can connect."""
        self._sockets = [clients]
        """The sockets that other processes reach."""
        started, epoch = trio.current_time(), os.urandom(16)
        folder = None if cost_cache is None else cost_cache.folder

        self._counters = ServerStatistics()
        self._last_minute = LastMinute(self._counters, started)
        self._cost_keeper = None if cost_cache is None else CostKeeper(cost_cache)
        self._scheduler = _scheduler_of(settings, self._cost_keeper)
        request_ids = count(1)
        desk = ChainDesk(
            models,
            request_ids,
            max_requests=settings.max_queued_requests,
            max_bytes=settings.max_queued_bytes,
        )
        self._stories = Stories(
            self._scheduler.troubles,
            lambda: self._scheduler.batches,
            self._labels_of,
            desk.requests,
        )
        trace = None if settings.record_trace is None else TraceRecorder(Path(settings.record_trace))
        self._journal = Journal(self._counters, trace)
        audits = AuditBook(models, kept_in(folder))
        kept = KeptReplies(
            max_bytes=settings.kept_bytes,
            max_age_s=settings.kept_s,
            max_replies=settings.window_requests,
            now=started,
        )

        outgoing = Outgoing(clients, "clients", self._counters, codec_of(Role.SERVER_OF_CLIENTS))
        egress = Egress(outgoing, kept, Ends(*self._observers(), sample=audits.sample))
        sessions = Sessions(settings, kept, requests)
        self._dispatcher = Dispatcher(
            self._scheduler,
            egress,
            self._journal,
            clock=trio.current_time,
            prefetch=settings.prefetch,
            quarantine=Quarantine(settings.quarantine_requests, settings.quarantine_s),
            audits=audits,
            desk=desk,
            grants=sessions.grants,
        )
        self._auditor = Auditor(audits, self._dispatcher, folder)
        self._shadows = Shadows(models, self._dispatcher, egress.ends)
        self.readings = Readings(
            settings=settings,
            addresses=self.addresses,
            models=models,
            counters=self._counters,
            last_minute=self._last_minute,
            scheduler=self._scheduler,
            dispatcher=self._dispatcher,
            sessions=sessions,
            kept=kept,
            stories=self._stories,
            audits=audits,
            shadows=self._shadows,
            sockets=self._sockets,
            started=started,
            leaves=self._leaves,
        )
        """What the server tells of itself."""
        self._client_port = ClientPort(
            egress,
            self._dispatcher,
            models,
            sessions,
            settings,
            epoch=epoch,
            ids=request_ids,
            describe=self.readings.statistics,
            readiness=self.readings.readiness,
            totals=self.readings.totals,
            acknowledge=self._auditor.acknowledge,
            explain=self.readings.explain,
        )
        self._availability = Availability(
            models,
            self._dispatcher,
            self._client_port,
            workers_may_come=workers is not None,
            forget_after_s=settings.kept_s,
        )
        self._ports: list[ClientPort | WorkerPort | LocalPort] = [self._client_port]
        self._dispatcher.ports = self._ports
        self._remote_ports: list[ClientPort | WorkerPort] = [self._client_port]
        """The ports whose peers are other processes."""
        self._worker_port: WorkerPort | None = None
        self._local_port: LocalPort | None = None
        self._own_slots = count(1)
        self._tasks: trio.Nursery
        if workers is not None:
            self._listen_to_workers(workers, epoch)
        if local is not None:
            self._listen_to_slots(local)

    def _observers(self) -> Iterator[Observer]:
        """Yield the observers of ends. Spans use runs that the stories have kept, so the tracer comes after them."""
        yield from (self._stories, self._journal)
        if self._tracer is not None:
            self._tracer.follow(self._stories)
            yield self._tracer

    def _listen_to_workers(self, socket: PeerSocket, epoch: bytes) -> None:
        outgoing = Outgoing(socket, "workers", self._counters, codec_of(Role.SERVER_OF_WORKERS))
        port = WorkerPort(
            outgoing, self._dispatcher, self._models, self._availability, self._settings, epoch=epoch
        )
        self._worker_port = self.readings.worker_port = port
        self._sockets.append(socket)
        self._ports.append(port)
        self._remote_ports.append(port)

    def _listen_to_slots(self, threads: SlotThreads, name: str = "local") -> LocalPort:
        socket, codec = threads.listen()
        outgoing = Outgoing(socket, "slots", self._counters, codec)
        port = LocalPort(outgoing, self._dispatcher, self._models, self._availability, threads, name)
        self._local_port = port
        self._ports.append(port)
        return port

    # ---------------------------------------------------------------- for the caller

    def leave(self) -> None:
        """Say from now on that this server is not ready. It takes requests all the same, until `drain`."""
        self._leaves.set()

    def drain(self, *, grace_s: float | None = None) -> None:
        """Refuse new requests from now on. `serve` returns when the admitted ones have ended, or after the grace.

        `grace_s` replaces the setting, where waiting is useless.
        """
        if grace_s is not None:
            self._grace_s = grace_s
        self.leave()
        self._drain_asked.set()

    def own_processes(self, owner: ProcessOwner, groups: Mapping[str, int] | None = None) -> None:
        """Let `owner` kill workers that hang. It calls `worker_ended` when a process has ended.

        `groups`: the workers that it keeps running, by name, each with the number of its entry of `workers`.
        """
        self.groups_changed({} if groups is None else groups)
        if self._worker_port is not None:
            self._worker_port.processes.owner = owner

    def groups_changed(self, groups: Mapping[str, int]) -> None:
        """Know these workers of the configuration, by name, each with the number of its entry of `workers`."""
        self.readings.groups = groups
        for group in groups.values():
            for how in ("died", "ended"):
                self._counters.worker_ends.setdefault((group, how), 0)

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

    def has_own_slots(self) -> bool:
        """Tell whether every slot of this process can run batches: none hangs, and no thread has ended."""
        return self._local_port is not None and self._local_port.is_whole

    async def replace_own_slots(self, threads: SlotThreads) -> None:
        """Serve by these slots of this process from now on. The old ones finish what they have, and are released."""
        old = self._local_port
        port = self._listen_to_slots(threads, f"local+{next(self._own_slots)}")
        await self._tasks.start(port.serve)
        if old is not None:
            await old.drain(self._settings.grace_s)
            self._ports.remove(old)
            await old.ended.wait()

    async def worker_finished(self, worker: str) -> None:
        """Return when no request waits for a model in an old generation that only workers have that end, as this one does.

        From then on it gets no more batches.
        """
        port = self._worker_port
        if port is None:
            return
        await self._dispatcher.until(lambda: self._ended or not port.is_needed(worker))
        if not self._ended:
            port.give_no_more(worker)
            self._dispatcher.end_turn()

    def move_traffic(self) -> None:
        """Let the workers join, all in one turn, that their owner held and holds no more."""
        if self._worker_port is not None and not self._ended:
            self._worker_port.move_traffic(trio.current_time())
            self._dispatcher.end_turn()

    def model_given_up(self, name: str, why: str) -> None:
        """End the requests of a model as `unavailable`: no worker process is left for it. A worker may still dial in."""
        if not self._ended:
            self._availability.give_up(name, why, trio.current_time())
            self._dispatcher.end_turn()

    def model_withdrawn(self, name: str, why: str) -> None:
        """Give up a model that was removed from the configuration: the server is ready without it."""
        self._models.withdraw(name)
        self.model_given_up(name, why)

    def model_expected(self, name: str, settings: ModelSettings, *, may_change: bool = False) -> None:
        """Let requests wait for a model whose worker will come. `may_change`: it may bring another signature, too."""
        changed = self._models.expect(name, settings, may_change=may_change)
        if changed and not self._ended:
            log.info("model changes", model=name, worker=None, what="only how it is batched")
            self._availability.models_added(changed, trio.current_time())
        self.model_awaited(name)

    def model_awaited(self, name: str) -> None:
        """Let requests wait again for a model whose workers are started after all."""
        if not self._ended:
            self._availability.hope_again(name)

    def was_never_served(self, name: str) -> bool:
        """Tell whether a model was added while the server ran, and no worker has served it since."""
        return name in self._models.new

    def change_chains(self, chains: Iterable[ChainSpec]) -> None:
        """Serve these chains, and no others, from now on."""
        new = self._models.change_chains(chains)
        if not self._ended:
            self._availability.models_added(new, trio.current_time())
            self._dispatcher.end_turn()

    def change_versions(self, versions: Mapping[str, Versions]) -> None:
        """Draw requests that name no version by these shares from now on."""
        new = self._models.change_versions(versions)
        self._shadows.renew()
        if not self._ended:
            self._availability.models_added(new, trio.current_time())
            self._dispatcher.end_turn()

    def known_costs(self) -> list[KnownCosts]:
        """Return the costs of the models that workers serve now, as traffic has corrected them."""
        learned = {one.table: one for one in self.readings.scheduler.learned_costs(0.0)}
        tables = {
            name: table
            for worker in {slot.worker for slot in self._dispatcher.slots.values()}
            for name, table in worker.costs.items()
            if table.points and self._models.by_name.get(name) is worker.serves.get(name)
        }
        return [
            KnownCosts.of(
                self._models.by_name[name].signature,
                table if (own := learned.get(table.digest)) is None else table.corrected(own),
            )
            for name, table in tables.items()
        ]

    def count_reloads(self, results: Iterable[str]) -> None:
        """Set the counters of reloads to 0, one for each result."""
        self._counters.reloads.update(dict.fromkeys(results, 0))

    def versions_without_traffic(self) -> list[str]:
        """Return a line for each version that gets no traffic, since it does not take what its name announced."""
        return self._models.misfits()

    def reload_ended(self, result: str, seconds: float, *, ok: bool, why: Sequence[str]) -> None:
        """Count a reload that has ended, and remember the last one that was `ok`. The page shows `why` one was not."""
        self._counters.reloads[result] += 1
        told = self._models.misfits()  # while they last
        self.readings.reload_troubles = [
            f"the last reload was {result}: {line}" for line in why if line not in told
        ]
        if ok:
            self._counters.reloaded_at, self._counters.reload_s = time.time(), seconds

    def serve_files(self, digests: Mapping[str, str]) -> None:
        """Serve the models from files of these digests from now on. Workers that have read other files are refused.

        Connected workers stay, and until one with these files has joined, others may join with those before. For a model
        without a digest, the first worker that joins names it, and so it does for the engine of each model.
        """
        for name, digest in digests.items():
            before = self._models.digests.get(name)
            if before is not None and before != digest:
                log.info("model has other files", model=name, digest=digest, before=before)
        self._models.serve_files(digests, [name for name in digests if self._availability.is_served(name)])
        self._auditor.files_changed()
        self._shadows.renew()

    def keep_files(self, digests: Mapping[str, str]) -> None:
        """Serve these models from files of these digests after all: no worker could be started with the others."""
        self._models.keep_files(digests)

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

    def statistics(self) -> dict[str, Any]:
        """Return the counters, as plain data (`StatisticsEntry`)."""
        return at_once(self.readings.statistics())

    def _labels_of(self, model: str) -> list[str]:
        """Return the labels of the slots that serve a model."""
        return [slot.label for slot in self._dispatcher.slots.values() if model in slot.worker.models]

    # ---------------------------------------------------------------- its tasks

    async def _run(self, task_status: trio.TaskStatus[Server], reachable: trio.Event | None) -> None:
        cost_keeper = self._cost_keeper
        self.readings.reachable = reachable
        try:
            async with trio.open_nursery() as nursery:
                self._tasks = nursery
                for port in self._remote_ports:
                    await nursery.start(port.outgoing.socket.run)
                    nursery.start_soon(port.run)
                nursery.start_soon(self._dispatcher.run_alarm)
                nursery.start_soon(self._beat)
                nursery.start_soon(self._auditor.run)
                nursery.start_soon(self._shadows.run)
                if cost_keeper is not None:
                    nursery.start_soon(cost_keeper.run, self._scheduler.learned_costs)
                if self._local_port is not None:
                    await nursery.start(self._local_port.serve)
                if reachable is None:
                    self._tell_ready()
                else:
                    nursery.start_soon(self._tell_ready_after, reachable)
                task_status.started(self)
                await self._drain()
                if cost_keeper is not None:
                    await cost_keeper.aclose()
                if self._tracer is not None:
                    await self._tracer.aclose()
                nursery.cancel_scope.cancel()
        finally:
            self._ended = True
            self._dispatcher.look()
            self._journal.close()
            if self._tracer is not None:
                self._tracer.stop()

    async def _tell_ready_after(self, reachable: trio.Event) -> None:
        await reachable.wait()
        self._tell_ready()

    def _tell_ready(self) -> None:
        log.info(
            "server ready",
            listen=self.addresses,
            workers=self.worker_addresses,
            models=self._models.names,
        )

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
            self._availability.sweep(now)
            self._dispatcher.end_turn()
            # This takes the event loop 20 to 30 ms after a peak: a server with one request per beat is not idle.
            idle = not self._dispatcher.unfinished and requests == self._counters.requests
            if idle and self._idle_bytes is not None:
                give_back_freed_memory(above_bytes=self._idle_bytes)
            requests = self._counters.requests
            for _ in self._last_minute.take(now):
                await trio.lowlevel.checkpoint()

    async def _drain(self) -> None:
        await self._drain_asked.wait()
        dispatcher, counters = self._dispatcher, self._counters
        log.info("server drains", unfinished=dispatcher.unfinished, grace_s=self._grace_s)
        self._client_port.drain()
        dispatcher.drain(trio.current_time())
        dispatcher.end_turn()
        with trio.move_on_after(self._grace_s):
            await dispatcher.until(lambda: not dispatcher.unfinished)
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
        hangs=HangLimits(min_s=settings.effective_hang_min_s, grace_s=settings.hang_grace_s),
        learned={} if cost_keeper is None else cost_keeper.read(),
    )


async def serve(
    settings: ServerSettings,
    *,
    models: Mapping[str, ModelSettings] | None = None,
    chains: Iterable[ChainSpec] = (),
    versions: Mapping[str, Versions] | None = None,
    digests: Mapping[str, str] | None = None,
    keys: ServerSecurity | None = None,
    cost_cache: CostCache | None = None,
    own_workers: str | None = None,
    own_gateways: str | None = None,
    local: SlotThreads | None = None,
    tracer: RequestTracer | None = None,
    clients: PeerSocket | None = None,
    workers: PeerSocket | None = None,
    reachable: trio.Event | None = None,
    memory: int | None = None,
    idle_bytes: int | None = IDLE_BYTES,
    task_status: trio.TaskStatus[Server] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve until drained or cancelled; hand a `Server` to `nursery.start`.

    models: settings by name; clients may ask for these models before a worker serves them.
    chains: of these models; each can be asked for once its models are served.
    versions: the names that have several of the models, which are called `NAME@VERSION` then, and their shares.
    digests: sha256 of the models' files, by name. The first worker of a model without one names it.
    keys: the keys of `settings.security`, read from its files.
    cost_cache: keeps the costs that are learned from traffic, for the next server.
    own_workers: a private address for the workers that this server's process starts.
    own_gateways: a private address for the gateways that it starts, the last of the server's `addresses`.
    local: slots in this process.
    tracer: makes spans of requests; the server closes it at its end.
    clients, workers: sockets to use instead of those made from the settings' addresses. All are closed at the end.
    reachable: set when ports that others open for this server (gateways) are reachable; the log calls it ready then. None:
        there are none.
    memory: bytes of memory by which the bytes of requests are bounded. None: those that this process may use.
    idle_bytes: resident bytes above which an idle server returns freed memory. None: never, as in a program of others.

    Raises AddressInUse when another process listens at an address. Raises ConfigurationError for an address that other
    machines reach, without `keys` or `security: network`.
    """
    client_socket, worker_socket = clients, workers
    memory = memory_bytes() if memory is None else memory
    requests = room_of(memory, settings.max_queued_bytes, settings.window_bytes)
    room = OutboxRoom(min(settings.max_outbox_bytes, requests.grants))
    log.info("memory for requests", granted_bytes=requests.grants, unasked_bytes=requests.unasked)
    try:
        if client_socket is None:
            roles = (KeyRole.CLIENT, KeyRole.ADMIN, KeyRole.GATEWAY)
            addresses = [*settings.listen, *([] if own_gateways is None else [own_gateways])]
            largest = min(MAX_FRAME_BYTES, requests.grants)
            client_socket = listen(addresses, settings, keys, "clients", roles, room, CLIENT_LIMITS, largest)
        dial_in = [address for address in (own_workers, settings.worker_listen) if address is not None]
        if worker_socket is None and dial_in:
            roles_of_workers = (KeyRole.WORKER,)
            worker_socket = listen(dial_in, settings, keys, "workers", roles_of_workers, room, WORKER_LIMITS)
        served = ServedModels(models or {}, digests or {}, chains, versions)
        server = Server(
            settings,
            served,
            client_socket,
            worker_socket,
            requests,
            cost_cache=cost_cache,
            local=local,
            tracer=tracer,
            idle_bytes=idle_bytes,
        )
        await server._run(task_status, reachable)
    finally:
        for socket in (client_socket, worker_socket):
            if socket is not None:
                socket.close()


SENT_AHEAD = 32
"""Messages that libzmq buffers for a peer that does not read, besides its outbox.

A message to a client has about 1 MiB at most (`CLIENT_LIMITS`), or holds one larger result.
"""


def _let_all_in(addresses: Sequence[str], port: str, *, safe: bool) -> None:
    """Warn of addresses that other machines reach, without keys; raises `ConfigurationError` unless the network is safe."""
    if not safe:
        raise ConfigurationError(
            [f"{address}: other machines reach it (security is needed)" for address in addresses]
        )
    advice = "each can end this process, too: use keys (docs/security.md)"
    log.warning(
        "every peer that reaches these addresses is let in", port=port, listen=addresses, advice=advice
    )


def listen(
    addresses: Sequence[str],
    settings: ServerSettings,
    keys: ServerSecurity | None,
    port: str,
    roles: Sequence[KeyRole],
    room: OutboxRoom,
    limits: Limits,
    max_frame_bytes: int = MAX_FRAME_BYTES,
) -> RouterSocket:
    """Bind a socket to all these addresses, for peers whose key has one of these roles.

    port: name in logs and counters.
    room: bytes that the outboxes of all ports may hold together.
    limits: the largest messages of this port.
    max_frame_bytes: the largest frame; a peer that announces a larger one is disconnected before libzmq holds it.

    Raises AddressInUse, and ConfigurationError for an address that other machines reach, without `keys` or
    `security: network`.
    """
    open_to_all = [address for address in addresses if is_beyond_loopback(address)]
    if open_to_all and keys is None:
        _let_all_in(open_to_all, port, safe=settings.network_is_safe)
    # CURVE requires keys at tcp addresses only.
    asks = keys is not None and any(map(is_protectable, addresses))
    # One frame for the header, and one too many, by which the decoder recognises a message to refuse.
    (farewell,) = encode([Goodbye()])
    asked = SocketOptions(
        high_water_mark=SENT_AHEAD,
        max_frames=limits.max_frames + 2,
        max_frame_bytes=max_frame_bytes,
        farewell=bytes(farewell),
    )
    socket = (
        ProtectedRouter(keys, roles, port=port, options=asked, room=room)
        if asks and keys
        else RouterSocket(options=asked, room=room)
    )
    with ExitStack() as unless_bound:
        unless_bound.callback(socket.close)
        for address in addresses:
            socket.bind(address)
        unless_bound.pop_all()
    return socket


KEEP_EVERY_S = 60.0
"""Seconds between two writings. A killed server loses what it learned since the last one."""
CLOSE_GRACE_S = 2.0
"""Seconds to wait for the last writing, for a disk that does not answer."""


class CostKeeper:
    """The learned costs of one server. Only `run` writes, so that no older state can replace a newer one."""

    def __init__(self, cache: CostCache) -> None:
        self._cache = cache
        self._kept: dict[str, int] = {}
        """Batches that the last written costs were learned from, by table."""
        self._closing = trio.Event()
        self._closed = trio.Event()

    def read(self) -> Mapping[str, LearnedCosts]:
        """Read the costs that earlier servers have written, by table."""
        found = self._cache.all_learned()
        log.debug("learned costs read", tables=len(found))
        return found

    async def run(self, learned: Callable[[float], Sequence[LearnedCosts]]) -> None:
        """Write the costs that `learned` returns, until closed or cancelled. It gets the time in seconds since the epoch."""
        last = False
        while not last:
            with trio.move_on_after(KEEP_EVERY_S):
                await self._closing.wait()
            last = self._closing.is_set()
            known = learned(time.time())
            news = [one for one in known if self._kept.get(one.table) != one.batches]
            if news:
                await trio.to_thread.run_sync(self._write, news, abandon_on_cancel=True)
            self._kept = {one.table: one.batches for one in known}
        self._closed.set()

    async def aclose(self) -> None:
        """End `run` after a last writing, or after `CLOSE_GRACE_S` seconds."""
        self._closing.set()
        with trio.move_on_after(CLOSE_GRACE_S) as scope:
            await self._closed.wait()
        if scope.cancelled_caught:
            log.warning("learned costs not kept", why=f"not written within {CLOSE_GRACE_S:g} s")

    def _write(self, news: Sequence[LearnedCosts]) -> None:
        for one in news:
            self._cache.keep_learned(one)
