"""Reloads of a server: it reads the files of keys and the YAML again, replaces workers, and keeps the result.

    reading ──▶ replacing ──▶ ok, or incomplete: some keys, workers or models stay as they were, or still start
       ├──────▶ refused: nothing is changed, except perhaps keys
       └──────▶ ok, where only a plan was asked for

SIGHUP and the admin port request reloads. SIGHUP replaces every process, since operators use it to recover; the admin port
those that would be made of something else (`roles.py`), and those of which that is not known. One reload at a time reads
files, in the order of the requests. The next one begins while the workers of the last one are still being replaced; then
both end with the same workers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from math import inf
from typing import Any

import structlog
import trio

from shapestream.errors import ConfigurationError
from shapestream.known_costs import private_folder, write_known_costs
from shapestream.loading.process_slots import own_slots
from shapestream.loading.sources import digests_of, sources_of
from shapestream.serving.server import Server
from shapestream.settings import LoadedSettings, ModelSettings, ServerSettings, Settings, load_settings
from shapestream.settings.values import spell_bytes
from shapestream_engine.machine import allowed_cpus, free_memory
from shapestream_workers.access import server_security
from shapestream_workers.gateways import GatewayPorts
from shapestream_workers.process import drop_what_is_gone
from shapestream_workers.roles import Roles, WorkerRole, own_role_of, roles_of
from shapestream_workers.supervisor.core import Restarted
from shapestream_workers.supervisor.processes import SupervisedProcesses

log = structlog.get_logger()

MOST_REMEMBERED = 64
"""Reloads whose result can be read: about those of the last minute, even where a script reloads every second."""


class ReloadRequest(StrEnum):
    """The processes that a reload replaces."""

    CHANGES = "changes"
    ALL = "all"
    NOTHING = "nothing"
    """It only tells what would happen."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """The memory and the time that a reload needs, by what the present processes have taken."""

    memory_bytes: int
    """Bytes in addition while it runs, mapped files left out: of the new workers, and of those replaced at a time."""
    seconds: float
    """Seconds in which the new processes become ready."""
    free_bytes: int
    """Bytes that were free before it began, with those of processes of an earlier reload that end first."""
    free_by: str
    """The limit of these: `machine`, or `memory limit`."""

    @property
    def fits(self) -> bool:
        """True if so much memory is free."""
        return self.memory_bytes <= self.free_bytes


def _needs_of(
    changed: Sequence[str], before: Collection[str], workers: SupervisedProcesses, *, at_once: bool
) -> Needs:
    """Estimate by the processes that run; a new worker takes as much as the largest of them."""
    (memory, ending), starts = workers.private_bytes(), workers.start_seconds()
    largest, slowest = max(memory.values(), default=0), max(starts.values(), default=0.0)
    added = sum(name not in before for name in changed)
    sizes = [memory.get(name) or largest for name in changed if name in before]
    times = [starts.get(name, slowest) for name in changed if name in before] or [0.0]
    free = free_memory()
    return Needs(
        memory_bytes=added * largest + (sum(sizes) if at_once else max(sizes, default=0)),
        seconds=round(
            max(*times, slowest if added else 0.0) if at_once else sum(times) + (slowest if added else 0.0), 1
        ),
        free_bytes=free.amount + ending,
        free_by=free.by,
    )


OWN = "local"
"""The name of the server's own process among workers."""


def _troubles(kind: str, restarted: Restarted) -> Iterator[str]:
    """Yield a line for each process that is not what was asked for."""
    for words, found in (
        ("goes on unchanged", restarted.kept),
        ("is given up", restarted.given_up),
        ("is not replaced yet", restarted.starting),
    ):
        for name, why in found.items():
            yield f"{kind} {name} {words}: {why}"


NO_CHANGES = Changes(added=[], removed=[], changed={}, need_restart=[])
NOTHING_RESTARTED = Restarted(replaced=(), kept={}, given_up={}, starting={})


