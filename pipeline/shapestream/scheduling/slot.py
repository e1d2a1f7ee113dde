"""A slot and its worker: what runs there, and where the slot stands in the queues of its models.

A free slot stands in `free` of each of them, a busy one in their agendas: `ends`, by when its batch is predicted to end,
and `commits`, by when the next batch should be sent there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shapestream.scheduling.model_queue import ModelQueue
    from shapestream.scheduling.records import Batch

__all__ = ["Isolated", "Slot", "Worker"]


class Worker:
    """A process with some slots: what one batch does to it, it does to all that run there."""

    __slots__ = ("isolated", "killed", "name", "slots")

    def __init__(self, name: str) -> None:
        self.name = name
        self.slots: dict[int, Slot] = {}
        self.isolated: Isolated | None = None
        """Nothing new is started here but one suspect at a time; None in ordinary times."""
        self.killed = False
        """Its process is to be ended, because a batch hangs there."""

    def runs_no_longer(self, batch: Batch | None) -> None:
        """Where it is kept for suspects: this one is over, and the next may run."""
        if self.isolated is not None and self.isolated.batch is batch:
            self.isolated.batch = None

    @property
    def open(self) -> bool:
        """Whether its slots may be given any batch."""
        return self.isolated is None and not self.killed

    def __repr__(self) -> str:
        return f"<worker {self.name}: {len(self.slots)} slots{', isolated' if self.isolated else ''}>"


class Isolated:
    """What a worker that is kept for suspects runs: nothing yet, or one."""

    __slots__ = ("batch",)

    def __init__(self) -> None:
        self.batch: Batch | None = None


class Slot:
    """A place where one batch at a time runs."""

    __slots__ = (
        "aside_until",
        "batch",
        "behind",
        "closing",
        "id",
        "models",
        "owes_rest",
        "paces",
        "prefetch_s",
        "queues",
        "refusals",
        "worker",
    )

    def __init__(
        self,
        id: int,  # noqa: A002 - the name that events use
        models: frozenset[str],
        prefetch_s: float | None = None,
        worker: Worker | None = None,
    ) -> None:
        self.id = id
        self.models = models
        self.worker = Worker(f"slot {id}") if worker is None else worker
        self.worker.slots[id] = self
        self.prefetch_s = prefetch_s
        """How long a batch takes from the decision to the slot; None: nothing is sent ahead."""
        self.queues: list[ModelQueue] = []
        """The queues of those of its models that have been added so far."""
        self.batch: Batch | None = None
        """What it runs."""
        self.behind: Batch | None = None
        """What waits there for the end of `batch`; None without one."""
        self.paces: dict[str, float] = {}
        """By model: seconds here / seconds on the most common kind of slot, as far as known."""
        self.closing = False
        """It leaves when its batch is over; `queues` is empty by then."""
        self.aside_until: float | None = None
        """It gets nothing until then, since it could not run what it got."""
        self.refusals = 0
        """Batches in a row that it answered with `unavailable`."""
        self.owes_rest = False
        """It did so while another batch waited there, and rests when that one has ended."""

    def __repr__(self) -> str:
        idle = "closing" if self.closing else "aside" if self.aside_until else "free" if self.free else "kept"
        return f"<slot {self.id}: {self.batch or idle}>"

    @property
    def idle(self) -> bool:
        """Whether it could run a batch now."""
        return self.batch is None and not self.closing and self.aside_until is None

    @property
    def free(self) -> bool:
        """Whether it may be given any batch: it is idle, and its worker is neither kept for suspects nor to be killed."""
        return self.idle and self.worker.open

    def connect(self, queue: ModelQueue) -> None:
        """One of its models has a queue now."""
        self.queues.append(queue)
        if self.free:
            queue.free[self.id] = self
        elif self.batch is not None:
            queue.ends.add(self.batch.ends_at, self)
            if self.behind is None and self.batch.commit_at is not None:
                queue.commits.add(self.batch.commit_at, self)

    def expect(self, running: Batch) -> None:
        """This batch will end, and the next may be sent before that."""
        for queue in self.queues:
            queue.ends.add(running.ends_at, self)
            if running.commit_at is not None:
                queue.commits.add(running.commit_at, self)

    def forget(self, running: Batch) -> None:
        """It has ended, or nothing is sent to this slot any more."""
        for queue in self.queues:
            queue.ends.remove(running.ends_at, self)
            if running.commit_at is not None:
                queue.commits.remove(running.commit_at, self)

    def commit_again(self, running: Batch) -> None:
        """Nothing waits behind this batch any more."""
        if running.commit_at is not None:
            for queue in self.queues:
                queue.commits.add(running.commit_at, self)

    def forget_commit(self, running: Batch) -> None:
        """Nothing is sent ahead to wait for the end of this batch, for now."""
        if running.commit_at is not None:
            for queue in self.queues:
                queue.commits.remove(running.commit_at, self)
