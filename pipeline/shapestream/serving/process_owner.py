"""Processes that were started beside the server: who owns them, and what is said between owner and server.

Of a worker that dialled in the server knows only what it says. Of one whose process it owns through somebody, it
learns at once when that has ended and how, and it can have it ended.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

__all__ = ["LastState", "ProcessOwner"]


class ProcessOwner(Protocol):
    """Whoever started worker processes for this server. Its calls return at once."""

    def owns(self, worker: str, pid: int) -> bool:
        """Whether this worker's process is one of its own, and its end has not been told yet."""

    def kill(self, worker: str, pid: int, reason: str) -> None:
        """Ends that process, which does what it should not; its end is told like any other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LastState:
    """What the server knows of a worker whose process has ended."""

    busy: bool = False
    """Whether it had batches that it had not answered."""
    answered_at: float | None = None
    """When it last reported a batch that had run, if it ever did: seconds of trio's clock."""
