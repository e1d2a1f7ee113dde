"""Reloads of a server: it reads the files of keys and the YAML again, replaces every worker, and keeps the result.

    reading ──▶ replacing ──▶ ok, or incomplete: some keys, workers or models stay as they were, or still start
       └──────▶ refused: nothing is changed, except perhaps keys

SIGHUP and the admin port request reloads. One reload at a time reads files, in the order of the requests. The next one
begins while the workers of the last one are still being replaced; then both end with the same workers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any

import structlog
import trio

from shapestream.errors import ConfigurationError
from shapestream.loading.models import digests_of
from shapestream.serving.server import Server
from shapestream.settings import LoadedSettings, ModelSettings, ServerSettings, Settings, load_settings
from shapestream.settings.version_settings import ROUTING
from shapestream_workers.access import server_security
from shapestream_workers.supervisor.core import Restarted
from shapestream_workers.supervisor.processes import SupervisedProcesses

log = structlog.get_logger()

MOST_REMEMBERED = 64
"""Reloads whose result can be read: about those of the last minute, even where a script reloads every second."""


class ReloadState(StrEnum):
    """State of a reload; the diagram above shows the transitions."""

    READING = "reading"
    REPLACING = "replacing"
    OK = "ok"
    INCOMPLETE = "incomplete"
    REFUSED = "refused"


RESULTS = (ReloadState.OK, ReloadState.INCOMPLETE, ReloadState.REFUSED)
"""The states of a reload that has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """The differences between a YAML and the one before it."""

    added: list[str]
    """Names of models."""
    removed: list[str]
    changed: dict[str, list[str]]
    """Keys that changed, by the model's name; `files` where its files did."""
    need_restart: list[str]
    """Keys of settings whose new values the running server does not use."""


NO_CHANGES = Changes(added=[], removed=[], changed={}, need_restart=[])
NOTHING_RESTARTED = Restarted(replaced=(), kept={}, given_up={}, starting={})


@dataclass(slots=True, kw_only=True, eq=False)
class Reload:
    """One reload and its result so far."""

    number: int
    began: float
    state: ReloadState = ReloadState.READING
    why: list[str] = field(default_factory=list)
    """Problems, each as a line that names its place if it has one."""
    changes: Changes = NO_CHANGES
    """The changes of the YAML, once that is read and can be used."""
    restarted: Restarted = NOTHING_RESTARTED
    """The result for each worker, once all are replaced or cannot be."""
    gateways: Restarted = NOTHING_RESTARTED
    """The result for each gateway."""
    seconds: float | None = None
    """Seconds from the request to the end; None before."""

    def to_dict(self) -> dict[str, Any]:
        """Return the reload as plain data."""
        changes = self.changes
        return {
            "number": self.number,
            "state": self.state.value,
            "ended": self.state in RESULTS,
            "seconds": self.seconds,
            "why": self.why,
            "models": {"added": changes.added, "removed": changes.removed, "changed": changes.changed},
            "need_restart": changes.need_restart,
            "workers": asdict(self.restarted),
            "gateways": asdict(self.gateways),
        }


def changes_between(
    before: Settings,
    now: Settings,
    *,
    files: set[str],
    started: Settings,
    served: Callable[[str], ModelSettings | None],
) -> Changes:
    """Compare the settings that were read last with those that are read now.

    `files`: names of models whose files have changed. `started`: the settings that the server was started with.
    `served`: returns the settings by which the server batches a model, or None for one that it has not served yet.
    """
    old, new = before.models_by_name, now.models_by_name
    changed: dict[str, list[str]] = {}
    need_restart = [f"server.{key}" for key in _changed_keys(_as_read(started.server), _as_read(now.server))]
    if started.in_process != now.in_process:
        need_restart.append("in_process")
    for name in sorted(old.keys() & new.keys()):
        keys = [*_changed_keys(old[name], new[name]), *(["files"] if name in files else [])]
        if keys:
            changed[name] = keys
    for name, model in sorted(new.items()):
        used = served(name)
        if used is not None and used.batching != model.batching:
            need_restart.append(f"models[{name}].batching")
    if (
        not now.worker_groups
    ):  # only this process, or workers that dial in, have models: no reload replaces them
        other = {
            name for name, keys in changed.items() if not {*keys} <= {*ROUTING}
        }  # shares have changed at once
        need_restart += [f"models[{name}]" for name in sorted((old.keys() ^ new.keys()) | other)]
        return replace(NO_CHANGES, need_restart=need_restart)
    return Changes(
        added=sorted(new.keys() - old.keys()),
        removed=sorted(old.keys() - new.keys()),
        changed=changed,
        need_restart=need_restart,
    )


def _as_read(server: ServerSettings) -> ServerSettings:
    """Return the settings without those that a command line may replace."""
    return server.model_copy(update={"record_trace": None})


def _changed_keys(old: ServerSettings | ModelSettings, new: ServerSettings | ModelSettings) -> list[str]:
    return [key for key in type(new).file_keys() if getattr(old, key) != getattr(new, key)]


