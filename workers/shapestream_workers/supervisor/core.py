"""The supervisor decides when worker processes start, restart, stop and are given up. Events in, actions out.

          begin                     exited                        too many in the window,
    idle ──────▶ running ─────────────────────▶ waiting             or its configuration
                   │  ▲                          │   │ ──────────────────▶ given up
                   │  └──────────────────────────┘   │    cannot be used
     stop requested│        restart time has come    │ stop requested
                   ▼                                 ▼
                stopping ───────────exited───────▶ stopped
                   (killed when its time is up)

A *role* is a configured worker, such as `w0`. A process has the name of its role, or `w0+1` if it replaces another one.

Crash: a process that ends is started again after a wait that grows with each crash (exponential backoff with jitter).
`max_crashes` crashes within `window_s` give the worker up, as does the exit status for an unusable configuration.
A crash during a batch does not count, if the worker answered other batches within the window: the batch is to blame, and
the scheduler isolates its requests. Such a worker restarts after `blameless_backoff_max_s` at most.

Replacement: a process that passed its memory limit, or that is restarted on request, goes on serving. Its successor is
started beside it, in the same role. When the successor is ready, the old process is asked to finish. One process is
replaced at a time over all workers, so there is at most one process too many. If the successor is given up, the old
process goes on.

Roles come and go by request. A new role is started at once, beside the others. A role that is wanted no more is asked to
finish when no wanted one is about to start or to be replaced, and one of them serves: its models may have moved there.

Move: a restart may start all successors, and the processes of new roles, at once. These are *held*: they get no batches. The
traffic moves when each is ready, or is known not to come up: all are let in together, and those that they replace are asked
to finish. If a successor is given up, nothing moves: the others end as well, and every old process goes on. A role that is
new, or was given up before, holds nothing up: without it the others move. A held process whose predecessor dies stays held;
where nothing moves it is let in, since its role would have none.

The supervisor promises that `finished` becomes true after StopRequested: each process that does not end in time is killed.
It starts nothing itself and reads no clock: times are seconds of a monotonic clock of the caller, and `jitter` is a number
in [0, 1) that the caller draws. processes.py carries the actions out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import TypeAlias, assert_never

from shapestream_workers import EXIT_CONFIGURATION, EXIT_UNUSABLE
from shapestream_workers.supervisor.replacements import (
    ProcessState,
    Replacements,
    RestartPolicy,
    WorkerRecord,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReady:
    """A process has compiled its models, and the server has welcomed it."""

    worker: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplacementWanted:
    """A process has passed its memory limit and should be replaced by a new one."""

    worker: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerExited:
    """A process ended. `status` is negative for a signal, as in `subprocess`."""

    worker: str
    status: int
    busy: bool = False
    """True if it ended while it ran a batch."""
    answered_at: float | None = None
    """Time of its last answer to a batch, if there was one."""
    said: str = ""
    """The problems of its configuration, as it reported them; or why it could not be started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartRequested:
    """Replace processes by new ones, one after the other. Start those again that were given up."""

    fresh: frozenset[str] | None = None
    """The roles whose processes are replaced, or that are new; None: all."""
    roles: tuple[str, ...] | None = None
    """All roles that are wanted from now on; None: those that are there."""
    start_s: float | None = None
    """Time in which a new process must be ready, or it is killed and not started again. None: it may take as long as it
    likes, and the restart ends without it."""
    at_once: bool = False
    """Start all new processes at once, and let the traffic move when each is ready or is known not to come up."""

    def is_about(self, role: str) -> bool:
        """Tell whether this role's processes are replaced, or it is new."""
        return self.fresh is None or role in self.fresh


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaveRequested:
    """Tell every process to leave, and start none from now on. Each ends when it likes, or by StopRequested."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRequested:
    """Let every worker finish, within this time."""

    grace_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StopNow:
    """End every worker at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WakeupDue:
    """The time of `next_wakeup()` has come."""


