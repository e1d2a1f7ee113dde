"""Gives work to slots: a batch for every free slot, one ahead for busy ones, and back again what stands in the wrong place.

The scheduler tells what happened to the books; this, called once at the end of every event, does what follows from them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shapestream.scheduling.actions import Action, FailRequest, ReportFault, StartBatch
from shapestream.scheduling.apart import ModelApart
from shapestream.scheduling.cost_model import CostModel
from shapestream.scheduling.cost_surface import Surface
from shapestream.scheduling.deadlines import take_turn
from shapestream.scheduling.division import portion
from shapestream.scheduling.hang_watch import HangWatch
from shapestream.scheduling.isolation import Isolation
from shapestream.scheduling.ledger import Ledger
from shapestream.scheduling.model_queue import ModelQueue
from shapestream.scheduling.planner import Cut, PlanningBudget, plan_batch, together, unplanned
from shapestream.scheduling.records import RERUN, RUNNING, Batch, Request
from shapestream.scheduling.slot import Slot
from shapestream.scheduling.slots import SlotTable
from shapestream.scheduling.turns import faster_first, next_up

__all__ = ["Dispatching"]


class Dispatching:
    """Starts, sends ahead and recalls batches, until nothing more may be done."""

    __slots__ = (
        "_costs",
        "_ledger",
        "_next_batch",
        "_queues",
        "_slots",
        "_watch",
        "budget",
        "isolation",
        "waiting",
    )

    def __init__(
        self,
        ledger: Ledger,
        slots: SlotTable,
        costs: CostModel,
        queues: dict[str, ModelQueue],
        waiting: dict[str, ModelQueue],
        watch: HangWatch,
    ) -> None:
        self._ledger = ledger
        self._watch = watch
        self._slots = slots
        self._costs = costs
        self._queues = queues
        self.waiting = waiting
        """Models with waiting requests; one that no longer has any is dropped at a later look."""
        self.budget = PlanningBudget()
        self.isolation = Isolation(ledger, slots, self._start_alone)
        self._next_batch = 1

    def run(self, now: float, actions: list[Action]) -> None:
        """Starts batches until no slot is free or nothing may start: the scheduler is work-conserving."""
        waiting = self.waiting
        slots = self._slots
        isolation = self.isolation
        if isolation.suspected or isolation.isolated:
            isolation.run(now, actions)
        while waiting and slots.free_count:
            request = next_up(waiting.values(), now, _has_free, self._fills)
            if request is None:
                break
            slot = faster_first(request.queue)
            actions.append(self._give_up(request, slot, now) or self._give(request, slot, now, actions))
        if waiting:
            self._send_ahead(now, actions)
            for name in [name for name, queue in waiting.items() if not queue.waiting]:
                del waiting[name]
        if slots.ahead_count and slots.free_count:
            self._recall_for_free(now, actions)

    def idles(self, now: float) -> bool:
        """Whether a free slot idles although a request may start; never after `run`."""
        return next_up(self._queues.values(), now, _has_free, self._fills) is not None

    def next_wakeup(self) -> float | None:
        """When something may be done for which no event will come."""
        times: list[float] = []
        slots = self._slots
        if self.waiting and slots.aside and (back := slots.next_return()) is not None:
            times.append(back)
        for queue in self.waiting.values():
            if not queue.startable:
                continue
            due = queue.due.first() if queue.delay_s and not queue.rerun_count else None
            if queue.free:
                if due is not None:
                    times.append(due[0])
            elif queue.profile.idempotent and (commit := queue.commits.first()) is not None:
                times.append(commit[0] if due is None else max(commit[0], due[0]))
        if slots.ahead_count and slots.free_count:
            for queue in self._queues.values():
                if queue.startable or len(queue.free) <= queue.recalling:
                    continue
                if (first := queue.ahead.first()) is not None:
                    times.append(first[0] + (first[1].prefetch_s or 0.0))
        return min(times, default=None)

    # ------------------------------------------------------------ starting

    def _give_up(self, request: Request, slot: Slot, now: float) -> FailRequest | None:
        """Ends a request whose turn has come too late for a whole call, where the queue is as long as deadlines allow.

        Then somebody will be late, since the queue took longer than was promised. To cut the call so that this one is in
        time would make everybody behind it later, who are as near to their deadlines; then their calls have to be cut as
        well, and soon the slots run calls of one row. Who had little time from the start is not meant: its deadline is
        near because it waited, for two thirds of its time at least.
        """
        queue = request.queue
        deadline = request.deadline
        if (
            deadline is None
            or self._ledger.admission.saturated_at(queue) < request.arrived
            or request.state is RERUN
        ):
            return None
        starts_at = now if slot.batch is None else max(now, slot.batch.ends_at)
        left_s = deadline - starts_at
        if starts_at - request.arrived < 2.0 * left_s:
            return None
        name = queue.profile.name
        try:
            company = self._costs.company_s(name, request.shape, request.rows)
        except Exception:  # noqa: BLE001 - what cannot be priced is tried
            return None
        if company is None or left_s >= company[1] * self._costs.speed(name, slot.id):
            return None
        return self._ledger.fail_late(request, now)

    def _give(self, request: Request, slot: Slot, now: float, actions: list[Action]) -> StartBatch:
        """Cuts the batch that a request goes in, and starts it on a slot, or behind what that runs."""
        queue = request.queue
        name = queue.profile.name
        ledger = self._ledger
        clients = len(ledger.clients)
        surface = self._costs.surface(name, slot.id)
        speed = self._costs.speed(name, slot.id)
        if request.state is RERUN:
            group = queue.take_rerun()
            plan, predicted_s = self._cut(lambda: together(group, surface), group, surface, speed, actions)
        else:
            anchor = take_turn(request, ledger.deadlines.urgent.get(request.client), clients, now)
            starts_at = now if slot.batch is None else max(now, slot.batch.ends_at)
            turn = anchor
            anchor = turn.bucket.first()  # one whose turn was exchanged may still stand before it

            def planned() -> Cut:
                most_s, max_rows = portion(queue, slot, anchor, surface, speed, now)
                plan = plan_batch(
                    anchor, surface, self.budget, speed=speed, most_s=most_s, max_rows=max_rows, now=starts_at
                )
                if len(plan.members) > 1 and (apart := ledger.apart.of(name)) is not None:
                    plan = _apart(apart, anchor, plan, surface)
                return plan

            plan, predicted_s = self._cut(planned, [anchor], surface, speed, actions)
            members_s = sum([member.share_s for member in plan.members])
            queue.shares.dispatched(turn.tag, turn.turn, members_s, clients)
            queue.take(plan.members, RUNNING)
        return self._start(queue, slot, plan, request, predicted_s, now)

    def _cut(
        self,
        plan: Callable[[], Cut],
        otherwise: Sequence[Request],
        surface: Surface,
        speed: float,
        actions: list[Action],
    ) -> tuple[Cut, float | None]:
        """The batch that `plan` cuts, and its predicted seconds on its slot.

        Where that fails, `otherwise` run as they are: to look at neighbours of any sizes must not cost a request its turn.
        """
        try:
            cut = plan()
            predicted_s = _predicted_s(cut, surface, speed)
            rounding = otherwise[0].queue.rounding
            if rounding is not None:
                rounding.start(cut.call_rows, cut.shape)
        except Exception as error:  # noqa: BLE001 - see above
            ids = tuple([request.id for request in otherwise])
            actions.append(ReportFault(error=error, about="plan of a batch", requests=ids))
            return unplanned(otherwise), None
        return cut, predicted_s

    def _start_alone(self, queue: ModelQueue, slot: Slot, now: float, actions: list[Action]) -> StartBatch:
        """Starts the first suspect of a model, where nothing else runs."""
        name = queue.profile.name
        surface = self._costs.surface(name, slot.id)
        request, accused = queue.take_suspect()
        speed = self._costs.speed(name, slot.id)
        plan, predicted_s = self._cut(
            lambda: together([request], surface), [request], surface, speed, actions
        )
        action = self._start(queue, slot, plan, request, predicted_s, now)
        batch = self._slots.batches[action.batch]
        batch.alone, batch.accused = True, accused
        return action

    def _start(
        self, queue: ModelQueue, slot: Slot, plan: Cut, first: Request, predicted_s: float | None, now: float
    ) -> StartBatch:
        batch = Batch(self._next_batch, slot, queue, plan.members, plan.sizes(queue.has_batch), predicted_s)
        if predicted_s is not None:
            batch.guess_s = plan.seconds * self._costs.speed(queue.profile.name, slot.id)
        self._next_batch += 1
        self.budget.earn(predicted_s, now)
        behind = slot.batch
        if behind is None:
            self._slots.occupy(slot, batch, now)
            self._watch.began(batch, now)
        else:
            self._slots.send_ahead(slot, batch)
        self._ledger.start(batch, plan, first, behind, now)
        return StartBatch(
            batch=batch.id,
            slot=slot.id,
            model=queue.profile.name,
            requests=batch.ids,
            sizes=batch.sizes,
            behind=None if behind is None else behind.id,
        )

    def _fills(self, anchor: Request) -> bool:
        """Whether the batch of this request would be full; asked only for models that wait for company."""
        profile = anchor.queue.profile
        surface = self._costs.surface(profile.name)
        try:
            plan = plan_batch(anchor, surface, self.budget, speed=1.0, most_s=None, now=float("-inf"))
        except Exception:  # noqa: BLE001 - it goes now, and what is wrong is reported when its batch is cut
            return True
        return plan.rows >= profile.max_batch

    # ------------------------------------------------------------ ahead of time

    def _send_ahead(self, now: float, actions: list[Action]) -> None:
        """Sends batches to busy slots that will soon be free, of models that have no free slot."""
        while (request := next_up(self.waiting.values(), now, _wants_ahead, self._fills)) is not None:
            first = request.queue.commits.first()
            assert first is not None
            slot = first[1]
            actions.append(self._give_up(request, slot, now) or self._give(request, slot, now, actions))

    def _recall_for_free(self, now: float, actions: list[Action]) -> None:
        """Where a slot is free and nothing waits for it, calls back what waits elsewhere behind another batch.

        Not what will start before it could be sent anew: about as long as sending takes, before and after the time
        for which its start is predicted.
        """
        for queue in self._queues.values():
            while len(queue.free) > queue.recalling and not queue.startable:
                last = queue.ahead.last()
                if last is None:
                    break
                starts_at, slot = last
                if now >= starts_at - (slot.prefetch_s or 0.0):
                    first = queue.ahead.first()
                    assert first is not None
                    starts_at, slot = first
                    if now < starts_at + (slot.prefetch_s or 0.0):
                        break
                assert slot.behind is not None
                reason = f"slot {next(iter(queue.free))} is free"
                actions.append(self._ledger.recall(slot.behind, now, reason))


def _apart(apart: ModelApart, anchor: Request, plan: Cut, surface: Surface) -> Cut:
    """The same batch without those that run apart from the anchor; if there are any, only its own shape is left."""
    if apart.runs_alone(anchor):
        return together([anchor], surface)
    mark = apart.mark(anchor)
    if all(apart.mark(member) == mark for member in plan.members):
        return plan
    shape = anchor.shape
    return together(
        [member for member in plan.members if member.shape == shape and apart.mark(member) == mark],
        surface,
    )


def _predicted_s(plan: Cut, surface: Surface, speed: float) -> float | None:
    """Seconds of a batch on its slot; None while nothing is measured."""
    if not surface.measured:
        return None
    rows, shape = plan.call_rows, plan.shape
    return speed * min(plan.seconds, surface.most_s(rows, shape) + surface.preparation_s(rows, shape))


def _has_free(queue: ModelQueue, now: float) -> bool:
    return bool(queue.free)


def _wants_ahead(queue: ModelQueue, now: float) -> bool:
    """Whether all slots of a model that has waiting requests are busy, and it is time to send one of them its next batch."""
    if queue.free or not queue.startable or not queue.profile.idempotent:
        return False
    first = queue.commits.first()
    return first is not None and first[0] <= now
