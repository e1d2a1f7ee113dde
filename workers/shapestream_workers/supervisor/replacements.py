"""The processes that a supervisor knows, and the queue of those that are to be replaced."""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass, field
from itertools import count


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """The limits and waits of the supervisor."""

    backoff_initial_s: float = 0.1
    """Wait before the first restart. It is short because a single crash is likely to be chance."""
    backoff_factor: float = 3.0
    """Each further crash within the window multiplies the wait by this."""
    backoff_max_s: float = 10.0
    """The wait never grows above this."""
    jitter: float = 0.25
    """Largest share that is added to the wait at random, so that workers do not restart together."""
    max_crashes: int = 6
    """Crashes within the window after which the worker is given up."""
    blameless_backoff_max_s: float = 1.0
    """Longest wait after a crash during a batch, of a worker that answered others within the window.

    Such a crash does not count towards giving up."""
    window_s: float = 120.0
    """Time after which a crash is forgotten, and least time that a restart waits for a process to come up."""
    healthy_s: float = 3.0
    """Time of service after which the earlier crashes of a worker are forgotten."""
    replace_after_starts: float = 4.0
    """Least time of service before a replacement, as a multiple of the start-up time.

    So a worker spends most of its time serving, however low its memory limit is. A restart waits as long for a successor, in
    start-up times of the process that it replaces."""
    drain_s: float = 30.0
    """Time in which a replaced process must finish its batches."""


class ProcessState(enum.Enum):
    """State of one worker; the diagram above shows the transitions."""

    IDLE = "idle"
    RUNNING = "running"
    WAITING = "waiting"
    STOPPING = "stopping"
    STOPPED = "stopped"
    GIVEN_UP = "given up"


@dataclass(slots=True, eq=False)
class WorkerRecord:
    """One worker: a process that is kept running, and its history."""

    name: str
    role: str
    """The configured worker that it is or replaces, with the same command line."""
    state: ProcessState = ProcessState.IDLE
    starts: int = 0
    number: int = 0
    """Number of the start of its last process, counted over all workers."""
    wake_at: float | None = None
    """Time to restart (WAITING) or to kill (STOPPING)."""
    started_at: float = 0.0
    ready_at: float | None = None
    """Time at which its present process became ready."""
    crashes: deque[float] = field(default_factory=deque)
    """Times of the crashes within the window, at most `max_crashes`."""
    answered_at: float | None = None
    """Time of the last known answer to a batch by one of its processes."""
    blameless: deque[float] = field(default_factory=lambda: deque(maxlen=64))
    """Times of the crashes during batches, which do not count towards giving up."""
    successor: WorkerRecord | None = None
    """The process that replaces it, once that is started."""
    irreplaceable: str | None = None
    """The reason why its replacement was given up; None if none was."""
    given_up: str = ""
    """The reason why it was given up; empty otherwise."""
    replace_soon: bool = False
    """A replacement was requested, so `replace_after_starts` does not apply."""
    ready_by: float | None = None
    """Time by which it must be ready; None if there is none, or once it was."""
    doomed: str | None = None
    """The reason for which its process was killed, and is not started again; None for any other process."""
    outdated: bool = False
    """Its process was ended, since a newer restart replaces it."""
    held: bool = False
    """It gets no batches before the others of its move are ready."""
    spare: bool = False
    """No process of its role served when it was asked for, so the others do without it."""
    last_said: str = ""
    """The reason that its last process gave for its end; empty if it gave none."""


class Replacements:
    """The queue of processes to replace. One at a time has a successor, or all that were demanded, `at_once`."""

    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        self._wanting: list[WorkerRecord] = []
        self._numbers = count(1)
        self.at_once = False

    def want(self, old: WorkerRecord) -> None:
        """Queue a process for replacement, unless it is queued already."""
        if old.state is ProcessState.RUNNING and old not in self._wanting and old.irreplaceable is None:
            self._wanting.append(old)

    def demand(self, old: WorkerRecord) -> None:
        """Queue a process for replacement as soon as it is ready, even if its replacement was given up before."""
        if old.state is ProcessState.RUNNING:
            old.irreplaceable, old.replace_soon = None, True
            self.want(old)

    def forget(self, worker: WorkerRecord) -> None:
        """Remove a process from the queue: it has ended, or goes on as it is."""
        worker.replace_soon = False
        if worker in self._wanting:
            self._wanting.remove(worker)

    def next_successor(self, now: float) -> WorkerRecord | None:
        """Return the next successor to start, or None if none is due."""
        for old in self._free():
            at = self._earliest(old)
            if at is not None and at <= now:
                old.successor = WorkerRecord(f"{old.role}+{next(self._numbers)}", old.role)
                return old.successor
        return None

    def next_time(self) -> float | None:
        """Return the time at which the next successor is due, if no event comes before; None: never."""
        return min((at for at in map(self._earliest, self._free()) if at is not None), default=None)

    def is_asked_for(self, new: WorkerRecord) -> bool:
        """Tell whether this successor was demanded, rather than wanted for its predecessor's memory."""
        old = self.predecessor(new)
        return old is not None and old.replace_soon

    def predecessor(self, new: WorkerRecord) -> WorkerRecord | None:
        """Return the running process that this one replaces, or None."""
        return next((old for old in self._wanting if old.successor is new), None)

    def _free(self) -> list[WorkerRecord]:
        """Return the processes that may be replaced now; none while the process of an earlier request ends."""
        successors = [old.successor for old in self._wanting if old.successor is not None]
        if self.at_once and not any(new.outdated for new in successors):
            free = [old for old in self._wanting if old.successor is None and old not in successors]
            return [old for old in free if old.replace_soon or not successors]
        return [] if successors else self._wanting

    def _earliest(self, old: WorkerRecord) -> float | None:
        """Return the earliest time to replace a process; None before it is ready."""
        if old.ready_at is None:
            return None
        if old.replace_soon:
            return old.ready_at
        return old.ready_at + self._policy.replace_after_starts * (old.ready_at - old.started_at)
