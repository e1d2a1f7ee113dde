"""`shapestream worker`: compiles the models of a group and serves them to a server, in a process of its own.

A worker that a server started (`--supervised`) ends with that server. One that a user started waits for its server, and
connects again after that has restarted.
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import structlog
import trio

from shapestream.addresses import check_destination, is_beyond_loopback, is_protectable, reached_from_here
from shapestream.errors import ConfigurationError
from shapestream.loading.models import placement_warnings
from shapestream.loading.process_slots import process_slots
from shapestream.loading.trials import Measuring
from shapestream.serving.allocator import keep_freed_memory
from shapestream.settings import AdminSettings, LoadedSettings, WorkerGroupSettings
from shapestream.settings.values import spell_bytes
from shapestream.transport.curve_keys import CallerKeys
from shapestream.transport.interface import Connection, Wake
from shapestream.transport.zeromq import BlockingDealer, DealerSocket, SocketOptions
from shapestream_engine.machine import allowed_cpus, divide_cpus, resident_bytes
from shapestream_workers import EXIT_CONFIGURATION, EXIT_OK, EXIT_RUNTIME, EXIT_UNUSABLE
from shapestream_workers.access import caller_keys, open_admin_port
from shapestream_workers.interruption import handed_over
from shapestream_workers.process import (
    NAME_VARIABLE,
    READY_LINE,
    REPLACE_LINE,
    exit_after,
    keep_what_is_loaded,
    name_of_start,
)
from shapestream_workers.upkeep import watch_memory
from shapestream_workers.worker import Worker, WorkerEnd

if TYPE_CHECKING:
    from shapestream.serving.admin import AdminPort

log = structlog.get_logger()

LAST_WORDS_S = 0.5
"""Seconds between the second signal and the end of the process, whatever an engine's threads do."""
ELSEWHERE = "this address is on this machine; if the server runs elsewhere, say --connect tcp://HOST:PORT"
"""Advice while no server has answered: `server.worker_listen` of a copied YAML is the address on the server's machine."""
_STATUSES = {
    WorkerEnd.DRAINED: EXIT_OK,
    WorkerEnd.REFUSED: EXIT_CONFIGURATION,
    WorkerEnd.UNUSABLE: EXIT_UNUSABLE,
    WorkerEnd.SLOT_ENDED: EXIT_RUNTIME,
    WorkerEnd.SLOT_HANGS: EXIT_RUNTIME,
}


def server_address(loaded: LoadedSettings, connect: str | None) -> str:
    """Return the address of the server for workers. Raises `ConfigurationError`, or `TransportError` for a bad address."""
    address = connect or loaded.settings.server.worker_listen
    if address is None:
        message = "server.worker_listen is not set (set it, or say --connect ADDRESS)"
        raise ConfigurationError([loaded.problem(("server",), message)])
    address = reached_from_here(address)
    check_destination(address)
    return address


def keys_to_show(
    loaded: LoadedSettings, address: str, key: Path | None, server_key: str | None
) -> CallerKeys | None:
    """Return the keys for the server at this address, or None if it asks for none. Raises `ConfigurationError`."""
    if not is_protectable(address):
        return None  # keys of the environment may be meant for another server
    keys = caller_keys(key, server_key)
    security = loaded.settings.server.security
    if keys is None and security is not None and security.mode != "network":
        message = (
            "the server asks workers for keys (add --key FILE --server-key KEY; `shapestream keys new NAME` makes FILE, "
            "and the server's server.security.workers must list NAME.pub)"
        )
        raise ConfigurationError([loaded.problem(("server", "security"), message)])
    return keys


def run_worker(
    loaded: LoadedSettings,
    group: WorkerGroupSettings,
    address: str,
    *,
    name: str,
    index: int = 0,
    ready_channel: int | None,
    keys: CallerKeys | None = None,
    admin: AdminSettings | None = None,
) -> int:
    """Serve until told to stop, and return the exit status. Raises `ConfigurationError` for unusable models.

    `index`: the number of this process in its group, from 0.
    """
    keep_freed_memory()
    structlog.contextvars.bind_contextvars(process=name)
    port = open_admin_port(loaded, admin)
    if ready_channel is None:  # else the server has said it
        for line in placement_warnings(loaded):
            log.warning("configuration", what=line)
    processes = sum(other.count for other in loaded.settings.worker_groups)
    cpus = allowed_cpus()
    slots, threads = divide_cpus(cpus.amount, max(1, processes), group.slots, group.threads)
    own = loaded.settings.models_of(group, index)
    dialling = _Dialling(address, keys)
    with port.preparing() if port is not None else nullcontext():
        served = process_slots(
            loaded,
            own,
            group,
            slots=slots,
            threads=threads,
            check=lambda _: _check_memory_limit(loaded, group),
            measuring=Measuring.beside(address),
            dial=dialling.dial,
        )
    supervised = ready_channel is not None
    unique = _unique_name(name, supervised=supervised)
    log.info(
        "worker starts",
        worker=unique,
        server=address,
        models=list(served.models),
        slots=slots,
        threads=threads,
        cpus=cpus.amount,
        cpus_by=cpus.by,
    )
    worker = Worker(
        unique,
        served,
        dialling.connect,
        ready=partial(_tell_ready, ready_channel),
        asks_again=not supervised,  # a supervised worker has only the server that started it
        once=tuple(model.name for model in own if not model.idempotent),
        advice=None if supervised or is_beyond_loopback(address) else ELSEWHERE,
    )
    keep_what_is_loaded()
    with handed_over() as taken_over:
        grace_s = loaded.settings.server.grace_s
        return trio.run(_run, worker, grace_s, group.memory_limit, ready_channel, taken_over, port)


