"""Which slots there are, what each of them runs, and which are free for which model.

A slot is free unless it runs a batch, is put aside, or closes, or its worker is kept for suspects (isolation.py) or to be
killed. It is put aside when it could not run what it was given (`unavailable`): twice as long each time in a row, so that
a broken slot, which fails quickly, does not eat up the attempts of everybody's requests while sound slots are busy.

A busy slot may hold a second batch, which waits behind the one that runs and takes its place when that is over.
"""

from __future__ import annotations

from shapestream.scheduling.events import ContractError
from shapestream.scheduling.model_queue import ModelQueue
from shapestream.scheduling.records import Batch, Hang
from shapestream.scheduling.slot import Isolated, Slot, Worker

__all__ = ["SlotTable", "aside_s"]

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