@dataclass(slots=True, kw_only=True, eq=False)
class Reload:
    """One reload and its result so far."""

    number: int
    began: float
    asked: ReloadRequest = ReloadRequest.ALL
    state: ReloadState = ReloadState.READING
    why: list[str] = field(default_factory=list)
    """Problems, each as a line that names its place if it has one."""
    changes: Changes = NO_CHANGES
    """The changes of the YAML, once that is read and can be used."""
    restarted: Restarted = NOTHING_RESTARTED
    """The result for each worker, once all are replaced or cannot be."""
    gateways: Restarted = NOTHING_RESTARTED
    """The result for each gateway."""
    needs: Needs | None = None
    """The memory and the time that its worker processes need; None before the YAML is read, and without such."""
    seconds: float | None = None
    """Seconds from the request to the end; None before."""

    def to_dict(self) -> dict[str, Any]:
        """Return the reload as plain data."""
        changes = self.changes
        return {
            "number": self.number,
            "what": self.asked.value,
            "state": self.state.value,
            "ended": self.state in RESULTS,
            "seconds": self.seconds,
            "why": self.why,
            "models": {"added": changes.added, "removed": changes.removed, "changed": changes.changed},
            "need_restart": changes.need_restart,
            "workers": asdict(self.restarted),
            "gateways": asdict(self.gateways),
            "needs": None if self.needs is None else asdict(self.needs),
        }


def changes_between(
    before: Settings,
    now: Settings,
    *,
    files: set[str],
    started: Settings,
) -> Changes:
    """Compare the settings that were read last with those that are read now.

    `files`: names of models whose files have changed. `started`: the settings that the server was started with.
    """
    old, new = before.models_by_name, now.models_by_name
    changed: dict[str, list[str]] = {}
    need_restart = [f"server.{key}" for key in _changed_keys(_as_read(started.server), _as_read(now.server))]
    for kind in ("http", "grpc"):
        gateways = getattr(started.server, kind), getattr(now.server, kind)
        if None not in gateways and gateways[0].address != gateways[1].address:
            need_restart.append(f"server.{kind}.address")
        elif None in gateways and gateways[0] != gateways[1]:
            need_restart.append(f"server.{kind}")
    if (started.in_process is None) != (now.in_process is None):
        need_restart.append("in_process")
    elif started.in_process and now.in_process:
        own = (started.in_process.memory_limit, now.in_process.memory_limit)
        need_restart += ["in_process.memory_limit"] if own[0] != own[1] else []
    for name in sorted(old.keys() & new.keys()):
        keys = [*_changed_keys(old[name], new[name]), *(["files"] if name in files else [])]
        if keys:
            changed[name] = keys
    if now.worker_groups and not started.worker_groups:
        need_restart.append("workers")
    return Changes(
        added=sorted(new.keys() - old.keys()),
        removed=sorted(old.keys() - new.keys()),
        changed=changed,
        need_restart=need_restart,
    )


def _as_read(server: ServerSettings) -> ServerSettings:
    """Return the settings without those that a command line may replace, and those that a reload changes."""
    unread: dict[str, Any] = dict.fromkeys(("record_trace", "reload_s", "surge", "http", "grpc"))
    if server.security is not None:
        listed = dict.fromkeys(("clients", "admins", "gateways", "workers"), ())
        unread["security"] = server.security.model_copy(update=listed)
    return server.model_copy(update=unread)


def _changed_keys(old: ServerSettings | ModelSettings, new: ServerSettings | ModelSettings) -> list[str]:
    return [key for key in type(new).file_keys() if getattr(old, key) != getattr(new, key)]


@dataclass(slots=True, kw_only=True, eq=False)
class _Fresh:
    """What a reload has read."""

    loaded: LoadedSettings
    digests: dict[str, str]
    """Of the models' files."""
    before: Mapping[str, str]
    """Those that were served before."""
    roles: Sequence[WorkerRole]
    own: WorkerRole | None
    """What the slots of this process would be made of; None where models run in workers."""
    replaced: frozenset[str] = frozenset()
    """The roles whose processes are replaced, or are new."""

    @property
    def at_once(self) -> bool:
        """True if all new processes start at once, and the traffic moves when they are ready."""
        return self.loaded.settings.server.surge == "all"


