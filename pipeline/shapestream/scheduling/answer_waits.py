"""How long a free slot waits for the requests that follow the answers it has just given.

Clients that keep a number of requests in flight send the next ones a round trip after their answers. If the slot starts at
once with the queued requests, the new ones wait for a whole call. So the requests in flight part into two waves, and a slot
that never waits does not join them again.

A slot that has just answered a batch waits if all of these hold:

- The queued rows and as many rows as were answered take less time in one call than in two, by prediction. The slot waits
  for at most `LONGEST_WAIT` of the time saved, and of the call that it answered. Where seconds are linear, no slot waits.
- After the answers that were watched last, half as many rows came within that time (`Returns`). Watching holds up no slot.
  So where requests do not follow answers, one wait in vain is followed by none.
- No member of the batch that could start would miss its deadline.
- Every free slot of the model has just answered, and no request is to run again. A slot that has idled is not held back.

The wait ends with its time, when as many rows have come as were answered, or when a batch would be full. It also ends when
another slot is free, or when a request comes that has no time for it. A batch that would wait is not prefetched. A model
with `max_delay_s` waits for that time instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from math import isfinite

from shapestream.scheduling.cost_grid import Sizes, elements_of
from shapestream.scheduling.deadlines import Deadlines
from shapestream.scheduling.events import CutReason
from shapestream.scheduling.model_queue import Awaited, ModelQueue
from shapestream.scheduling.planner import Plan, plan_batch
from shapestream.scheduling.queueing import RUNNING, Request
from shapestream.scheduling.slots import Slot, SlotPool
from shapestream.scheduling.worker_costs import WorkerCosts

LONGEST_WAIT = 1 / 8
"""Longest wait of a free slot, as a part of the seconds that sharing a call is predicted to save (docs/decisions.md)."""
MOST_SLOTS = 8
"""Largest number of free slots of a model that wait; all are looked at. Where more are free, requests seldom wait."""


class AnswerWaits:
    """Decides which free slots wait for requests that follow answers. It is asked while they do (`Returns.after_s`)."""

    __slots__ = ("_deadlines", "_pools")

    def __init__(self, deadlines: Deadlines, pools: Mapping[str, SlotPool]) -> None:
        self._deadlines = deadlines
        self._pools = pools

    def is_awaited(self, anchor: Request, queue: ModelQueue, slot: Slot, now: float) -> bool:
        """Tell whether a free slot waits before it takes the request whose turn it is; if so, its queue notes the wait."""
        returns = queue.returns
        if queue.awaited is not None or (last := slot.answered) is None:
            return False
        name = queue.name
        free = [other.answered for other in islice(self._pools[name].free.values(), MOST_SLOTS + 1)]
        answered = [one for one in free if one is not None and one.model == name]
        if len(answered) < len(free) or len(free) > MOST_SLOTS:
            return False
        arrived = returns.arrived_rows - min([one.arrived_rows for one in answered])
        missing = sum([one.rows for one in answered]) - arrived
        if missing <= 0:
            return False
        until = min([one.at for one in answered])
        until += self._worth_s(anchor, queue, slot, missing, last.shape, last.ran_s, now)
        if until <= now:
            return False
        queue.awaited = Awaited(until, min(queue.rows + missing, queue.profile.max_batch))
        return True

    def will_be_awaited(self, anchor: Request, queue: ModelQueue, slot: Slot) -> bool:
        """Tell whether a slot will wait when its batch is over, before it takes the request whose turn it is now."""
        batch = slot.batch
        assert batch is not None
        if batch.queue is not queue:
            return False
        rows = sum([request.rows for request in batch.members if request.state is RUNNING])
        ran_s = batch.ends_at - batch.started
        return self._worth_s(anchor, queue, slot, rows, batch.sizes[1:], ran_s, batch.ends_at) > 0.0

    def _worth_s(
        self,
        anchor: Request,
        queue: ModelQueue,
        slot: Slot,
        rows: int,
        shape: Sizes,
        ran_s: float,
        starts_at: float,
    ) -> float:
        """Return the seconds for which a slot waits for so many rows; 0.0 if it does not wait.

        `shape`, `ran_s`: of the call that was answered. `starts_at`: when the slot could start without these rows.
        """
        after_s = queue.returns.after_s
        if (
            LONGEST_WAIT * ran_s < after_s
            or queue.delay_s
            or queue.alone
            or anchor.empty
            or anchor.arrival.suspect
        ):
            return 0.0
        try:
            costs = queue.costs.on(slot.id)
            slowdown = costs.slowdown
            cut = plan_batch(anchor, queue, costs, Plan(), slowdown=slowdown, starts_at=starts_at)
            saved = slowdown * saved_s(cut.rows, cut.largest, rows, shape, costs, queue.padded)
        except Exception:  # noqa: BLE001 - it goes now, and what is wrong is reported when its batch is cut
            return 0.0
        worth_s = LONGEST_WAIT * min(saved, ran_s)
        if cut.reason is not CutReason.COST or worth_s < after_s:
            return 0.0
        in_time = self._deadlines.allow(cut.members, starts_at + worth_s, cut.seconds * slowdown)
        return worth_s if in_time else 0.0


def saved_s(
    rows: int, shape: Sizes, more_rows: int, more_shape: Sizes, costs: WorkerCosts, paddable: Sequence[bool]
) -> float:
    """Return the predicted seconds that are saved if as many rows as possible of a second batch join the first.

    0.0 if seconds are not measured, or if a limit of a batch keeps them from sharing a call. `paddable`: of the shapes.
    """
    profile = costs.profile
    joined = min(more_rows, profile.max_batch - rows)
    if joined <= 0 or not costs.worker_class.measured:
        return 0.0
    if any(
        own != other and not padded for own, other, padded in zip(shape, more_shape, paddable, strict=True)
    ):
        return 0.0
    largest = tuple(map(max, shape, more_shape))
    most = costs.bytes.planned_most
    if most is not None and costs.bytes.of_batch(rows + joined, largest) > most:
        return 0.0
    if profile.max_padding_ratio is not None:
        part = costs.padded_part
        real = rows * elements_of(part(shape)) + joined * elements_of(part(more_shape))
        if real < (1.0 - profile.max_padding_ratio) * (rows + joined) * elements_of(part(largest)):
            return 0.0
    saved = costs.call(rows, shape).seconds + costs.call(more_rows, more_shape).seconds
    saved -= costs.call(rows + joined, largest).seconds
    if joined < more_rows:
        saved -= costs.call(more_rows - joined, more_shape).seconds
    return saved if isfinite(saved) else 0.0
