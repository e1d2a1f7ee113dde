"""The supervisor's own records: how patient it is, where a worker stands, and what it remembers of one."""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass, field

__all__ = ["RestartPolicy", "State", "WorkerRecord"]


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
    blameless_backoff_max_s: float = 1.0
    """The longest wait after a crash in the middle of a batch, of a worker that had answered others within the window:
    what it ran is to blame, and that is dealt with elsewhere; it is not counted towards giving up."""
    window_s: float = 120.0
    """A crash is forgotten after so long."""
    healthy_s: float = 3.0
    """A worker that served for so long is sound: its earlier crashes are forgotten."""
    replace_after_starts: float = 4.0
    """A process is replaced only when it has served so many times as long as it took to start: however low a memory
    limit is, most of the time goes to serving."""
    drain_s: float = 30.0
    """How long a process that is replaced may take to finish what it runs."""


class State(enum.Enum):
    """Where one worker stands; the diagram above shows how it moves."""

    IDLE = "idle"
    RUNNING = "running"
    WAITING = "waiting"
    STOPPING = "stopping"
    STOPPED = "stopped"
    GIVEN_UP = "given up"


@dataclass(slots=True, eq=False)
class WorkerRecord:
    """One worker: a process that is kept running, and what happened to it so far."""

    name: str
    role: str
    """The worker that it is, or whose replacement it is or was: the same command line."""
    state: State = State.IDLE
    starts: int = 0
    wake_at: float | None = None
    """When to restart (WAITING), or to kill (STOPPING)."""
    started_at: float = 0.0
    ready_at: float | None = None
    """Since when its present process serves."""
    crashes: deque[float] = field(default_factory=deque)
    """Times of the crashes that are not forgotten yet; never longer than `max_crashes`."""
    answered_at: float | None = None
    """When one of its processes last answered a batch, as far as that is known."""
    blameless: deque[float] = field(default_factory=lambda: deque(maxlen=64))
    """Times of the crashes that what it ran is to blame for."""
    successor: WorkerRecord | None = None
    """The process that is to take over, once there is one."""
    irreplaceable: bool = False
    """A replacement was given up once."""
    replace_soon: bool = False
    """It is to be replaced because somebody asked for it: however short it has served."""
