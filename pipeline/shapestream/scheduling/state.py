"""The state of the scheduler: requests, batches, slots and workers, and every change of their states.

Events and actions are frozen because they cross a border. These are mutable and slotted, because only the scheduler
sees them and each request pays for every attribute that is written.

A slot is free unless it runs a batch, rests, or closes, or its worker is reserved for suspects (recovery.py) or
condemned. It rests after it could not run its batch (`unavailable`), twice as long each time in a row: a broken slot
fails quickly, and must not use up the attempts of all requests while sound slots are busy.

A busy slot may hold a second batch, queued behind the one that runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from math import inf
from typing import TYPE_CHECKING, Final

from shapestream.scheduling.events import ContractError

if TYPE_CHECKING:
    from shapestream.scheduling.queueing import Bucket, ModelQueue


class State(IntEnum):
    """Where a request is. The order matters: `LazyHeap` asks whether a request is still before some state."""

    QUEUED = 0
    """In a lane, free to be cut into any batch of it."""
    RERUN = 1
    """Waits at the front, in a group that is fixed, because its batch failed or was lost."""
    SUSPECT = 2
    """Waits at the front, to be run where nothing else runs, because a process died, or hung, that ran it."""
    RUNNING = 3
    DONE = 4
    """It had its one ending."""


# Looking a member up on an enum costs three times a global; these are compared on the hot path.
QUEUED: Final = State.QUEUED
RERUN: Final = State.RERUN
SUSPECT: Final = State.SUSPECT
RUNNING: Final = State.RUNNING
DONE: Final = State.DONE


class Request:
    """One admitted request, from admission to its ending."""

    __slots__ = (
        "arrived",
        "batch",
        "bucket",
        "client",
        "cost_s",
        "deadline",
        "failed_s",
        "id",
        "losses",
        "nbytes",
        "order",
        "priority",
        "promised",
        "queue",
        "rank",
        "rows",
        "shape",
        "share_s",
        "state",
        "tag",
        "turn",
    )

    batch: Batch | None
    bucket: Bucket

    def __init__(
        self,
        id: int,  # noqa: A002 - the name that events and actions use
        client: int,
        queue: ModelQueue,
        rows: int,
        shape: tuple[int, ...],
        nbytes: int,
        deadline: float | None,
        priority: int,
        arrived: float,
        rank: float,
        order: int,
        tag: float = 0.0,
        cost_s: float = 0.0,
        share_s: float = 0.0,
        promised: bool = False,
    ) -> None:
        self.id = id
        self.client = client
        self.queue = queue
        self.rows = rows
        self.shape = shape
        self.nbytes = nbytes
        self.deadline = deadline
        self.priority = priority
        self.arrived = arrived
        self.rank = rank
        """Its place: the smallest goes first, of equals the first by `order`. See fairness.py."""
        self.turn = rank
        """When it is its turn, on the scale of the ranks: its rank, unless an urgent request of its client took that."""
        self.order = order
        self.tag = tag
        """Its start tag: the rank without the priority."""
        self.cost_s = cost_s
        """Predicted seconds of one slot, in good company; 0.0 while nothing is measured."""
        self.share_s = share_s
        """The same of all slots of its model; nominal while nothing is measured."""
        self.promised = promised
        """Whether it was estimated to meet its deadline when it was admitted."""
        self.losses = 0
        self.failed_s = 0.0
        """Shares of the batches of several that failed with it: all that ran in vain, if it was to blame."""
        self.state = QUEUED
        self.batch = None

    @property
    def empty(self) -> bool:
        """Whether it has no elements, whatever it claims to be along the other dimensions."""
        return not self.rows or 0 in self.shape

    def __repr__(self) -> str:
        return f"<request {self.id}: {self.rows} x {self.shape}, {self.state.name.lower()}>"


class Hang(IntEnum):
    """How far things have come with a batch that runs much longer than its like; see recovery.py."""

    NOT = 0
    CANCELLED = 1
    """Its slot was asked to stop it."""
    KILLED = 2
    """It was asked to end the process."""
    GIVEN_UP = 3
    """Not even that helped: its members were answered, and its slot is lost."""


class Batch:
    """What runs on a slot at once, or waits there behind what runs."""

    __slots__ = (
        "accused",
        "alone",
        "cancelled",
        "commit_at",
        "ends_at",
        "guess_s",
        "hang",
        "hang_at",
        "id",
        "ids",
        "members",
        "predicted_s",
        "queue",
        "recalled",
        "sizes",
        "slot",
        "started",
        "wanted",
    )

    def __init__(
        self,
        id: int,  # noqa: A002 - the name that events and actions use
        slot: Slot,
        queue: ModelQueue,
        members: Sequence[Request],
        sizes: tuple[int, ...],
        predicted_s: float | None = None,
    ) -> None:
        self.id = id
        self.slot = slot
        self.queue = queue
        self.members = members
        self.ids = tuple([request.id for request in members])
        self.sizes = sizes
        self.wanted = len(members)
        """Members that somebody still waits for."""
        self.predicted_s = predicted_s
        """Seconds of this slot; None while nothing is measured."""
        self.guess_s = predicted_s or 0.0
        """The same without the bound for sizes beyond all that was measured; for the hang watch alone."""
        self.started: float | None = None
        """Since when it is the one that its slot runs; None while it waits behind another."""
        self.ends_at = 0.0
        """When it is predicted to end; when it started, where nothing is measured. Set at the start."""
        self.commit_at: float | None = None
        """When the next batch should be sent to its slot; None: not before it has ended. Set at the start."""
        self.recalled = False
        """Its slot was asked to give it back."""
        self.alone = False
        """It is one suspect, and nothing else runs in its worker: whatever happens there, it is to blame."""
        self.accused = False
        """And a process died, or hung, before that may have run it: if this one does, too, it is poisoned."""
        self.cancelled = False
        """Its slot was asked to stop it."""
        self.hang = Hang.NOT
        self.hang_at = inf
        """When it has run so long that the next step is taken against it; set at the start."""

    def __repr__(self) -> str:
        return f"<batch {self.id} on slot {self.slot.id}: {self.wanted} of {len(self.ids)} wanted>"

    def release_members(self) -> None:
        """The batch is over. Members point at their batch; this cycle must not be left to the collector."""
        self.members = ()


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


EARLY = 0.12
"""The share of its predicted time that a batch may end early and still find the next one at its slot.

