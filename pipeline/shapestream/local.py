"""A server inside this program: `async with shapestream.local.connect("server.yaml", cpus=4) as client`.

One spelling for all programs: `async with` under trio and asyncio, `with` where no event loop runs. The client is the one of
`shapestream`, `shapestream.aio` or `shapestream.blocking`, and so are its calls, errors and limits.

    the program's event loop or thread          a thread of its own
    client ── CrossingConnection ─────────────▶ trio.run(serve) ──▶ slots: threads

The server has a thread and a trio run of its own, whatever the program runs. It opens no socket, and writes no file but the
caches of proofs and costs. It leaves alone what belongs to the program: signals, the memory allocator, limits, the garbage
collector, and structlog's configuration. Its log lines go to the standard library's logger `shapestream`. Models are proved
in child processes, as everywhere.

docs/hosts.md says what a process of its own gives besides, and which key of a YAML does what here.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import trio

from shapestream.client import aio_client, blocking_client, trio_client
from shapestream.client.async_face import Client, running_library
from shapestream.errors import ConfigurationError
from shapestream.loading.process_slots import own_slots
from shapestream.serving.server import Server, serve
from shapestream.serving.slot_threads import SlotThreads
from shapestream.settings import (
    ChainSettings,
    InProcessSettings,
    LoadedSettings,
    ModelSettings,
    load_settings,
    settings_of,
)
from shapestream.settings.version_settings import served_name
from shapestream.telemetry.logging import get_logger, in_a_host
from shapestream.transport.crossing import CrossingServer
from shapestream.versions import Versions, versioned
from shapestream_engine.calibration import CostCache
from shapestream_engine.machine import Allowance, allowed_cpus

__all__ = ["ChainSettings", "Local", "ModelSettings", "connect"]

log = get_logger()

IGNORED = (
    *("workers", "logging", "in_process.memory_limit"),
    *("server.listen", "server.worker_listen", "server.security", "server.max_clients"),
    *("server.admin", "server.http", "server.grpc", "server.tracing"),
    *("server.client_silence_s", "server.worker_silence_s"),
    *("server.grace_s", "server.lame_duck_s", "server.reload_s", "server.surge"),
)
"""Keys of a YAML that have no meaning here: processes, addresses and their callers, and times of either."""
_NEVER_SILENT_S = 86400.0
"""Seconds for which this program may be busy elsewhere before its requests are dropped. It cannot vanish by itself."""
_WELCOME_S = 60.0
"""Seconds for the server's first answer, which comes at once unless other threads hold the interpreter."""

_told = threading.Lock()
"""Taken once, by the server that tells what all of this process have in common."""
_preparing = threading.Lock()
"""Held while models are compiled, proved and measured: an engine compiles in one thread at a time."""


def connect(
    config: str | Path | None = None,
    *,
    models: Sequence[ModelSettings | Mapping[str, Any]] | None = None,
    chains: Sequence[ChainSettings | Mapping[str, Any]] = (),
    cpus: int | None = None,
    close_timeout: float = 10.0,
) -> Local:
    """Start a server in this program, and connect to it: `async with` under trio and asyncio, `with` elsewhere.

    config: a YAML as for `shapestream serve`. What concerns processes, addresses and callers is ignored, with a line that
        names it.
    models, chains: instead of a YAML, the settings as objects, or as mappings with a YAML's keys. Only here, `function` may
        be the function itself, of a module that can be imported; it needs no registration.
    cpus: CPUs that the models use; they decide the slots, the threads, and which costs and verdicts apply. Default: all
        that this process may use. A program of many processes gives each its part.
    close_timeout: seconds for running calls to end when the block is left. One that hangs is named in the log, and its
        thread is left behind.

    Entering the block proves the models, or reads earlier verdicts; it may take minutes the first time.

    Raises:
    ConfigurationError: at once, with all that the configuration has wrong; when the block is entered, with the models that
        cannot be served.
    """
    if (config is None) == (models is None):
        raise TypeError("connect takes a YAML, or models=[…]: one of them")
    if chains and models is None:
        raise TypeError("chains=[…] goes with models=[…]; a YAML has its own")
    if cpus is not None and (type(cpus) is not int or cpus < 1):
        raise ValueError(f"cpus is a count from 1, not {cpus!r}")
    loaded = settings_of(models, chains) if models is not None else load_settings(config or "", serves=False)
    if not loaded.settings.models:
        raise ConfigurationError([f"{loaded.path}: models: there is no model to serve here"])
    return Local(_Server(loaded, cpus, close_timeout))


