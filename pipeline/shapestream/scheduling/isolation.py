"""Suspects: requests whose process died while it may have run them, and the last attempts of those that were lost time
and again; and a worker for each to run alone in.

What kills a process takes everything along that runs there, so nobody is to blame who was not alone. A suspect therefore
waits until some worker is empty, and while it runs nothing else is started on any of that worker's slots. If the process
dies again, it was this request; if not, it gets its answer like any other. Suspects go before everything else; the
worker that is emptied for them is the only one that gets less work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from shapestream.scheduling.actions import Action, StartBatch
from shapestream.scheduling.ledger import Ledger
from shapestream.scheduling.model_queue import ModelQueue
from shapestream.scheduling.records import Hang, Request
from shapestream.scheduling.slot import Slot, Worker
from shapestream.scheduling.slots import SlotTable

__all__ = ["Isolation"]

Start: TypeAlias = Callable[[ModelQueue, Slot, float, list[Action]], StartBatch]


class Isolation:
    """Chooses workers for suspects, empties them, and lets them go when no suspect is left for them."""

    __slots__ = ("_ledger", "_slots", "_start", "isolated", "suspected")

    def __init__(self, ledger: Ledger, slots: SlotTable, start: Start) -> None:
        """`start` runs the first suspect of a model on a slot."""
        self._ledger = ledger
        self._slots = slots
        self._start = start
        self.suspected: dict[str, ModelQueue] = {}
        """Models with suspects that wait; one that no longer has any is dropped at the next look."""
        self.isolated: dict[str, Worker] = {}
        """The workers that are kept for suspects, whether they run one or are still being emptied."""

    def suspect(self, request: Request, *, accused: bool) -> None:
        """This request waits to be run alone. `accused`: a process died, or hung, that may have run it."""
        queue = request.queue
        queue.put_suspect(request, accused=accused)
        self.suspected[queue.profile.name] = queue

    def run(self, now: float, actions: list[Action]) -> None:
        """Starts the suspects that can be started, and keeps as many workers for them as is right."""
        for worker in list(self.isolated.values()):
            self._use(worker, now, actions)
        for queue in self._in_order():
            while queue.suspect_count:
                emptied = self._being_emptied(queue)
                chosen = self.choose(queue, now, emptied)
                if chosen is None:
                    break
                if emptied is not None:
                    self._let_go(emptied)
                self.isolated[chosen.name] = chosen
                for batch in self._slots.isolate(chosen):
                    reason = f"worker {chosen.name} is kept for a suspect"
                    actions.append(self._ledger.recall(batch, now, reason))
                self._use(chosen, now, actions)

    def _in_order(self) -> list[ModelQueue]:
        """The models with suspects, the one whose suspect goes first before the others."""
        for name in [name for name, queue in self.suspected.items() if not queue.suspect_count]:
            del self.suspected[name]
        return sorted(self.suspected.values(), key=_first_turn)

    def _use(self, worker: Worker, now: float, actions: list[Action]) -> None:
        """Runs the next suspect in a worker that is empty; lets it go if there is none, or it could not run it."""
        assert worker.isolated is not None
        if worker.isolated.batch is not None:
            return
        places = [
            (_first_turn(queue), slot)
            for slot in _usable(worker)
            for queue in slot.queues
            if queue.suspect_count
        ]
        if not places:
            self._let_go(worker)
        elif all(slot.batch is None or slot.batch.hang is Hang.GIVEN_UP for slot in worker.slots.values()):
            turn, slot = min(places, key=lambda place: place[0])
            queue = next(queue for queue in slot.queues if queue.suspect_count and _first_turn(queue) == turn)
            actions.append(self._start(queue, slot, now, actions))
            worker.isolated.batch = slot.batch

    def _let_go(self, worker: Worker) -> None:
        del self.isolated[worker.name]
        self._slots.release(worker)

    def _being_emptied(self, queue: ModelQueue) -> Worker | None:
        """The worker that will soon be free for a suspect of this model, if there is one."""
        for worker in self.isolated.values():
            if worker.isolated is not None and worker.isolated.batch is None and _serves(worker, queue):
                return worker
        return None

    def choose(self, queue: ModelQueue, now: float, instead_of: Worker | None = None) -> Worker | None:
        """The worker to keep for suspects of this model; None if none can be, or enough are kept already.

        The one that will be empty first. At most half of all are kept at a time, and one after which some model would
        have no slot left only if there is no other, and alone. `instead_of` one that is still being emptied, only one
        that is empty now, such as a worker that has just come.
        """
        workers = self._slots.workers
        kept = [worker for worker in self.isolated.values() if worker is not instead_of]
        if len(kept) >= max(1, len(workers) // 2):
            return None
        able = [
            worker
            for worker in workers.values()
            if worker.isolated is None
            and _serves(worker, queue)
            and (instead_of is None or all(slot.batch is None for slot in worker.slots.values()))
        ]
        harmless = [worker for worker in able if not _starves(worker, kept)]
        if not harmless and (kept or (instead_of is not None and not _starves(instead_of, kept))):
            return None
        return min(harmless or able, key=lambda worker: _empty_in_s(worker, now), default=None)


def _starves(worker: Worker, kept: Sequence[Worker]) -> bool:
    """Whether some model of this worker would have no slot outside it and those that are kept."""
    held = [slot for other in (*kept, worker) for slot in other.slots.values()]
    models = {queue.profile.name: queue for slot in worker.slots.values() for queue in slot.queues}
    return any(sum(queue in slot.queues for slot in held) >= queue.slot_count for queue in models.values())


def _first_turn(queue: ModelQueue) -> tuple[float, int]:
    first = queue.next_suspect()
    assert first is not None
    return first.turn, first.order


def _usable(worker: Worker) -> list[Slot]:
    """The slots that may be given something once they are idle."""
    if worker.killed:
        return []
    return [slot for slot in worker.slots.values() if not slot.closing and slot.aside_until is None]


def _serves(worker: Worker, queue: ModelQueue) -> bool:
    return any(queue in slot.queues for slot in _usable(worker))


def _empty_in_s(worker: Worker, now: float) -> float:
    """In how many seconds it is predicted to be empty; a batch that is late already is taken to stay as late again."""
    seconds = [0.0]
    for slot in worker.slots.values():
        if slot.batch is not None:
            behind_s = 0.0 if slot.behind is None else slot.behind.predicted_s or 0.0
            seconds.append(abs(slot.batch.ends_at - now) + behind_s)
    return max(seconds)
