"""Virtual time: the same `Scheduler` object that the server uses, over a trace, as fast as it can decide.

Events lie in one heap, as tuples; nothing is an object that lives for one step only. Nothing waits and no clock is read,
but for what the decisions themselves cost.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from heapq import heappop
from itertools import islice
from math import inf, prod
from time import thread_time
from typing import Any, assert_never

from shapestream.scheduling.events import (
    Action,
    Arrival,
    CancelBatch,
    DeliverResults,
    Event,
    FailRequest,
    ForgetRequest,
    KillSlot,
    ModelAdded,
    ModelProfile,
    RecallBatch,
    ReportFault,
    RequestsArrived,
    SlotJoined,
    StartBatch,
    TimePassed,
)
from shapestream.simulation.play import Policy, Simulated, Workload
from shapestream.simulation.records import DONE, EXPIRED, FAILED, LATE, REFUSED, Requests
from shapestream.simulation.simulated_slots import (
    ARRIVED,
    ENDED,
    SimulatedSlots,
    SimulationError,
    SlotPlan,
    Truth,
)
from shapestream.simulation.trace import TraceRequest
from shapestream_engine.batch import ErrorCode
from shapestream_engine.cost_table import CostTable

__all__ = ["Policy", "Simulated", "SimulationError", "Workload", "simulate"]

BYTES_PER_ELEMENT = 8
"""A trace knows no bytes; the limits of a simulated queue in bytes are as good as this guess."""
_MAX_IDLE_WAKEUPS = 10_000

_REFUSALS = frozenset({"overloaded", "too_large", "draining", "unavailable", "invalid"})


def simulate(
    policy: Policy,
    profiles: Sequence[ModelProfile],
    slots: Sequence[SlotPlan],
    truth: Truth,
    workload: Workload,
    *,
    calibration: Mapping[str, CostTable] | None = None,
    round_up: Mapping[str, Callable[[tuple[int, ...]], tuple[int, ...]]] | None = None,
    check_every: int | None = None,
) -> Simulated:
    """Plays a workload to its end. `calibration` is what slots bring along; `round_up` what the models' strategies do.

    `check_every` so many events the policy's books are checked. Raises `SimulationError` if the policy cannot go on.
    """
    return _Simulation(policy, profiles, slots, truth, workload, calibration or {}, round_up or {}).run(
        check_every
    )


class _Simulation:
    def __init__(
        self,
        policy: Policy,
        profiles: Sequence[ModelProfile],
        plans: Sequence[SlotPlan],
        truth: Truth,
        workload: Workload,
        calibration: Mapping[str, CostTable],
        round_up: Mapping[str, Callable[[tuple[int, ...]], tuple[int, ...]]],
    ) -> None:
        self._policy = policy
        self._profiles = profiles
        self._plans = list(plans)
        self._calibration = calibration
        self._rounding = [round_up.get(profile.name) for profile in profiles]
        self._rounded: list[dict[tuple[int, ...], tuple[int, ...]]] = [{} for _ in profiles]
        self._requests = Requests()
        self._heap: list[tuple[float, int, int, Any]] = []
        by_name = {profile.name: profile for profile in profiles}
        self._slots = SimulatedSlots(self._plans, by_name, truth, self._requests, self._heap)
        self._way_s = truth.way_s
        self._workload = workload
        self._source: Iterator[TraceRequest] = iter(workload.requests)
        self._next: TraceRequest | None = None
        self._returning: deque[tuple[float, int]] = deque()
        """Closed loop, in order of time: when how many new requests come."""
        self._finished = 0
        self._decide_s = 0.0
        self._longest_s = 0.0
        self._events = 0
        self._codes: dict[str, int] = {}
        self._now = 0.0

    # ------------------------------------------------------------ the loop

    def run(self, check_every: int | None) -> Simulated:
        """Until nothing will happen any more."""
        self._begin()
        began_s = min(self._next_arrival_s(), inf)
        idle_wakeups = 0
        while True:
            arrival_s = self._next_arrival_s()
            heap_s = self._heap[0][0] if self._heap else inf
            wakeup = self._policy.next_wakeup()
            at = min(arrival_s, heap_s, inf if wakeup is None else max(wakeup, self._now))
            if at == inf:
                break
            events = self._events
            if heap_s <= at:
                self._pop()
            elif arrival_s <= at:
                self._arrive(at)
            else:
                idle_wakeups = idle_wakeups + 1 if at <= self._now else 0
                if idle_wakeups > _MAX_IDLE_WAKEUPS:
                    raise SimulationError(f"woken {_MAX_IDLE_WAKEUPS} times in a row at {at:g} s with no end")
                self._handle(TimePassed(), at)
                continue
            idle_wakeups = 0
            if check_every is not None and self._events // check_every != events // check_every:
                self._policy.check_invariants()
        return Simulated(
            requests=self._requests,
            slots=self._slots.time,
            slot_count=len(self._plans),
            began_s=0.0 if began_s == inf else began_s,
            ended_s=self._now,
            decide_s=self._decide_s,
            longest_decision_s=self._longest_s,
            events=self._events,
            codes=self._codes,
        )

    def _begin(self) -> None:
        for profile in self._profiles:
            self._handle(ModelAdded(model=profile), 0.0)
        models = frozenset(profile.name for profile in self._profiles)
        for number, plan in enumerate(self._plans):
            joined = SlotJoined(
                slot=number,
                models=models,
                worker=plan.worker,
                costs=self._calibration,
                prefetch_s=2 * self._way_s or None,
            )
            self._handle(joined, 0.0)
        self._decide_s = self._longest_s = 0.0
        self._events = 0
        if self._workload.in_flight is None:
            self._next = next(self._source, None)
        else:
            self._returning.append((0.0, self._workload.in_flight))

    def _next_arrival_s(self) -> float:
        if self._next is not None:
            return max(self._next.at_s, self._now)
        return self._returning[0][0] if self._returning else inf

    def _arrive(self, at: float) -> None:
        """Hands on what comes at the same moment as one event, as the server does with one turn."""
        if self._workload.in_flight is not None:
            _, count = self._returning.popleft()
            arrived = [self._arrival(request, at) for request in islice(self._source, count)]
        else:
            arrived = []
            while (request := self._next) is not None and request.at_s <= at:
                arrived.append(self._arrival(request, request.at_s))
                self._next = next(self._source, None)
        if arrived:
            self._handle(RequestsArrived(requests=tuple(arrived)), at)

    def _arrival(self, request: TraceRequest, at: float) -> Arrival:
        number = request.model
        sizes = request.sizes
        deadline = None if request.deadline_s is None else at + request.deadline_s
        elements = prod(sizes)
        id = self._requests.add(at, inf if deadline is None else deadline, elements)  # noqa: A001
        rounding = self._rounding[number]
        if rounding is not None:
            known = self._rounded[number]
            if (rounded := known.get(sizes)) is None:
                rounded = known[sizes] = rounding(sizes)
            sizes = rounded
        return Arrival(
            id=id,
            client=request.client,
            model=self._profiles[number].name,
            sizes=sizes,
            nbytes=elements * BYTES_PER_ELEMENT,
            deadline=deadline,
            priority=request.priority,
        )

    def _pop(self) -> None:
        at, _, kind, job = heappop(self._heap)
        if kind == ARRIVED:
            self._now = at
            self._slots.arrive(job, at)
        elif kind != ENDED or self._slots.end(job, at):
            self._handle(self._slots.report(job), at)

    # ------------------------------------------------------------ decisions and what comes of them

    def _handle(self, event: Event, at: float) -> None:
        self._now = at
        self._events += 1
        began = thread_time()
        actions = self._policy.handle(event, at)
        took = thread_time() - began
        self._decide_s += took
        if took > self._longest_s:
            self._longest_s = took
        finished = self._finished
        for action in actions:
            self._act(action, at)
        if self._workload.in_flight is not None and self._finished > finished:
            self._returning.append((at + self._workload.round_trip_s, self._finished - finished))

    def _act(self, action: Action, at: float) -> None:
        match action:
            case StartBatch():
                self._slots.start(action, at)
            case DeliverResults():
                deadline = self._requests.deadline
                for request in action.requests:
                    self._end(request, DONE if at <= deadline[request] else LATE, at)
            case FailRequest():
                self._codes[action.code] = self._codes.get(action.code, 0) + 1
                late = action.code == "deadline_exceeded"
                self._end(action.id, EXPIRED if late else REFUSED if action.code in _REFUSALS else FAILED, at)
            case ForgetRequest():
                self._end(action.id, FAILED, at)
            case CancelBatch():
                self._slots.take_back(action.batch, at, ErrorCode.CANCELLED)
            case RecallBatch():
                self._slots.take_back(action.batch, at, ErrorCode.RECALLED)
            case ReportFault():
                raise SimulationError(f"the policy could not work out {action.about}") from action.error
            case KillSlot():
                raise SimulationError("the policy kills a slot, and nothing hangs here")
            case _:
                assert_never(action)

    def _end(self, request: int, outcome: int, at: float) -> None:
        requests = self._requests
        if requests.outcome[request]:
            raise SimulationError(f"request {request} ended twice, at {at:g} s")
        requests.outcome[request] = outcome
        requests.ended[request] = at
        self._finished += 1