def connect_to(
    loaded: LoadedSettings, only: Collection[str], *, cpus: int | None = None, close_timeout: float = 10.0
) -> Local:
    """Do what `connect` does, for some models of a configuration that was read before, and the chains of these.

    Keys that have no meaning here are not named: the caller's configuration is that of a server.
    """
    return Local(_Server(loaded, cpus, close_timeout, only))


class Local:
    """A server of this program and its client, before the block and for its length. Made by `connect`; entered once."""

    def __init__(self, server: _Server) -> None:
        self._server = server
        self._client: AbstractAsyncContextManager[Client] | blocking_client.Client | None = None

    async def __aenter__(self) -> Client:
        library = running_library()
        assert library is not None, "a coroutine runs in trio or asyncio"
        server = self._server
        connect = trio_client.connect if library == "trio" else aio_client.connect
        entered = False
        try:
            server.start()
            await _wait(server.ready, library)
            self._client = client = connect(server.endpoint.connect, connect_timeout=_WELCOME_S)
            found = await client.__aenter__()
            entered = True
        finally:
            if not entered:
                server.stop()
        return found

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        client, library = self._client, running_library()
        assert isinstance(client, AbstractAsyncContextManager)
        assert library is not None
        try:
            return await client.__aexit__(kind, error, trace)
        finally:
            self._server.stop()
            if library == "trio":
                with trio.CancelScope(shield=True):
                    await _wait(self._server.ended, library)
            else:
                await _wait(self._server.ended, library)

    def __enter__(self) -> blocking_client.Client:
        if (library := running_library()) is not None:
            raise TypeError(f"{library} runs here: write async with shapestream.local.connect(…) as client")
        server = self._server
        entered = False
        try:
            server.start()
            server.ready.result()
            self._client = client = blocking_client.connect(
                server.endpoint.connect, connect_timeout=_WELCOME_S
            )
            entered = True
        finally:
            if not entered:
                server.stop()
        return client

    def __exit__(self, *_: object) -> None:
        assert isinstance(self._client, blocking_client.Client)
        try:
            self._client.close()
        finally:
            self._server.stop()
            self._server.ended.result()


async def _wait(future: Future[None], library: Literal["trio", "asyncio"]) -> None:
    """Wait for a future of another thread, which a cancellation leaves alone. Raises its error."""
    if library == "asyncio":
        await asyncio.shield(asyncio.wrap_future(future))
        return
    done, token = trio.Event(), trio.lowlevel.current_trio_token()

    def tell(_: object) -> None:
        try:
            token.run_sync_soon(done.set)
        except trio.RunFinishedError:
            return  # the waiting task was cancelled, and its run has ended

    future.add_done_callback(tell)
    await done.wait()
    future.result()


