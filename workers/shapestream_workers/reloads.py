"""Reloads of a server: the files of keys and the YAML are read again, every worker is replaced, and what came of it.

    reading ──▶ replacing ──▶ ok, or incomplete: some keys, workers or models stay as they were, or still start
       └──────▶ refused: nothing is changed, but perhaps keys

SIGHUP and the admin port ask for them. Files are read by one reload at a time, in the order in which they were asked for.
Workers that start take their time, so the next reload begins while the last one's workers are still replaced; then both
end with the same workers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import structlog
import trio

from shapestream.errors import ConfigurationError
from shapestream.serving.server import Server
from shapestream.settings import LoadedSettings, ModelSettings, ServerSettings, Settings, load_settings
from shapestream_workers.model_trust import digests_of
from shapestream_workers.security import server_security
from shapestream_workers.supervisor.core import Restarted
from shapestream_workers.supervisor.processes import WorkerProcesses

log = structlog.get_logger()

# Reloads whose result can be asked for: those of the last minutes, even where a script reloads every second.
MOST_REMEMBERED = 64


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
    """The settings in which a YAML differs from the one before it."""

    added: list[str]
    """Names of models."""
    removed: list[str]
    changed: dict[str, list[str]]
    """Keys that changed, by the model's name; `files` where its files did."""
    need_restart: list[str]
    """Keys of settings whose new values the running server does not use."""


@dataclass(slots=True, kw_only=True, eq=False)
class Reload:
    """One reload, and what came of it so far."""

    number: int
    began: float
    state: ReloadState = ReloadState.READING
    why: list[str] = field(default_factory=list)
    """Problems, each as a line that names its place where it has one."""
    changes: Changes | None = None
    """None before the YAML is read, and where it cannot be used."""
    replaced: tuple[str, ...] = ()
    kept: dict[str, str] = field(default_factory=dict)
    """Workers that go on as they were, and why."""
    given_up: dict[str, str] = field(default_factory=dict)
    """Workers without a process, and why."""
    starting: dict[str, str] = field(default_factory=dict)
    """Workers whose new process has not come up in time, and why the reload waits no longer."""
    seconds: float | None = None
    """From when it was asked for to its end."""

    def to_dict(self) -> dict[str, Any]:
        """Return the reload as plain data; without `seconds` it is under way."""
        changes = self.changes or Changes(added=[], removed=[], changed={}, need_restart=[])
        return {
            "number": self.number,
            "state": self.state.value,
            "ended": self.state in RESULTS,
            "seconds": self.seconds,
            "why": self.why,
            "models": {"added": changes.added, "removed": changes.removed, "changed": changes.changed},
            "need_restart": changes.need_restart,
            "workers": {
                "replaced": list(self.replaced),
                "kept": self.kept,
                "given_up": self.given_up,
                "starting": self.starting,
            },
        }


