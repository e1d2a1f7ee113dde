"""Events of worker processes and actions on them: the interface between core.py and processes.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

__all__ = [
    "Action",
    "Event",
    "GiveUp",
    "KeepWorker",
    "KillWorker",
    "ReplacementWanted",
    "RestartRequested",
    "StartWorker",
    "StopNow",
    "StopRequested",
    "TerminateWorker",
    "TimePassed",
    "WorkerExited",
    "WorkerReady",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReady:
    """A process has compiled its models and is known to the server."""

    worker: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplacementWanted:
    """A process is sound, but should be replaced by a fresh one: it has passed its memory limit."""

    worker: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerExited:
    """A process ended. `status` is negative for a signal, as `subprocess` has it."""

    worker: str
    status: int
    busy: bool = False
    """True if it ended while it ran a batch."""
    answered_at: float | None = None
    """Time of its last answer to a batch, if there was one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartRequested:
    """Replace every process by a fresh one, one after the other; try again with those that were given up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRequested:
    """Let every worker finish, within this time."""

    grace_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StopNow:
    """Do not wait for anything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimePassed:
    """`next_wakeup()` has come."""


Event: TypeAlias = (
    WorkerReady | ReplacementWanted | RestartRequested | WorkerExited | StopRequested | StopNow | TimePassed
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StartWorker:
    """Start this process."""

    worker: str
    attempt: int
    """0 for the first start, then 1, 2, ..."""
    role: str
    """The configured worker that it is: `worker` itself, or the one that it replaces."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TerminateWorker:
    """Ask this process to finish (SIGTERM)."""

    worker: str


@dataclass(frozen=True, slots=True, kw_only=True)
class KillWorker:
    """End this process now (SIGKILL)."""

    worker: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GiveUp:
    """This worker is not started again."""

    worker: str
    reason: str
    configuration: bool
    """True if its configuration is at fault, so that no worker of its kind can run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepWorker:
    """No replacement for this worker can be started; it goes on as it is."""

    worker: str
    reason: str


Action: TypeAlias = StartWorker | TerminateWorker | KillWorker | GiveUp | KeepWorker
