"""The simulator: the server's own `Scheduler` over a trace on virtual time.

Future events lie in one heap, as tuples. No clock is read except to time the decisions themselves. Requests of chains become
requests of their stages as in the server (played_chains.py): each stage's when those of the stages before it have ended.
"""

from __future__ import annotations

from array import array
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from itertools import islice
from math import inf, prod
from time import thread_time
from typing import TypeAlias, assert_never

import numpy as np
from numpy.typing import NDArray

from shapestream.chains.plan import Chain
from shapestream.scheduling.actions import (
    Action,
    CancelBatch,
    DeliverResults,
    FailRequest,
    ForgetRequest,
    KillSlot,
    RecallBatch,
    RejoinSlots,
    ReportFault,
    StartBatch,
    TellLoneRun,
)
from shapestream.scheduling.batches import Batch
from shapestream.scheduling.events import (
    Arrival,
    BatchFailed,
    BatchFinished,
    Event,
    ModelAdded,
    ModelProfile,
    RequestCancelled,
    RequestsArrived,
    SlotClosing,
    SlotJoined,
    SlotLeft,
    TimePassed,
)
from shapestream.scheduling.scheduler import Scheduler
from shapestream.telemetry.trace import Sent, TraceChain, TraceRequest
from shapestream_engine.batch import ErrorCode
from shapestream_engine.cost_table import CostTable
from shapestream_workers.lab.plain_server import PlainServer
from shapestream_workers.lab.played_chains import PlayedChains, PlayedRun, StagePart
from shapestream_workers.lab.true_cost import TrueCost

LEFT, DONE, LATE, EXPIRED, REFUSED, FAILED = range(6)
"""Outcomes: unfinished; answered in time; answered late; ended by its deadline; not admitted; other failures."""
ARRIVED, ENDED, REPORTED, RESTARTED = range(4)
"""Kinds of entries in the heap of events: a batch reached its slot, a batch ended there, its report came back, the worker
that it ended serves again."""
NO_CHAIN, OF_STAGE = -1, -2
"""In the place of a chain's number: a client's request for a model; a request of a stage, which no client sent."""
BYTES_PER_ELEMENT = 8
"""Assumed bytes of an element, for limits in bytes: a trace has none."""
_NOISES = 4096
_MAX_IDLE_WAKEUPS = 10_000
_REFUSALS = frozenset({"overloaded", "too_large", "draining", "unavailable", "invalid"})


