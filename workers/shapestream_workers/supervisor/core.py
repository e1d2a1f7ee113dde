"""When to start, restart, stop and give up on worker processes: events in, actions out; no clock, no chance.

          begin                     exited                        too many in the window,
    idle ──────▶ running ─────────────────────▶ waiting             or its configuration
                   │  ▲                          │   │ ──────────────────▶ given up
                   │  └──────────────────────────┘   │    cannot be used
     stop requested│        restart time has come    │ stop requested
                   ▼                                 ▼
                stopping ───────────exited───────▶ stopped
                   (killed when its time is up)

Times are seconds of a monotonic clock that the caller chooses; `jitter` is a number in [0, 1) that it draws.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import assert_never

from shapestream_workers.supervisor.events import (
    Action,
    Event,
    GiveUp,
    KillWorker,
    StartWorker,
    StopNow,
    StopRequested,
    TerminateWorker,
    TimePassed,
    WorkerExited,
    WorkerReady,
)

__all__ = [
    "RestartPolicy",
    "State",
    "Supervisor",
]

EXIT_CONFIGURATION = 3
"""The exit status of a process that cannot use its configuration: trying again would change nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """How patient the supervisor is with a worker that dies."""

    backoff_initial_s: float = 0.1
    """Wait before the first restart. The first is nearly at once: one crash is bad luck."""
    backoff_factor: float = 3.0
    """Each further crash within the window multiplies the wait by this."""
    backoff_max_s: float = 10.0
    """The wait never grows above this."""
    jitter: float = 0.25
    """Up to this share is added to the wait, so that workers do not come back in step."""
    max_crashes: int = 6
    """So many crashes within the window, and the worker is given up."""
    window_s: float = 120.0
    """A crash is forgotten after so long."""
    healthy_s: float = 3.0
    """A worker that served for so long is sound: its earlier crashes are forgotten."""


class State(enum.Enum):
    """Where one worker stands; the diagram above shows how it moves."""

    IDLE = "idle"
    RUNNING = "running"
    WAITING = "waiting"
    STOPPING = "stopping"
    STOPPED = "stopped"
    GIVEN_UP = "given up"


@dataclass(slots=True)
class _Worker:
    name: str
    state: State = State.IDLE
    starts: int = 0
    wake_at: float | None = None
    """When to restart (WAITING), or to kill (STOPPING)."""
    ready_at: float | None = None
    crashes: deque[float] = field(default_factory=deque)
    """Times of the crashes that are not forgotten yet; never longer than `max_crashes`."""


class Supervisor:
    """The state of all workers of one server. Every method is synchronous and returns what to do."""

    def __init__(self, workers: Iterable[str], policy: RestartPolicy | None = None) -> None:
        self._policy = policy or RestartPolicy()
        self._workers = {name: _Worker(name) for name in workers}
        self._stopping = False

    def begin(self) -> list[Action]:
        """Start everything; to be called once."""
        return [self._start(worker) for worker in self._workers.values() if worker.state is State.IDLE]

    def handle(self, event: Event, now: float, *, jitter: float = 0.0) -> list[Action]:
        """What follows from `event`."""
        match event:
            case WorkerReady(worker=name):
                self._workers[name].ready_at = now
                return []
            case WorkerExited(worker=name, status=status):
                return self._exited(self._workers[name], status, now, jitter)
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
        return min(
            (worker.wake_at for worker in self._workers.values() if worker.wake_at is not None), default=None
        )

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

    def _start(self, worker: _Worker) -> StartWorker:
        worker.state, worker.wake_at, worker.ready_at = State.RUNNING, None, None
        worker.starts += 1
        return StartWorker(worker=worker.name, attempt=worker.starts - 1)

    def _exited(self, worker: _Worker, status: int, now: float, jitter: float) -> list[Action]:
        if worker.state not in (State.RUNNING, State.STOPPING):
            return []
        worker.wake_at = None
        if self._stopping:
            worker.state = State.STOPPED
            return []
        if status == EXIT_CONFIGURATION:
            worker.state = State.GIVEN_UP
            return [GiveUp(worker=worker.name, reason="its configuration cannot be used", configuration=True)]
        policy = self._policy
        if worker.ready_at is not None and now - worker.ready_at >= policy.healthy_s:
            worker.crashes.clear()
        worker.crashes.append(now)
        while worker.crashes[0] <= now - policy.window_s:
            worker.crashes.popleft()
        if len(worker.crashes) >= policy.max_crashes:
            worker.state = State.GIVEN_UP
            reason = f"it ended {len(worker.crashes)} times within {policy.window_s:g} s"
            return [GiveUp(worker=worker.name, reason=reason, configuration=False)]
        backoff_s = policy.backoff_initial_s * policy.backoff_factor ** (len(worker.crashes) - 1)
        worker.state = State.WAITING
        worker.wake_at = now + min(backoff_s, policy.backoff_max_s) * (1.0 + policy.jitter * jitter)
        return []

    def _stop(self, worker: _Worker, kill_at: float) -> list[Action]:
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

    def _kill(self, worker: _Worker) -> list[Action]:
        running = worker.state in (State.RUNNING, State.STOPPING)
        if running:
            worker.state, worker.wake_at = State.STOPPING, None
        elif worker.state is not State.GIVEN_UP:
            worker.state, worker.wake_at = State.STOPPED, None
        return [KillWorker(worker=worker.name)] if running else []

    def _wake(self, worker: _Worker, now: float) -> list[Action]:
        if worker.wake_at is None or worker.wake_at > now:
            return []
        if worker.state is State.WAITING:
            return [self._start(worker)]
        return self._kill(worker)