class _Server:
    """The server in its thread. `start` and `stop` are for the program's threads, and return at once."""

    def __init__(
        self,
        loaded: LoadedSettings,
        cpus: int | None,
        close_timeout: float,
        only: Collection[str] | None = None,
    ) -> None:
        """`only`: the names of the models to serve. None: all."""
        settings = loaded.settings
        self._models = {
            name: model for name, model in settings.models_by_name.items() if only is None or name in only
        }
        known = settings.versions
        self._chains = [
            chain.spec()
            for chain in settings.chains
            if all(served_name(stage.model, known) in self._models for stage in chain.stages)
        ]
        served = {*self._models, *[chain.name for chain in self._chains]}
        self._versions = {
            # Of a part of the versions, the one with the rest has all requests.
            name: versions if only is None else Versions.of(name, [(versions.rest, None)], versions.by)
            for name, versions in known.items()
            if versioned(name, versions.rest) in served
        }
        self._loaded = loaded.with_server(worker_listen=None, client_silence_s=_NEVER_SILENT_S)
        self._tells_ignored = only is None
        self._cpus = allowed_cpus() if cpus is None else Allowance(cpus, "caller")
        self._close_s = close_timeout
        self.endpoint = CrossingServer()
        self.ready: Future[None] = Future()
        """Done once the server takes requests, with the error if it never does."""
        self.ended: Future[None] = Future()
        """Done when its thread ends, with the error that ended it."""
        self._lock = threading.Lock()
        """Guards the two below: `stop` may come before there is a server to stop."""
        self._stop_asked = False
        self._stop_server: Any = None

    def start(self) -> None:
        """Start the thread. It is a daemon: a call that hangs keeps no program alive."""
        if self._stop_asked or self.ready.running():
            raise RuntimeError("this server was entered before; connect anew")
        self.ready.set_running_or_notify_cancel()
        threading.Thread(target=self._run, name="shapestream-server", daemon=True).start()

    def stop(self) -> None:
        """Let the server end, from any thread, any number of times."""
        with self._lock:
            self._stop_asked = True
            stop = self._stop_server
        if stop is not None:
            stop()

    def _run(self) -> None:
        in_a_host()
        error: Exception | None = None
        try:
            _tell_once()
            if self._tells_ignored:
                _tell_ignored(self._loaded)
            wanted = self._loaded.settings.in_process or InProcessSettings()
            models = [*self._models.values()]
            with _preparing:
                if self._stop_asked:
                    return
                slots = own_slots(self._loaded, models, wanted, self._cpus, close_s=self._close_s / 2)
            if not self._stop_asked:
                trio.run(self._serve, slots)
        except Exception as raised:  # noqa: BLE001 - the thread's edge; the program's thread raises it
            error = raised
        finally:
            for future in (self.ready, self.ended):
                if not future.done():
                    if error is None:
                        future.set_result(None)
                    else:
                        future.set_exception(error)

    async def _serve(self, slots: SlotThreads) -> None:
        async with trio.open_nursery() as nursery:
            start = partial(
                serve,
                self._loaded.settings.server,
                models=self._models,
                chains=self._chains,
                versions=self._versions,
                digests=slots.digests,
                cost_cache=CostCache.of_environment(),
                local=slots,
                clients=self.endpoint,
                idle_bytes=None,
            )
            server: Server = await nursery.start(start)
            token = trio.lowlevel.current_trio_token()

            def stop() -> None:
                try:
                    # What the client has withdrawn ends with its call; then the slots have as long again.
                    token.run_sync_soon(partial(server.drain, grace_s=self._close_s / 2))
                except trio.RunFinishedError:
                    return  # it has ended

            with self._lock:
                self._stop_server, stop_asked = stop, self._stop_asked
            if stop_asked:
                stop()
            self.ready.set_result(None)


def _tell_once() -> None:
    """Tell the log what a server of its own process would keep, once in this process."""
    if _told.acquire(blocking=False):
        log.warning(
            "models run in this process",
            why="a crash of a model ends it, a call that hangs keeps its slot, and no memory limit holds (docs/hosts.md)",
        )


def _tell_ignored(loaded: LoadedSettings) -> None:
    """Name the keys of the YAML that have no meaning here, in one line."""
    written = {".".join(map(str, place)) for place in loaded.source.places}
    if found := [key for key in IGNORED if key in written]:
        log.warning("keys without a meaning here", keys=", ".join(found), path=str(loaded.path))
