"""`shapestream serve`: run the server and the workers that a YAML names.

On the first SIGTERM or SIGINT the server refuses new requests and finishes those that it has, within `grace_s`. Then it
stops the workers. The second signal ends everything at once. On SIGHUP the server reads the lists of keys and the YAML
again, and replaces every worker by a new process, one after the other. `shapestream reload` replaces only those that would
be made of something else.
"""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import structlog
import trio

from shapestream.addresses import is_protectable
from shapestream.errors import ConfigurationError
from shapestream.loading.models import placement_warnings
from shapestream.loading.process_slots import own_slots
from shapestream.loading.sources import digests_of, sources_of
from shapestream.serving.allocator import keep_freed_memory
from shapestream.serving.server import Server, serve
from shapestream.serving.slot_threads import SlotThreads
from shapestream.settings import LoadedSettings, Settings
from shapestream.settings.values import spell_bytes
from shapestream.transport.guards import connections_that_fit, raise_descriptor_limit
from shapestream.versions import canaries
from shapestream_engine.calibration import CostCache
from shapestream_engine.machine import allowed_cpus, divide_cpus
from shapestream_workers import EXIT_CONFIGURATION, EXIT_OK, EXIT_RUNTIME
from shapestream_workers.access import open_admin_port, server_security
from shapestream_workers.gateways import STOP_GRACE_S, GatewayPorts, open_ports
from shapestream_workers.interruption import handed_over
from shapestream_workers.process import exit_after, keep_what_is_loaded
from shapestream_workers.reloads import Reload, ReloadRequest, Reloads
from shapestream_workers.roles import Roles, own_role_of, roles_of
from shapestream_workers.supervisor.core import Restarted
from shapestream_workers.supervisor.processes import GaveUp, SupervisedProcesses
from shapestream_workers.supervisor.replacements import RestartPolicy
from shapestream_workers.upkeep import notify, tend_watchdog, watch_memory

if TYPE_CHECKING:
    from shapestream.serving.admin import AdminPort
    from shapestream.serving.admin_pages import EventStream, Page
    from shapestream.serving.tracing import RequestTracer

log = structlog.get_logger()

LAST_WORDS_S = 1.0
"""Seconds to tell the clients after the second signal, or when no worker is left."""


def run_server(loaded: LoadedSettings) -> int:
    """Serve until told to stop, and return the exit status. Raises `ConfigurationError` before any port is open."""
    keep_freed_memory()
    raise_descriptor_limit()
    keys = server_security(loaded)
    for line in placement_warnings(loaded):
        log.warning("configuration", what=line)
    admin = open_admin_port(loaded, loaded.settings.server.admin)
    local = None
    digests = digests_of(loaded.settings.models)
    in_process = loaded.settings.in_process
    if in_process is not None:
        with admin.preparing() if admin is not None else nullcontext():
            local = own_slots(loaded, loaded.settings.models, in_process, allowed_cpus())
        digests = dict(local.digests)
        log.warning(
            "models run in the server's process", why="in_process: a crash of a model ends the server"
        )
    settings = loaded.with_server(max_clients=_clients_that_fit(loaded)).settings
    tracer = open_tracer(loaded)
    gateway_ports = open_ports(loaded)
    with _own_addresses(loaded.settings) as (own_workers, own_gateways):
        start = partial(
            serve,
            settings.server,
            models=loaded.settings.models_by_name,
            chains=[chain.spec() for chain in loaded.settings.chains],
            versions=loaded.settings.versions,
            digests=digests,
            keys=keys,
            cost_cache=CostCache.of_environment(),
            own_workers=own_workers,
            own_gateways=own_gateways,
            local=local,
            tracer=tracer,
        )
        with handed_over() as taken_over:
            return trio.run(_Serving(loaded, local, start, admin, gateway_ports, digests).run, taken_over)


def open_tracer(loaded: LoadedSettings) -> RequestTracer | None:
    """Return the maker of spans; None if none is configured, or if its libraries are missing.

    Raises `ConfigurationError` for variables `OTEL_*` that cannot be used.
    """
    endpoint = loaded.settings.server.tracing
    if endpoint is None:
        return None
    try:
        from shapestream.serving.tracing import RequestTracer, otlp_exporter
    except ModuleNotFoundError as error:
        log.warning("no tracing", why=str(error), advice="pip install 'shapestream[otel]'")
        return None
    try:
        return RequestTracer(otlp_exporter(endpoint))
    except ValueError as error:
        problem = loaded.problem(("server", "tracing"), f"a variable OTEL_* cannot be used: {error}")
        raise ConfigurationError([problem]) from error


