"""When to start, restart, stop and give up on worker processes: events in, actions out; no clock, no chance.

          begin                     exited                        too many in the window,
    idle ──────▶ running ─────────────────────▶ waiting             or its configuration
                   │  ▲                          │   │ ──────────────────▶ given up
                   │  └──────────────────────────┘   │    cannot be used
     stop requested│        restart time has come    │ stop requested
                   ▼                                 ▼
                stopping ───────────exited───────▶ stopped
                   (killed when its time is up)

A process that is to be *replaced* goes on serving while another is started beside it, in the same role; when that is ready,
the old one is asked to finish. `replacements.py` says whose turn it is.

Times are seconds of a monotonic clock that the caller chooses; `jitter` is a number in [0, 1) that it draws.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import assert_never

from shapestream_workers.supervisor.events import (
    Action,
    Event,
    GiveUp,
    KeepWorker,
    KillWorker,
    ReplacementWanted,
    RestartRequested,
    StartWorker,
    StopNow,
    StopRequested,
    TerminateWorker,
    TimePassed,
    WorkerExited,
    WorkerReady,
)
from shapestream_workers.supervisor.records import RestartPolicy, State, WorkerRecord
from shapestream_workers.supervisor.replacements import Replacements

__all__ = [
    "RestartPolicy",
    "State",
    "Supervisor",
]

EXIT_CONFIGURATION = 3
"""The exit status of a process that cannot use its configuration: trying again would change nothing."""
EXIT_OTHER_FILES = 4
"""The exit status of a process that has read other files of a model than those that are served."""


class Supervisor:
    """The state of all workers of one server. Every method is synchronous and returns what to do."""

    def __init__(self, workers: Iterable[str], policy: RestartPolicy | None = None) -> None:
        self._policy = policy or RestartPolicy()
        self._workers = {name: WorkerRecord(name, name) for name in workers}
        self._replacements = Replacements(self._policy)
        self._stopping = False

    def begin(self, now: float = 0.0) -> list[Action]:
        """Start everything; to be called once."""
        return [self._start(worker, now) for worker in self._workers.values() if worker.state is State.IDLE]

    def handle(self, event: Event, now: float, *, jitter: float = 0.0) -> list[Action]:
        """What follows from `event`."""
        actions = self._obey(event, now, jitter)
        if not self._stopping and (successor := self._replacements.next_successor(now)) is not None:
            self._workers[successor.name] = successor
            actions.append(self._start(successor, now))
        return actions

    def _obey(self, event: Event, now: float, jitter: float) -> list[Action]:
        match event:
            case WorkerReady(worker=name):
                return self._ready(self._workers[name], now)
            case ReplacementWanted(worker=name):
                self._replacements.want(self._workers[name])
                return []
            case RestartRequested():
                return self._restart(now)
            case WorkerExited():
                return self._exited(self._workers[event.worker], event, now, jitter)
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
            case TimePassed():
                return [action for worker in self._workers.values() for action in self._wake(worker, now)]
            case _:
                assert_never(event)

    def next_wakeup(self) -> float | None:
        """When `TimePassed` is due, if nothing else happens before."""
        times = [worker.wake_at for worker in self._workers.values() if worker.wake_at is not None]
        if not self._stopping and (at := self._replacements.next_time()) is not None:
            times.append(at)
        return min(times, default=None)

    def role_of(self, worker: str) -> str:
        """Which of the workers that the supervisor was given this process is, or replaces."""
        return self._workers[worker].role

    def state_of(self, worker: str) -> State:
        """Where this worker stands."""
        return self._workers[worker].state

    @property
    def finished(self) -> bool:
        """Whether no process runs and none will be started."""
        return all(worker.state in (State.STOPPED, State.GIVEN_UP) for worker in self._workers.values())

    @property
    def hopeless(self) -> bool:
        """Whether there were workers and every one of them was given up."""
        return bool(self._workers) and all(
            worker.state is State.GIVEN_UP for worker in self._workers.values()
        )

    def __repr__(self) -> str:
        counts = dict.fromkeys(State, 0)
        for worker in self._workers.values():
            counts[worker.state] += 1
        said = ", ".join(f"{count} {state.value}" for state, count in counts.items() if count)
        return f"<Supervisor {said or 'without workers'}>"

    def _restart(self, now: float) -> list[Action]:
        """Those that run are replaced in turn; those that were given up get another chance."""
        if self._stopping:
            return []
        actions: list[Action] = []
        for worker in self._workers.values():
            if worker.state is State.GIVEN_UP:
                worker.crashes.clear()
                actions.append(self._start(worker, now))
            elif self._replacements.predecessor(worker) is None:
                self._replacements.demand(worker)
        return actions

    def _start(self, worker: WorkerRecord, now: float) -> StartWorker:
        worker.state, worker.wake_at = State.RUNNING, None
        worker.started_at, worker.ready_at = now, None
        worker.starts += 1
        return StartWorker(worker=worker.name, attempt=worker.starts - 1, role=worker.role)

    def _ready(self, worker: WorkerRecord, now: float) -> list[Action]:
        if worker.ready_at is None:
            worker.ready_at = now
        old = self._replacements.predecessor(worker)
        return [] if old is None else self._stop(old, now + self._policy.drain_s)

    def _exited(self, worker: WorkerRecord, exit_: WorkerExited, now: float, jitter: float) -> list[Action]:
        if worker.state not in (State.RUNNING, State.STOPPING):
            return []
        worker.wake_at = None
        if self._stopping:
            worker.state = State.STOPPED
            return []
        self._replacements.forget(worker)
        if worker.successor is not None:
            # Whether it was asked to end or died before that: its place is taken.
            del self._workers[worker.name]
            return []
        if exit_.status == EXIT_CONFIGURATION:
            return self._give_up(worker, "its configuration cannot be used", configuration=True)
        if exit_.status == EXIT_OTHER_FILES:
            if worker.ready_at is None:
                reason = "a model's files were replaced (SIGHUP serves the new ones)"
                return self._give_up(worker, reason, configuration=False)
            # It has served, so the files were replaced since: its next process reads those that are served now.
            self._wait(worker, 1, self._policy.backoff_max_s, now, jitter)
            return []
        if exit_.answered_at is not None:
            worker.answered_at = exit_.answered_at
        policy = self._policy
        if exit_.busy and worker.answered_at is not None and now - worker.answered_at <= policy.window_s:
            deaths, limit_s = worker.blameless, policy.blameless_backoff_max_s
            deaths.append(now)
            self._wait(worker, sum(at > now - policy.window_s for at in deaths), limit_s, now, jitter)
            return []
        if worker.ready_at is not None and now - worker.ready_at >= policy.healthy_s:
            worker.crashes.clear()
        worker.crashes.append(now)
        while worker.crashes[0] <= now - policy.window_s:
            worker.crashes.popleft()
        if len(worker.crashes) >= policy.max_crashes:
            reason = f"it ended {len(worker.crashes)} times within {policy.window_s:g} s"
            return self._give_up(worker, reason, configuration=False)
        self._wait(worker, len(worker.crashes), policy.backoff_max_s, now, jitter)
        return []

    def _wait(self, worker: WorkerRecord, deaths: int, limit_s: float, now: float, jitter: float) -> None:
        """It is started again later: the longer, the more often it has ended."""
        policy = self._policy
        backoff_s = policy.backoff_initial_s * policy.backoff_factor ** min(deaths - 1, 32)
        worker.state = State.WAITING
        worker.wake_at = now + min(backoff_s, limit_s) * (1.0 + policy.jitter * jitter)

    def _give_up(self, worker: WorkerRecord, reason: str, *, configuration: bool) -> list[Action]:
        old = self._replacements.predecessor(worker)
        if old is not None and old.state is State.RUNNING:
            # Too large as it is, the old one goes on: that is better than none.
            del self._workers[worker.name]
            self._replacements.forget(old)
            old.successor, old.irreplaceable = None, True
            return [KeepWorker(worker=old.name, reason=reason)]
        worker.state = State.GIVEN_UP
        return [GiveUp(worker=worker.name, reason=reason, configuration=configuration)]

    def _stop(self, worker: WorkerRecord, kill_at: float) -> list[Action]:
        match worker.state:
            case State.RUNNING:
                worker.state, worker.wake_at = State.STOPPING, kill_at
                return [TerminateWorker(worker=worker.name)]
            case State.IDLE | State.WAITING:
                worker.state, worker.wake_at = State.STOPPED, None
            case State.STOPPING if worker.wake_at is not None:
                worker.wake_at = min(worker.wake_at, kill_at)
            case _:
                pass
        return []

    def _kill(self, worker: WorkerRecord) -> list[Action]:
        running = worker.state in (State.RUNNING, State.STOPPING)
        if running:
            worker.state, worker.wake_at = State.STOPPING, None
        elif worker.state is not State.GIVEN_UP:
            worker.state, worker.wake_at = State.STOPPED, None
        return [KillWorker(worker=worker.name)] if running else []

    def _wake(self, worker: WorkerRecord, now: float) -> list[Action]:
        if worker.wake_at is None or worker.wake_at > now:
            return []
        if worker.state is State.WAITING:
            return [self._start(worker, now)]
        return self._kill(worker)
