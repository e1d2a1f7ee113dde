"""`shapestream serve`: the server and its workers, from one process, from a YAML; their common beginning and end.

On the first SIGTERM or SIGINT the server refuses what is new and finishes what it has, within its grace; then
the workers are stopped. The second one ends everything at once. On SIGHUP the lists of keys are read
again, and every worker is replaced by a fresh process, one after the other.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import structlog
import trio

from shapestream.addresses import is_protectable
from shapestream.errors import ConfigurationError
from shapestream.serving.allocator import keep_freed_memory
from shapestream.serving.local_executor import LocalSlots
from shapestream.serving.models import ModelOptions
from shapestream.serving.options import ServerOptions
from shapestream.serving.server import Server, serve
from shapestream.settings import Settings
from shapestream.settings_loader import LoadedSettings
from shapestream.transport.descriptors import raise_descriptor_limit
from shapestream_engine.calibration_cache import CostCache
from shapestream_engine.resources import divide_cpus
from shapestream_workers.costs import tables
from shapestream_workers.in_process_memory import InProcessMemory
from shapestream_workers.models import available_cpus, compile_models
from shapestream_workers.parent_watch import exit_after
from shapestream_workers.security import server_security
from shapestream_workers.supervisor.processes import GaveUp, WorkerProcesses
from shapestream_workers.supervisor.records import RestartPolicy

__all__ = ["run_server", "server_options", "worker_commands"]

log = structlog.get_logger()

# For workers to end after the server has drained: they have nothing left to do by then.
STOP_GRACE_S = 5.0
# After the second signal, or when nothing can serve any more: just enough to tell the clients.
LAST_WORDS_S = 1.0
EXIT_OK, EXIT_RUNTIME, EXIT_CONFIGURATION = 0, 1, 3


def server_options(settings: Settings, worker_listen: str | None) -> ServerOptions:
    """The server's options, from its settings; `worker_listen` is where workers reach it, if there are any."""
    server = settings.server
    return ServerOptions(
        listen=server.listen,
        worker_listen=worker_listen,
        dial_in_listen=None if worker_listen in (None, server.worker_listen) else server.worker_listen,
        network_is_safe=server.security is not None and server.security.mode == "network",
        record_trace=None if server.record_trace is None else Path(server.record_trace),
        models={
            model.name: ModelOptions(
                max_batch=model.batching.max_batch,
                max_delay_s=model.batching.max_delay_ms / 1000,
                max_padding_ratio=model.batching.max_padding_ratio,
                max_batch_bytes=model.batching.max_batch_bytes,
                hang_after_s=model.batching.hang_limit_s,
                idempotent=model.idempotent,
            )
            for model in settings.models
        },
        max_queued_requests=server.max_queued_requests,
        max_queued_bytes=server.max_queued_bytes,
        max_queued_s=server.max_queued_s,
        window_requests=server.window_requests,
        window_bytes=server.window_bytes,
        windows_per_key=server.windows_per_key,
        kept_bytes=server.kept_bytes,
        kept_s=server.kept_s,
        max_sessions=server.max_clients,
        prefetch=server.prefetch,
        heartbeat_s=server.heartbeat_s,
        client_silence_s=server.client_silence_s,
        worker_silence_s=server.worker_silence_s,
        hang_min_s=server.hang_min_s or max(10.0, 2 * server.worker_silence_s),
        hang_grace_s=server.hang_grace_s,
        quarantine_requests=server.quarantine_requests,
        quarantine_s=server.quarantine_s,
        grace_s=server.grace_s,
    )


def worker_commands(loaded: LoadedSettings, address: str) -> dict[str, list[str]]:
    """A command line per worker process; the same CLI that users have, with what only a parent can say."""
    commands: dict[str, list[str]] = {}
    for number, group in enumerate(loaded.settings.worker_groups):
        for _ in range(group.count):
            name = f"w{len(commands)}"
            # -P: a file in the current folder must not shadow a module, which -m alone would allow.
            command = [
                sys.executable,
                "-P",
                "-m",
                "shapestream_workers",
                "worker",
                str(loaded.path.absolute()),
            ]
            commands[name] = [
                *command,
                "--connect",
                address,
                "--group",
                str(number),
                "--name",
                name,
                "--supervised",
            ]
    return commands


def models_of_workers(settings: Settings) -> dict[str, frozenset[str]]:
    """What each worker serves, by the names that `worker_commands` gives them."""
    groups = [group for group in settings.worker_groups for _ in range(group.count)]
    return {
        f"w{number}": frozenset(model.name for model in settings.models_of(group))
        for number, group in enumerate(groups)
    }


def run_server(loaded: LoadedSettings) -> int:
    """Serves until told to stop; returns the exit status. Raises `ConfigurationError` before any port is open."""
    keep_freed_memory()
    raise_descriptor_limit()
    security = server_security(loaded)
    local = None
    in_process = loaded.settings.in_process
    if in_process is not None:
        slots, threads = divide_cpus(available_cpus(), 1, in_process.slots, in_process.threads)
        models = compile_models(loaded, loaded.settings.models, slots=slots, threads=threads)
        costs = tables(loaded.settings.models, models, slots=slots, threads=threads)
        local = LocalSlots(models=models, slots=slots, costs=costs)
        log.warning(
            "models run in the server's process", why="in_process: a crash of a model ends the server"
        )
    with _worker_address(loaded.settings) as address:
        options = replace(
            server_options(loaded.settings, address),
            security=security,
            cost_cache=CostCache.of_environment(),
        )
        return trio.run(_Serving(loaded, local, options).run)