class Reloads:
    """The reloads of one server."""

    def __init__(
        self,
        loaded: LoadedSettings,
        server: Server,
        *,
        digests: Mapping[str, str],
        own: WorkerRole | None,
        roles: Roles,
        workers: Callable[[], SupervisedProcesses | None],
        gateways: SupervisedProcesses | None,
        gateway_ports: GatewayPorts | None,
        expect: Callable[[Settings, frozenset[str], frozenset[str], Collection[str]], None],
        settled: Callable[[Restarted], None],
    ) -> None:
        """`digests`: of the models' files. `own`: what the slots of this process are made of, if it has any.

        `roles`: of the workers. `workers` returns their processes, or None without any. `gateways`: the processes that speak
        HTTP, if there are any. `expect` is called before the workers read new settings, with the names of the models before,
        of the roles that are replaced, and of the models that changed; `settled` when each was replaced or cannot be.
        """
        self._loaded = loaded
        self._server = server
        self._present = loaded.settings
        self._digests = dict(digests)
        self._own = own
        self._roles = roles
        self._doubtful: set[str] = set()
        """Roles whose present process may be made of something else than was read for it."""
        self._restarts: dict[str, int] = {}
        """The restarts of each role when the last reload ended: one that died since has read the YAML by itself."""
        self._workers = workers
        self._gateways = gateways
        self._gateway_ports = gateway_ports
        self._expect = expect
        self._settled = settled
        self._asked = trio.Event()
        self._waiting: deque[Reload] = deque()
        """The requested reloads that have not begun, one of each kind at most: later requests share them."""
        self._numbers = 0
        self._remembered: deque[Reload] = deque(maxlen=MOST_REMEMBERED)
        server.count_reloads([state.value for state in RESULTS])

    def ask(self, asked: ReloadRequest = ReloadRequest.ALL) -> Reload:
        """Request a reload, and return it. One that has not begun to read serves every request of its kind until it does."""
        found = next((reload for reload in self._waiting if reload.asked is asked), None)
        if found is None:
            self._numbers += 1
            found = Reload(number=self._numbers, began=trio.current_time(), asked=asked)
            self._remembered.append(found)
            self._waiting.append(found)
            self._asked.set()
        return found

    def find(self, number: int | None = None) -> Reload | None:
        """Return the reload with this number, or the last one; None if there was none, or if it is forgotten."""
        found = (reload for reload in reversed(self._remembered) if number in (None, reload.number))
        return next(found, None)

    async def run(self) -> None:
        """Carry out the requested reloads, until cancelled."""
        async with trio.open_nursery() as nursery:
            while True:
                await self._asked.wait()
                self._asked = trio.Event()
                while self._waiting:
                    reload = self._waiting.popleft()
                    if (fresh := await self._read(reload)) is not None:
                        await self._replace_own(reload, fresh)
                        await self._tell_costs()
                        nursery.start_soon(self._replace, reload, self._workers(), fresh)

    async def _read(self, reload: Reload) -> _Fresh | None:
        """Read keys, YAML and what models are made of, and use them. Return what there is to replace.

        If the YAML cannot be used, only keys change.
        """
        is_plan = reload.asked is ReloadRequest.NOTHING
        try:
            # In a thread: large files take a while, and a slow disk must not hold the event loop.
            fresh = await trio.to_thread.run_sync(self._read_files, abandon_on_cancel=True)
            self._doubt(self._workers())
            self._check_memory(reload, fresh)
        except ConfigurationError as error:
            if not is_plan:
                self._read_keys(reload, self._loaded)
                log.error("configuration is not changed", why=error.problems, what="no worker is restarted")
            reload.why += error.problems
            self._end(reload, ReloadState.REFUSED)
            return None
        return self._use(reload, fresh)

    def _use(self, reload: Reload, fresh: _Fresh) -> _Fresh | None:
        """Use what was read. Return it if there are processes to replace."""
        settings, workers = fresh.loaded.settings, self._workers()
        reload.changes = self._changes(fresh)
        if reload.asked is ReloadRequest.NOTHING:
            self._plan(reload, fresh)
            return None
        same_keys = _as_read(settings.server).security == _as_read(self._loaded.settings.server).security
        self._read_keys(reload, fresh.loaded if same_keys else self._loaded)
        before = frozenset(self._present.models_by_name)
        every = reload.asked is ReloadRequest.ALL
        changed_models = settings.models_by_name.keys() if every else reload.changes.changed.keys()
        self._present, self._digests = settings, fresh.digests
        if self._own is None:
            self._server.serve_files(fresh.digests)
        self._server.change_versions(settings.versions)
        self._server.change_chains([chain.spec() for chain in settings.chains])
        self._server.change_logging(settings.logging.level, settings.logging.format)
        if workers is not None:
            changed = self._roles.follow(fresh.roles, self._doubtful)
            fresh.replaced = frozenset(self._roles.by_name) if every else changed
            self._doubtful |= fresh.replaced  # until they are replaced
            self._expect(settings, before, fresh.replaced, changed_models)
            log.info("configuration is read again", models=[model.name for model in settings.models])
            self._tell_restart(reload, fresh)
        else:
            if self._own is None:
                self._expect(settings, before, frozenset(), changed_models)
            log.info("configuration is read again", models=[model.name for model in settings.models])
            log.info("no worker is restarted", why="there is none that was started here")
            if self._gateways is None and self._own is None:
                self._settle(reload)
                return None
        reload.state = ReloadState.REPLACING
        return fresh

    def _changes(self, fresh: _Fresh) -> Changes:
        """Compare what was read with what was read last."""
        digests = fresh.digests
        return changes_between(
            self._present,
            fresh.loaded.settings,
            files={name for name in digests if digests[name] != self._digests.get(name)},
            started=self._loaded.settings,
        )

    def _check_memory(self, reload: Reload, fresh: _Fresh) -> None:
        """Work out what a reload needs. Raises `ConfigurationError` where that is not free, and all is to start at once."""
        if (workers := self._workers()) is None:
            return
        roles = self._roles.copy()
        changed = roles.follow(fresh.roles, self._doubtful)
        names = [name for name in roles.by_name if name in changed or reload.asked is ReloadRequest.ALL]
        needs = reload.needs = _needs_of(names, self._roles.by_name, workers, at_once=fresh.at_once)
        if fresh.at_once and not needs.fits:
            rolling = _needs_of(names, self._roles.by_name, workers, at_once=False)
            text = (
                f"the new processes need about {spell_bytes(needs.memory_bytes)} of memory beside the old ones, and "
                f"{spell_bytes(needs.free_bytes)} are free ({needs.free_by}); one after the other they need "
                f"{spell_bytes(rolling.memory_bytes)} (surge: rolling)"
            )
            raise ConfigurationError([fresh.loaded.problem(("server", "surge"), text)])

    def _tell_restart(self, reload: Reload, fresh: _Fresh) -> None:
        """Log which processes are about to start, what that needs, and what is free."""
        assert reload.needs is not None  # there are workers
        needs = reload.needs
        write = log.info if needs.fits else log.warning
        write(
            "workers are restarted",
            how="all at once" if fresh.at_once else "one after the other",
            workers=sorted(fresh.replaced),
            memory=spell_bytes(needs.memory_bytes),
            free=spell_bytes(needs.free_bytes),
            free_by=needs.free_by,
            seconds=needs.seconds,
        )

    def _plan(self, reload: Reload, fresh: _Fresh) -> None:
        """Tell what a reload of the changes would do, and end this one."""
        roles = self._roles.copy()
        changed = roles.follow(fresh.roles, self._doubtful)
        before, after = self._roles.by_name, roles.by_name
        replaced = [name for name in after if name in changed and name in before]
        unchanged = [name for name in after if name not in changed]
        if self._own is not None and fresh.own is not None:
            (unchanged if self._is_own_same(fresh.own) else replaced).append(OWN)
        reload.restarted = Restarted(
            replaced=tuple(replaced),
            added=tuple(name for name in after if name not in before),
            unchanged=tuple(unchanged),
            removed=tuple(name for name in before if name not in after),
            kept={},
            given_up={},
            starting={},
        )
        self._end(reload, ReloadState.OK)

    def _doubt(self, workers: SupervisedProcesses | None) -> None:
        """Doubt roles of which a process was started since the last reload: it has read the files by itself."""
        for name, known in ({} if workers is None else workers.presences).items():
            if known.restarts != self._restarts.get(name, 0):
                self._doubtful.add(name)

    def _read_keys(self, reload: Reload, loaded: LoadedSettings) -> None:
        """Let in the keys that a YAML and its files list now. If the files cannot be used, the keys stay as they were."""
        try:
            security = server_security(loaded)
        except ConfigurationError as error:
            log.error("keys are not changed", why=error.problems)
            reload.why += error.problems
            return
        if security is not None:
            self._server.let_in(security.ring)
            log.info("keys are read again", **security.ring.counts())

    def _read_files(self) -> _Fresh:
        """Read the YAML and what its models are made of. Raises `ConfigurationError`."""
        loaded = load_settings(self._loaded.path)
        settings = loaded.settings
        digests = digests_of(settings.models)
        sources = sources_of(settings.models, digests)
        cpus = allowed_cpus().amount
        return _Fresh(
            loaded=loaded,
            digests=digests,
            before=self._digests,
            roles=[*roles_of(settings, cpus, sources)],
            own=own_role_of(settings, cpus, sources),
        )

    async def _replace_own(self, reload: Reload, fresh: _Fresh) -> None:
        """Replace the slots of this process, if they would be made of something else, or if one was lost.

        The models are compiled beside the old ones, in a thread. If one cannot be, or not within `server.reload_s`, the old
        ones go on.
        """
        settings, own = fresh.loaded.settings, fresh.own
        if self._own is None or own is None or settings.in_process is None:
            return
        if reload.asked is not ReloadRequest.ALL and self._is_own_same(own):
            self._expect_own(settings, same=True)
            reload.restarted = replace(NOTHING_RESTARTED, unchanged=(OWN,))
            return
        limit_s = settings.server.reload_s or inf
        try:
            with trio.fail_after(limit_s):
                slots = await trio.to_thread.run_sync(
                    own_slots,
                    fresh.loaded,
                    settings.models,
                    settings.in_process,
                    allowed_cpus(),
                    self._server.known_costs(),
                    abandon_on_cancel=True,
                )
        except (ConfigurationError, trio.TooSlowError) as error:
            why = f"it was not ready within {limit_s:g} s (server.reload_s)"
            if isinstance(error, ConfigurationError):
                why = "; ".join(error.problems)
            log.error("own slots are kept", why=why)
            reload.restarted = replace(NOTHING_RESTARTED, kept={OWN: why})
            return
        self._server.serve_files({**fresh.digests, **slots.digests})
        self._expect_own(settings, same=False)
        await self._server.replace_own_slots(slots)
        drop_what_is_gone()
        self._own = own
        reload.restarted = replace(NOTHING_RESTARTED, replaced=(OWN,))

    async def _tell_costs(self) -> None:
        """Write the costs that are known for the workers that start from now on."""
        for folder in filter(None, map(private_folder, self._server.worker_addresses[:1])):
            await trio.to_thread.run_sync(write_known_costs, folder, self._server.known_costs())

    def _is_own_same(self, own: WorkerRole) -> bool:
        """Tell whether the slots of this process would be made of the same, and none of them was lost."""
        same = self._own is not None and own.made_of is not None and own.made_of == self._own.made_of
        return same and self._server.has_own_slots()

    def _expect_own(self, settings: Settings, *, same: bool) -> None:
        """Tell the server which models this process serves from now on; `same`: with the signatures that they had."""
        assert self._own is not None
        names = settings.models_by_name
        for name, model in names.items():
            self._server.model_expected(name, model, may_change=not same)
        for name in sorted(self._own.models - names.keys()):
            self._server.model_withdrawn(name, "the reloaded configuration has it no more")

    async def _replace(self, reload: Reload, workers: SupervisedProcesses | None, fresh: _Fresh) -> None:
        """Replace the gateways, which read their files again, then the workers, and record the result."""
        if self._gateways is not None and self._gateway_ports is not None:
            commands, changed = self._gateway_ports.follow(fresh.loaded)
            every = reload.asked is ReloadRequest.ALL
            replaced = await self._gateways.restart(commands, frozenset(commands) if every else changed)
            if replaced is not None:
                reload.gateways = replaced
                self._gateway_ports.doubt([*replaced.kept, *replaced.given_up, *replaced.starting])
        if workers is not None:
            commands = self._roles.commands(fresh.loaded, self._server.worker_addresses[0])
            start_s = fresh.loaded.settings.server.reload_s
            restarted = await workers.restart(
                commands, fresh.replaced, start_s=start_s, at_once=fresh.at_once
            )
            if restarted is None:
                reload.why.append("the workers have ended")
                self._end(reload, ReloadState.INCOMPLETE)
                return
            reload.restarted = restarted
            self._doubtful.difference_update(restarted.replaced, restarted.added, restarted.removed)
            self._restarts = {name: known.restarts for name, known in workers.presences.items()}
            self._keep_files(restarted, fresh)
            self._settled(restarted)
        self._settle(reload)

    def _keep_files(self, restarted: Restarted, fresh: _Fresh) -> None:
        """Serve the files before where only old processes have a model: else one that connects anew would be refused."""
        roles = self._roles.by_name
        done = (*restarted.replaced, *restarted.added, *restarted.unchanged)
        new = frozenset[str]().union(*[roles[name].models for name in done if name in roles])
        old = frozenset[str]().union(*[roles[name].models for name in restarted.kept if name in roles])
        kept = {name: fresh.before[name] for name in old - new if name in fresh.before}
        self._digests |= kept
        self._server.keep_files(kept)

    def _settle(self, reload: Reload) -> None:
        """End a reload whose processes are replaced, or cannot be."""
        reload.why += self._server.versions_without_traffic()
        sound = not reload.why and reload.restarted.is_whole and reload.gateways.is_whole
        self._end(reload, ReloadState.OK if sound else ReloadState.INCOMPLETE)

    def _end(self, reload: Reload, state: ReloadState) -> None:
        reload.state = state
        reload.seconds = round(trio.current_time() - reload.began, 3)
        if reload.asked is ReloadRequest.NOTHING:
            return
        troubles = [
            *reload.why,
            *_troubles("worker", reload.restarted),
            *_troubles("gateway", reload.gateways),
        ]
        self._server.reload_ended(state.value, reload.seconds, ok=state is ReloadState.OK, why=troubles)
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
