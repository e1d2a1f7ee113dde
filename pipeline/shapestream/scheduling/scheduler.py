"""The scheduler: events in, actions out. It decides everything about batches and does nothing else.

It stands between the clients' port, which makes requests of entries that are valid for their model, and the slots. It
knows no clock, socket, task or tensor: the same events at the same times give the same actions, in the server, in the
simulator and in the tests. docs/scheduling.md describes the policy.

Every event first changes the books (`_take`), and then slots get work (`_follow`):

1. Deadlines that have passed end their requests (deadlines.py), and slots whose rest is over come back.
2. The event changes the queue (queueing.py), the slots (slots.py) or the batches that ran there (recovery.py).
3. While a slot is free, the request whose turn it is (fairness.py) gets a batch of what pays beside it (planner.py). A free
   slot idles only while requests wait for company (answer_waits.py).
4. Where all slots are busy, a batch may be queued behind the running one, shortly before that is predicted to end.
5. Where sharing a call does not pay, a slot is given several calls (bundles.py).
6. Batches that nobody needs any more are stopped.

It promises that every admitted request ends once, that one batch or one bundle at most is queued behind the batch that a
slot runs, and that an event takes time by what it changes, not by how many requests wait. It does not promise that a
prediction comes true: what hangs, or is late, is found by time (hang_watch.py).

An error in a plan or a price ends at most the requests that it is about. After any other error nothing here can be relied
on: the scheduler starts over with its models alone, and all workers greet anew.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from heapq import nlargest
from math import inf
from typing import assert_never

from shapestream.scheduling.actions import (
    Action,
    CancelBatch,
    DeliverResults,
    FailRequest,
    ForgetRequest,
    RejoinSlots,
    ReportFault,
    StartBatch,
)
from shapestream.scheduling.admission import Admission
from shapestream.scheduling.answer_waits import AnswerWaits
from shapestream.scheduling.audit import Audit, is_in_the_way
from shapestream.scheduling.batches import AuditBatch, Batch, BatchState, Suspicion
from shapestream.scheduling.bundles import Bundles, Handed, Ready
from shapestream.scheduling.costs import NOTHING_LEARNED, CostModel
from shapestream.scheduling.deadlines import Deadlines, Refusal
from shapestream.scheduling.events import (
    Arrival,
    AuditKind,
    AuditWanted,
    BatchFailed,
    BatchFinished,
    ContractError,
    CostsTold,
    CutReason,
    DrainStarted,
    Event,
    LoneRunKnown,
    ModelAdded,
    ModelProfile,
    ModelRemoved,
    ModelRunsAlone,
    ModelUnavailable,
    RequestCancelled,
    RequestsAbandoned,
    RequestsArrived,
    SlotClosing,
    SlotJoined,
    SlotLeft,
    SlotsJoined,
    TimePassed,
)
from shapestream.scheduling.fairness import PATIENCE, QueueRoom
from shapestream.scheduling.hang_watch import HangLimits, HangWatch
from shapestream.scheduling.invariants import check
from shapestream.scheduling.ledger import Ledger, Told, Troubles
from shapestream.scheduling.model_queue import ModelQueue, QueuedSizes, Queues
from shapestream.scheduling.planner import Cut, Plan, alone, batch_of, plan_batch, portion, unplanned
from shapestream.scheduling.queueing import QUEUED, RERUN, RUNNING, Request, by_rerun
from shapestream.scheduling.recovery import Isolation, Recovery
from shapestream.scheduling.scheduler_statistics import SchedulerStatistics, statistics_of
from shapestream.scheduling.slots import Slot, SlotState, SlotTable, faster_first
from shapestream.scheduling.wide_slots import WideSlots
from shapestream.scheduling.worker_costs import WorkerCosts
from shapestream_engine.cost_table import LearnedCosts

MOST_QUEUES = 16
"""Queues that are counted by size, at most."""


def _turn(request: Request) -> tuple[float, int]:
    """Return the key that orders requests of all kinds."""
    return by_rerun(request) if request.state is RERUN else request.turn


def _of_its_models(
    request: Request, queues: Mapping[str, ModelQueue], now: float, ready: Callable[[ModelQueue, float], bool]
) -> Request:
    """Return the first request of its client, of all models that are `ready`: the model goes that had least of the
    client's time.

    Priorities and ageing count here as between clients. A later stage of a chain goes before what is younger than its
    parent, where both are later by what was submitted with them, as in their own models. So what was begun is finished
    first, a tokenizer fills the queue of an encoder, whose requests then share calls, and a detector does not hold up
    an older chain's crops.
    """
    best, best_key = request, (request.flow.start_s - request.bonus_s, request.order)
    elder = request if request.arrival.since is not None else None
    for flow in request.flow.client.flows.values():
        if flow is request.flow or not flow.queued:
            continue
        first = flow.first()
        queue = queues[first.model]
        if not ready(queue, now) or queue.waits_until > now:
            continue
        key = (flow.start_s - first.bonus_s, first.order)
        if key < best_key:
            best, best_key = first, key
        if first.arrival.since is not None and (elder is None or _begun(first) < _begun(elder)):
            elder = first
    return best if elder is None or _begun(best) <= _begun(elder) else elder


def _begun(request: Request) -> float:
    """Return when a request's parent, or else it itself, arrived, later by the work that was submitted with it."""
    since = request.arrival.since
    began = request.arrived if since is None else since
    return began + PATIENCE * request.arrival.submitted * request.share_s