def changes_between(
    before: Settings,
    now: Settings,
    *,
    files: set[str],
    started: Settings,
    served: Callable[[str], ModelSettings | None],
) -> Changes:
    """Compare what was read last with what is read now.

    `files`: models whose files are others now. `started`: what the server was started with, and goes on with.
    `served`: the settings by which it batches a model that was served before.
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
    alone = not now.worker_groups  # then only the server's own process has models, or workers that dial in
    if alone:
        need_restart += [f"models[{name}]" for name in sorted((old.keys() ^ new.keys()) | changed.keys())]
    return Changes(
        added=[] if alone else sorted(new.keys() - old.keys()),
        removed=[] if alone else sorted(old.keys() - new.keys()),
        changed={} if alone else changed,
        need_restart=need_restart,
    )


def _as_read(server: ServerSettings) -> ServerSettings:
    """Return the settings without values that a command line may give in place of the YAML."""
    return server.model_copy(update={"record_trace": None})


def _changed_keys(old: ServerSettings | ModelSettings, new: ServerSettings | ModelSettings) -> list[str]:
    return [key for key in type(new).model_fields if getattr(old, key) != getattr(new, key)]


class Reloads:
    """The reloads of one server."""

    def __init__(
        self,
        loaded: LoadedSettings,
        server: Server,
        *,
        digests: Mapping[str, str],
        own_digests: Mapping[str, str],
        workers: Callable[[], WorkerProcesses | None],
        expect: Callable[[Settings], None],
        settled: Callable[[Restarted], None],
    ) -> None:
        """`digests`: of the files that models are served from; `own_digests` of them: by this process.

        `workers`: the worker processes, None without any. `expect` is called before they read new settings, `settled` when
        each was replaced or cannot be.
        """
        self._loaded = loaded
        self._server = server
        self._present = loaded.settings
        self._digests = dict(digests)
        self._own_digests = own_digests
        self._workers = workers
        self._expect = expect
        self._settled = settled
        self._asked = trio.Event()
        self._next: Reload | None = None
        """The reload that was asked for and has not begun; there is no second one behind it."""
        self._numbers = 0
        self._remembered: deque[Reload] = deque(maxlen=MOST_REMEMBERED)
        server.count_reloads([state.value for state in RESULTS])

    def ask(self) -> Reload:
        """Ask for a reload. One that has not begun to read serves those who ask before it does."""
        if self._next is None:
            self._numbers += 1
            self._next = Reload(number=self._numbers, began=trio.current_time())
            self._remembered.append(self._next)
            self._asked.set()
        return self._next

    def find(self, number: int | None = None) -> Reload | None:
        """Return the reload of this number, or the last one; None where there was none, or it is forgotten."""
        found = (reload for reload in reversed(self._remembered) if number in (None, reload.number))
        return next(found, None)

    async def run(self) -> None:
        """Carry out what is asked for, until cancelled."""
        async with trio.open_nursery() as nursery:
            while True:
                await self._asked.wait()
                self._asked, reload, self._next = trio.Event(), self._next, None
                assert reload is not None, "the event says so"
                workers = await self._read(reload)
                if workers is not None:
                    nursery.start_soon(self._replace, reload, workers)

    async def _read(self, reload: Reload) -> WorkerProcesses | None:
        """Read keys, YAML and the digests of models, and use them; return the workers that are to be replaced, if any.

        Where the YAML cannot be used, nothing but keys changes.
        """
        self._read_keys(reload)
        try:
            # In a thread: large files take a while, and a slow disk must not hold the event loop.
            fresh, digests = await trio.to_thread.run_sync(self._read_files, abandon_on_cancel=True)
        except ConfigurationError as error:
            log.error("configuration is not changed", why=error.problems, what="no worker is restarted")
            reload.why += error.problems
            self._end(reload, ReloadState.REFUSED)
            return None
        for name, digest in self._own_digests.items():
            if digests.get(name, digest) != digest:
                advice = "restart the server to serve the new ones"
                log.warning("model keeps its files", model=name, why="it runs in this process", advice=advice)
            digests[name] = digest
        settings, files = (
            fresh.settings,
            {name for name in digests if digests[name] != self._digests.get(name)},
        )
        reload.changes = changes_between(
            self._present,
            settings,
            files=files,
            started=self._loaded.settings,
            served=self._server.settings_of,
        )
        self._present, self._digests = settings, digests
        self._server.serve_files(digests)
        self._server.change_logging(settings.logging.level, settings.logging.format)
        workers = self._workers()
        if workers is None:
            log.info("no worker is restarted", why="there is none that was started here")
            self._end(reload, ReloadState.INCOMPLETE if reload.why else ReloadState.OK)
            return None
        self._expect(settings)
        log.info("configuration is read again", models=[model.name for model in settings.models])
        log.info("workers are restarted", how="one after the other")
        reload.state = ReloadState.REPLACING
        return workers

    def _read_keys(self, reload: Reload) -> None:
        """Let in the keys that their files list now; those of before, if these cannot be used."""
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
        """Return the YAML, and the digests of its models' files, as they are now.

        Raises `ConfigurationError`, also for what these processes cannot become.
        """
        fresh = load_settings(self._loaded.path)
        before, now = ([group.count for group in one.settings.worker_groups] for one in (self._loaded, fresh))
        if before != now:
            message = (
                f"groups of {_spell(now)} processes instead of {_spell(before)} "
                "(restart the server to change their number)"
            )
            raise ConfigurationError([fresh.problem(("workers",), message)])
        return fresh, digests_of(fresh.settings.models)

    async def _replace(self, reload: Reload, workers: WorkerProcesses) -> None:
        """Replace the workers, and note how that ended."""
        restarted = await workers.restart()
        if restarted is None:
            reload.why.append("the workers have ended")
            self._end(reload, ReloadState.INCOMPLETE)
            return
        reload.replaced, reload.starting = restarted.replaced, restarted.starting
        reload.kept, reload.given_up = restarted.kept, restarted.given_up
        self._settled(restarted)
        sound = not (reload.why or reload.kept or reload.given_up or reload.starting)
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
            kept=reload.kept,
            given_up=reload.given_up,
            starting=reload.starting,
        )


def _spell(counts: list[int]) -> str:
    return ", ".join(map(str, counts)) or "no"
