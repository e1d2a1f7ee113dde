"""Any sequence of events: every promise of docs/scheduling.md is checked after each of them.

The machine keeps its own books, from events and actions alone, and never looks into the scheduler.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count
from math import prod

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from shapestream.scheduling import Scheduler
from shapestream.scheduling.actions import (
    Action,
    CancelBatch,
    DeliverResults,
    FailRequest,
    ForgetRequest,
    StartBatch,
)
from shapestream.scheduling.events import (
    Arrival,
    BatchFailed,
    BatchFinished,
    ClientLeft,
    DrainStarted,
    Event,
    ModelAdded,
    ModelProfile,
    RequestCancelled,
    RequestsArrived,
    SlotJoined,
    SlotLeft,
    TimePassed,
)

MAX_QUEUED_REQUESTS = 14
MAX_QUEUED_BYTES = 200
MAX_ATTEMPTS = 2


def _profile(
    name: str, dimensions: tuple[str, ...], paddable: tuple[bool, ...], **options: float
) -> ModelProfile:
    has_batch = dimensions[0] == "batch"
    return ModelProfile(
        name=name, dimensions=dimensions, has_batch=has_batch, paddable=paddable, max_batch=6, **options
    )


PROFILES = {
    profile.name: profile
    for profile in (
        _profile("text", ("batch", "seq"), (False, True), max_padding_ratio=0.25),
        _profile("image", ("batch", "height", "width"), (False, False, True), max_padding_ratio=0.5),
        _profile("exact", ("batch", "seq"), (False, False)),
        _profile("alone", ("height", "width"), (True, True)),
        _profile("patient", ("batch", "seq"), (False, True), max_padding_ratio=0.25, max_delay_s=0.5),
    )
}
LATE = "exact"  # the model that is added, if at all, by a rule
MODELS = (*PROFILES, "unknown")


def _turn(model: st.SearchStrategy[str]) -> st.SearchStrategy[list[tuple[object, ...]]]:
    """What arrives in one turn: (model, sizes, client, bytes, time left, priority) each."""
    return st.lists(
        st.tuples(
            model,
            st.tuples(st.integers(0, 4), st.integers(1, 4), st.integers(3, 4)),
            st.integers(0, 2),
            st.sampled_from([1, 1, 2, 10, 10, 10, 10, 70, MAX_QUEUED_BYTES + 1]),
            st.sampled_from([None, None, None, None, None, 0.0, 0.3, 1.0, 3.0]),
            st.sampled_from([0, 0, 0, 0, 1, -1, 40]),
        ),
        min_size=2,
        max_size=9,
    )


TURNS = st.one_of(*[_turn(st.just(name)) for name in PROFILES], _turn(st.sampled_from(MODELS)))


@dataclass
class Known:
    """What the machine knows of one request."""

    arrival: Arrival
    order: int
    arrived: float
    batch: int | None = None
    lost: int = 0
    group: frozenset[int] | None = None  # the ids that it must run again with, if it must

    @property
    def shape(self) -> tuple[int, ...]:
        """Its sizes without the batch axis."""
        return self.arrival.sizes[1:] if PROFILES[self.arrival.model].has_batch else self.arrival.sizes

    @property
    def rows(self) -> int:
        """Its rows; 1 where there is no batch axis."""
        return self.arrival.sizes[0] if PROFILES[self.arrival.model].has_batch else 1

    @property
    def rank(self) -> tuple[float, int]:
        """Its place: a step of priority is a second of waiting, 32 steps count at most."""
        return self.arrived - max(-32, min(32, self.arrival.priority)), self.order

    @property
    def lane(self) -> tuple[object, ...]:
        """What must be equal to share a batch."""
        profile = PROFILES[self.arrival.model]
        sizes = zip(profile.dimensions, self.arrival.sizes, profile.paddable, strict=True)
        fixed = tuple(size for name, size, padded in sizes if name != "batch" and not padded)
        return self.arrival.model, fixed


@dataclass
class Running:
    """What the machine knows of one batch."""

    start: StartBatch
    cancelled: bool = False
    over: bool = False
    wanted: set[int] = field(default_factory=set)


class SchedulerMachine(RuleBasedStateMachine):
    """Plays events at the scheduler and holds its actions against its promises."""

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = self._new_scheduler()
        self.now = 0.0
        self.log: list[tuple[Event, float, list[Action]]] = []
        self.ids = count(1)
        self.orders = count()
        self.known: dict[int, Known] = {}
        self.ended: dict[int, str] = {}
        self.refused: set[int] = set()
        self.slots: dict[int, frozenset[str]] = {}
        self.slot_ids = count()
        self.batches: dict[int, Running] = {}
        self.models: set[str] = set()
        self.draining = False

    @staticmethod
    def _new_scheduler() -> Scheduler:
        return Scheduler(MAX_QUEUED_REQUESTS, MAX_QUEUED_BYTES, MAX_ATTEMPTS)

    # ------------------------------------------------------------ events

    @initialize()
    def begin(self) -> None:
        """All models but one are there from the start, and a slot."""
        for profile in PROFILES.values():
            if profile.name != LATE:
                self._add_model(profile)
        self._add_slot(frozenset(MODELS))

    def _add_model(self, profile: ModelProfile) -> None:
        self.models.add(profile.name)
        self._play(ModelAdded(model=profile))

    @precondition(lambda self: LATE not in self.models)
    @rule()
    def add_late_model(self) -> None:
        """A model may be added while slots that name it are there."""
        self._add_model(PROFILES[LATE])

    @rule(specs=TURNS)
    def requests_arrive(self, specs) -> None:
        """Requests of all kinds arrive in one turn."""
        arrivals = []
        for model, sizes, client, nbytes, remaining, priority in specs:
            dimensions = len(PROFILES[model].dimensions) if model in PROFILES else 2
            arrivals.append(
                Arrival(
                    id=next(self.ids),
                    client=client,
                    model=model,
                    sizes=sizes[:dimensions],
                    nbytes=nbytes,
                    deadline=None if remaining is None else self.now + remaining,
                    priority=priority,
                )
            )
        queued_before = [known for known in self._queued() if not self._is_late(known.arrival.id)]
        room = MAX_QUEUED_REQUESTS - len(queued_before)
        for arrival in arrivals:
            self.known[arrival.id] = Known(arrival, next(self.orders), self.now)
        actions = self._play(RequestsArrived(requests=tuple(arrivals)))
        failed = {action.id: action.code for action in actions if isinstance(action, FailRequest)}
        admitted = [arrival for arrival in arrivals if arrival.id not in failed]
        for arrival in arrivals:
            self._check_refusal(arrival, failed.get(arrival.id))
        assert len(admitted) <= max(0, room), "the queue's bound in requests"
        if admitted:
            held = sum(request.arrival.nbytes for request in queued_before)
            assert held + sum(a.nbytes for a in admitted) <= MAX_QUEUED_BYTES, "the queue's bound in bytes"
        if "overloaded" in failed.values():
            held = sum(k.arrival.nbytes for k in queued_before) + sum(a.nbytes for a in admitted)
            full = len(admitted) >= room or held + max(a.nbytes for a in arrivals) > MAX_QUEUED_BYTES
            assert full, "a request was refused although there was room"

    def _check_refusal(self, arrival: Arrival, code: str | None) -> None:
        """The reasons that are certain beforehand."""
        if self.draining:
            assert code == "draining"
        elif arrival.model not in self.models:
            assert code == "unavailable"
        elif arrival.deadline is not None and arrival.deadline <= self.now:
            assert code == "deadline_exceeded"
        elif arrival.nbytes > MAX_QUEUED_BYTES:
            assert code in ("too_large", "overloaded")
        else:
            assert code in (None, "overloaded")

    @rule(
        models=st.sampled_from(
            [
                frozenset(MODELS),
                frozenset(MODELS),
                frozenset({"text", LATE}),
                frozenset({"image", "alone", "patient"}),
            ]
        )
    )
    def slot_joins(self, models) -> None:
        """A slot serves some models, or all."""
        if len(self.slots) < 3:
            self._add_slot(models)

    def _add_slot(self, models: frozenset[str]) -> None:
        slot = next(self.slot_ids)
        self.slots[slot] = models
        self._play(SlotJoined(slot=slot, models=models))

    @precondition(lambda self: self._running())
    @rule(data=st.data())
    def slot_leaves(self, data) -> None:
        """A slot dies, with its batch if it had one."""
        slot = data.draw(st.sampled_from(sorted(self.slots)))
        del self.slots[slot]
        for running in self._running():
            if running.start.slot == slot:
                self._lose(running)
        self._play(SlotLeft(slot=slot))

    def _lose(self, running: Running) -> None:
        """What the loss of a batch means for its members, before the scheduler has said anything."""
        running.over = True
        for id_ in running.wanted:
            self.known[id_].lost += 1
            self.known[id_].batch = None
            self.known[id_].group = frozenset({id_})

    @precondition(lambda self: self._running())
    @rule(data=st.data(), run_s=st.sampled_from([0.0, 0.2, 1.0]))
    def batch_finishes(self, data, run_s) -> None:
        """A batch ends well; members with a deadline may have been left out by their slot."""
        running = data.draw(st.sampled_from(self._running()))
        may_expire = [i for i in running.start.requests if self.known[i].arrival.deadline is not None]
        expired = frozenset(i for i in may_expire if data.draw(st.integers(0, 3)) == 0)
        running.over = True
        wanted = set(running.wanted)
        batch = running.start.batch
        late = {i for i in wanted if self._is_late(i)} | (wanted & expired)
        actions = self._play(BatchFinished(batch=batch, run_s=run_s, expired=expired))
        assert all(self.ended[id_] == "deadline_exceeded" for id_ in late), "a late result was delivered"
        delivered = [set(a.requests) for a in actions if isinstance(a, DeliverResults)]
        assert delivered == ([wanted - late] if wanted - late else []), "a result that was ready is missing"

    @precondition(lambda self: self._running())
    @rule(data=st.data(), code=st.sampled_from(["model_error", "internal"]))
    def batch_is_broken(self, data, code) -> None:
        """A batch fails because of its data."""
        running = data.draw(st.sampled_from(self._running()))
        running.over = True
        self._halve(running)
        self._play(BatchFailed(batch=running.start.batch, code=code, message="broken"))

    @precondition(lambda self: self._running())
    @rule(data=st.data(), code=st.sampled_from(["unavailable", "cancelled"]))
    def batch_is_lost(self, data, code) -> None:
        """A batch fails because of its device; its slot stays."""
        running = data.draw(st.sampled_from(self._running()))
        self._lose(running)
        self._play(BatchFailed(batch=running.start.batch, code=code, message="gone"))

    def _halve(self, running: Running) -> None:
        """Which groups must run again. A batch of one has no second try."""
        left = [i for i in running.start.requests if i in running.wanted and not self._is_late(i)]
        middle = (len(left) + 1) // 2
        for id_ in running.wanted:
            self.known[id_].batch = None
        if len(running.start.requests) > 1:
            for half in (left[:middle], left[middle:]):
                for id_ in half:
                    self.known[id_].group = frozenset(half)

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def request_is_cancelled(self, data) -> None:
        """Any id may be withdrawn, at any time, and more than once."""
        id_ = data.draw(st.sampled_from([i for i in self.known if i not in self.ended] or list(self.known)))
        alive = id_ not in self.ended and not self._is_late(id_)
        self._play(RequestCancelled(id=id_))
        assert not alive or self.ended[id_] == "cancelled"

    @precondition(lambda self: len(self._queued()) > 2)
    @rule(client=st.integers(0, 2))
    def client_leaves(self, client) -> None:
        """A client takes along whatever it had."""
        own = [i for i, k in self.known.items() if k.arrival.client == client and i not in self.ended]
        own = [i for i in own if not self._is_late(i)]
        self._play(ClientLeft(client=client))
        assert all(self.ended[id_] == "forgotten" for id_ in own)

    @rule(seconds=st.sampled_from([0.01, 0.3, 1.1]))
    def time_passes(self, seconds) -> None:
        """The next event comes later; a timer may be late, too."""
        self.now += seconds

    @rule()
    def timer_fires(self) -> None:
        """The caller wakes the scheduler when it wished."""
        wakeup = self.scheduler.next_wakeup()
        if wakeup is not None:
            self.now = max(self.now, wakeup)
            self._play(TimePassed())

    @precondition(lambda self: len(self.log) > 35 and not self.draining)
    @rule()
    def drain_starts(self) -> None:
        """The server goes away after a while."""
        self.draining = True
        self._play(DrainStarted())

    # ------------------------------------------------------------ what the machine knows

    def _is_late(self, id_: int) -> bool:
        deadline = self.known[id_].arrival.deadline
        return deadline is not None and deadline <= self.now

    def _running(self) -> list[Running]:
        return [running for running in self.batches.values() if not running.over]

    def _queued(self) -> list[Known]:
        return [k for i, k in self.known.items() if i not in self.ended and k.batch is None]

    def _free_slots(self) -> set[int]:
        return set(self.slots) - {running.start.slot for running in self._running()}

    # ------------------------------------------------------------ what the scheduler promises

    def _play(self, event: Event) -> list[Action]:
        actions = self.scheduler.handle(event, self.now)
        self.log.append((event, self.now, list(actions)))
        for action in actions:
            match action:
                case StartBatch():
                    self._started(action)
                case DeliverResults():
                    assert self.batches[action.batch].over, "a batch was delivered while it ran"
                    for id_ in action.requests:
                        assert id_ in self.batches[action.batch].start.requests
                        assert not self._is_late(id_), "a late result was delivered"
                        self._end(id_, "delivered")
                case FailRequest():
                    self._failed(action, event)
                case ForgetRequest():
                    assert isinstance(event, ClientLeft)
                    assert self.known[action.id].arrival.client == event.client
                    self._end(action.id, "forgotten")
                case CancelBatch():
                    running = self.batches[action.batch]
                    assert not running.over, "a batch was cancelled that is over"
                    assert not running.cancelled, "a batch was cancelled twice"
                    assert running.start.slot == action.slot
                    assert not running.wanted, "a batch was cancelled that somebody waits for"
                    running.cancelled = True
        return actions

    def _end(self, id_: int, how: str) -> None:
        assert id_ in self.known
        assert id_ not in self.ended, f"request {id_} ended twice"
        self.ended[id_] = how
        for running in self.batches.values():
            running.wanted.discard(id_)

    def _failed(self, action: FailRequest, event: Event) -> None:
        known = self.known[action.id]
        match action.code:
            case "deadline_exceeded":
                left_out = isinstance(event, BatchFinished) and action.id in event.expired
                assert left_out or self._is_late(action.id), "failed before its deadline"
            case "cancelled":
                assert isinstance(event, RequestCancelled)
                assert action.id == event.id
            case "worker_lost":
                assert known.lost == MAX_ATTEMPTS
            case "model_error" | "internal":
                assert isinstance(event, BatchFailed)
                assert (action.id,) == self.batches[event.batch].start.requests, "not alone to blame"
                assert (action.code, action.message) == (event.code, event.message)
            case _:
                assert isinstance(event, RequestsArrived)
                assert action.id in {arrival.id for arrival in event.requests}
        self._end(action.id, action.code)

    def _started(self, start: StartBatch) -> None:
        profile = PROFILES[start.model]
        members = [self.known[id_] for id_ in start.requests]
        assert start.batch not in self.batches
        assert start.slot in self._free_slots(), "a slot runs one batch at a time"
        assert start.model in self.slots[start.slot]
        assert members
        assert len(members) == len(set(start.requests))
        for id_, member in zip(start.requests, members, strict=True):
            assert id_ not in self.ended, "what has ended was started"
            assert member.batch is None, "a request runs twice at once"
            assert not self._is_late(id_), "an inference started after its request's deadline"
        assert {start.model} == {member.arrival.model for member in members}
        assert len({member.lane for member in members}) == 1, "a batch mixes what may not mix"
        self._check_sizes(start, members, profile)
        self._check_order(start, members, profile)
        for member in members:
            member.batch = start.batch
            member.group = None
        self.batches[start.batch] = Running(start, wanted=set(start.requests))

    def _check_sizes(self, start: StartBatch, members: list[Known], profile: ModelProfile) -> None:
        shape = tuple(map(max, zip(*[member.shape for member in members], strict=True)))
        rows = sum(member.rows for member in members)
        assert start.sizes == ((rows, *shape) if profile.has_batch else shape)
        if len(members) == 1:
            return
        assert profile.has_batch, "a request without a batch axis shares a call"
        assert rows <= profile.max_batch
        assert len(members) <= profile.max_batch
        if members[0].group is None:
            wanted = sum(member.rows * prod(member.shape) for member in members)
            assert wanted >= (1.0 - profile.max_padding_ratio) * rows * prod(shape), "too much padding"

    def _check_order(self, start: StartBatch, members: list[Known], profile: ModelProfile) -> None:
        """What must run again goes first, in its group; then the oldest by rank; no equal is overtaken."""
        waiting = [k for k in self._queued() if k.arrival.model == start.model and self._admitted(k)]
        again = [k for k in waiting if k.group is not None]
        if again:
            group = members[0].group
            assert group is not None, "a newcomer went before what must run again"
            assert set(start.requests) == {i for i in group if i not in self.ended}, "a group was changed"
            return
        others = [k for k in waiting if k.arrival.id not in start.requests]
        if not profile.max_delay_s or not profile.has_batch:
            assert min(k.rank for k in waiting) == min(m.rank for m in members), "the oldest did not go"
        for member in members:
            for other in others:
                if (other.shape, other.arrival.priority) == (member.shape, member.arrival.priority):
                    assert other.order > member.order, "an equal was overtaken"

    def _admitted(self, known: Known) -> bool:
        """Of the turn that is being played, refusals come before starts, so what has no ending is in."""
        return known.arrival.id not in self.ended

    @invariant()
    def books_agree(self) -> None:
        """The scheduler's own invariants hold, and its statistics are what the machine knows."""
        self.scheduler.check_invariants()
        statistics = self.scheduler.statistics()
        assert statistics.queued == len(self._queued())
        assert statistics.queued_bytes == sum(known.arrival.nbytes for known in self._queued())
        assert statistics.running == sum(len(running.wanted) for running in self._running())
        assert (statistics.slots, statistics.free_slots) == (len(self.slots), len(self._free_slots()))

    @invariant()
    def no_free_slot_idles(self) -> None:
        """A free slot never idles while a request that it could run waits, unless for its delay."""
        served = {model for slot in self._free_slots() for model in self.slots[slot]}
        last = self.log[-1][1] if self.log else 0.0
        for known in self._queued():
            if known.arrival.model in served:
                delay_s = PROFILES[known.arrival.model].max_delay_s
                assert delay_s, "a free slot idles while a request waits"
                assert known.group is None, "a free slot idles while a request waits to run again"
                assert known.arrived + delay_s > last, "a request waited longer than its delay"

    @invariant()
    def nobody_waits_past_the_deadline(self) -> None:
        """After each event all that is late has been answered, and the next deadline wakes the scheduler."""
        last = self.log[-1][1] if self.log else 0.0
        deadlines = [
            known.arrival.deadline
            for id_, known in self.known.items()
            if id_ not in self.ended and known.arrival.deadline is not None
        ]
        assert all(deadline > last for deadline in deadlines)
        wakeup = self.scheduler.next_wakeup()
        assert wakeup is None or wakeup > last, "a wakeup in the past would be a busy loop"
        if deadlines:
            assert wakeup is not None
            assert wakeup <= min(deadlines)

    @invariant()
    def unwanted_batches_are_cancelled(self) -> None:
        """A running batch that nobody waits for has been cancelled, and no other."""
        for running in self._running():
            assert running.cancelled == (not running.wanted)

    def teardown(self) -> None:
        """With a slot for everything, all that is left ends well; and the same events give the same actions."""
        if self.models:
            self._add_slot(frozenset(MODELS))
            while self._running() or self._queued():
                while self._running():
                    running = self._running()[0]
                    running.over = True
                    self._play(BatchFinished(batch=running.start.batch, run_s=0.1))
                self.timer_fires()
        assert set(self.known) == set(self.ended), "a request was lost"
        assert self.scheduler.statistics().idle
        again = self._new_scheduler()
        for event, now, actions in self.log:
            assert actions == again.handle(event, now), "the same events gave other actions"


SchedulerMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)


class TestScheduler(SchedulerMachine.TestCase):
    """Hypothesis searches for a sequence of events that breaks a promise."""