def _clients_that_fit(loaded: LoadedSettings) -> int:
    """Return `max_clients`, or the number that the limit of open files allows. Raises `ConfigurationError` below one."""
    settings = loaded.settings
    wanted = settings.server.max_clients
    workers = sum(group.count for group in settings.worker_groups)
    cpus = allowed_cpus().amount
    slots = sum(
        group.count * (divide_cpus(cpus, workers, group.slots, group.threads)[0] + (group.wide is not False))
        for group in settings.worker_groups
    )
    # A gateway is a process like a worker, and one client.
    for gateways in settings.server.http, settings.server.grpc:
        workers += 0 if gateways is None else gateways.count
    fits = connections_that_fit(workers, slots, admin=settings.server.admin is not None)
    if fits is None or fits >= wanted:
        return wanted
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if fits < 1:
        text = f"no client fits beside {workers} workers into {limit} open files (raise the limit: ulimit -n)"
        raise ConfigurationError([loaded.problem(("server", "max_clients"), text)])
    log.warning(
        "fewer clients fit than max_clients",
        max_clients=wanted,
        fits=fits,
        workers=workers,
        limit=limit,
        advice="raise the limit of open files (ulimit -n), or lower max_clients",
    )
    return fits


@contextmanager
def _own_addresses(settings: Settings) -> Iterator[tuple[str | None, str | None]]:
    """Yield private addresses for this server's own workers and for its gateways; None for what needs none.

    These processes have no key. So the workers need a private address if the configured one asks for keys.
    """
    listen = settings.server.worker_listen
    asks = settings.server.security is not None and listen is not None and is_protectable(listen)
    for_workers = settings.worker_groups and (listen is None or asks)
    for_gateways = settings.server.http is not None or settings.server.grpc is not None
    if not for_workers and not for_gateways:
        yield None, None
        return
    # The path of a socket must be short: TMPDIR, or the folder of the YAML, may be too long.
    with TemporaryDirectory(prefix="shapestream-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        yield (
            f"ipc://{folder}/workers" if for_workers else None,
            f"ipc://{folder}/g" if for_gateways else None,
        )


def has_terminal() -> bool:
    """Tell whether the log goes to a terminal.

    A terminal that closes sends SIGHUP to its foreground processes. That SIGHUP ends the server, as Ctrl-C does.
    """
    return os.isatty(2)