class Scheduler:
    """Decides which requests run together, where and when.

    Every admitted id ends exactly once, by `DeliverResults`, `FailRequest` or `ForgetRequest`; so does
    every id that is refused, by `FailRequest`. Times given to `handle` must not go backwards; if one does,
    the latest so far is used. Raises ContractError only for events that break the contract of events.py.

    No other error leaves `handle`: what could not be worked out is a `ReportFault`, and a request that it is about fails
    alone, as `internal`. After any other error all requests fail so, and the slots are to join again (`RejoinSlots`).
    """

    __slots__ = (
        "_admission",
        "_answer_waits",
        "_audits",
        "_bundles",
        "_costs",
        "_deadlines",
        "_hangs",
        "_is_followed",
        "_isolation",
        "_learned",
        "_ledger",
        "_max_attempts",
        "_next_batch",
        "_now",
        "_plan",
        "_queues",
        "_recovery",
        "_room",
        "_slots",
        "_troubles",
        "_watch",
        "_wide",
        "batch_of",
        "batches",
        "requests",
    )

    def __init__(
        self,
        max_queued_requests: int,
        max_queued_bytes: int,
        max_attempts: int = 3,
        *,
        hangs: HangLimits | None = None,
        learned: Mapping[str, LearnedCosts] = NOTHING_LEARNED,
    ) -> None:
        """`hangs`: when a batch hangs; None: never. `learned`: what an earlier one's `learned_costs` said, by table."""
        self._room = max_queued_requests, max_queued_bytes
        self._max_attempts = max_attempts
        self._hangs = hangs
        self._learned = learned
        self._troubles = Troubles()
        self._next_batch = 1
        self._now = float("-inf")
        self._is_followed = False
        """True if the last event is followed by another one, which comes before any batch starts."""
        self._open_books()

    def _open_books(self) -> None:
        """Know no model, slot and request."""
        self._costs = CostModel(self._learned)
        self._watch = HangWatch(self._hangs)
        self._queues = Queues()
        self._slots = SlotTable()
        pools = self._slots.pools
        self._deadlines = Deadlines(pools)
        self._admission = Admission(QueueRoom(*self._room), self._deadlines, self._queues, pools)
        self._ledger = Ledger(self._admission, self._deadlines, self._queues, self._slots, self._troubles)
        self.requests: Mapping[int, Request] = self._ledger.requests
        """Those that have not ended, by id."""
        self.batches: Mapping[int, Batch] = self._slots.batches
        """Those that run, or are queued behind one that does, by number."""
        self.batch_of: Mapping[int, Batch] = self._ledger.batch_of
        """By request, the batch that it is in."""
        self._isolation = Isolation(self._ledger, self._slots, self._start_alone)
        self._wide = WideSlots(self._queues, self._slots)
        self._recovery = Recovery(
            self._ledger,
            self._queues,
            self._slots,
            self._costs,
            self._watch,
            self._isolation,
            self._wide,
            self._max_attempts,
        )
        self._audits = tuple(
            [Audit(kind, self._queues, self._slots, self._isolation, self._start_audit) for kind in AuditKind]
        )
        self._answer_waits = AnswerWaits(self._deadlines, pools)
        self._plan = Plan()
        self._bundles = Bundles(
            self._queues,
            self._slots,
            self._answer_waits,
            self._deadlines,
            self._plan,
            self._next_up,
            partial(self._planned, tries=False),
            self._dispatch,
        )

    # ------------------------------------------------------------ what the caller uses

    def handle(self, event: Event, now: float) -> list[Action]:
        """Take one event and return what to do about it, in order."""
        if now < self._now:
            now = self._now
        if self._slots.wide_count:
            arrived = len(event.requests) if isinstance(event, RequestsArrived) else 0
            self._wide.passed(now - self._now, arrived)
        self._now = now
        actions: list[Action] = []
        try:
            self._take(event, now, actions)
            self._is_followed = isinstance(event, BatchFinished) and event.followed
            if self._is_followed:
                self._drop_unwanted(now, actions)
            else:
                self._follow(now, actions)
        except ContractError:
            raise
        except Exception as error:  # noqa: BLE001 - the edge where a defect becomes a line of the log
            return self._start_over(event, error, actions)
        return actions

    def _start_over(self, event: Event, error: Exception, actions: Sequence[Action]) -> list[Action]:
        """Know the models alone, end all requests as `internal`, and let the slots join again.

        Of what was decided in this event only ends are carried out. What was learned from traffic is forgotten; workers
        bring their measured costs.
        """
        ends = [
            action for action in actions if isinstance(action, DeliverResults | FailRequest | ForgetRequest)
        ]
        left = {request.id: request.arrival for request in self._ledger.requests.values()}
        batches = self._ledger.batch_of
        if isinstance(event, RequestsArrived):
            left |= {arrival.id: arrival for arrival in event.requests}
        for end in ends:
            for arrival in end.requests if isinstance(end, DeliverResults) else (end.request,):
                left.pop(arrival.id, None)
        models, draining = self._queues.values(), self._admission.draining
        self._open_books()
        self._is_followed = False
        self._admission.draining = draining or isinstance(event, DrainStarted)
        for known in models:
            self._add_model(known.profile)
            queue = self._queues[known.name]
            queue.alone, queue.unavailable = known.alone, known.unavailable
        self._note_model(event)
        message = "the server lost track of its requests, and ended all of them; see its log"
        return [
            ReportFault(error=error, about=type(event).__name__),
            *ends,
            *[
                FailRequest(request=left[id_], code="internal", message=message, batch=batches.get(id_))
                for id_ in sorted(left)
            ],
            RejoinSlots(),
        ]

    def _note_model(self, event: Event) -> None:
        """Take in what an event says of a model and of no request."""
        match event:
            case ModelAdded():
                self._add_model(event.model, event.like)
            case ModelUnavailable() if event.model in self._queues:
                self._queues[event.model].unavailable = event.message
            case ModelRunsAlone():
                self._queues[event.model].alone = event.alone
            case _:
                pass

    def _take(self, event: Event, now: float, actions: list[Action]) -> None:
        """Change the books by an event."""
        ledger = self._ledger
        deadlines = self._deadlines
        while deadlines.entries and (late := deadlines.due(now)) is not None:
            actions.append(ledger.fail_late(late, now))
        if self._slots.resting:
            self._slots.wake(now)
        match event:
            case RequestsArrived():
                self._requests_arrived(event.requests, now, actions)
            case BatchFinished():
                self._recovery.finished(event, now, actions)
            case TimePassed():
                pass
            case RequestCancelled():
                if (request := ledger.requests.get(event.id)) is not None:
                    actions.append(ledger.fail(request, "cancelled", "withdrawn by its caller", now))
            case RequestsAbandoned():
                ledger.forget(event.ids, now, actions)
            case BatchFailed():
                self._recovery.failed(event, now, actions)
            case CostsTold():
                try:
                    self._costs.take_in(event.model, event.costs)
                except Exception as error:  # noqa: BLE001 - the slots serve without what was measured
                    actions.append(ReportFault(error=error, about="costs of a model"))
            case SlotJoined():
                self._slots_joined((event,), actions)
            case SlotsJoined():
                self._slots_joined(event.slots, actions)
            case SlotClosing():
                for behind in self._slots.close(event.slot):
                    actions.append(ledger.recall(behind, now, f"slot {event.slot} closes"))
            case SlotLeft():
                self._recovery.slot_left(event, now, actions)
            case LoneRunKnown():
                self._isolation.known(event.id)
            case ModelAdded() | ModelRunsAlone():
                self._note_model(event)
            case ModelUnavailable():
                self._model_unavailable(event, now, actions)
            case ModelRemoved():
                self._remove_model(event.model)
            case DrainStarted():
                self._admission.draining = True
            case AuditWanted():
                next(audit for audit in self._audits if audit.kind is event.kind).want(event)
            case _:
                assert_never(event)

    def _model_unavailable(self, event: ModelUnavailable, now: float, actions: list[Action]) -> None:
        """Fail what waits for a model that no slot will come for."""
        self._note_model(event)
        for request in list(self._ledger.requests.values()):
            if request.model == event.model and request.state is not RUNNING:
                actions.append(self._ledger.fail(request, "unavailable", event.message, now))

    def next_wakeup(self) -> float | None:
        """Return when `TimePassed` is wanted, if nothing happens before; always later than the last event."""
        first = self._watch.next_look
        if self._deadlines.entries and (expiry := self._deadlines.next()) is not None:
            first = min(first, expiry)
        waiting = self._queues.waiting
        for audit in self._audits:
            if audit.due_at < first:
                first = audit.due_at
        if waiting and self._slots.resting and (back := self._slots.next_wake()) is not None:
            first = min(first, back)
        for queue in waiting:
            start_at = -inf if self._has_free(queue, self._now) else self._prefetch_due(queue)
            if start_at is None or not queue.startable:
                continue
            if not queue.rerun_count:
                start_at = max(start_at, queue.waits_until)
            if start_at > -inf:
                first = min(first, start_at)
        return first if first < inf else None

    def check_invariants(self) -> None:
        """Raise AssertionError if the books do not agree. Looks at everything: for tests and the simulator."""
        check(self._ledger, self._queues, self._isolation, self._slots, self._now)
        startable = self._next_up(self._has_free, self._now)
        assert startable is None or self._is_followed, "a free slot idles while a request may start"
        for audit in self._audits:
            batch = audit.running
            assert batch is None or batch.state is not BatchState.RUNNING or not is_in_the_way(batch), (
                "an audit runs on while a request needs its slot"
            )

    def troubles(self, id: int) -> Told:  # noqa: A002 - the name that events use
        """Return the decisions about a recent request that its usual way does not explain, oldest first."""
        return self._troubles.of(id)

    @property
    def lone_run_told_at(self) -> float | None:
        """When `TellLoneRun` was said last, while a suspect waits for `LoneRunKnown`; None otherwise."""
        return self._isolation.told_at

    def statistics(self, now: float | None = None) -> SchedulerStatistics:
        """Return the state now; None: at the last event."""
        now = self._now if now is None else max(now, self._now)
        return statistics_of(self._ledger, self._queues, self._slots, now)

    def sizes_waiting(self) -> dict[str, QueuedSizes]:
        """Return the queues of the `MOST_QUEUES` models with the most waiting requests, by size."""
        queues = [queue for queue in self._queues.waiting if queue.waiting]
        longest = nlargest(MOST_QUEUES, queues, key=lambda queue: queue.waiting)
        return {queue.profile.name: queue.sizes_waiting() for queue in longest}

    def standing(self, slot: int) -> str:
        """Return the state of a slot, as `Slot.standing`; "gone" for an unknown one."""
        known = self._slots.slots.get(slot)
        return SlotState.GONE.value if known is None else known.standing

    def learned_costs(self, saved_at: float) -> list[LearnedCosts]:
        """Return what traffic made of the measured costs, for the next scheduler; `saved_at`: now, in seconds since the
        epoch."""
        return self._costs.learned(saved_at)

    # ------------------------------------------------------------ models and slots

    def is_idle(self, model: str) -> bool:
        """Tell whether a model has no request and no batch."""
        queue = self._queues.get(model)
        if queue is not None and queue.unfinished:
            return False
        return not any(batch.queue.name == model for batch in self.batches.values())

    def _add_model(self, profile: ModelProfile, like: str | None = None) -> None:
        known = self._queues.get(profile.key)
        if known is None:
            queue = self._queues[profile.key] = ModelQueue(
                profile, self._costs.add_model(profile, like), self._admission.room
            )
            self._slots.add_model(queue, like)
        elif known.profile != profile:
            raise ContractError(f"model {profile.name!r} is here already, with another profile")

    def _remove_model(self, model: str) -> None:
        """Forget a model, and all that was learned of it. Unknown models are ignored."""
        queue = self._queues.get(model)
        if queue is None:
            return
        if not self.is_idle(model):
            raise ContractError(f"model {model!r} has requests")
        del self._queues[model]
        self._queues.waiting.pop(queue, None)
        queue.end()
        self._costs.remove_model(model)
        self._slots.remove_model(model)
        self._admission.forget_model(model)
        self._watch.forget_model(model)
        self._wide.forget_model(model)

    def _slots_joined(self, events: Sequence[SlotJoined], actions: list[Action]) -> None:
        first_of: dict[str, Slot] = {}
        for event in events:
            self._slots.join(
                event.slot,
                event.models,
                event.prefetch_s,
                event.worker,
                event.peer,
                in_server=event.in_server,
                wide=event.wide,
            )
            slot = self._slots.slots[event.slot]
            alike = first_of.setdefault(event.worker or f"slot {event.slot}", slot)
            try:
                self._costs.join(event.slot, event.worker, event.costs, event.models, wide=event.wide)
                for pool in slot.pools:
                    queue, name = pool.queue, pool.queue.name
                    if slot is not alike:  # slots of one worker are equally fast
                        self._slots.set_pace(slot, name, alike.paces.get(name, 1.0))
                    elif queue.seen:
                        self._recovery.measure_pace(slot, queue, next(reversed(queue.seen)))
            except Exception as error:  # noqa: BLE001 - the slot serves without what it has measured
                actions.append(ReportFault(error=error, about="costs of a slot"))

    # ------------------------------------------------------------ requests

    def _requests_arrived(self, arrivals: tuple[Arrival, ...], now: float, actions: list[Action]) -> None:
        ledger = self._ledger
        admission = self._admission
        queues = self._queues
        if len(arrivals) > 1:
            asked: dict[str, set[tuple[int, ...]]] = {}
            for arrival in arrivals:
                asked.setdefault(arrival.model, set()).add(arrival.sizes)
            for name in asked.keys() & queues.keys():
                queues[name].costs.expect(asked[name])
        for arrival in arrivals:
            queue = queues.get(arrival.model)
            due = now
            shape = None
            try:
                # All that may fail comes before the ledger and the queue change. What the room and the rounding have counted
                # until then stays: it is about what was asked for.
                terms = admission.consider(arrival, queue, now)
                if isinstance(terms, Refusal):
                    actions.append(ledger.refuse(arrival, terms))
                    continue
                assert queue is not None, "a model that is not known is refused"
                if queue.delay_s or queue.awaited is not None:
                    due = self._deadlines.wait_until(arrival, queue, now)
                costs = queue.costs
                if costs.rounding is not None and 0 not in arrival.sizes:
                    costs.rounding.observe(arrival.sizes)
                if costs.steps is not None:
                    shape = costs.steps.rounded(arrival.sizes)
            except Exception as error:  # noqa: BLE001 - one arrival fails alone
                refusal = Refusal(
                    "internal", "the server cannot work out how to run this request; see its log"
                )
                actions.append(ReportFault(error=error, about="terms of a request", requests=(arrival.id,)))
                actions.append(ledger.refuse(arrival, refusal))
                continue
            request = ledger.admit(arrival, queue, terms, now, shape)
            queues.waiting[queue] = None
            if queue.delay_s:
                queue.due.push(due, request)
            elif queue.awaited is not None and due <= now:
                queue.await_no_longer()

    def _drop_unwanted(self, now: float, actions: list[Action]) -> None:
        """Stop the batches of which all members have ended; until they report, their slots keep them."""
        # The same batch twice: its last member was late in the very event that let it begin.
        for batch in dict.fromkeys(self._ledger.unwanted):
            if batch.id not in self._slots.batches:
                continue
            if batch.cancel():
                actions.append(CancelBatch(batch=batch))
            elif batch.state is BatchState.BEHIND:
                actions.append(self._ledger.recall(batch, now, "all its members have ended"))
        self._ledger.unwanted.clear()

    # ------------------------------------------------------------ batches

    def _follow(self, now: float, actions: list[Action]) -> None:
        """Do what follows from the books: start batches until no slot is free or nothing may start, then prefetch, then let
        bundles grow.

        A free slot idles only while requests wait for company: for `max_delay_s`, or as answer_waits.py says.
        """
        if self._watch.next_look <= now:
            self._recovery.hang(now, actions)
        if self._plan.left:
            self._plan.begin_turn()
        handed: Handed = {}
        queues, waiting, slots = self._queues, self._queues.waiting, self._slots
        isolation = self._isolation
        if isolation.suspected or isolation.isolated:
            isolation.run(now, actions)
        while waiting and slots.free_count:
            request = self._next_up(self._has_free, now)
            if request is None:
                break
            queue, slot = queues[request.model], faster_first(slots.pools[request.model])
            if (
                request.state is RERUN
                or queue.returns.after_s == inf
                or not self._answer_waits.is_awaited(request, queue, slot, now)
            ):
                if slot.worker.wide is not None:
                    slot = self._wide.choose(request, queue, slot)
                self._dispatch(request, queue, slot, now, actions, handed)
        for audit in self._audits:
            if audit.active:
                audit.tend(now, actions, draining=self._admission.draining)
        if waiting:
            self._queues.forget_empty()
        if waiting:
            self._prefetch(now, actions, handed)
            self._queues.forget_empty()
        slots.begun.clear()
        for batches in handed.values():
            actions.append(StartBatch(batches=tuple(batches)))
        if self._ledger.unwanted:
            self._drop_unwanted(now, actions)

    def _prefetch(self, now: float, actions: list[Action], handed: Handed) -> None:
        """Queue batches behind those that end soon, then let bundles grow."""
        queues, slots = self._queues, self._slots
        while (request := self._next_up(self._wants_prefetch, now)) is not None:
            queue, slot = queues[request.model], slots.pools[request.model].prefetches[0][2]
            isolated = request.arrival.suspect and slot.worker.in_server
            follow = request.state is not RERUN and queue.returns.after_s < inf
            if isolated or (follow and self._answer_waits.will_be_awaited(request, queue, slot)):
                slots.stop_prefetch(slot)
            else:
                self._dispatch(request, queue, slot, now, actions, handed)
        if slots.begun:
            self._bundles.complete(handed, now, actions)

    def _next_up(self, ready: Ready, now: float) -> Request | None:
        """Return the request that goes next, of all models that are `ready`; None if all wait, or nothing does.

        It is the first request of the client whose turn it is, and of the model whose turn it is of those that the client
        asks; or one that is to run again, in the order of the ranks.

        With a delay, nothing of a model goes until some request's delay has ended or a batch would be full; nor does it
        while requests are awaited that follow answers (answer_waits.py).
        """
        best: Request | None = None
        waiting = self._queues.waiting
        for queue in waiting:
            if not ready(queue, now):
                continue
            request = queue.first()
            if (
                request is not None
                and (queue.delay_s or queue.awaited is not None)
                and queue.waits_until > now
            ):
                request = self._first_of_full(queue, request)
            if request is not None and (best is None or _turn(request) < _turn(best)):
                best = request
            if queue.rerun_count:
                again = min(queue.next_rerun(), key=by_rerun)
                if best is None or by_rerun(again) < _turn(best):
                    best = again
        if best is not None and len(waiting) > 1 and best.state is QUEUED and len(best.flow.client.flows) > 1:
            return _of_its_models(best, self._queues, now, ready)
        return best

    def _first_of_full(self, queue: ModelQueue, first: Request) -> Request | None:
        """Return a request whose batch would be full: the head of a full bucket, or else `first` with its neighbours."""
        if queue.rows < queue.profile.max_batch:
            return None
        if queue.full:
            heads = [bucket.first() for bucket in queue.full.values()]
            return min(heads, key=lambda request: request.turn)
        return first if self._fills(first, queue) else None

    def _has_free(self, queue: ModelQueue, now: float) -> bool:
        return bool(self._slots.pools[queue.name].free)

    def _prefetch_due(self, queue: ModelQueue) -> float | None:
        """Return when a batch of this model should be queued behind a running one; None where a slot is free, or nothing
        may be.

        `max_delay_s` may put it off.
        """
        pool = self._slots.pools[queue.name]
        if pool.free or not queue.startable or not queue.profile.idempotent:
            return None
        return pool.prefetches[0][0] if pool.prefetches else None

    def _wants_prefetch(self, queue: ModelQueue, now: float) -> bool:
        due = self._prefetch_due(queue)
        return due is not None and due <= now

    def _dispatch(
        self,
        request: Request,
        queue: ModelQueue,
        slot: Slot,
        now: float,
        actions: list[Action],
        handed: Handed,
        cut: Cut | None = None,
    ) -> None:
        """Start the batch of the request whose turn it is on a slot, or queue it behind those that are there; or shed it.

        `cut`: its batch, if that was planned.
        """
        deadline = request.arrival.deadline
        if deadline is not None and self._deadlines.comes_too_late(request, deadline, queue, slot, now):
            actions.append(self._ledger.fail_late(request, now))
            return
        company_s = 0.0
        if queue.costs.rounding is not None and not queue.alone:
            # Since it was admitted, the cap on shapes may have left none that holds it within `max_batch_bytes`.
            for member in queue.next_rerun() if request.state is RERUN else (request,):
                refusal = self._admission.too_large(queue, member.rows, member.own_shape)
                if refusal is not None:
                    actions.append(self._ledger.fail(member, refusal.code, refusal.message, now))
                    return
        if request.arrival.suspect and slot.worker.in_server:  # nothing else may run in its process
            self._isolate(request, queue, now, actions)
            return
        if request.state is RERUN:
            cut, predicted_s = self._cut(queue.take_rerun(), queue, slot, now, actions, fixed=CutReason.RERUN)
        else:
            cut, predicted_s = self._cut([request], queue, slot, now, actions, planned=cut)
            if slot.batch is None and (queue.delay_s or queue.awaited is not None):
                company_s = now - max(request.arrived, slot.idle_since, slot.rests_until)
            share_s = None if predicted_s is None else predicted_s / self._slots.pools[queue.name].serving
            queue.take(request, cut.members, share_s)
        batch = self._start(queue, slot, cut, request, predicted_s, now, company_s=company_s)
        handed.setdefault(slot, []).append(batch)

    def _isolate(self, request: Request, queue: ModelQueue, now: float, actions: list[Action]) -> None:
        """Let a suspect whose turn it is run where nothing else runs. It takes all slots, so its client pays for all."""
        call_s = self._recovery.call_s([request])
        if request.state is RERUN:
            queue.take_rerun()
        else:
            queue.take(request, [request], call_s or None)
        self._isolation.suspect(request, queue, call_s)
        self._isolation.run(now, actions)

    def _planned(
        self,
        anchor: Request,
        queue: ModelQueue,
        slot: Slot,
        costs: WorkerCosts,
        slowdown: float,
        now: float,
        *,
        tries: bool,
    ) -> Cut:
        """Return the batch that a request goes in; `tries`: whether it may be larger than pays, to try a price."""
        if queue.count == 1:
            return batch_of([anchor], costs)
        most_s, max_rows = portion(self._slots.pools[queue.name], slot, anchor, costs, slowdown, now)
        return plan_batch(
            anchor,
            queue,
            costs,
            self._plan,
            slowdown=slowdown,
            most_s=most_s,
            max_rows=max_rows,
            starts_at=slot.free_at(now),
            tries=tries,
        )

    def _cut(
        self,
        group: Sequence[Request],
        queue: ModelQueue,
        slot: Slot,
        now: float,
        actions: list[Action],
        *,
        fixed: CutReason | None = None,
        planned: Cut | None = None,
    ) -> tuple[Cut, float | None]:
        """Return the batch of a group, and its predicted seconds on its slot; `fixed`: why it gets no company.

        `planned`: the batch, where it was planned before.

        Where that fails, the group runs as it is: to look at neighbours of any sizes must not cost a request its turn.
        """
        first = group[0]
        try:
            costs = queue.costs.on(slot.id)
            slowdown = costs.worker_class.slowdown(costs.worker)
            if planned is not None:
                cut = planned
            elif queue.alone:
                cut = alone(group, first.rows, first.own_shape, costs)
            elif fixed is None:
                cut = self._planned(first, queue, slot, costs, slowdown, now, tries=True)
            else:
                cut = batch_of(group, costs, reason=fixed)
            predicted_s = slowdown * cut.seconds if costs.worker_class.measured else None
            cut.started(costs)
        except Exception as error:  # noqa: BLE001 - see above
            ids = tuple([request.id for request in group])
            actions.append(ReportFault(error=error, about="plan of a batch", requests=ids))
            return unplanned(group), None
        return cut, predicted_s

    def _start_alone(self, queue: ModelQueue, slot: Slot, now: float, actions: list[Action]) -> StartBatch:
        """Start the first suspect of a model, where nothing else runs."""
        request = queue.take_suspect()
        cut, predicted_s = self._cut([request], queue, slot, now, actions, fixed=CutReason.SUSPECT)
        suspicion = Suspicion.ACCUSED if request.accused else Suspicion.LAST
        batch = self._start(queue, slot, cut, request, predicted_s, now, suspicion)
        return StartBatch(batches=(batch,))

    def _start_audit(
        self, queue: ModelQueue, slot: Slot, cut: Cut, wanted: AuditWanted, now: float
    ) -> StartBatch:
        """Start an audit."""
        costs = queue.costs.on(slot.id)
        cut.started(costs)
        batch = AuditBatch(self._next_batch, slot, queue, (), cut.sizes(queue.has_batch))
        batch.run = wanted.run
        self._next_batch += 1
        predicted_s = costs.slowdown * cut.seconds if costs.worker_class.measured else None
        self._slots.start_audit(slot, batch, predicted_s, now)
        self._watch.began(batch, now)
        return StartBatch(batches=(batch,))

    def _start(
        self,
        queue: ModelQueue,
        slot: Slot,
        cut: Cut,
        first: Request,
        predicted_s: float | None,
        now: float,
        suspicion: Suspicion = Suspicion.NONE,
        company_s: float = 0.0,
    ) -> Batch:
        batch = Batch(
            self._next_batch, slot, queue, cut.members, cut.sizes(queue.has_batch), predicted_s, suspicion
        )
        self._next_batch += 1
        queue.awaited = None
        behind = slot.behind[-1] if slot.behind else slot.batch
        if behind is None:
            self._slots.start(slot, batch, now)
            self._watch.began(batch, now)
        else:
            self._slots.queue_behind(slot, batch)
        self._ledger.start(batch, cut, first, behind, company_s, now)
        return batch

    @staticmethod
    def _fills(anchor: Request, queue: ModelQueue) -> bool:
        """Tell whether the batch of this request would be full; asked only for models that wait for company."""
        try:
            # By a plan of its own: the turn's is for batches that start.
            cut = plan_batch(anchor, queue, queue.costs.on(), Plan(), starts_at=-inf)
        except Exception:  # noqa: BLE001 - it goes now, and what is wrong is reported when its batch is cut
            return True
        return cut.rows >= queue.profile.max_batch
