"""Wide slots: when a lone request runs on all cores of a process.

The slots of a process divide its threads. So a request that is alone there waits while most of the cores idle. A process
may have one more slot, the *wide* one, whose compiled models use all of its threads (`SlotJoined.wide`). It has prices of
its own, and is in no pool: no capacity, estimate, share or prefetch counts it. A request whose turn it is, and for which
another slot is free, runs on the wide slot instead if all of these hold:

- nothing runs in the process, and nothing else waits for its slots;
- the request is no suspect, does not run again, and its model may share calls (an audit may have found that it may not);
- it is predicted to end sooner there, by more than the requests lose that come meanwhile. Each of them shares the cores with
  the wide call. With n of them per second, they lose about K * n * s * s seconds in a wide call of s seconds.

n is counted: requests that arrived while a batch ran, by the seconds in which one did. A caller that asks one thing at a
time never meets its own calls, so n is 0 for it, however fast it asks. Of several processes each gets its part of n.

A request that comes beside a wide call begins on another slot at once, if one is free; in another process, if nothing runs
there. So nothing waits for a wide call but by the cores that it takes.

The prices of slots are those of busy processes. What a lone request gains depends on lone runs, so their ratios to the
prices are learned, one for each way and all sizes (`_LoneRuns`): where a neighbour takes the cores of a machine or leaves
them, few runs show it, while the prices of single sizes follow one by one. Now and then a lone request without a deadline
runs the other way, or a wrong price would forbid the run that corrects it.
"""

from __future__ import annotations

from itertools import islice
from math import isfinite

from shapestream.scheduling.batches import Batch
from shapestream.scheduling.model_queue import ModelQueue, Queues
from shapestream.scheduling.queueing import QUEUED, Request
from shapestream.scheduling.slots import Slot, SlotState, SlotTable

K = 0.5
"""Part of a wide call's seconds that a request loses which comes meanwhile, on average. Simulated on two cores with MiniLM's
calls: with 0 the p50 is up to 5 % longer near the peak, with 1 less is gained at 60 % of it (docs/experiments.md)."""
KEPT = 1.0 - 1.0 / 64.0
"""Part of the counts that each arrival leaves: n follows the load within about 64 requests, however long calls take."""
WEIGHT = 0.2
"""Weight of the newest lone run in the mean ratio to its price."""
MOST_RATIO = 4.0
"""The largest ratio of a run to its price that is believed, and the inverse of the smallest: one stall teaches little."""
FIRST_RUNS = 16
"""Lone requests of a model that take turns between a slot and the wide one, before anything is known of lone runs."""
TRY_EVERY = 16
"""After these, one of so many runs the other way than predicted: some five tries show that neighbours have left."""
LOOK = 64
"""Free slots among which one in an idle process is looked for, at most."""


class _LoneRuns:
    """The lone requests of one model."""

    __slots__ = ("count", "ratio", "wide_ratio")

    def __init__(self) -> None:
        self.count = 0
        self.ratio = 1.0
        """Seconds of a run with nothing beside it / its price on a slot that is not wide."""
        self.wide_ratio = 1.0
        """The same on the wide slot."""

    def took(self, busy_s: float, predicted_s: float, *, wide: bool) -> None:
        """Learn from a run that was alone from its beginning to its end."""
        ratio = min(MOST_RATIO, max(1.0 / MOST_RATIO, busy_s / predicted_s))
        if wide:
            self.wide_ratio += WEIGHT * (ratio - self.wide_ratio)
        else:
            self.ratio += WEIGHT * (ratio - self.ratio)

    def tries(self) -> bool:
        """Count a lone request, and tell whether it runs the other way than predicted."""
        self.count += 1
        return self.count % (2 if self.count <= FIRST_RUNS else TRY_EVERY) == 0


