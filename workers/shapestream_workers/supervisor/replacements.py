"""Who is to be replaced, in which order, and when: one at a time over all workers.

So no more than one process is there in addition, and the others, and the old one itself until the new one is ready,
go on serving: a model is never without the processes that serve it.
"""

from __future__ import annotations

from itertools import count

from shapestream_workers.supervisor.records import RestartPolicy, State, WorkerRecord

__all__ = ["Replacements"]


class Replacements:
    """The processes that are to be replaced. At most one of them has its successor already."""

    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        self._wanting: list[WorkerRecord] = []
        self._numbers = count(1)

    def want(self, old: WorkerRecord) -> None:
        """Puts a process at the end of the line. Asking again changes nothing."""
        if old.state is State.RUNNING and old not in self._wanting and not old.irreplaceable:
            self._wanting.append(old)

    def demand(self, old: WorkerRecord) -> None:
        """The same for somebody who asks, and may know why it should work by now: without a time to serve before."""
        if old.state is State.RUNNING and old.successor is None:
            old.irreplaceable, old.replace_soon = False, True
            self.want(old)

    def forget(self, worker: WorkerRecord) -> None:
        """Its process has ended, or goes on as it is."""
        worker.replace_soon = False
        if worker in self._wanting:
            self._wanting.remove(worker)

    def next_successor(self, now: float) -> WorkerRecord | None:
        """A new process to be started beside the one that it replaces, if it is time for one."""
        for old in self._free():
            at = self._earliest(old)
            if at is not None and at <= now:
                old.successor = WorkerRecord(f"{old.role}+{next(self._numbers)}", old.role)
                return old.successor
        return None

    def next_time(self) -> float | None:
        """When `next_successor` will have one, if nothing happens before."""
        return min((at for at in map(self._earliest, self._free()) if at is not None), default=None)

    def predecessor(self, new: WorkerRecord) -> WorkerRecord | None:
        """The process that this one is to replace, as long as that is there."""
        return next((old for old in self._wanting if old.successor is new), None)

    def _free(self) -> list[WorkerRecord]:
        """Those that may come next; none while one is being replaced."""
        return [] if any(old.successor is not None for old in self._wanting) else self._wanting

    def _earliest(self, old: WorkerRecord) -> float | None:
        """When it has served for long enough; None before it is ready."""
        if old.ready_at is None:
            return None
        if old.replace_soon:
            return old.ready_at
        return old.ready_at + self._policy.replace_after_starts * (old.ready_at - old.started_at)