def _tell_ready(channel: int | None) -> None:
    if channel is not None:
        os.write(channel, READY_LINE)


def _unique_name(name: str, *, supervised: bool) -> str:
    """Return the name by which the server knows this process: the one that its server gave it, if one started it."""
    # Removed from the environment: a worker that a model's code starts is another process.
    told = os.environ.pop(NAME_VARIABLE, None)
    return told if supervised and told else name_of_start(f"{name}-{socket.gethostname()}")


class _Dialling:
    """The connections of a worker to its server."""

    def __init__(self, address: str, keys: CallerKeys | None) -> None:
        self._address = address
        self._keys = keys
        # The socket accepts no message while there is no connection.
        self._options = SocketOptions(immediate=True)
        self._latest: DealerSocket | None = None

    def dial(self, wake: Wake) -> BlockingDealer:
        """Return the connection of a slot."""
        return BlockingDealer(self._address, wake, keys=self._keys, options=self._options)

    def connect(self) -> Connection:
        """Return a new connection of the control. Where the server refused the last one, the log says why."""
        if self._latest is not None and self._latest.refusal is not None:
            why = self._latest.refusal
            log.warning("the server does not let this worker in", server=self._address, why=why)
        self._latest = DealerSocket(keys=self._keys, options=self._options)
        self._latest.connect(self._address)
        return self._latest


def _check_memory_limit(loaded: LoadedSettings, group: WorkerGroupSettings) -> None:
    """Raise `ConfigurationError` for a limit that this process has passed before its first batch."""
    if group.memory_limit is None:
        return
    key = ("workers", loaded.settings.worker_groups.index(group), "memory_limit")
    try:
        resident = resident_bytes()
    except OSError as error:
        raise ConfigurationError(
            [loaded.problem(key, f"it cannot be measured: {error} (it needs Linux)")]
        ) from error
    if resident > group.memory_limit:
        message = (
            f"{spell_bytes(group.memory_limit)} is less than the {spell_bytes(resident)} that a worker takes with its "
            "compiled models, before the first request (raise the limit; requests need memory too)"
        )
        raise ConfigurationError([loaded.problem(key, message)])


def _leave(name: str, memory_limit: int, channel: int | None, resident: int) -> None:
    """Ask the supervisor to replace this worker, which holds too much memory. Without a supervisor, drain and end."""
    log.warning(
        "memory limit passed",
        worker=name,
        resident=spell_bytes(resident),
        limit=spell_bytes(memory_limit),
        what="it drains and ends; start it again" if channel is None else "it will be replaced",
    )
    if channel is None:
        signal.raise_signal(signal.SIGTERM)
    else:
        os.write(channel, REPLACE_LINE)


async def _run(
    worker: Worker,
    grace_s: float,
    memory_limit: int | None,
    channel: int | None,
    obeys_signals: Callable[[], None],
    port: AdminPort | None,
) -> int:
    status = EXIT_RUNTIME
    async with trio.open_nursery() as nursery:
        await nursery.start(_obey_signals, worker, grace_s, nursery.cancel_scope)
        obeys_signals()
        if memory_limit is not None:
            passed = partial(_leave, worker.name, memory_limit, channel)
            nursery.start_soon(watch_memory, memory_limit, passed)
        if port is not None:
            from shapestream.serving.admin_pages import health_page

            pages = {
                "/health/live": health_page("live", list),  # the event loop answers: it is alive
                "/health/ready": health_page("ready", worker.not_ready),
            }
            nursery.start_soon(port.run, pages)
        await worker.run()
        if worker.end is WorkerEnd.SLOT_HANGS:
            exit_after(LAST_WORDS_S)
        status = _STATUSES[worker.end]
        nursery.cancel_scope.cancel()
    return status


async def _obey_signals(
    worker: Worker, grace_s: float, scope: trio.CancelScope, *, task_status: trio.TaskStatus[None]
) -> None:
    """Drain on the first signal. End on the second one, or when draining takes longer than `grace_s`."""
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        task_status.started()
        async for _ in signals:
            worker.drain()
            break
        with trio.move_on_after(grace_s):
            async for _ in signals:
                break
        log.warning("stopping at once")
        exit_after(LAST_WORDS_S)
        scope.cancel()