class WideSlots:
    """Chooses between a free slot and the wide slot of its process."""

    __slots__ = ("_alone", "_busy_s", "_met", "_queues", "_runs", "_slots")

    def __init__(self, queues: Queues, slots: SlotTable) -> None:
        self._queues = queues
        self._slots = slots
        self._met = 0.0
        """Requests that arrived while a batch ran; older ones count less."""
        self._busy_s = 0.0
        """Seconds in which one did, likewise."""
        self._runs: dict[str, _LoneRuns] = {}
        """By model."""
        self._alone: dict[int, int] = {}
        """By slot, the request that began there with nothing beside it."""

    def forget_model(self, model: str) -> None:
        """Forget the lone runs of a model that is gone."""
        self._runs.pop(model, None)

    def passed(self, seconds: float, arrived: int) -> None:
        """Note the time since the last event, and how many requests have arrived now. Asked before these change anything."""
        if self._slots.batches:
            self._busy_s += seconds
            self._met += arrived
        if arrived:
            kept = KEPT**arrived
            self._busy_s *= kept
            self._met *= kept

    @property
    def arrivals_per_s(self) -> float:
        """Requests per second that arrive while something runs."""
        return self._met / self._busy_s if self._busy_s > 0.0 else 0.0

    def choose(self, request: Request, queue: ModelQueue, slot: Slot) -> Slot:
        """Return the slot for a request that would begin on `slot`, which is free and whose worker has a wide slot."""
        wide = slot.worker.wide
        assert wide is not None
        if wide.state is SlotState.BUSY:
            return self._elsewhere(queue, slot)
        if not self._is_alone(request, queue, slot, wide):
            return slot
        try:
            found = self._cheaper(request, queue, slot, wide)
        except Exception:  # noqa: BLE001 - what is wrong with a price is reported when the batch is cut
            return slot
        if queue.name in self._runs:
            self._alone[found.id] = request.id
        return found

    def ran(self, batch: Batch, busy_s: float) -> None:
        """Learn from a batch that ran without preparations, on a slot whose worker has a wide one."""
        slot: Slot = batch.slot
        began_alone = self._alone.pop(slot.id, None)
        predicted_s = batch.predicted_s
        if began_alone is None or not predicted_s or self._slots.newest != batch.id:
            return
        if [began_alone] == [member.id for member in batch.members]:
            self._runs[batch.queue.name].took(busy_s, predicted_s, wide=slot.wide)

    def forget(self, slot: int) -> None:
        """Forget a slot that has left."""
        self._alone.pop(slot, None)

    def _is_alone(self, request: Request, queue: ModelQueue, slot: Slot, wide: Slot) -> bool:
        """Tell whether nothing runs in the process of a slot, and nothing else waits for it."""
        return (
            wide.state is SlotState.IDLE
            and queue.name in wide.models
            and request.state is QUEUED
            and queue.waiting == 1
            and not queue.alone
            and not request.arrival.suspect
            and all(own.batch is None for own in slot.worker.slots.values())
            and not any(
                other.waiting and other is not queue and other.sharing is queue.sharing
                for other in self._queues.waiting
            )
        )

    def _cheaper(self, request: Request, queue: ModelQueue, slot: Slot, wide: Slot) -> Slot:
        if queue.costs.on(wide.id).worker_class is queue.costs.on(slot.id).worker_class:
            return slot  # it has no prices of its own
        runs = self._runs.get(queue.name)
        if runs is None:
            runs = self._runs[queue.name] = _LoneRuns()
        narrow_s = runs.ratio * _price(request, queue, slot)
        wide_s = runs.wide_ratio * _price(request, queue, wide)
        if not (isfinite(narrow_s) and isfinite(wide_s) and narrow_s > 0.0 and wide_s > 0.0):
            return slot
        arrivals_per_s = self.arrivals_per_s / max(1, len(self._slots.workers))
        pays = narrow_s - wide_s > K * arrivals_per_s * wide_s * wide_s
        if request.arrival.deadline is None and runs.tries():
            pays = not pays
        return wide if pays else slot

    def _elsewhere(self, queue: ModelQueue, slot: Slot) -> Slot:
        """Return a free slot in whose process no wide call runs; `slot` if there is none."""
        for other in islice(self._slots.pools[queue.name].free.values(), LOOK):
            beside = other.worker.wide
            if beside is None or beside.state is not SlotState.BUSY:
                return other
        return slot


def _price(request: Request, queue: ModelQueue, slot: Slot) -> float:
    """Return the predicted seconds of a request alone on a slot, a part of its preparation included; 0.0 while unknown."""
    costs = queue.costs.on(slot.id)
    if not costs.worker_class.measured:
        return 0.0
    return costs.slowdown * costs.call(request.rows, request.own_shape).seconds
