"""The worker processes that a server's configuration asks for: which of them serve, and why others are missing.

The owner of the processes calls the methods; metrics and the page read the result. All times are arguments, in seconds.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple


class Presence(StrEnum):
    """The state of a configured worker."""

    STARTING = "starting"
    """It has never been ready; a process runs, or will be started."""
    SERVING = "serving"
    MISSING = "missing"
    """Its last process has ended, and no other is ready yet."""
    GIVEN_UP = "given up"
    """It is missing, and no process is started for it any more."""


@dataclass(slots=True)
class WorkerPresence:
    """The presence of one configured worker, and the last end of its processes."""

    presence: Presence
    since: float | None = None
    """Time from which `presence` holds; None before the first process is started."""
    restarts: int = 0
    """Processes that were started after the first one, for any reason."""
    last_end: str = ""
    """Exit status of the last process that ended, such as "status 1" or "SIGKILL"; empty before."""
    why: str = ""
    """The reason in the log for that end, or for giving up; empty if there is none."""
    ended_at: float | None = None
    """Time when the last process ended."""


class ConfiguredWorker(NamedTuple):
    """A configured worker, as metrics and the page show it."""

    name: str
    group: int
    """Its entry of `workers`, from 0."""
    state: WorkerPresence
    memory_bytes: int


class WorkerPresences:
    """The presence of each configured worker, by name. What happens to one that was removed is not kept."""

    __slots__ = ("_reasons", "_serving", "_started", "by_worker")

    def __init__(self, names: Iterable[str]) -> None:
        self.by_worker = {name: WorkerPresence(Presence.STARTING) for name in names}
        self._serving: dict[str, set[int]] = {name: set() for name in self.by_worker}
        """Process ids of the ready processes of each worker: two for a short time, while one is replaced."""
        self._started: set[str] = set()
        self._reasons: dict[str, str] = {}
        """The reason for the next end of a worker's process, where it is known before."""

    def add(self, name: str) -> None:
        """Know a worker that the configuration has now."""
        self.by_worker[name] = WorkerPresence(Presence.STARTING)
        self._serving[name] = set()

    def remove(self, name: str) -> None:
        """Forget a worker that the configuration has no more."""
        del self.by_worker[name], self._serving[name]
        self._started.discard(name)
        self._reasons.pop(name, None)

    def started(self, name: str, now: float) -> None:
        """Note that a process is started. A worker that was given up counts as missing again."""
        worker = self.by_worker[name]
        worker.restarts += name in self._started
        self._started.add(name)
        if worker.since is None:
            worker.since = now
        if worker.presence is Presence.GIVEN_UP:
            worker.presence = Presence.MISSING

    def serves(self, name: str, pid: int, now: float) -> None:
        """Note that a process is ready."""
        if (worker := self.by_worker.get(name)) is None:
            return
        self._serving[name].add(pid)
        if worker.presence is not Presence.SERVING:
            worker.presence, worker.since = Presence.SERVING, now

    def reason(self, name: str, why: str) -> None:
        """Note the reason why a process of this worker will end soon."""
        if name in self.by_worker:
            self._reasons[name] = why

    def ended(self, name: str, pid: int, status: int, now: float) -> None:
        """Note the end of a process, with its status as `subprocess` returns it."""
        if (worker := self.by_worker.get(name)) is None:
            return
        self._serving[name].discard(pid)
        worker.last_end, worker.ended_at, worker.why = spell_status(status), now, self._reasons.pop(name, "")
        if worker.presence is not Presence.GIVEN_UP and not self._serving[name]:
            # A worker that has never served is missing since its first start.
            worker.since = now if worker.presence is Presence.SERVING else worker.since
            worker.presence = Presence.MISSING

    def given_up(self, name: str, why: str) -> None:
        """Note that no process is started for this worker any more."""
        worker = self.by_worker[name]
        worker.presence, worker.why = Presence.GIVEN_UP, why


def spell_status(status: int) -> str:
    """Spell an exit status of `subprocess`: the name of a signal, or "status 1"."""
    if status >= 0:
        return f"status {status}"
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"