class _Serving:
    """One run of `serve`: the server, its workers and its signals."""

    def __init__(
        self,
        loaded: LoadedSettings,
        local: SlotThreads | None,
        start: Callable[..., Awaitable[None]],
        admin: AdminPort | None,
        gateway_ports: GatewayPorts | None,
        digests: Mapping[str, str],
    ) -> None:
        """`start` is `serve` with all of its arguments but `task_status`; `digests`: of the models' files."""
        self._loaded = loaded
        self._admin = admin
        self._gateway_ports = gateway_ports
        self._local = local
        self._start = start
        self._digests = digests
        self._server: Server
        self._reloads: Reloads
        self._drained = trio.Event()
        self._gateways: SupervisedProcesses | None = None
        self._gateways_ended = trio.Event()
        self._reachable = trio.Event()
        """Set when all ports answer."""
        self._workers: SupervisedProcesses | None = None
        self._roles = Roles()
        """The workers, by the YAML that was read last."""
        self._sound: set[str] = set()
        """Those that were not given up."""
        self._known_roles: frozenset[str] = frozenset()
        """The workers of the YAML before."""
        self._status = EXIT_OK
        self._stop_asked = False
        self._had_terminal = has_terminal()

    async def run(self, obeys_signals: Callable[[], None]) -> int:
        """Serve and return the exit status. `obeys_signals` is called once signals are received here."""
        # Signals are received before any peer can know of the server: an earlier one would end the process.
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT, signal.SIGHUP) as signals:
            obeys_signals()
            return await self._run(signals)

    async def _run(self, signals: AsyncIterator[int]) -> int:
        # In a thread: a function's package may have thousands of files.
        sources = await trio.to_thread.run_sync(sources_of, self._loaded.settings.models, self._digests)
        self._roles.follow([*roles_of(self._loaded.settings, allowed_cpus().amount, sources)])
        async with trio.open_nursery() as nursery:
            server = self._server = await nursery.start(self._serve)
            gateways = self._gateways = self._gateway_processes()
            self._reloads = Reloads(
                self._loaded,
                server,
                digests=self._digests,
                own=own_role_of(self._loaded.settings, allowed_cpus().amount, sources),
                roles=self._roles,
                workers=lambda: self._workers,
                gateways=gateways,
                gateway_ports=self._gateway_ports,
                expect=self._expect,
                settled=self._give_up_new_models,
            )
            nursery.start_soon(self._reloads.run)
            if self._admin is not None:
                nursery.start_soon(self._admin.run, self._pages())
            keep_what_is_loaded()
            if gateways is None:
                self._tell_reachable()
            nursery.start_soon(tend_watchdog, server.readings.standstill)
            in_process = self._loaded.settings.in_process
            if in_process is not None and in_process.memory_limit is not None:
                warn = partial(_warn_of_memory, in_process.memory_limit)
                nursery.start_soon(watch_memory, in_process.memory_limit, warn)
            nursery.start_soon(self._obey_signals, signals, nursery)
            if gateways is not None:
                nursery.start_soon(self._run_gateways, gateways)
            await self._run_workers()
            await self._drained.wait()
            await self._gateways_ended.wait()
            nursery.cancel_scope.cancel()
        return self._status

    def _pages(self) -> dict[str, Page | EventStream]:
        from shapestream.serving.admin_pages import reload_page, server_pages

        def find(number: int | None) -> dict[str, Any] | None:
            found = self._reloads.find(number)
            return None if found is None else found.to_dict()

        def ask(asked: str) -> dict[str, Any]:
            return self._ask_for_reload(ReloadRequest(asked)).to_dict()

        page = reload_page(ask, find)
        return {**server_pages(self._server), "/reload": page}

    async def _serve(self, *, task_status: trio.TaskStatus[Server]) -> None:
        try:
            await self._start(task_status=task_status, reachable=self._reachable)
        finally:
            self._drained.set()

    async def _run_workers(self) -> None:
        """Run the workers until none is left, because the server has drained or they were given up."""
        server = self._server
        if not server.worker_addresses or not self._loaded.settings.worker_groups:
            return
        roles, settings = self._roles, self._loaded.settings.server
        spare = canaries(
            self._loaded.settings.versions
        )  # the others have a version of what such a worker serves
        self._sound, self._known_roles = set(roles.by_name), frozenset(roles.by_name)
        self._workers = SupervisedProcesses(
            roles.commands(self._loaded, server.worker_addresses[0]),
            RestartPolicy(drain_s=settings.grace_s + STOP_GRACE_S),
            spare=[name for name, role in roles.by_name.items() if role.models <= spare.keys()],
            ended=lambda role, worker, died: server.worker_ended(
                worker, died=died, group=roles.group_of(role)
            ),
            given_up=self._given_up,
            revived=self._revived,
            moved=server.move_traffic,
            finished=server.worker_finished,
        )
        server.own_processes(self._workers, roles.groups)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._stop_after_server, self._workers)
            try:
                await self._workers.run()
            except GaveUp as error:
                self._workers = None
                if self._loaded.settings.server.worker_listen is not None and not error.configuration:
                    log.error("no worker is left", why=str(error), what="others may dial in")
                else:
                    self._status = EXIT_CONFIGURATION if error.configuration else EXIT_RUNTIME
                    log.error("server stops", why=str(error))
                    server.drain(grace_s=LAST_WORDS_S)
            nursery.cancel_scope.cancel()

    def _given_up(self, worker: str, reason: str) -> None:
        """End the requests for models that only this worker served."""
        self._sound.discard(worker)
        roles = self._roles.by_name
        if worker in roles:
            lost = roles[worker].models.difference(*[roles[other].models for other in self._sound])
            for name in sorted(lost):
                self._server.model_given_up(name, f"its workers were given up, the last one because {reason}")

    def _revived(self, worker: str) -> None:
        """Let requests wait again for the models of a worker that was given up."""
        self._sound.add(worker)
        for name in self._roles.by_name[worker].models:
            self._server.model_awaited(name)

    def _gateway_processes(self) -> SupervisedProcesses | None:
        """Return the processes that speak HTTP and gRPC, or None if none are configured."""
        if self._gateway_ports is None:
            self._gateways_ended.set()
            return None
        return self._gateway_ports.processes(
            self._server.addresses[-1], self._loaded.settings.server, all_ready=self._tell_reachable
        )

    def _tell_reachable(self) -> None:
        """Tell the log and systemd that the server is ready, once: gRPC's port is not open before its gateways are."""
        if self._reachable.is_set():
            return
        for kind, address in self._gateway_ports.addresses.items() if self._gateway_ports else ():
            log.info(f"{kind} ready", address=address)
        self._reachable.set()
        notify("READY=1")

    async def _run_gateways(self, gateways: SupervisedProcesses) -> None:
        """Run the gateways until the server has drained. They answer what the server answered, and end."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._stop_after_server, gateways)
            try:
                await gateways.run()
            except GaveUp as error:
                self._status = EXIT_CONFIGURATION
                log.error("server stops", why=str(error))
                self._server.drain(grace_s=LAST_WORDS_S)
            finally:
                self._close_gateway_ports()
                self._gateways_ended.set()
            nursery.cancel_scope.cancel()

    async def _stop_after_server(self, processes: SupervisedProcesses) -> None:
        await self._drained.wait()
        if processes is self._gateways:
            self._close_gateway_ports()
        processes.stop(STOP_GRACE_S)

    def _close_gateway_ports(self) -> None:
        """Refuse connections once no gateway accepts them: the system would keep them waiting."""
        if self._gateway_ports is not None:
            self._gateway_ports.close()

    def _expect(
        self,
        settings: Settings,
        before: frozenset[str],
        replaced: frozenset[str],
        changed: Collection[str],
    ) -> None:
        """Tell the server which models the YAML has now, and which of those `before` it has no more.

        Those of `replaced` roles may come with another signature, and those that `changed`, if only workers have them that
        dial in.
        """
        roles = self._roles.by_name
        self._server.groups_changed(self._roles.groups)
        self._sound = {name for name in roles if name in self._sound or name not in self._known_roles}
        self._known_roles = frozenset(roles)
        here = self._roles.models
        may_change = frozenset[str]().union(*[roles[name].models for name in replaced])
        models = settings.models_by_name
        for name, model in sorted(models.items()):
            self._server.model_expected(
                name, model, may_change=name in (may_change if name in here else changed)
            )
        for name in sorted(before - models.keys()):
            self._server.model_withdrawn(name, "the reloaded configuration has it no more")

    def _give_up_new_models(self, restarted: Restarted) -> None:
        """End the requests for new models that no worker serves, because none could be replaced."""
        roles = self._roles.by_name
        brought = [
            roles[one].models
            for one in (*restarted.replaced, *restarted.added, *restarted.unchanged)
            if one in roles
        ]
        for worker, why in restarted.kept.items():
            for name in roles[worker].models.difference(*brought) if worker in roles else ():
                if self._server.was_never_served(name):
                    self._server.model_given_up(name, f"no worker could be started with it: {why}")

    def _ask_for_reload(self, asked: ReloadRequest) -> Reload:
        """Request a reload. Raises `ConfigurationError` while the server stops."""
        if self._stop_asked:
            raise ConfigurationError(["the server stops"])
        return self._reloads.ask(asked)

    async def _leave(self, lame_duck_s: float) -> None:
        """Take requests at the gateways for a while, although the server is not ready, and then drain.

        It ends when the last gateway has ended, since no connection was left. The server of none drains at once.
        """
        self._server.leave()
        if self._gateways is not None:
            self._gateways.leave()
        with trio.move_on_after(lame_duck_s):
            await self._gateways_ended.wait()
        self._server.drain()

    async def _obey_signals(self, signals: AsyncIterator[int], nursery: trio.Nursery) -> None:
        async for number in signals:
            name = signal.Signals(number).name
            if number == signal.SIGHUP and not (self._had_terminal and not has_terminal()):
                try:
                    self._ask_for_reload(ReloadRequest.ALL)
                except ConfigurationError as error:
                    log.info("no worker is restarted", why=str(error))
                continue
            if not self._stop_asked:
                self._stop_asked = True
                settings = self._loaded.settings.server
                # Who presses Ctrl-C in a terminal waits for no balancer.
                lame_duck_s = 0.0 if number == signal.SIGINT else settings.effective_lame_duck_s
                log.info("stopping", signal=name, lame_duck_s=lame_duck_s, grace_s=settings.grace_s)
                notify("STOPPING=1")
                nursery.start_soon(self._leave, lame_duck_s)
                continue
            log.warning("stopping at once", signal=name)
            self._status = EXIT_RUNTIME
            if self._workers is not None:
                self._workers.stop_now()
            exit_after(LAST_WORDS_S)
            nursery.cancel_scope.cancel()
            return


def _warn_of_memory(limit_bytes: int, resident: int) -> None:
    """Warn once: a server that runs models in its own process cannot be replaced."""
    log.warning(
        "memory limit passed",
        resident=spell_bytes(resident),
        limit=spell_bytes(limit_bytes),
        what="in_process: the server goes on; use workers, which are replaced",
    )
