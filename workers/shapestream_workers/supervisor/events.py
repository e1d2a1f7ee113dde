"""What happens to worker processes, and what to do about it: the words between core.py and processes.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

__all__ = [
    "Action",
    "Event",
    "GiveUp",
    "KillWorker",
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
class WorkerExited:
    """A process ended. `status` is negative for a signal, as `subprocess` has it."""

    worker: str
    status: int


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


Event: TypeAlias = WorkerReady | WorkerExited | StopRequested | StopNow | TimePassed


@dataclass(frozen=True, slots=True, kw_only=True)
class StartWorker:
    """Start this process."""

    worker: str
    attempt: int
    """0 for the first start, then 1, 2, ..."""


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
    """Whether its configuration is at fault, so that no worker of its kind can ever run."""


Action: TypeAlias = StartWorker | TerminateWorker | KillWorker | GiveUp
