"""The simulator: the server's own `Scheduler` over a trace on virtual time.

Future events lie in one heap, as tuples. No clock is read except to time the decisions themselves.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import islice
from math import inf, prod
from time import thread_time
from typing import Any, Protocol, assert_never

import numpy as np
from numpy.typing import NDArray

from shapestream.scheduling.events import (
    Action,
    Arrival,
    BatchFailed,
    BatchFinished,
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
from shapestream.telemetry.trace import TraceRequest
from shapestream_engine.batch import ErrorCode
from shapestream_engine.cost_table import CostTable
from shapestream_workers.lab.true_cost import TrueCost

__all__ = [
    "ARRIVED",
    "DONE",
    "ENDED",
    "EXPIRED",
    "FAILED",
    "LATE",
    "LEFT",
    "REFUSED",
    "REPORTED",
    "Policy",
    "Requests",
    "Simulated",
    "SimulatedSlots",
    "SimulationError",
    "SlotPlan",
    "SlotTime",
    "Truth",
    "Workload",
    "simulate",
]

LEFT, DONE, LATE, EXPIRED, REFUSED, FAILED = range(6)
"""Outcomes: unfinished; answered in time; answered late; ended by its deadline; not admitted; other failures."""


class Requests:
    """Requests and their outcomes in columns, by id from 1; a million take some 40 MB. Row 0 is unused."""

    def __init__(self) -> None:
        self.arrived = array("d", [0.0])
        """Intended arrivals, in seconds."""
        self.ended = array("d", [0.0])
        self.deadline = array("d", [float("inf")])
        self.elements = array("q", [0])
        """Products of the requests' own sizes: their elements without padding."""
        self.outcome = bytearray([FAILED])

    def add(self, arrived: float, deadline: float, elements: int) -> int:
        """Add a request; return its id."""
        self.arrived.append(arrived)
        self.ended.append(0.0)
        self.deadline.append(deadline)
        self.elements.append(elements)
        self.outcome.append(LEFT)
        return len(self.outcome) - 1

    def __len__(self) -> int:
        return len(self.outcome) - 1

    def outcomes(self) -> NDArray[np.uint8]:
        """The outcome of each request, in the order of arrival."""
        return np.frombuffer(bytes(self.outcome), np.uint8)[1:]

    def column(self, values: array[float]) -> NDArray[np.float64]:
        """A column as an array, in the order of arrival."""
        return np.array(values, np.float64)[1:]


@dataclass(slots=True)
class SlotTime:
    """Work of all slots together."""

    busy_s: float = 0.0
    calls: int = 0
    batches: int = 0
    members: int = 0
    computed: int = 0
    """Elements of all calls, padding included."""
    useful: int = 0
    """Elements of the requests that ran in them."""
    preparations: int = 0
    prefetched: int = 0
    """Batches that were sent while their slot was busy."""
    recalled: int = 0


