"""The worker processes that a server's configuration asks for: which serve, since when one is missing, and why.

The process owner notes what happens to each; metrics and the page read it. No clock is read here: times are arguments,
in seconds.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple


class Presence(StrEnum):
    """Whether a configured worker is there."""

    STARTING = "starting"
    """It was never ready; a process runs, or will."""
    SERVING = "serving"
    MISSING = "missing"
    """Its last process has ended, and no other serves yet."""
    GIVEN_UP = "given up"
    """It is missing, and no process is started for it."""


@dataclass(slots=True)
class WorkerPresence:
    """One configured worker."""

    presence: Presence
    since: float | None = None
    """Time from which it is what it is; None before its first process is started."""
    restarts: int = 0
    """Processes that were started for it after the first one, whatever the reason."""
    last_end: str = ""
    """How the last process that ended did, such as "status 1" or "SIGKILL"; empty before one has ended."""
    why: str = ""
    """The reason that the log gave for that end, or for giving up; empty where it gave none."""
    ended_at: float | None = None
    """Time of that end."""


class ConfiguredWorker(NamedTuple):
    """The standing of a worker, as its server tells it."""

    name: str
    group: int
    """Its entry of `workers`, from 0."""
    standing: WorkerPresence
    memory_bytes: int


class Roll:
    """The standing of each configured worker, by name."""

    __slots__ = ("_reasons", "_serving", "_standings", "_started")

    def __init__(self, names: Iterable[str]) -> None:
        self._standings = {name: WorkerPresence(Presence.STARTING) for name in names}
        self._serving: dict[str, set[int]] = {name: set() for name in self._standings}
        """The processes that serve in each place: two, for a moment, while one is replaced."""
        self._started: set[str] = set()
        self._reasons: dict[str, str] = {}
        """Why the next end of a process of a worker comes, where that is known before."""

    @property
    def standings(self) -> Mapping[str, WorkerPresence]:
        """By name, as they are now."""
        return self._standings

    def started(self, name: str, now: float) -> None:
        """Note that a process is started; one that was given up is awaited again."""
        one = self._standings[name]
        one.restarts += name in self._started
        self._started.add(name)
        if one.since is None:
            one.since = now
        if one.presence is Presence.GIVEN_UP:
            one.presence = Presence.MISSING

    def serves(self, name: str, pid: int, now: float) -> None:
        """Note that a process is ready."""
        one = self._standings[name]
        self._serving[name].add(pid)
        if one.presence is not Presence.SERVING:
            one.presence, one.since = Presence.SERVING, now

    def reason(self, name: str, why: str) -> None:
        """Note why a process of this worker is about to end."""
        self._reasons[name] = why

    def ended(self, name: str, pid: int, status: int, now: float) -> None:
        """Note the end of a process, with the status that `subprocess` tells."""
        one = self._standings[name]
        self._serving[name].discard(pid)
        one.last_end, one.ended_at, one.why = spell_status(status), now, self._reasons.pop(name, "")
        if one.presence is not Presence.GIVEN_UP and not self._serving[name]:
            # One that never served is missing since its place was first to be filled.
            one.since = now if one.presence is Presence.SERVING else one.since
            one.presence = Presence.MISSING

    def given_up(self, name: str, why: str) -> None:
        """Note that no process is started any more."""
        one = self._standings[name]
        one.presence, one.why = Presence.GIVEN_UP, why


def spell_status(status: int) -> str:
    """An exit status as `subprocess` tells it: a signal by its name, else `status 1`."""
    if status >= 0:
        return f"status {status}"
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"