class Reloads:
    """The reloads of one server."""

    def __init__(
        self,
        loaded: LoadedSettings,
        server: Server,
        *,
        digests: Mapping[str, str],
        own_digests: Mapping[str, str],
        workers: Callable[[], SupervisedProcesses | None],
        gateways: SupervisedProcesses | None,
        expect: Callable[[Settings], None],
        settled: Callable[[Restarted], None],
    ) -> None:
        """`digests`: of the models' files; `own_digests`: of those that this process itself serves.

        `workers` returns the worker processes, or None without any. `gateways`: the processes that speak HTTP, if there are
        any. `expect` is called before the workers read new settings, `settled` when each was replaced or cannot be.
        """
        self._loaded = loaded
        self._server = server
        self._present = loaded.settings
        self._digests = dict(digests)
        self._own_digests = own_digests
        self._workers = workers
        self._gateways = gateways
        self._expect = expect
        self._settled = settled
        self._asked = trio.Event()
        self._next: Reload | None = None
        """The requested reload that has not begun. Later requests share it, so there is at most one."""
        self._numbers = 0
        self._remembered: deque[Reload] = deque(maxlen=MOST_REMEMBERED)
        server.count_reloads([state.value for state in RESULTS])

    def ask(self) -> Reload:
        """Request a reload, and return it. A reload that has not begun to read serves every request until it does."""
        if self._next is None:
            self._numbers += 1
            self._next = Reload(number=self._numbers, began=trio.current_time())
            self._remembered.append(self._next)
            self._asked.set()
        return self._next

    def find(self, number: int | None = None) -> Reload | None:
        """Return the reload with this number, or the last one; None if there was none, or if it is forgotten."""
        found = (reload for reload in reversed(self._remembered) if number in (None, reload.number))
        return next(found, None)

    async def run(self) -> None:
        """Carry out the requested reloads, until cancelled."""
        async with trio.open_nursery() as nursery:
            while True:
                await self._asked.wait()
                self._asked, reload, self._next = trio.Event(), self._next, None
                assert reload is not None, "the event says so"
                if await self._read(reload):
                    nursery.start_soon(self._replace, reload, self._workers())

    async def _read(self, reload: Reload) -> bool:
        """Read keys, YAML and the digests of models, and use them. Return True if there are processes to replace.

        If the YAML cannot be used, only keys change.
        """
        self._read_keys(reload)
        try:
            # In a thread: large files take a while, and a slow disk must not hold the event loop.
            fresh, digests = await trio.to_thread.run_sync(self._read_files, abandon_on_cancel=True)
        except ConfigurationError as error:
            log.error("configuration is not changed", why=error.problems, what="no worker is restarted")
            reload.why += error.problems
            self._end(reload, ReloadState.REFUSED)
            return False
        for name, digest in self._own_digests.items():
            if digests.get(name, digest) != digest:
                advice = "restart the server to serve the new ones"
                log.warning("model keeps its files", model=name, why="it runs in this process", advice=advice)
            digests[name] = digest
        settings = fresh.settings
        files = {name for name in digests if digests[name] != self._digests.get(name)}
        reload.changes = changes_between(
            self._present,
            settings,
            files=files,
            started=self._loaded.settings,
            served=self._server.settings_of,
        )
        self._present, self._digests = settings, digests
        self._server.serve_files(digests)
        self._server.change_versions(settings.versions)
        old_chains = self._server.change_chains([chain.spec() for chain in settings.chains])
        need_restart = [*reload.changes.need_restart, *(f"chains[{name}]" for name in old_chains)]
        reload.changes = replace(reload.changes, need_restart=need_restart)
        self._server.change_logging(settings.logging.level, settings.logging.format)
        if self._workers() is not None:
            self._expect(settings)
            log.info("configuration is read again", models=[model.name for model in settings.models])
            log.info("workers are restarted", how="one after the other")
        else:
            log.info("no worker is restarted", why="there is none that was started here")
            if self._gateways is None:
                self._end(reload, ReloadState.INCOMPLETE if reload.why else ReloadState.OK)
                return False
        reload.state = ReloadState.REPLACING
        return True

    def _read_keys(self, reload: Reload) -> None:
        """Let in the keys that the files list now. If the files cannot be used, the keys stay as they were."""
        try:
            security = server_security(self._loaded)
        except ConfigurationError as error:
            log.error("keys are not changed", why=error.problems)
            reload.why += error.problems
            return
        if security is not None:
            self._server.let_in(security.ring)
            log.info("keys are read again", **security.ring.counts())

    def _read_files(self) -> tuple[LoadedSettings, dict[str, str]]:
        """Read the YAML and the digests of its models' files.

        Raises `ConfigurationError`, also for another number of worker processes.
        """
        fresh = load_settings(self._loaded.path)
        before, now = ([group.count for group in one.settings.worker_groups] for one in (self._loaded, fresh))
        if before != now:
            message = (
                f"groups of {', '.join(map(str, now)) or 'no'} processes instead of "
                f"{', '.join(map(str, before)) or 'no'} (restart the server to change their number)"
            )
            raise ConfigurationError([fresh.problem(("workers",), message)])
        return fresh, digests_of(fresh.settings.models)

    async def _replace(self, reload: Reload, workers: SupervisedProcesses | None) -> None:
        """Replace the gateways, which read their files again, then the workers, and record the result."""
        if self._gateways is not None and (replaced := await self._gateways.restart()) is not None:
            reload.gateways = replaced
        if workers is not None:
            restarted = await workers.restart()
            if restarted is None:
                reload.why.append("the workers have ended")
                self._end(reload, ReloadState.INCOMPLETE)
                return
            reload.restarted = restarted
            self._settled(restarted)
        sound = not reload.why and reload.restarted.is_whole and reload.gateways.is_whole
        self._end(reload, ReloadState.OK if sound else ReloadState.INCOMPLETE)

    def _end(self, reload: Reload, state: ReloadState) -> None:
        reload.state = state
        reload.seconds = round(trio.current_time() - reload.began, 3)
        self._server.reload_ended(state.value, reload.seconds, ok=state is ReloadState.OK)
        write = log.info if state is ReloadState.OK else log.error
        write(
            "reload ended",
            result=state.value,
            number=reload.number,
            seconds=reload.seconds,
            kept=reload.restarted.kept,
            given_up=reload.restarted.given_up,
            starting=reload.restarted.starting,
        )