Measured (docs/performance.md): of a thousand batches of MiniLM four in ten ended before their successor, sent when the
prediction said, was there; with this margin one in ten. What is sent earlier is planned with less to choose from.
"""
MIN_ASIDE_S = 0.1
"""The first pause, at least: a slot that recovers at once costs little."""
MAX_ASIDE_S = 30.0
"""No pause is longer, so that a slot whose device came back is found again."""
CALLS_ASIDE = 2.0
"""The first pause in calls of the model: by then another slot has become free and taken what this one refused."""


def aside_s(refusals: int, call_s: float | None) -> float:
    """How long a slot is put aside that has answered so many batches in a row with `unavailable`."""
    first_s = max(MIN_ASIDE_S, CALLS_ASIDE * (call_s or 0.0))
    return float(min(MAX_ASIDE_S, first_s * 2.0 ** min(refusals - 1, 32)))


class SlotTable:
    """The slots: they come, run batches, rest, are kept for suspects, and go."""

    __slots__ = ("ahead_count", "aside", "batches", "free_count", "slots", "workers")

    def __init__(self) -> None:
        self.batches: dict[int, Batch] = {}
        """All that run, or are queued behind another one."""
        self.slots: dict[int, Slot] = {}
        self.workers: dict[str, Worker] = {}
        self.free_count = 0
        self.ahead_count = 0
        """Batches that wait behind another one."""
        self.aside: dict[int, Slot] = {}
        """Those that are put aside; few, if any."""

    # ------------------------------------------------------------ coming and going

    def join(
        self,
        id: int,  # noqa: A002 - the name that events use
        models: frozenset[str],
        queues: dict[str, ModelQueue],
        prefetch_s: float | None = None,
        process: str = "",
    ) -> None:
        """Adds a slot of the named process. Models that are not known yet are connected when they are added."""
        if id in self.slots:
            raise ContractError(f"slot {id} has joined already")
        process = process or f"slot {id}"
        worker = self.workers.setdefault(process, Worker(process))
        slot = self.slots[id] = Slot(id, models, prefetch_s, worker)
        self.free_count += slot.free
        for name in sorted(models & queues.keys()):
            self._connect(slot, queues[name])

    def connect_model(self, queue: ModelQueue) -> None:
        """Connects a model that was added after slots that name it had joined."""
        for slot in self.slots.values():
            if queue.profile.name in slot.models and not slot.closing:
                self._connect(slot, queue)

    def _connect(self, slot: Slot, queue: ModelQueue) -> None:
        if slot.queues and slot.queues[0].shares is not queue.shares:
            slot.queues[0].shares.absorb(queue.shares)
        queue.add_pace(1.0)  # nothing is known of its speed yet
        queue.slot_count += 1
        slot.connect(queue)

    def leave(self, id: int) -> tuple[Batch | None, Batch | None]:  # noqa: A002
        """Removes a slot; what it ran and what waited behind that are returned. Unknown slots are ignored."""
        slot = self.slots.get(id)
        if slot is None:
            return None, None
        self.close(id)
        del self.slots[id]
        worker = slot.worker
        del worker.slots[id]
        if not worker.slots:
            del self.workers[worker.name]
        worker.runs_no_longer(slot.batch)
        if worker.killed and any(not other.closing for other in worker.slots.values()):
            self.spare(worker)  # a process that has gone as a whole has closed all its slots before
        behind = slot.behind
        if behind is not None:
            self._unqueue(slot, behind)
            slot.behind = None
            del self.batches[behind.id]
        if slot.batch is not None:
            del self.batches[slot.batch.id]
        return slot.batch, behind

    def close(self, id: int) -> Slot | None:  # noqa: A002
        """Lets a slot get no more batches; what it has stays. The slot, unless it is unknown or closing already."""
        slot = self.slots.get(id)
        if slot is None or slot.closing:
            return None
        self._hide(slot)
        self.aside.pop(id, None)
        slot.aside_until = None
        slot.closing = True
        if slot.batch is not None:
            slot.forget(slot.batch)
        for queue in slot.queues:
            queue.slot_count -= 1
            queue.remove_pace(slot.paces.get(queue.profile.name, 1.0))
        slot.queues.clear()
        return slot

    # ------------------------------------------------------------ batches

    def occupy(self, slot: Slot, batch: Batch, now: float) -> None:
        """A free slot starts a batch, or one that is kept for suspects starts one."""
        self.batches[batch.id] = batch
        self._hide(slot)
        self._begin(slot, batch, now)

    def send_ahead(self, slot: Slot, batch: Batch) -> None:
        """A batch will wait behind the one that this slot runs."""
        running = slot.batch
        assert running is not None
        assert slot.behind is None
        self.batches[batch.id] = batch
        slot.behind = batch
        self.ahead_count += 1
        slot.forget_commit(running)
        batch.queue.ahead.add(running.ends_at, slot)

    def recall(self, slot: Slot, batch: Batch) -> None:
        """The slot is asked to give back what waits there."""
        running = slot.batch
        assert running is not None
        batch.recalled = True
        batch.queue.ahead.remove(running.ends_at, slot)
        batch.queue.recalling += 1

    def expect_back(self, slot: Slot) -> Batch | None:
        """What a slot runs is asked for, since it cannot run it; it is returned, unless it has been asked for before."""
        running = slot.batch
        if running is None or running.recalled:
            return None
        running.recalled = True
        slot.forget_commit(running)
        running.commit_at = None
        return running

    def end(self, batch: Batch, now: float) -> Batch | None:
        """A batch is over: its slot is free, or runs what waited behind it, or has nothing waiting any more.

        What waited is returned if it runs now.
        """
        slot = batch.slot
        del self.batches[batch.id]
        slot.worker.runs_no_longer(batch)
        if slot.behind is batch:
            self._unqueue(slot, batch)
            slot.behind = None
            if slot.batch is not None:
                slot.commit_again(slot.batch)
            return None
        slot.forget(batch)
        behind, slot.behind = slot.behind, None
        if behind is not None:
            self._unqueue(slot, behind, batch)
            self._begin(slot, behind, now)
        else:
            slot.batch = None
            self._show(slot)
        if slot.worker.killed:
            self.spare(slot.worker)  # whoever ends the process regardless lets it close first
        return behind

    def _begin(self, slot: Slot, batch: Batch, now: float) -> None:
        slot.batch = batch
        batch.started = now
        batch.ends_at = now + (batch.predicted_s or 0.0)
        # Behind a batch that may come back nothing is sent: nobody knows when the slot will be free.
        expected = batch.predicted_s is not None and not batch.recalled and slot.worker.open
        if expected and slot.prefetch_s is not None and batch.predicted_s is not None:
            batch.commit_at = max(now, batch.ends_at - slot.prefetch_s - EARLY * batch.predicted_s)
        slot.expect(batch)

    def _unqueue(self, slot: Slot, behind: Batch, running: Batch | None = None) -> None:
        """A batch no longer waits behind the one that runs, or ran until now."""
        self.ahead_count -= 1
        if behind.recalled:
            behind.queue.recalling -= 1
        else:
            ahead_of = running or slot.batch
            assert ahead_of is not None
            behind.queue.ahead.remove(ahead_of.ends_at, slot)

    # ------------------------------------------------------------ speed

    def set_pace(self, slot: Slot, queue: ModelQueue, pace: float) -> None:
        """A slot takes so many times what the most common kind takes for this model."""
        name = queue.profile.name
        queue.remove_pace(slot.paces.get(name, 1.0))
        queue.add_pace(pace)
        slot.paces[name] = pace

    # ------------------------------------------------------------ rests

    def put_aside(self, slot: Slot, until: float) -> None:
        """Lets an idle slot rest until then."""
        self._hide(slot)
        slot.aside_until = until
        self.aside[slot.id] = slot

    def take_back(self, now: float) -> None:
        """Frees the slots that have rested long enough, in the order in which their time came."""
        due = [
            (slot.aside_until, slot)
            for slot in self.aside.values()
            if slot.aside_until is not None and slot.aside_until <= now
        ]
        for _, slot in sorted(due, key=lambda pair: pair[0]):
            del self.aside[slot.id]
            slot.aside_until = None
            self._show(slot)

    def next_return(self) -> float | None:
        """When the first slot has rested long enough."""
        return min(
            (slot.aside_until for slot in self.aside.values() if slot.aside_until is not None), default=None
        )

    # ------------------------------------------------------------ isolation

    def isolate(self, worker: Worker) -> list[Batch]:
        """Keeps a worker for suspects: it gets nothing else. What waits there behind other batches should be recalled."""
        for slot in worker.slots.values():
            self._hide(slot)
        worker.isolated = Isolated()
        behind = [self.send_no_more(slot) for slot in worker.slots.values()]
        return [batch for batch in behind if batch is not None]

    def release(self, worker: Worker) -> None:
        """No suspect needs the worker any more."""
        worker.isolated = None
        self._show_all(worker)

    def condemn(self, worker: Worker) -> None:
        """Its process is about to be ended: it gets nothing else."""
        for slot in worker.slots.values():
            self._hide(slot)
            self.send_no_more(slot)
        worker.killed = True

    def spare(self, worker: Worker) -> None:
        """Nothing is left to end its process for, and it serves on with what slots it has left."""
        if worker.killed and not any(
            slot.batch is not None and slot.batch.hang is Hang.KILLED for slot in worker.slots.values()
        ):
            worker.killed = False
            self._show_all(worker)

    def give_up(self, slot: Slot) -> None:
        """What a slot runs will not end: it is lost, and the rest of its worker serves on."""
        slot.worker.runs_no_longer(slot.batch)
        self.spare(slot.worker)
        self.close(slot.id)

    def send_no_more(self, slot: Slot) -> Batch | None:
        """Lets nothing be sent ahead to wait for the batch that a slot runs. What waits there and should be recalled."""
        running = slot.batch
        if running is None:
            return None
        if slot.behind is None:
            slot.forget_commit(running)
        running.commit_at = None
        return None if slot.behind is None or slot.behind.recalled else slot.behind

    def _show_all(self, worker: Worker) -> None:
        for slot in worker.slots.values():
            self._show(slot)

    def _show(self, slot: Slot) -> None:
        """It can be given something, if nothing else is in the way."""
        if slot.free:
            self.free_count += 1
            for queue in slot.queues:
                queue.free[slot.id] = slot

    def _hide(self, slot: Slot) -> None:
        """It is given nothing from now on. To be called before that which makes it so."""
        if slot.free:
            self.free_count -= 1
            for queue in slot.queues:
                del queue.free[slot.id]
