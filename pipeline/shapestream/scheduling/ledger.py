"""The book of admitted requests, and the one place where a request ends.

Every ending of a request goes through `deliver`, `fail` or `forget`. Each takes the request out of its queue or its
batch, so that no second ending can find it.

Beside it stand its last troubles: decisions that no request's usual way explains. serving/stories.py tells a request's
user of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final, TypeAlias

from shapestream.scheduling.actions import (
    Action,
    DeliverResults,
    FailRequest,
    ForgetRequest,
    RecallBatch,
)
from shapestream.scheduling.admission import Admission, Terms
from shapestream.scheduling.batches import Batch, CutFacts
from shapestream.scheduling.deadlines import Deadlines, Refusal
from shapestream.scheduling.events import Arrival, ContractError
from shapestream.scheduling.model_queue import ModelQueue, Queues
from shapestream.scheduling.planner import Cut
from shapestream.scheduling.queueing import RUNNING, Request
from shapestream.scheduling.slots import SlotTable

Told: TypeAlias = list[tuple[float, str]]
"""Troubles of one request, oldest first, as (time, text)."""
MOST_TROUBLES = 1024
"""Troubles that are remembered, at most; each concerns the requests of a batch."""
ENDED: Final = Arrival(id=-1, client=-1, model="", sizes=(), nbytes=0)
"""In place of the arrival of a request that has ended."""


class Troubles:
    """The last recalls, losses, failures, rests and hangs. A text is formatted when it is read."""

    __slots__ = ("_last",)

    def __init__(self) -> None:
        self._last: deque[tuple[float, tuple[int, ...], str, tuple[object, ...]]] = deque(
            maxlen=MOST_TROUBLES
        )

    def add(self, time: float, ids: tuple[int, ...], what: str, *details: object) -> None:
        """Remember what happened to these requests; `what` is a format string for the details."""
        self._last.append((time, ids, what, details))

    def of(self, id: int) -> Told:  # noqa: A002 - the name that events and actions use
        """Return the troubles that are remembered of one request, oldest first."""
        return [(time, what.format(*details)) for time, ids, what, details in self._last if id in ids]


class Ledger:
    """The live requests by id. It tells queues, shares, deadlines and batches of every admission, start and end."""

    __slots__ = (
        "_queues",
        "_slots",
        "admission",
        "batch_of",
        "deadlines",
        "next_order",
        "requests",
        "running",
        "troubles",
        "unwanted",
    )

    def __init__(
        self,
        admission: Admission,
        deadlines: Deadlines,
        queues: Queues,
        slots: SlotTable,
        troubles: Troubles,
    ) -> None:
        self.admission = admission
        self.deadlines = deadlines
        self._queues = queues
        self._slots = slots
        self.troubles = troubles
        self.requests: dict[int, Request] = {}
        self.batch_of: dict[int, Batch] = {}
        """By request, the batch that it is in. That may be over already, until the request waits again or ends."""
        self.running = 0
        """Requests in batches, running or queued behind another, that have not ended."""
        self.unwanted: list[Batch] = []
        """Batches whose last wanted member has ended; the scheduler empties it."""
        self.next_order = 0

    def admit(
        self,
        arrival: Arrival,
        queue: ModelQueue,
        terms: Terms,
        now: float,
        shape: tuple[int, ...] | None = None,
    ) -> Request:
        """Take a request in and let it wait; `shape` is what it is padded to. Raises ContractError for a known id."""
        if arrival.id in self.requests:
            raise ContractError(f"request {arrival.id} is here already; ids are used once")
        shares = queue.shares
        if not shares.room.requests:
            shares.catch_up()
        flow = queue.flow_of(arrival.client)
        place, rank, bonus_s, lead_s = shares.stamp(flow, arrival, terms.share_s)
        order = self.next_order
        # By place: a class takes keywords by a dict, for which each name is looked up.
        request = Request(
            arrival,
            flow,
            rank,
            order,
            now,
            queue.has_batch,
            shape,
            bonus_s,
            lead_s,
            terms.cost_ns,
            terms.share_s,
        )
        request.ahead = queue.count
        queue.add(request, place)
        queue.waits.enter(1, now)
        self.next_order = order + 1
        self.requests[arrival.id] = request
        queue.unfinished += 1
        if arrival.deadline is not None:
            self.deadlines.watch(request, arrival.deadline, queue, terms.then_s)
        shares.room.enter_new(arrival.nbytes)
        return request

    def refuse(self, arrival: Arrival, refusal: Refusal) -> FailRequest:
        """Return the ending of a request that was never taken in."""
        return FailRequest(
            request=arrival,
            code=refusal.code,
            message=refusal.message,
            retry_after_s=refusal.retry_after_s,
            cause=refusal.cause,
        )

    def start(
        self, batch: Batch, cut: Cut, first: Request, behind: Batch | None, company_s: float, now: float
    ) -> None:
        """Move the members of a batch out of the queue's room; they have left their lane already.

        `first` is the request whose turn it was; `company_s` is for how long it waited for company while the slot was free.
        """
        nbytes, ahead = 0, []
        for request in cut.members:
            arrival = request.arrival
            self.batch_of[arrival.id] = batch
            nbytes += arrival.nbytes
            ahead.append(request.ahead)
        count = len(cut.members)
        self.running += count
        queue = batch.queue
        queue.leave(count, nbytes, now)
        batch.behind = None if behind is None else behind.id
        facts = (
            cut.padding,
            batch.predicted_s,
            queue.meet(batch.sizes),
            first.arrival.id,
            queue.count,
            queue.profile.max_batch,
            cut.reason,
            tuple(ahead),
            company_s,
        )
        batch.facts = tuple.__new__(CutFacts, facts)  # see `member_of` in ends.py

    def recall(self, batch: Batch, now: float, reason: str) -> RecallBatch:
        """Ask for a batch that is queued behind another."""
        batch.recall()
        self.troubles.add(now, batch.ids, "batch {} is recalled: {}", batch.id, reason)
        return RecallBatch(batch=batch)

    def put_back(self, requests: Sequence[Request], now: float) -> None:
        """Move requests of a batch that is over back to what waits, beyond the bound if need be."""
        for request in requests:
            del self.batch_of[request.id]
            queue = self._queues[request.model]
            queue.waits.enter(1, now)
            queue.shares.room.enter(1, request.nbytes)
        self.running -= len(requests)

    def deliver(self, batch: Batch, members: Sequence[Request], actions: list[Action]) -> None:
        """End those members of a finished batch that still run."""
        count = len(members)
        all_ran = count == len(batch.members)
        arrivals = batch.arrivals if all_ran else [request.arrival for request in members]
        actions.append(DeliverResults(batch=batch, requests=arrivals))
        for request in members:
            request.end()
            self._remove(request)
        self.running -= count
        self.deadlines.shrink(len(self.requests))

    def fail(self, request: Request, code: str, message: str, now: float) -> FailRequest:
        """End a request with an error."""
        failed = FailRequest(
            request=request.arrival,
            code=code,
            message=message,
            ahead=request.ahead,
            batch=self.batch_of.get(request.id),
        )
        self._withdraw(request, now)
        return failed

    def fail_late(self, request: Request, now: float) -> FailRequest:
        """End a request whose deadline has passed, or cannot be met any more.

        A running request whose batch is over was left out of the call by its slot: it never ran.
        """
        batch = self._live_batch_of(request)
        if batch is not None and not batch.is_behind:
            message = "the deadline passed while the request was running"
        elif request.deadline is not None and request.deadline > now:
            message = "the deadline cannot be met any more: too little time is left to run the request"
        else:
            message = "the deadline passed while the request was waiting"
        return self.fail(request, "deadline_exceeded", message, now)

    def forget(self, ids: Sequence[int], now: float, actions: list[Action]) -> None:
        """End requests whose client is gone."""
        for id_ in ids:
            if (request := self.requests.get(id_)) is not None:
                actions.append(ForgetRequest(request=request.arrival, batch=self.batch_of.get(id_)))
                self._withdraw(request, now)

    def _withdraw(self, request: Request, now: float) -> None:
        if request.state is RUNNING:
            request.end()
            self.running -= 1
            if (batch := self._live_batch_of(request)) is not None:
                batch.wanted -= 1
                if not batch.wanted:
                    self.unwanted.append(batch)
        else:
            queue = self._queues[request.model]
            queue.drop(request)
            queue.leave(1, request.nbytes, now)
        self.deadlines.shrink(len(self.requests) - 1)
        self._remove(request)

    def _live_batch_of(self, request: Request) -> Batch | None:
        """Return the batch of a running request; None if it is over."""
        batch = self.batch_of.get(request.id)
        return None if batch is None else self._slots.batches.get(batch.id)

    def _remove(self, request: Request) -> None:
        """Forget a request, at last: until then a fault still finds it here, and it is not lost."""
        id_ = request.arrival.id
        queue = self._queues[request.model]
        shares = queue.shares
        if request.reworks:
            for rework in request.reworks:
                rework.leave(shares)
        shares.ended(request.flow)
        self.batch_of.pop(id_, None)
        del self.requests[id_]
        queue.unfinished -= 1
        # Heaps keep what has ended until it is at their top, or until such entries are many: not with its tensors.
        request.arrival = ENDED
