"""The worker processes that were started for this server: their names, and when one must be killed.

The owner of the processes tells how each ends. Of a worker that dialled in, the server knows only its messages.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from shapestream.telemetry.presence import WorkerPresence

SILENCES_TO_KILL = 10
"""Multiple of `worker_silence_s` after which a silent process of this server is killed, and so replaced.

It is lost already, and its batches ran elsewhere. One that was only stopped for a while may come back before that.
"""


class ProcessOwner(Protocol):
    """The starter of worker processes for this server. Its calls return at once."""

    def owns(self, worker: str) -> bool:
        """Tell whether the process that greets by this name is one of its own, and its end was not told yet."""

    def kill(self, worker: str, reason: str) -> None:
        """Kill that process. Its end is reported like any other."""

    @property
    def presences(self) -> Mapping[str, WorkerPresence]:
        """Return the presence of each worker that it keeps running, by name."""

    def memory_bytes(self) -> Mapping[str, int]:
        """Return the bytes of RAM of their processes, by the same names."""


class OwnProcesses:
    """The worker processes of this server, as the workers' port knows them; none without an owner."""

    def __init__(self, silence_s: float) -> None:
        self.owner: ProcessOwner | None = None
        """The starter of the processes; None if this server has none."""
        self._silence_s = silence_s
        self._silent_since: dict[str, float] = {}
        """Times at which processes were lost for their silence, by name."""
        self._refused: dict[str, str] = {}
        """Reasons why greetings were refused, by name, of processes that have not ended yet."""

    def own(self, name: str) -> bool:
        """Tell whether the worker of this name is one of these processes."""
        return self.owner is not None and self.owner.owns(name)

    def greeted(self, name: str) -> None:
        """Forget the silence of a process, since it has greeted again."""
        self._silent_since.pop(name, None)

    def refused(self, name: str, why: str) -> None:
        """Keep the reason why a greeting was refused, until the process ends."""
        if self.own(name):
            self._refused[name] = why

    def ended(self, name: str) -> str:
        """Forget a process that has ended. Returns why its greeting was refused; empty if it was not."""
        self._silent_since.pop(name, None)
        return self._refused.pop(name, "")

    def silent(self, name: str, now: float) -> None:
        """Count the silence of a process from now on."""
        if self.own(name):
            self._silent_since[name] = now

    def kill_silent(self, now: float) -> None:
        """Kill the processes that stayed silent."""
        for name, since in list(self._silent_since.items()):
            if self.owner is None or not self.owner.owns(name):
                del self._silent_since[name]
            elif now - since > SILENCES_TO_KILL * self._silence_s:
                del self._silent_since[name]
                self.owner.kill(name, f"it was silent for {now - since:.0f} s")