class SimulationError(Exception):
    """The policy broke its contract: a defect of the policy, or of the simulator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Everything that a simulation depends on, except its policy; a sweep changes one value of it."""

    profiles: Sequence[ModelProfile]
    costs: Mapping[str, TrueCost]
    """True costs, by model."""
    traffic: Iterable[Sent]
    """Requests in order of time: `Traffic`, `Recorded`, or a list."""
    chains: Sequence[Chain] = ()
    """By the numbers of the traffic."""
    believed: Mapping[str, TrueCost] = field(default_factory=dict)
    """Costs that a calibration measured before; of other models the scheduler learns them from traffic."""
    slots: int = 1
    """Slots that serve all models."""
    slots_of: Mapping[str, int] = field(default_factory=dict)
    """Further slots, by the only model that they serve. Each is a worker of its own."""
    slots_per_worker: int = 1
    """Slots of one worker share prepared shapes."""
    wide: float | None = None
    """Each worker has a wide slot, on which a lone call is so many times as fast. Calls beside it share the cores: a wide
    call asks for all of its worker's, another one for one part of them, and all get the same part of what they ask for.
    None: no worker has one."""
    speeds: tuple[float, ...] = (1.0,)
    """Factors on the true seconds, repeated over the slots: 2.0 is half as fast."""
    in_flight: int | None = None
    """Requests in flight in a closed loop, whatever their times; None: requests arrive at their times."""
    in_flight_of: Mapping[int, int] = field(default_factory=dict)
    """The same by client, where each client has a closed loop of its own instead."""
    round_trip_s: float = 0.001
    """In a closed loop: seconds from an answer to the next request."""
    noise: float = 0.0
    """Sigma of a lognormal factor of mean 1 on every call."""
    way_s: float = 0.0
    """Seconds from a decision to the slot, and from the end of a batch to the scheduler."""
    failing: Mapping[int, float] = field(default_factory=dict)
    """By client, the share of its requests that fail each call with them at its end, as where a model raises."""
    killing: Mapping[int, float] = field(default_factory=dict)
    """By client, the share of its requests that end the worker's process so."""
    restart_s: float = 1.0
    """Seconds until a worker that ended serves again."""
    max_queued_requests: int = 8192
    round_up: Mapping[str, Callable[[tuple[int, ...]], tuple[int, ...]]] = field(default_factory=dict)
    """Rounding of a request's sizes by the model's strategy, by model; plain servers use it too."""
    seed: int = 0

    @property
    def in_loops(self) -> bool:
        """Whether requests follow answers, not times."""
        return self.in_flight is not None or bool(self.in_flight_of)

    @property
    def slot_count(self) -> int:
        """All slots but the wide ones, whose numbers follow."""
        return self.slots + sum(self.slots_of.values())

    @property
    def wide_count(self) -> int:
        """Wide slots: one for each worker that serves all models."""
        return 0 if self.wide is None else -(-self.slots // self.slots_per_worker)

    def worker_of(self, slot: int) -> str:
        """Return the name of the slot's worker."""
        if slot >= self.slot_count:
            return f"w{slot - self.slot_count}"
        return f"w{slot // self.slots_per_worker}" if slot < self.slots else f"own{slot}"

    def speed_of(self, slot: int) -> float:
        """Return the factor on the true seconds of this slot."""
        return self.speeds[slot % len(self.speeds)]


class Requests:
    """Requests and their outcomes in columns, by id from 0; a million take some 50 MB."""

    def __init__(self) -> None:
        self.arrived = array("d")
        """Intended arrivals, in seconds."""
        self.ended = array("d")
        self.deadline = array("d")
        self.client = array("q")
        self.elements = array("q")
        """Products of the requests' own sizes: their elements without padding. 0 of a chain's request."""
        self.chain = array("q")
        """Number of the chain that a client asked for; `NO_CHAIN`, `OF_STAGE`."""
        self.outcome = bytearray()

    def add(
        self, arrived: float, deadline: float, elements: int, client: int = 0, chain: int = NO_CHAIN
    ) -> int:
        """Add a request; return its id."""
        self.chain.append(chain)
        self.client.append(client)
        self.arrived.append(arrived)
        self.ended.append(0.0)
        self.deadline.append(deadline)
        self.elements.append(elements)
        self.outcome.append(LEFT)
        return len(self.outcome) - 1

    def __len__(self) -> int:
        return len(self.outcome)

    def outcomes(self) -> NDArray[np.uint8]:
        """Return the outcome of each request, in the order of arrival."""
        return np.frombuffer(bytes(self.outcome), np.uint8)

    def chains(self) -> NDArray[np.int64]:
        """Return the chain of each request, in the order of arrival."""
        return np.array(self.chain, np.int64)

    def column(self, values: array[float]) -> NDArray[np.float64]:
        """Return a column as an array, in the order of arrival."""
        return np.array(values, np.float64)


@dataclass(slots=True, kw_only=True)
class Simulated:
    """Results of a simulation: its requests, and the work of all slots together."""

    slot_count: int
    requests: Requests = field(default_factory=Requests)
    began_s: float = 0.0
    ended_s: float = 0.0
    decide_s: float = 0.0
    """Processor time of all decisions, on this machine."""
    busy_s: float = 0.0
    batches: int = 0
    members: int = 0
    """Requests that ran, by batch."""
    computed: int = 0
    """Elements of all calls, padding included."""
    useful: int = 0
    """Elements of the requests that ran in them."""
    preparations: int = 0
    prefetched: int = 0
    """Batches that were sent while their slot was busy."""
    recalled: int = 0
    deaths: int = 0
    """Workers that ended."""


Policy: TypeAlias = Scheduler | PlainServer


def simulate(policy: Policy, scenario: Scenario) -> Simulated:
    """Play a scenario to its end under `policy`. Raises `SimulationError` for a broken contract."""
    return _Simulation(policy, scenario).run()


def calls_of(profile: ModelProfile, sizes: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Return the sizes of the calls that a batch of these sizes takes."""
    if profile.row_calls is None or sizes[0] >= len(profile.row_calls):
        return [sizes]
    return [(rows, *sizes[1:]) for rows in profile.row_calls[sizes[0]]]


@dataclass(slots=True, eq=False)
class _Job:
    """One batch that was sent to a slot."""

    batch: Batch
    began: float = -1.0
    busy_s: float = 0.0
    due: float = inf
    """When it ends, as far as is known now."""
    speed: float = 1.0
    """The part of the cores that it asks for which it gets."""
    ended: bool = False
    expired: frozenset[int] = frozenset()
    preparations: int = 0
    code: ErrorCode | None = None
    kills: bool = False
    """Whether it ends its worker."""


def _outcome_of(code: str) -> int:
    return EXPIRED if code == "deadline_exceeded" else REFUSED if code in _REFUSALS else FAILED


class _Simulation:
    """The policy, its slots and the requests on their way."""

    def __init__(self, policy: Policy, scenario: Scenario) -> None:
        self._policy = policy
        self._scenario = scenario
        self._profiles = {profile.name: profile for profile in scenario.profiles}
        self._results = Simulated(slot_count=scenario.slot_count)
        self._requests = self._results.requests
        self._chains = PlayedChains(scenario.chains, scenario.max_queued_requests)
        self._source: Iterator[Sent] = iter(scenario.traffic)
        self._next: Sent | None = None
        self._returning: deque[tuple[float, int]] = deque()
        """In a closed loop: times and numbers of the next requests, in order."""
        self._callers: deque[int] = deque()
        """Where each client has a loop of its own: whose requests these are, in order."""
        self._passed_over: defaultdict[int, deque[Sent]] = defaultdict(deque)
        """By client, requests that came before one of another client that was looked for."""
        self._heap: list[tuple[float, int, int, _Job]] = []
        """Future events of slots: time, number, kind and batch."""
        self._pushed = 0
        self._jobs: dict[int, _Job] = {}
        self._every_slot = range(scenario.slot_count + scenario.wide_count)
        self._in_use: dict[str, tuple[float, int]] = {}
        """By worker, how many slots' cores are in use, and since when; with wide slots only."""
        self._running: list[_Job | None] = [None for _ in self._every_slot]
        self._behind: list[deque[_Job]] = [deque() for _ in self._every_slot]
        self._prepared: dict[tuple[str, str], set[tuple[int, ...]]] = {}
        self._rng = np.random.default_rng(scenario.seed)
        self._fates = np.random.default_rng((scenario.seed, 1))
        self._failing: set[int] = set()
        self._killing: set[int] = set()
        self._noises: list[float] = []
        self._finished = 0
        """Clients' requests that have ended."""
        self._calibration: dict[str, CostTable] = {}
        self._now = 0.0

    # ------------------------------------------------------------ the loop

    def run(self) -> Simulated:
        """Play events until none is left."""
        self._join()
        began_s = self._next_arrival_s()
        idle_wakeups = 0
        while True:
            arrival_s = self._next_arrival_s()
            heap_s = self._heap[0][0] if self._heap else inf
            wakeup = self._policy.next_wakeup()
            wakeup_s = min(inf if wakeup is None else wakeup, self._chains.next_deadline)
            at = min(arrival_s, heap_s, max(wakeup_s, self._now))
            if at == inf:
                break
            if heap_s <= at:
                self._pop()
            elif arrival_s <= at:
                self._arrive(at)
            else:
                idle_wakeups = idle_wakeups + 1 if at <= self._now else 0
                if idle_wakeups > _MAX_IDLE_WAKEUPS:
                    raise SimulationError(f"woken {_MAX_IDLE_WAKEUPS} times in a row at {at:g} s with no end")
                self._chains.time_passed(at)
                self._handle(TimePassed(), at)
                continue
            idle_wakeups = 0
        self._results.began_s = 0.0 if began_s == inf else began_s
        self._results.ended_s = self._now
        return self._results

    def _join(self) -> None:
        scenario = self._scenario
        for profile in scenario.profiles:
            self._handle(ModelAdded(model=profile), 0.0)
            if (known := scenario.believed.get(profile.name)) is not None:
                key = f"simulated {profile.name}"
                self._calibration[profile.name] = known.calibration(
                    key, profile.dimensions, profile.max_batch
                )
        for slot in self._every_slot:
            self._handle(self._joined(slot), 0.0)
        self._results.decide_s = 0.0
        for client, count in scenario.in_flight_of.items():
            self._callers.extend([client] * count)
        if scenario.in_loops:
            self._returning.append((0.0, len(self._callers) or scenario.in_flight or 0))
        else:
            self._next = next(self._source, None)

    def _joined(self, slot: int) -> SlotJoined:
        scenario = self._scenario
        if slot >= scenario.slot_count:
            return self._wide_joined(slot)
        own = [model for model, count in scenario.slots_of.items() for _ in range(count)]
        return SlotJoined(
            slot=slot,
            models=frozenset(self._profiles if slot < scenario.slots else own[slot - scenario.slots :][:1]),
            worker=self._scenario.worker_of(slot),
            costs=self._calibration,
            prefetch_s=2 * self._scenario.way_s or None,
        )

    def _wide_joined(self, slot: int) -> SlotJoined:
        faster = self._scenario.wide
        assert faster is not None
        costs = {
            name: replace(
                table,
                key=f"{table.key}, wide",
                points=tuple(replace(point, seconds=point.seconds / faster) for point in table.points),
            )
            for name, table in self._calibration.items()
        }
        return SlotJoined(
            slot=slot,
            models=frozenset(self._profiles),
            worker=self._scenario.worker_of(slot),
            costs=costs,
            wide=True,
        )

    def _next_arrival_s(self) -> float:
        if self._next is not None:
            return max(self._next.at_s, self._now)
        return self._returning[0][0] if self._returning else inf

    def _arrive(self, at: float) -> None:
        """Hand on requests of the same time as one event, as the server does in one turn."""
        if self._scenario.in_loops:
            _, count = self._returning.popleft()
            following = (
                [request for _ in range(count) if (request := self._next_of(self._callers.popleft()))]
                if self._scenario.in_flight_of
                else islice(self._source, count)
            )
            sent = [(request, at) for request in following]
        else:
            sent = []
            while (request := self._next) is not None and request.at_s <= at:
                sent.append((request, request.at_s))
                self._next = next(self._source, None)
        arrived = []
        for request, sent_s in sent:
            if isinstance(request, TraceChain):
                self._begin_chain(request, sent_s)
            else:
                arrived.append(self._arrival(request, sent_s))
        if sent:
            self._handle(RequestsArrived(requests=tuple(arrived)) if arrived else TimePassed(), at)

    def _begin_chain(self, request: TraceChain, at: float) -> None:
        deadline = None if request.deadline_s is None else at + request.deadline_s
        ends = inf if deadline is None else deadline
        request_id = self._requests.add(at, ends, 0, request.client, request.chain)
        self._chains.begin(request, request_id, deadline, at)

    def _next_of(self, client: int) -> Sent | None:
        """Take the next request of a client; those of others that come before it are kept for them."""
        kept = self._passed_over[client]
        while not kept and (request := next(self._source, None)) is not None:
            self._passed_over[request.client].append(request)
        return kept.popleft() if kept else None

    def _arrival(self, request: TraceRequest, at: float) -> Arrival:
        deadline = None if request.deadline_s is None else at + request.deadline_s
        return self._arrived(request.model, request.sizes, request.client, at, deadline, request.priority)

    def _part_arrived(self, part: StagePart, at: float) -> Arrival:
        """Submit a request of a stage, as `ChainDesk` does."""
        sent = part.run.played
        arrival = self._arrived(
            part.model, part.sizes, sent.client, at, part.run.deadline, sent.priority, OF_STAGE
        )
        self._chains.submitted(part, arrival.id)
        then = tuple([self._scenario.profiles[model].name for model in part.then])
        return replace(arrival, since=part.since, then=then, submitted=part.request.stage.requests)

    def _arrived(
        self,
        model: int,
        sizes: tuple[int, ...],
        client: int,
        at: float,
        deadline: float | None,
        priority: int,
        chain: int = NO_CHAIN,
    ) -> Arrival:
        elements = prod(sizes)
        profile = self._scenario.profiles[model]
        ends = inf if deadline is None else deadline
        request_id = self._requests.add(at, ends, elements, client, chain)
        for bad, shares in ((self._failing, self._scenario.failing), (self._killing, self._scenario.killing)):
            if shares and self._fates.random() < shares.get(client, 0.0):
                bad.add(request_id)
        if (round_up := self._scenario.round_up.get(profile.name)) is not None:
            sizes = round_up(sizes)
        return Arrival(
            id=request_id,
            client=client,
            model=profile.name,
            sizes=sizes,
            nbytes=elements * BYTES_PER_ELEMENT,
            deadline=deadline,
            priority=priority,
        )

    def _pop(self) -> None:
        at, _, kind, job = heappop(self._heap)
        if kind == ARRIVED:
            self._now = at
            self._reach_slot(job, at)
        elif kind == RESTARTED:
            for slot in self._beside(job.batch.slot.id):
                self._handle(self._joined(slot), at)
        elif kind == ENDED and at != job.due:
            pass  # others took or left cores meanwhile, and it ends at another time
        elif kind == ENDED and job.kills and not job.ended:
            self._end_worker(job, at)
        elif (kind != ENDED or self._end_batch(job, at)) and job.batch.id in self._jobs:
            self._handle(self._report(job), at)

    # ------------------------------------------------------------ decisions and what comes of them

    def _handle(self, event: Event, at: float) -> None:
        self._now = at
        finished = self._finished
        self._decide(event, at)
        due = isinstance(event, BatchFinished) and event.followed
        while self._chains.is_busy:
            due = not self._follow_chains(at) and due
        if due:
            self._decide(TimePassed(), at)
        if self._scenario.in_loops and self._finished > finished:
            self._return(self._finished - finished, at)

    def _return(self, count: int, at: float) -> None:
        """Let as many requests follow answers as were given now."""
        self._returning.append((at + self._scenario.round_trip_s, count))

    def _decide(self, event: Event, at: float) -> None:
        began = thread_time()
        actions = self._policy.handle(event, at)
        self._results.decide_s += thread_time() - began
        for action in actions:
            self._act(action, at)

    def _follow_chains(self, at: float) -> bool:
        """Submit and withdraw requests of stages, and end the chains' requests that are over; tell if any was submitted."""
        submit, withdraw, ended = self._chains.take()
        for run in ended:
            self._end_chain(run, at)
        for request in withdraw:
            self._decide(RequestCancelled(id=request), at)
        if submit:
            arrived = tuple([self._part_arrived(part, at) for part in submit])
            self._decide(RequestsArrived(requests=arrived), at)
        return bool(submit)

    def _end_chain(self, run: PlayedRun, at: float) -> None:
        if run.failure is not None:
            self._end(run.id, _outcome_of(run.failure.code), at)
        else:
            self._end(run.id, DONE if at <= self._requests.deadline[run.id] else LATE, at)

    def _act(self, action: Action, at: float) -> None:
        match action:
            case StartBatch():
                for batch in action.batches:
                    self._send(batch, at)
            case DeliverResults():
                deadline = self._requests.deadline
                for request in action.requests:
                    self._end(request.id, DONE if at <= deadline[request.id] else LATE, at)
                    self._chains.ended(request.id, None, at)
            case FailRequest():
                self._end(action.request.id, _outcome_of(action.code), at)
                self._chains.ended(action.request.id, action.code, at)
            case ForgetRequest():
                self._end(action.request.id, FAILED, at)
            case CancelBatch():
                self._take_back(action.batch.id, at, ErrorCode.CANCELLED)
            case RecallBatch():
                self._take_back(action.batch.id, at, ErrorCode.RECALLED)
            case ReportFault():
                raise SimulationError(f"the policy could not work out {action.about}") from action.error
            case KillSlot() | RejoinSlots():
                raise SimulationError("the policy ends a slot, and nothing hangs here")
            case TellLoneRun():
                raise SimulationError("the policy asks a client, and no server vanishes here")
            case _:
                assert_never(action)

    def _end(self, request: int, outcome: int, at: float) -> None:
        requests = self._requests
        if requests.outcome[request]:
            raise SimulationError(f"request {request} ended twice, at {at:g} s")
        requests.outcome[request] = outcome
        requests.ended[request] = at
        if requests.chain[request] == OF_STAGE:
            return
        self._finished += 1
        if self._scenario.in_flight_of:
            self._callers.append(requests.client[request])

    # ------------------------------------------------------------ slots

    def _send(self, batch: Batch, now: float) -> None:
        """Send a batch to its slot."""
        job = self._jobs[batch.id] = _Job(batch)
        self._results.prefetched += batch.behind is not None
        if self._scenario.way_s:
            self._push(now + self._scenario.way_s, ARRIVED, job)
        else:
            self._reach_slot(job, now)

    def _reach_slot(self, job: _Job, now: float) -> None:
        """Let a batch reach its slot: it begins, or is queued behind the running one."""
        if job.ended:
            return
        slot = job.batch.slot.id
        if self._running[slot] is None:
            self._begin(job, now)
        else:
            if job.batch.behind is None:
                raise SimulationError(f"slot {slot} is busy, and batch {job.batch.id} is not behind another")
            self._behind[slot].append(job)

    def _take_back(self, batch: int, now: float, code: ErrorCode) -> None:
        """Recall or cancel a batch. The order arrives at once; the report takes its way.

        A recall does not affect a running batch; a cancellation ends it.
        """
        job = self._jobs.get(batch)
        if job is None or job.ended or (job.began >= 0 and code is ErrorCode.RECALLED):
            return
        job.code = code
        self._results.recalled += code is ErrorCode.RECALLED
        slot = job.batch.slot.id
        if self._running[slot] is job:
            job.busy_s, job.due = now - job.began, now
            self._push(now, ENDED, job)
            return
        if job in self._behind[slot]:
            self._behind[slot].remove(job)
        job.ended = True
        self._push(now + self._scenario.way_s, REPORTED, job)

    def _end_batch(self, job: _Job, now: float) -> bool:
        """End a batch and begin the next one on its slot. Return whether its report has arrived."""
        if job.ended:
            return False
        job.ended = True
        slot = job.batch.slot.id
        self._running[slot] = None
        if self._scenario.wide is not None:
            job.busy_s = now - job.began
            self._share_cores(slot, now)
        self._account(job)
        if self._behind[slot]:
            self._begin(self._behind[slot].popleft(), now)
        if not self._scenario.way_s:
            return True
        self._push(now + self._scenario.way_s, REPORTED, job)
        return False

    def _end_worker(self, job: _Job, now: float) -> None:
        """End the worker of a batch, with all that runs or waits there, and start another."""
        self._account(job)
        self._results.deaths += 1
        slots = self._beside(job.batch.slot.id)
        for other in [other for other in self._jobs.values() if other.batch.slot.id in slots]:
            other.ended = True
            del self._jobs[other.batch.id]
        worker = self._scenario.worker_of(job.batch.slot.id)
        for _, known in [item for item in self._prepared.items() if item[0][0] == worker]:
            known.clear()
        for slot in slots:
            self._running[slot] = None
            self._behind[slot].clear()
        if self._scenario.wide is not None:
            self._share_cores(job.batch.slot.id, now)
        for slot in slots:
            self._handle(SlotClosing(slot=slot), now)
        for slot in slots:
            self._handle(SlotLeft(slot=slot, died=True), now)
        self._push(now + self._scenario.restart_s, RESTARTED, job)

    def _beside(self, slot: int) -> list[int]:
        """List the slots of a slot's worker."""
        worker_of = self._scenario.worker_of
        return [other for other in self._every_slot if worker_of(other) == worker_of(slot)]

    def _report(self, job: _Job) -> BatchFinished | BatchFailed:
        """Return the report of a batch, as an event for the scheduler."""
        batch = job.batch.id
        del self._jobs[batch]
        if job.code is not None:
            return BatchFailed(batch=batch, code=job.code, message=job.code)
        return BatchFinished(
            batch=batch,
            busy_s=job.busy_s,
            expired=job.expired,
            preparations=job.preparations,
            followed=bool(self._scenario.chains),
        )

    def _begin(self, job: _Job, now: float) -> None:
        batch = job.batch
        slot = batch.slot.id
        job.began = now
        self._running[slot] = job
        deadline = self._requests.deadline
        ids = tuple([arrival.id for arrival in batch.arrivals])
        late = [request for request in ids if deadline[request] < now]
        if late:
            job.expired = frozenset(late)
        if len(late) < len(ids):
            job.busy_s = self._call_s(job) * self._scenario.speed_of(slot)
            if batch.slot.wide:
                job.busy_s /= self._scenario.wide or 1.0
            ran = job.expired.symmetric_difference(ids)
            job.kills = not self._killing.isdisjoint(ran)
            if not self._failing.isdisjoint(ran):
                job.code = ErrorCode.MODEL_ERROR
        job.due = now + job.busy_s
        self._push(job.due, ENDED, job)
        if self._scenario.wide is not None:
            self._share_cores(slot, now)

    def _share_cores(self, slot: int, now: float) -> None:
        """Let what runs on the worker of a slot go on with its part of the cores, since a call has begun or ended there."""
        parts = self._scenario.slots_per_worker
        beside = self._beside(slot)
        running = [job for other in beside if (job := self._running[other]) is not None]
        asked = sum([parts if job.batch.slot.wide else 1 for job in running])
        self._note_use(slot, min(asked, sum(other < self._scenario.slot_count for other in beside)), now)
        speed = min(1.0, parts / max(1, asked))
        for job in running:
            if job.speed != speed:
                left_s = (job.due - now) * job.speed
                job.speed, job.due = speed, now + left_s / speed
                self._push(job.due, ENDED, job)

    def _note_use(self, slot: int, used: int, now: float) -> None:
        """Count the time for which cores of a worker were in use, as those of so many slots: a wide call has all slots'."""
        worker = self._scenario.worker_of(slot)
        since, before = self._in_use.get(worker, (now, 0))
        self._results.busy_s += before * (now - since)
        self._in_use[worker] = (now, used)

    def _call_s(self, job: _Job) -> float:
        """Return the seconds of the batch's calls; rows are covered as the profile says, new shapes are prepared first."""
        batch = job.batch
        cost = self._scenario.costs[batch.model]
        known = self._prepared.setdefault((self._scenario.worker_of(batch.slot.id), batch.model), set())
        seconds = 0.0
        for sizes in calls_of(self._profiles[batch.model], batch.sizes):
            seconds += cost.seconds(sizes)
            self._results.computed += prod(sizes)
            if cost.prepare_s and sizes not in known:
                known.add(sizes)
                job.preparations += 1
                seconds += cost.prepare_s
        return seconds * self._noise() if self._scenario.noise else seconds

    def _noise(self) -> float:
        if not self._noises:
            sigma = self._scenario.noise
            drawn = np.exp(sigma * self._rng.standard_normal(_NOISES) - sigma * sigma / 2)
            self._noises = drawn.tolist()
        return self._noises.pop()

    def _account(self, job: _Job) -> None:
        results = self._results
        if self._scenario.wide is None:  # else `_note_use` counts
            results.busy_s += job.busy_s
        results.batches += 1
        results.preparations += job.preparations
        if job.kills or job.code is ErrorCode.MODEL_ERROR:
            return
        elements = self._requests.elements
        members = [arrival.id for arrival in job.batch.arrivals]
        if job.expired:
            members = [request for request in members if request not in job.expired]
        results.members += len(members)
        results.useful += sum([elements[request] for request in members])

    def _push(self, at: float, kind: int, job: _Job) -> None:
        self._pushed += 1
        heappush(self._heap, (at, self._pushed, kind, job))