@contextmanager
def _worker_address(settings: Settings) -> Iterator[str | None]:
    """Where workers reach the server: as configured, or in a private folder for as long as the server lives.

    There also where a key is asked for at the configured one: the server's own workers have none.
    """
    listen = settings.server.worker_listen
    asks = settings.server.security is not None and listen is not None and is_protectable(listen)
    if not settings.worker_groups or (listen is not None and not asks):
        yield listen
        return
    # Short, since the path of a socket is: neither beside the YAML nor below the user's TMPDIR.
    folder = tempfile.mkdtemp(prefix="shapestream-", dir="/tmp")
    try:
        yield f"ipc://{folder}/workers"
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def has_terminal() -> bool:
    """Whether somebody sees what is logged. When a terminal is closed its foreground processes get a SIGHUP, too: then it
    means what Ctrl-C does, or a server would stay behind that nobody sees."""
    return os.isatty(2)


class _Serving:
    """One run of `serve`: the server, its workers, and the signals that end both."""

    def __init__(self, loaded: LoadedSettings, local: LocalSlots | None, options: ServerOptions) -> None:
        self._loaded = loaded
        self._local = local
        self._options = options
        self._drained = trio.Event()
        self._workers: WorkerProcesses | None = None
        self._status = EXIT_OK
        self._stop_asked = False
        self._had_terminal = has_terminal()

    async def run(self) -> int:
        """Returns the exit status."""
        # From before anybody can know of the server: a signal that came earlier than its receiver would end the process.
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT, signal.SIGHUP) as signals:
            return await self._run(signals)

    async def _run(self, signals: AsyncIterator[int]) -> int:
        async with trio.open_nursery() as nursery:
            server = await nursery.start(self._serve)
            in_process = self._loaded.settings.in_process
            if in_process is not None and in_process.memory_limit is not None:
                warden = InProcessMemory(
                    server, in_process.memory_limit, refuses=in_process.refuse_new_shapes
                )
                nursery.start_soon(warden.run)
            nursery.start_soon(self._obey_signals, signals, server, nursery.cancel_scope)
            await self._run_workers(server)
            await self._drained.wait()
            nursery.cancel_scope.cancel()
        return self._status

    async def _serve(self, *, task_status: trio.TaskStatus[Server]) -> None:
        try:
            await serve(self._options, local=self._local, task_status=task_status)
        finally:
            self._drained.set()

    async def _run_workers(self, server: Server) -> None:
        """Returns when there are none left: after the server has drained, or when they were given up."""
        if not server.worker_addresses or not self._loaded.settings.worker_groups:
            return
        models = models_of_workers(self._loaded.settings)
        sound = set(models)

        def given_up(worker: str, reason: str) -> None:
            sound.discard(worker)
            for name in sorted(models[worker].difference(*[models[other] for other in sound])):
                server.model_given_up(name, f"its workers were given up, the last one because {reason}")

        def revived(worker: str) -> None:
            sound.add(worker)
            for name in models[worker]:
                server.model_awaited(name)

        policy = RestartPolicy(drain_s=self._options.grace_s + STOP_GRACE_S)
        self._workers = WorkerProcesses(
            worker_commands(self._loaded, server.worker_addresses[0]),
            policy,
            ended=lambda worker, pid, died: server.worker_ended(worker, pid, died=died),
            given_up=given_up,
            revived=revived,
        )
        server.own_processes(self._workers)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._stop_workers_after_server, self._workers)
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

    async def _stop_workers_after_server(self, workers: WorkerProcesses) -> None:
        await self._drained.wait()
        workers.stop(STOP_GRACE_S)

    def _restart_workers(self) -> None:
        if self._workers is None or self._stop_asked:
            log.info(
                "no worker is restarted",
                why="the server stops" if self._stop_asked else "there is none that was started here",
            )
            return
        log.info("workers are restarted", how="one after the other")
        self._workers.restart()

    def _reread_keys(self, server: Server) -> None:
        """The keys that are let in, as their files are now; as they were, if these cannot be used."""
        try:
            security = server_security(self._loaded)
        except ConfigurationError as error:
            log.error("keys are not changed", why=error.problems)
            return
        if security is not None:
            server.let_in(security.ring)
            log.info("keys are read again", **security.ring.counts())

    async def _obey_signals(
        self, signals: AsyncIterator[int], server: Server, scope: trio.CancelScope
    ) -> None:
        async for number in signals:
            name = signal.Signals(number).name
            if number == signal.SIGHUP and not (self._had_terminal and not has_terminal()):
                self._reread_keys(server)
                self._restart_workers()
                continue
            if not self._stop_asked:
                self._stop_asked = True
                log.info("stopping", signal=name, grace_s=self._options.grace_s)
                server.drain()
                continue
            log.warning("stopping at once", signal=name)
            self._status = EXIT_RUNTIME
            if self._workers is not None:
                self._workers.stop_now()
            exit_after(LAST_WORDS_S)
            scope.cancel()
            return