class Policy(Protocol):
    """A decider: `Scheduler`, or a plain server."""

    def handle(self, event: Event, now: float) -> list[Action]:
        """Handle one event."""
        ...

    def next_wakeup(self) -> float | None:
        """Time at which `TimePassed` is wanted, or None."""
        ...

    def check_invariants(self) -> None:
        """Check its books; raises AssertionError."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Requests in order of time."""

    requests: Iterable[TraceRequest]
    in_flight: int | None = None
    """In a closed loop: requests in flight, whatever their times. None: requests arrive at their times."""
    round_trip_s: float = 0.0
    """In a closed loop: seconds from an answer to the next request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """Results of a simulation."""

    requests: Requests
    slots: SlotTime
    slot_count: int
    began_s: float
    ended_s: float
    decide_s: float
    """Processor time of all decisions, on this machine."""
    longest_decision_s: float
    events: int
    codes: Mapping[str, int]
    """Failed requests by code."""


ARRIVED, ENDED, REPORTED = range(3)
"""Kinds of entries in the heap of events: a batch reached its slot, a batch ended there, its report came back."""

_NOISES = 4096


class SimulationError(Exception):
    """The policy broke its contract: a defect of the policy, or of the simulator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotPlan:
    """One simulated slot."""

    worker: str = ""
    """Slots of one worker share prepared shapes."""
    speed: float = 1.0
    """Factor on the true seconds: 2.0 is half as fast."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Truth:
    """True costs, noise and delays of the simulated world."""

    costs: Mapping[str, TrueCost]
    """True costs, by model."""
    noise: float = 0.0
    """Sigma of a lognormal factor of mean 1 on every call."""
    way_s: float = 0.0
    """Seconds from a decision to the slot, and from the end of a batch to the scheduler."""
    seed: int = 0


class _Job:
    """One batch that was sent to a slot."""

    __slots__ = ("action", "began", "busy_s", "code", "ended", "expired", "preparations")

    def __init__(self, action: StartBatch) -> None:
        self.action = action
        self.began = -1.0
        self.busy_s = 0.0
        self.ended = False
        self.expired: frozenset[int] = frozenset()
        self.preparations = 0
        self.code: ErrorCode | None = None


class SimulatedSlots:
    """All slots of a simulation; they put future events into the heap as (time, number, kind, job)."""

    def __init__(
        self,
        plans: list[SlotPlan],
        profiles: Mapping[str, ModelProfile],
        truth: Truth,
        requests: Requests,
        heap: list[tuple[float, int, int, _Job]],
    ) -> None:
        self._plans = plans
        self._profiles = profiles
        self._truth = truth
        self._requests = requests
        self._heap = heap
        self._number = 0
        self._jobs: dict[int, _Job] = {}
        self._running: list[_Job | None] = [None] * len(plans)
        self._behind: list[deque[_Job]] = [deque() for _ in plans]
        self._prepared: dict[tuple[str, str], set[tuple[int, ...]]] = {}
        self._rng = np.random.default_rng(truth.seed)
        self._noises: list[float] = []
        self.time = SlotTime()

    def start(self, action: StartBatch, now: float) -> None:
        """Send a batch to its slot."""
        job = self._jobs[action.batch] = _Job(action)
        self.time.prefetched += action.behind is not None
        if self._truth.way_s:
            self._push(now + self._truth.way_s, ARRIVED, job)
        else:
            self.arrive(job, now)

    def arrive(self, job: _Job, now: float) -> None:
        """Let a batch reach its slot: it begins, or is queued behind the running one."""
        if job.ended:
            return
        slot = job.action.slot
        if self._running[slot] is None:
            self._begin(job, now)
        else:
            if job.action.behind is None:
                raise SimulationError(
                    f"slot {slot} is busy, and batch {job.action.batch} is not behind another"
                )
            self._behind[slot].append(job)

    def take_back(self, batch: int, now: float, code: ErrorCode) -> None:
        """Recall or cancel a batch. The order arrives at once; the report takes its way.

        A recall does not affect a running batch; a cancellation ends it.
        """
        job = self._jobs.get(batch)
        if job is None or job.ended or (job.began >= 0 and code is ErrorCode.RECALLED):
            return
        job.code = code
        self.time.recalled += code is ErrorCode.RECALLED
        slot = job.action.slot
        if self._running[slot] is job:
            job.busy_s = now - job.began
            self._push(now, ENDED, job)
            return
        if job in self._behind[slot]:
            self._behind[slot].remove(job)
        job.ended = True
        self._push(now + self._truth.way_s, REPORTED, job)

    def end(self, job: _Job, now: float) -> bool:
        """End a batch and begin the next one on its slot. Return whether its report has arrived."""
        if job.ended:
            return False
        job.ended = True
        slot = job.action.slot
        self._account(job)
        self._running[slot] = None
        if self._behind[slot]:
            self._begin(self._behind[slot].popleft(), now)
        if not self._truth.way_s:
            return True
        self._push(now + self._truth.way_s, REPORTED, job)
        return False

    def report(self, job: _Job) -> BatchFinished | BatchFailed:
        """The report of a batch, as an event for the scheduler."""
        batch = job.action.batch
        del self._jobs[batch]
        if job.code is not None:
            return BatchFailed(batch=batch, code=job.code, message=job.code)
        return BatchFinished(
            batch=batch, busy_s=job.busy_s, expired=job.expired, preparations=job.preparations
        )

    # ------------------------------------------------------------ inside a slot

    def _begin(self, job: _Job, now: float) -> None:
        action = job.action
        slot = action.slot
        job.began = now
        self._running[slot] = job
        deadline = self._requests.deadline
        late = [request for request in action.requests if deadline[request] < now]
        if late:
            job.expired = frozenset(late)
        if len(late) < len(action.requests):
            job.busy_s = self._call_s(job) * self._plans[slot].speed
        self._push(now + job.busy_s, ENDED, job)

    def _call_s(self, job: _Job) -> float:
        """Seconds of the batch's calls; rows are covered as the profile says, new shapes are prepared first."""
        action = job.action
        cost = self._truth.costs[action.model]
        plan = self._plans[action.slot]
        known = self._prepared.setdefault((plan.worker or str(action.slot), action.model), set())
        seconds = 0.0
        for sizes in self._calls(action):
            seconds += cost.seconds(sizes)
            self.time.calls += 1
            self.time.computed += prod(sizes)
            if (prepare_s := cost.preparation_s(sizes)) and sizes not in known:
                known.add(sizes)
                job.preparations += 1
                seconds += prepare_s
        return seconds * self._noise() if self._truth.noise else seconds

    def _calls(self, action: StartBatch) -> list[tuple[int, ...]]:
        profile = self._profiles[action.model]
        if profile.row_calls is None or action.sizes[0] >= len(profile.row_calls):
            return [action.sizes]
        return [(rows, *action.sizes[1:]) for rows in profile.row_calls[action.sizes[0]]]

    def _noise(self) -> float:
        if not self._noises:
            sigma = self._truth.noise
            drawn = np.exp(sigma * self._rng.standard_normal(_NOISES) - sigma * sigma / 2)
            self._noises = drawn.tolist()
        return self._noises.pop()

    def _account(self, job: _Job) -> None:
        time = self.time
        time.busy_s += job.busy_s
        time.batches += 1
        time.preparations += job.preparations
        elements = self._requests.elements
        members = job.action.requests
        if job.expired:
            members = tuple(request for request in members if request not in job.expired)
        time.members += len(members)
        time.useful += sum([elements[request] for request in members])

    def _push(self, at: float, kind: int, job: _Job) -> None:
        self._number += 1
        heappush(self._heap, (at, self._number, kind, job))


BYTES_PER_ELEMENT = 8
"""Assumed bytes of an element, for limits in bytes: a trace has none."""
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
    """Play a workload to its end. Slots join with `calibration`; `round_up` holds the rounding of the models' strategies.

    After every `check_every` events the policy's books are checked. Raises `SimulationError` for a broken contract.
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
        """In a closed loop: times and numbers of the next requests, in order."""
        self._finished = 0
        self._decide_s = 0.0
        self._longest_s = 0.0
        self._events = 0
        self._codes: dict[str, int] = {}
        self._now = 0.0

    # ------------------------------------------------------------ the loop

    def run(self, check_every: int | None) -> Simulated:
        """Play events until none is left."""
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
        """Hand on requests of the same time as one event, as the server does in one turn."""
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