Event: TypeAlias = (
    WorkerReady
    | ReplacementWanted
    | RestartRequested
    | WorkerExited
    | LeaveRequested
    | StopRequested
    | StopNow
    | WakeupDue
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StartWorker:
    """Start this process."""

    worker: str
    attempt: int
    """0 for the first start, then 1, 2, ..."""
    role: str
    """The configured worker: `worker` itself, or the one that it replaces."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveTraffic:
    """Let these processes get batches, all from one point of time. Until now they were held."""

    workers: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TellToLeave:
    """Tell this process that its server leaves."""

    worker: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TerminateWorker:
    """Ask this process to finish (SIGTERM)."""

    worker: str


@dataclass(frozen=True, slots=True, kw_only=True)
class KillWorker:
    """End this process now (SIGKILL)."""

    worker: str
    why: str = "it did not end in time"


@dataclass(frozen=True, slots=True, kw_only=True)
class GiveUp:
    """This worker is not started again."""

    worker: str
    reason: str
    configuration: bool
    """True if its configuration is at fault, so that no process of this role can run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepWorker:
    """Let a worker go on as it is, since no replacement can be started."""

    worker: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Restarted:
    """The end of a restart of workers, by role."""

    replaced: tuple[str, ...]
    """Roles whose processes were all started after the request."""
    added: tuple[str, ...] = ()
    """New roles, with a process that is ready."""
    unchanged: tuple[str, ...] = ()
    """Roles whose processes were not to be replaced."""
    removed: tuple[str, ...] = ()
    """Roles that are wanted no more, and whose processes have ended."""
    kept: dict[str, str]
    """Roles whose old process goes on, each with the reason."""
    given_up: dict[str, str]
    """Roles without a process, each with the reason."""
    starting: dict[str, str]
    """Roles whose new process is not ready in time, each with the reason. It goes on starting."""

    @property
    def is_whole(self) -> bool:
        """True if every role was replaced."""
        return not (self.kept or self.given_up or self.starting)


Action: TypeAlias = (
    StartWorker | MoveTraffic | TellToLeave | TerminateWorker | KillWorker | GiveUp | KeepWorker
)


class Supervisor:
    """The state of all workers of one server. Its methods return the actions to carry out."""

    def __init__(self, workers: Iterable[str], policy: RestartPolicy | None = None) -> None:
        self._policy = policy or RestartPolicy()
        self._workers = {name: WorkerRecord(name, name) for name in workers}
        self._replacements = Replacements(self._policy)
        self._stopping = False
        self._starts = 0
        self._start_s: float | None = None
        """That of the last restart."""
        self._moving: set[str] = set()
        """Roles of which no new process gets batches before all of them are ready, since a restart replaces them at once."""
        self._unwanted: set[str] = set()
        """Roles that a restart has removed, until their processes have ended."""
        self._may_be_empty = False
        """True once a restart has named the roles: without any, the supervisor waits for the next one."""

    def begin(self, now: float = 0.0) -> list[Action]:
        """Start all workers. Call it once."""
        return [
            self._start(worker, now) for worker in self._workers.values() if worker.state is ProcessState.IDLE
        ]

    def handle(self, event: Event, now: float, *, jitter: float = 0.0) -> list[Action]:
        """Handle an event, and return the actions to carry out."""
        actions = self._handle(event, now, jitter)
        if self._stopping:
            return actions
        while (successor := self._replacements.next_successor(now)) is not None:
            self._workers[successor.name] = successor
            if self._replacements.is_asked_for(successor):
                successor.ready_by = self._ready_by(now)
            actions.append(self._start(successor, now))
        actions += self._move(now)
        if self._unwanted and self._is_settled():
            for worker in [worker for worker in self._workers.values() if worker.role in self._unwanted]:
                actions += self._dismiss(worker, now)
        return actions

    def _handle(self, event: Event, now: float, jitter: float) -> list[Action]:
        match event:
            case WorkerReady(worker=name):
                return self._ready(self._workers[name], now)
            case ReplacementWanted(worker=name):
                self._replacements.want(self._workers[name])
                return []
            case RestartRequested():
                return self._restart(event, now)
            case WorkerExited():
                return self._exited(self._workers[event.worker], event, now, jitter)
            case LeaveRequested():
                self._stopping = True
                return [action for worker in self._workers.values() for action in self._leave(worker, now)]
            case StopRequested(grace_s=grace_s):
                self._stopping = True
                return [
                    action
                    for worker in self._workers.values()
                    for action in self._stop(worker, now + grace_s)
                ]
            case StopNow():
                self._stopping = True
                return [action for worker in self._workers.values() for action in self._kill(worker)]
            case WakeupDue():
                return [action for worker in [*self._workers.values()] for action in self._wake(worker, now)]
            case _:
                assert_never(event)

    def next_wakeup(self) -> float | None:
        """Return the time at which `WakeupDue` must be handled if no other event comes before. None: never."""
        workers = self._workers.values()
        times = [worker.wake_at for worker in workers]
        if not self._stopping:
            times += [*[worker.ready_by for worker in workers], self._replacements.next_time()]
        return min((at for at in times if at is not None), default=None)

    def role_of(self, worker: str) -> str:
        """Return the configured worker that this process is or replaces."""
        return self._workers[worker].role

    def state_of(self, worker: str) -> ProcessState:
        """Return the state of this worker."""
        return self._workers[worker].state

    @property
    def moves(self) -> bool:
        """True while processes wait for each other, to get batches together."""
        return bool(self._moving)

    def is_held(self, worker: str) -> bool:
        """Tell whether this worker gets no batches before others are ready, too."""
        return self._workers[worker].held

    @property
    def stopping(self) -> bool:
        """True if all processes are to end, or to leave."""
        return self._stopping

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles that are wanted, in order."""
        found = dict.fromkeys(worker.role for worker in self._workers.values())
        return tuple(role for role in found if role not in self._unwanted)

    def start_seconds(self) -> dict[str, float]:
        """Return how long the last process of each role took to be ready, by role; without those that never were."""
        ready = ((worker.role, worker.started_at, worker.ready_at) for worker in self._workers.values())
        return {role: ready_at - started_at for role, started_at, ready_at in ready if ready_at is not None}

    @property
    def starts(self) -> int:
        """The number of the last start of a process, over all workers."""
        return self._starts

    def restarted_since(
        self, start: int, now: float, asked: RestartRequested, before: Iterable[str]
    ) -> Restarted | None:
        """Return the result of a restart that was `asked` for after this start, or None while it is under way.

        `before`: the roles before the request.

        A worker that was kept, or given up, is tried again only at the next request. The restart ends without waiting for
        a process that is late. No other process is replaced before the late one has become ready or ended.
        """
        found = Restarted(replaced=(), kept={}, given_up={}, starting={})
        replaced: list[str] = []
        unchanged: list[str] = []
        roles: dict[str, list[WorkerRecord]] = {}
        for worker in self._workers.values():
            roles.setdefault(worker.role, []).append(worker)
        late = [worker for worker in self._workers.values() if (self.late_at(worker) or inf) <= now]
        if not late and self._unwanted:
            return None
        for role, workers in roles.items():
            is_new = all(worker.number > start for worker in workers)
            if role not in self._unwanted and not asked.is_about(role) and not _is_given_up(workers):
                unchanged.append(role)
            elif role not in self._unwanted and is_new and any(map(_serves, workers)):
                replaced.append(role)
            elif (why := self._late_word(role, workers, late, now)) is not None:
                found.starting[role] = why
            elif len(workers) > 1:
                return None
            elif _is_given_up(workers):
                found.given_up[role] = workers[0].given_up
            elif workers[0].state is ProcessState.RUNNING and workers[0].irreplaceable is not None:
                found.kept[role] = workers[0].irreplaceable
            else:
                return None
        known = (*before,)
        return replace(
            found,
            replaced=tuple(role for role in replaced if role in known),
            added=tuple(role for role in replaced if role not in known),
            unchanged=tuple(unchanged),
            removed=tuple(role for role in known if role not in roles),
        )

    def _late_word(
        self, role: str, workers: Sequence[WorkerRecord], late: Sequence[WorkerRecord], now: float
    ) -> str | None:
        """Return why a restart ends before this role is what was asked for; None if no process is late."""
        own = next((worker for worker in late if worker.role == role), None)
        if own is not None:
            return f"{own.name} is not ready after {now - own.started_at:.0f} s; end it to try again"
        if late and role in self._unwanted:
            return f"it ends after {late[0].name} is ready or has ended"
        if late and (held := next((one for one in workers if one.held), None)) is not None:
            return f"{held.name} gets requests after {late[0].name} is ready or has ended"
        if late and len(workers) == 1 and workers[0].replace_soon:
            return f"it is replaced after {late[0].name} is ready or has ended"
        return None

    def late_at(self, worker: WorkerRecord) -> float | None:
        """Return the time from which a restart does not wait for this process; None for one that is not starting."""
        if worker.state is not ProcessState.RUNNING or worker.ready_at is not None:
            return None
        old = self._replacements.predecessor(worker)
        start_s = 0.0 if old is None or old.ready_at is None else old.ready_at - old.started_at
        return worker.started_at + max(self._policy.window_s, self._policy.replace_after_starts * start_s)

    def next_late(self, now: float) -> float:
        """Return the next time at which a process becomes late, if nothing happens before; infinite without any."""
        times = [at for at in map(self.late_at, self._workers.values()) if at is not None and at > now]
        return min(times, default=inf)

    @property
    def finished(self) -> bool:
        """True if no process runs and none will be started."""
        if self._may_be_empty and not self._workers and not self._stopping:
            return False
        return all(
            worker.state in (ProcessState.STOPPED, ProcessState.GIVEN_UP) for worker in self._workers.values()
        )

    @property
    def hopeless(self) -> bool:
        """True if there are workers and all were given up."""
        return bool(self._workers) and all(
            worker.state is ProcessState.GIVEN_UP for worker in self._workers.values()
        )

    def __repr__(self) -> str:
        counts = dict.fromkeys(ProcessState, 0)
        for worker in self._workers.values():
            counts[worker.state] += 1
        said = ", ".join(f"{count} {state.value}" for state, count in counts.items() if count)
        return f"<Supervisor {said or 'without workers'}>"

    def _restart(self, asked: RestartRequested, now: float) -> list[Action]:
        """Queue processes for replacement, start those again that were given up, and those of new roles."""
        if self._stopping:
            return []
        wanted = self.roles if asked.roles is None else asked.roles
        self._may_be_empty = self._may_be_empty or asked.roles is not None
        self._start_s = asked.start_s
        self._unwanted = {worker.role for worker in self._workers.values()}.difference(wanted)
        self._replacements.at_once = asked.at_once
        self._moving = self._roles_to_move(asked, wanted)
        actions: list[Action] = []
        for worker in [*self._workers.values()]:
            if worker.role in self._unwanted:
                continue
            if worker.state is ProcessState.GIVEN_UP:
                worker.crashes.clear()
                worker.spare = True
                actions.append(self._start(worker, now))
            elif asked.is_about(worker.role):
                actions += self._renew(worker)
        there = {worker.role for worker in self._workers.values()}
        for role in wanted:
            if role not in there:
                new = self._workers[role] = WorkerRecord(role, role, ready_by=self._ready_by(now), spare=True)
                actions.append(self._start(new, now))
        return actions

    def _roles_to_move(self, asked: RestartRequested, wanted: Iterable[str]) -> set[str]:
        """Return the roles that move together: of this request, and those of an earlier one that are still held."""
        given_up = {one.role for one in self._workers.values() if one.state is ProcessState.GIVEN_UP}
        held = {one.role for one in self._workers.values() if one.held}
        return {
            role
            for role in wanted
            if (asked.at_once if asked.is_about(role) or role in given_up else role in held)
        }

    def _renew(self, worker: WorkerRecord) -> list[Action]:
        """Queue a process for replacement. One that starts beside others is ended instead: it has read what was before."""
        old = self._replacements.predecessor(worker)
        beside = worker.held or (worker.ready_at is None and (worker.ready_by is not None or old is not None))
        if worker.state is ProcessState.RUNNING and beside:
            worker.outdated = True
            return self._end(worker, "a newer reload replaces it")
        if worker.state is ProcessState.WAITING and old is not None:
            self._drop(worker, old)
        elif worker.doomed is not None:  # it is killed already
            worker.doomed, worker.outdated = None, True
        self._replacements.demand(worker)
        return []

    def _end(self, worker: WorkerRecord, why: str) -> list[Action]:
        """Kill a process that has nothing to finish."""
        worker.state, worker.wake_at = ProcessState.STOPPING, None
        return [KillWorker(worker=worker.name, why=why)]

    def _drop(self, new: WorkerRecord, old: WorkerRecord) -> None:
        """Forget a successor without a process. Its predecessor, which is still in the queue, gets another one."""
        del self._workers[new.name]
        old.successor = None

    # ---------------------------------------------------------------- moves

    def _move(self, now: float) -> list[Action]:
        """Let the traffic move to the held processes, once each is ready, or is known not to come up."""
        moving = [one for one in self._workers.values() if one.role in self._moving - self._unwanted]
        if not self._moving or not all(map(_may_move, moving)):
            return []
        self._moving = set()
        return self._let_in([worker for worker in moving if worker.held], now)

    def _let_in(self, held: Sequence[WorkerRecord], now: float) -> list[Action]:
        """Let held processes get batches, and those that they replace finish."""
        serve = tuple(worker.name for worker in held if worker.state is ProcessState.RUNNING)
        for worker in held:
            worker.held = False
        actions: list[Action] = [MoveTraffic(workers=serve)] if serve else []
        return actions + [action for worker in held for action in self._succeed(worker, now)]

    def _succeed(self, new: WorkerRecord, now: float) -> list[Action]:
        """Let the process finish that this one replaces, if there is one."""
        new.spare = False
        old = self._replacements.predecessor(new)
        return [] if old is None else self._stop(old, now + self._policy.drain_s)

    def _call_off(self, role: str, reason: str, now: float) -> list[Action]:
        """Let nothing move, since a process of this role does not come up: all old ones go on."""
        moving, self._moving = self._moving, set()
        why = f"nothing moves, since {role} cannot be replaced: {reason}"
        actions: list[Action] = []
        for worker in [one for one in self._workers.values() if one.role in moving]:
            old = self._replacements.predecessor(worker)
            if worker.held and (worker.spare or old is not None):
                actions += self._abandon(worker, why, now)
            elif worker.held:  # the old one has died meanwhile
                actions += self._let_in([worker], now)
            elif worker.successor is None and worker.replace_soon:
                actions += self._keep(worker, why)
        return actions

    def _abandon(self, worker: WorkerRecord, why: str, now: float) -> list[Action]:
        """Start a held process no more, and end it."""
        match worker.state:
            case ProcessState.RUNNING:
                worker.doomed = why
                return self._end(worker, why)
            case ProcessState.STOPPING:
                worker.doomed, worker.outdated = why, False
                return []
            case ProcessState.WAITING:
                return self._give_up(worker, why, now, configuration=False)
            case _:
                return []

    def _keep(self, old: WorkerRecord, reason: str) -> list[Action]:
        """Let a process go on, although it was to be replaced."""
        self._replacements.forget(old)
        old.successor, old.irreplaceable = None, reason
        return [KeepWorker(worker=old.name, reason=reason)]

    def _ready_by(self, now: float) -> float | None:
        return None if self._start_s is None else now + self._start_s

    def _is_settled(self) -> bool:
        """Tell whether a wanted role serves, and no other is about to start or to be replaced."""
        wanted = [worker for worker in self._workers.values() if worker.role not in self._unwanted]
        serve = [worker for worker in wanted if _serves(worker)]
        others = [worker for worker in wanted if not _serves(worker)]
        at_rest = all(worker.state is ProcessState.GIVEN_UP for worker in others)
        waits = any(one.replace_soon and one.state is not ProcessState.STOPPING for one in serve)
        return at_rest and not waits and bool(serve or not wanted)

    def _dismiss(self, worker: WorkerRecord, now: float) -> list[Action]:
        """Let a worker finish whose role is wanted no more, and forget one without a process."""
        self._replacements.forget(worker)
        actions = (
            self._stop(worker, now + self._policy.drain_s)
            if worker.state is not ProcessState.STOPPING
            else []
        )
        if worker.state is not ProcessState.STOPPING:
            self._forget(worker)
        return actions

    def _forget(self, worker: WorkerRecord) -> None:
        del self._workers[worker.name]
        if all(other.role != worker.role for other in self._workers.values()):
            self._unwanted.discard(worker.role)

    def _start(self, worker: WorkerRecord, now: float) -> StartWorker:
        worker.state, worker.wake_at = ProcessState.RUNNING, None
        worker.started_at, worker.ready_at = now, None
        worker.held = worker.role in self._moving
        if worker.held and worker.ready_by is None:
            worker.ready_by = self._ready_by(now)
        worker.starts += 1
        self._starts += 1
        worker.number = self._starts
        return StartWorker(worker=worker.name, attempt=worker.starts - 1, role=worker.role)

    def _ready(self, worker: WorkerRecord, now: float) -> list[Action]:
        worker.ready_by = None
        if worker.ready_at is None:
            worker.ready_at = now
        return [] if worker.held else self._succeed(worker, now)

    def _exited(self, worker: WorkerRecord, exit_: WorkerExited, now: float, jitter: float) -> list[Action]:
        if worker.state not in (ProcessState.RUNNING, ProcessState.STOPPING):
            return []
        worker.wake_at = None
        if self._stopping:
            worker.state = ProcessState.STOPPED
            return []
        worker.last_said = exit_.said
        if worker.doomed is not None:
            return self._give_up(worker, _with(worker.doomed, exit_.said), now, configuration=False)
        if worker.outdated:
            worker.outdated, worker.ready_by = False, self._ready_by(now)
            if (old := self._replacements.predecessor(worker)) is None:
                return [self._start(worker, now)]
            self._drop(worker, old)
            return []
        read_before = worker.replace_soon and worker.ready_at is None
        self._replacements.forget(worker)
        if worker.role in self._unwanted:
            self._forget(worker)
            return []
        if worker.successor is not None:
            # It was asked to end, or crashed before that; either way its successor runs, now with all the time it needs.
            new = worker.successor
            new.ready_by = new.ready_by if new.held else None
            if new.doomed is not None:
                new.doomed, new.outdated = None, True
            del self._workers[worker.name]
            return []
        if read_before and exit_.status in (EXIT_CONFIGURATION, EXIT_UNUSABLE):
            # It was started before the last request, and what it could not use is replaced.
            self._wait(worker, 1, self._policy.backoff_max_s, now, jitter)
            return []
        if exit_.status == EXIT_CONFIGURATION:
            reason = f"its configuration cannot be used{exit_.said and ': '}{exit_.said}"
            return self._give_up(worker, reason, now, configuration=True)
        if exit_.status == EXIT_UNUSABLE:
            if worker.ready_at is None:
                reason = (
                    "the server refused it: a model's files were replaced, or its engine was (SIGHUP serves the new "
                    "ones), or the program was (restart the server)"
                )
                return self._give_up(worker, reason, now, configuration=False)
            # It has served before, so files or the engine were replaced since. Its next process has the new ones.
            self._wait(worker, 1, self._policy.backoff_max_s, now, jitter)
            return []
        return self._crashed(worker, exit_, now, jitter)

    def _crashed(self, worker: WorkerRecord, exit_: WorkerExited, now: float, jitter: float) -> list[Action]:
        """Start a process again after a wait, or give it up."""
        if exit_.answered_at is not None:
            worker.answered_at = exit_.answered_at
        policy = self._policy
        if exit_.busy and worker.answered_at is not None and now - worker.answered_at <= policy.window_s:
            worker.blameless.append(now)
            crashes = sum(at > now - policy.window_s for at in worker.blameless)
            self._wait(worker, crashes, policy.blameless_backoff_max_s, now, jitter)
            return []
        if worker.ready_at is not None and now - worker.ready_at >= policy.healthy_s:
            worker.crashes.clear()
        worker.crashes.append(now)
        while worker.crashes[0] <= now - policy.window_s:
            worker.crashes.popleft()
        if len(worker.crashes) >= policy.max_crashes:
            reason = (
                f"it ended {len(worker.crashes)} times within {policy.window_s:g} s, at last {_how(exit_.status)}"
                f"{exit_.said and ': '}{exit_.said}"
            )
            return self._give_up(worker, reason, now, configuration=False)
        self._wait(worker, len(worker.crashes), policy.backoff_max_s, now, jitter)
        return []

    def _wait(self, worker: WorkerRecord, crashes: int, limit_s: float, now: float, jitter: float) -> None:
        """Schedule a restart. The wait grows with the number of crashes."""
        policy = self._policy
        backoff_s = policy.backoff_initial_s * policy.backoff_factor ** min(crashes - 1, 32)
        worker.state = ProcessState.WAITING
        worker.wake_at = now + min(backoff_s, limit_s) * (1.0 + policy.jitter * jitter)

    def _give_up(self, worker: WorkerRecord, reason: str, now: float, *, configuration: bool) -> list[Action]:
        old = self._replacements.predecessor(worker)
        if old is not None and old.state is ProcessState.RUNNING:
            # The old process goes on, even one that is too large: that is better than none.
            del self._workers[worker.name]
            actions = self._keep(old, reason)
            return actions + (self._call_off(old.role, reason, now) if old.role in self._moving else [])
        worker.state, worker.given_up, worker.doomed = ProcessState.GIVEN_UP, reason, None
        worker.ready_by, worker.held = None, False
        return [GiveUp(worker=worker.name, reason=reason, configuration=configuration)]

    def _leave(self, worker: WorkerRecord, now: float) -> list[Action]:
        if worker.state is ProcessState.RUNNING and _serves(worker):
            return [TellToLeave(worker=worker.name)]
        return self._stop(worker, now + self._policy.drain_s)  # one that never served has nothing to finish

    def _stop(self, worker: WorkerRecord, kill_at: float) -> list[Action]:
        match worker.state:
            case ProcessState.RUNNING:
                worker.state, worker.wake_at = ProcessState.STOPPING, kill_at
                return [TerminateWorker(worker=worker.name)]
            case ProcessState.IDLE | ProcessState.WAITING:
                worker.state, worker.wake_at = ProcessState.STOPPED, None
            case ProcessState.STOPPING if worker.wake_at is not None:
                worker.wake_at = min(worker.wake_at, kill_at)
            case _:
                pass
        return []

    def _kill(self, worker: WorkerRecord) -> list[Action]:
        running = worker.state in (ProcessState.RUNNING, ProcessState.STOPPING)
        if running:
            worker.state, worker.wake_at = ProcessState.STOPPING, None
        elif worker.state is not ProcessState.GIVEN_UP:
            worker.state, worker.wake_at = ProcessState.STOPPED, None
        return [KillWorker(worker=worker.name)] if running else []

    def _too_late(self) -> str:
        return f"it was not ready within {self._start_s or 0.0:g} s (server.reload_s)"

    def _wake(self, worker: WorkerRecord, now: float) -> list[Action]:
        if worker.ready_by is not None and worker.ready_by <= now:
            worker.ready_by = None
            if worker.state is ProcessState.RUNNING:
                worker.doomed = self._too_late()
                return self._end(worker, "it was not ready in time")
            if worker.state is ProcessState.WAITING:
                worker.wake_at = None
                return self._give_up(
                    worker, _with(self._too_late(), worker.last_said), now, configuration=False
                )
        if worker.wake_at is None or worker.wake_at > now:
            return []
        if worker.state is ProcessState.WAITING:
            return [self._start(worker, now)]
        return self._kill(worker)


def _serves(worker: WorkerRecord) -> bool:
    """Tell whether its process is ready, and gets batches."""
    return worker.ready_at is not None and not worker.held


def _may_move(worker: WorkerRecord) -> bool:
    """Tell whether no move has to wait for this process: it is held and ready, or is replaced, ends, or was given up."""
    if worker.held:
        return worker.state is ProcessState.RUNNING and worker.ready_at is not None
    return worker.successor is not None or worker.state in (ProcessState.STOPPING, ProcessState.GIVEN_UP)


def _with(reason: str, said: str) -> str:
    return f"{reason}{said and ': '}{said}"


def _is_given_up(workers: Sequence[WorkerRecord]) -> bool:
    return all(worker.state is ProcessState.GIVEN_UP for worker in workers)


def _how(status: int) -> str:
    return f"with status {status}" if status >= 0 else f"by signal {-status}"
