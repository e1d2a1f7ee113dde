"""Any legal model and any events: a server in small that keeps its own book of endings and of batches that run."""

from __future__ import annotations

from itertools import count
from math import inf
from random import Random

from hypothesis import strategies as st
from tests.pipeline.scheduling.seen import (
    CancelAsked,
    Delivered,
    Failed,
    Forgotten,
    KillAsked,
    RecallAsked,
    Seen,
    Started,
    in_order,
    seen,
)

from shapestream.scheduling import Scheduler
from shapestream.scheduling.actions import RejoinSlots, ReportFault
from shapestream.scheduling.events import (
    Arrival,
    AuditWanted,
    BatchFailed,
    BatchFinished,
    CutReason,
    DrainStarted,
    Event,
    InputBytes,
    ModelAdded,
    ModelProfile,
    ModelRunsAlone,
    ModelUnavailable,
    RequestCancelled,
    RequestsAbandoned,
    RequestsArrived,
    SlotClosing,
    SlotJoined,
    SlotLeft,
    TimePassed,
)
from shapestream.scheduling.hang_watch import HangLimits
from shapestream.scheduling.slots import BUNDLE
from shapestream_engine.cost_table import CostPoint, CostTable

SIZES = (0, 1, 2, 3, 7, 16, 100, 5000, 2**40)


@st.composite
def profiles(draw: st.DrawFn, name: str = "m") -> ModelProfile:
    """Draw a model: its dimensions, bounds, limits, cap, static shapes, rounding and side effects."""
    has_batch = draw(st.booleans())
    others = draw(st.integers(0 if has_batch else 1, 3))
    dimensions = ("batch",) * has_batch + tuple([f"d{number}" for number in range(others)])
    capped = draw(st.booleans()) and others > 0
    paddable = (has_batch and capped and draw(st.booleans()),) * has_batch + tuple(
        [draw(st.booleans()) for _ in range(others)]
    )
    bounded = st.sampled_from([1, 2, 16, 100, 5000])
    bounds = tuple([draw(bounded if capped else st.none() | bounded) for _ in dimensions])
    idempotent = draw(st.booleans()) or has_batch
    max_batch = draw(st.sampled_from([1, 2, 6, 64])) if idempotent else 1
    statics = ()
    if has_batch and draw(st.booleans()):
        statics = tuple(
            {
                (
                    draw(st.integers(1, max_batch)),
                    *[draw(st.integers(1, bound or 16)) for bound in bounds[1:]],
                )
                for _ in range(2)
            }
        )
    nbytes = draw(st.sampled_from([1, 4, 4096]))
    inputs = (InputBytes(nbytes=nbytes, axes=tuple(range(len(dimensions)))),) * draw(st.integers(0, 2))
    return ModelProfile(
        name=name,
        dimensions=dimensions,
        has_batch=has_batch,
        paddable=paddable,
        max_batch=max_batch,
        max_delay_s=draw(st.sampled_from([0.0, 0.5])),
        max_padding_ratio=draw(st.sampled_from([None, 0.0, 0.3])),
        inputs=inputs,
        max_batch_bytes=draw(st.sampled_from([None, 1, 1000, 100_000])) if inputs else None,
        bounds=bounds,
        max_shapes=draw(st.sampled_from([1, 2, 5, 40])) if capped else None,
        fills_rows=capped and has_batch and draw(st.booleans()),
        static_shapes=statics,
        free_sizes=draw(st.booleans()),
        hang_after_s=draw(st.sampled_from([None, None, 1.0, inf])),
        idempotent=idempotent,
    )


class AnyServer:
    """A scheduler, what it started, and how each request ended; what happens next is drawn by a seed."""

    def __init__(self, models: list[ModelProfile], seed: int, slots: int = 3) -> None:
        self.random = Random(seed)
        self.scheduler = Scheduler(60, 10**6, 3, hangs=HangLimits(min_s=2.0, grace_s=0.5))
        self.models = {model.name: model for model in models}
        self.now = 0.0
        self.ids, self.slot_ids = count(1), count()
        self.arrived: dict[int, Arrival] = {}
        self.ended: dict[int, str] = {}
        self.running: dict[int, Started] = {}
        self.slots: dict[int, str] = {}
        self.wide: dict[str, int] = {}
        """Those of them that are wide, by their worker."""
        self.faults: list[ReportFault] = []
        self.rejoining: list[str] = []
        """The workers of slots that are to join again."""
        self.grouped = {model.name for model in models if self.random.random() < 0.3}
        """The models whose requests have inputs in common."""
        for model in models:
            self.play(ModelAdded(model=model))
        for _ in range(slots):
            self.join()

    def play(self, event: Event) -> list[Seen]:
        """Handle an event, and note what comes of it."""
        actions = in_order(seen(self.scheduler.handle(event, self.now)))
        for action in actions:
            match action:
                case RejoinSlots():
                    self.running.clear()
                    workers, self.slots, self.wide = list(self.slots.values()), {}, {}
                    self.rejoining += workers
                case Started():
                    assert action.slot in self.slots
                    beside = [other for other in self.running.values() if other.slot == action.slot]
                    assert len(beside) <= BUNDLE, "a slot holds too many batches"
                    assert bool(beside) == (action.behind is not None), "a busy slot was given a batch"
                    self.running[action.batch] = action
                    self._check_bytes(action)
                    groups = {self.arrived[request].group for request in action.requests}
                    assert len(groups) <= 1, "a batch mixes groups"
                case Delivered():
                    for request in action.requests:
                        self.end(request, "delivered")
                case Failed():
                    self.end(action.id, action.code)
                case Forgotten():
                    self.end(action.id, "forgotten")
                case ReportFault():
                    self.faults.append(action)
                case CancelAsked() | RecallAsked():
                    assert action.batch in self.running or self.faults
                case KillAsked():
                    assert action.slot in self.slots
        return actions

    def end(self, request: int, how: str) -> None:
        """Note the one ending of a request."""
        assert request in self.arrived
        assert request not in self.ended, f"request {request} ended twice"
        self.ended[request] = how

    def _check_bytes(self, start: Started) -> None:
        """A call holds no more than its model's limit, unless one request does at its own sizes."""
        model = self.models[start.model]
        if model.max_batch_bytes is None or not start.requests or start.facts.reason is CutReason.SUSPECT:
            return
        held = _nbytes(model, start.sizes)
        own = max(_nbytes(model, self.arrived[request].sizes) for request in start.requests)
        alone = len(start.requests) == 1
        assert held <= (max(own, model.max_batch_bytes) if alone else model.max_batch_bytes), (
            "a call is filled up beyond its limit"
        )

    # ------------------------------------------------------------ what may happen

    def rejoin(self) -> None:
        """The slots that the scheduler forgot join again, as new ones."""
        workers, self.rejoining = self.rejoining, []
        for worker in workers:
            self.join(worker)

    def join(self, worker: str | None = None) -> None:
        """A slot joins, with measured costs or without; of some workers, a wide one as well."""
        worker = worker or self.random.choice(["a", "b", "c", "d"])
        self._join(worker, self.random.choice([None, 0.01]))
        if worker in "ad" and worker not in self.wide and self.random.random() < 0.7:
            self.wide[worker] = self._join(worker, None, wide=True)

    def _join(self, worker: str, prefetch_s: float | None, *, wide: bool = False) -> int:
        number = next(self.slot_ids)
        costs = {}
        if worker in "ab":
            key, second_s = (f"{worker}, wide", 5e-4) if wide else (worker, 1e-3)
            for name, model in self.models.items():
                rank = len(model.dimensions)
                points = [CostPoint(sizes=(size,) * rank, seconds=second_s * size) for size in (1, 6)]
                costs[name] = CostTable(key=key, dimensions=model.dimensions, points=tuple(points))
        self.slots[number] = worker
        self.play(
            SlotJoined(
                slot=number,
                models=frozenset(self.models),
                worker=worker,
                costs=costs,
                prefetch_s=prefetch_s,
                wide=wide,
            )
        )
        return number

    def arrive(self) -> None:
        """Requests of all kinds arrive in one turn."""
        arrivals = []
        for _ in range(self.random.randint(1, 8)):
            model = self.random.choice(list(self.models.values()))
            bounds = model.bounds or (None,) * len(model.dimensions)
            sizes = tuple([min(self.random.choice(SIZES), bound or 2**40) for bound in bounds])
            if self.random.random() < 0.7:
                sizes = tuple([max(1, min(size, 16)) for size in sizes])
            arrival = Arrival(
                id=next(self.ids),
                client=self.random.randrange(3),
                model=model.name,
                sizes=sizes,
                nbytes=self.random.choice([0, 10, 1000]),
                deadline=self.random.choice([None, None, self.now + 0.5]),
                priority=self.random.choice([0, 0, 0, 1, -40]),
                group=self.random.randrange(3) if model.name in self.grouped else None,
            )
            arrivals.append(arrival)
            self.arrived[arrival.id] = arrival
        self.play(RequestsArrived(requests=tuple(arrivals)))

    def active(self) -> list[Started]:
        """Batches that run and are not queued behind another."""
        return [start for start in self.running.values() if start.behind not in self.running]

    def report(self) -> None:
        """A batch ran, or did not."""
        if not self.active():
            return
        start = self.random.choice(self.active())
        del self.running[start.batch]
        code = self.random.choice(
            [None, None, None, None, "model_error", "invalid", "internal", "unavailable", "cancelled"]
        )
        if code is None:
            busy_s = self.random.choice([0.0, 1e-6, 0.01, 1.0, 1e5])
            self.play(BatchFinished(batch=start.batch, busy_s=busy_s, preparations=self.random.randrange(2)))
        else:
            self.play(BatchFailed(batch=start.batch, code=code, message="as drawn"))

    def leave(self) -> None:
        """A worker dies, or its connection breaks."""
        if len(self.slots) < 2:
            return
        worker = self.random.choice(list(self.slots.values()))
        died = self.random.random() < 0.5
        slots = [slot for slot, other in self.slots.items() if other == worker]
        for slot in slots:
            self.play(SlotClosing(slot=slot))
        for slot in slots:
            self.running = {number: start for number, start in self.running.items() if start.slot != slot}
            self.slots.pop(slot, None)
            if self.wide.get(worker) == slot:
                del self.wide[worker]
            self.play(SlotLeft(slot=slot, died=died))

    def withdraw(self) -> None:
        """A client withdraws a request, or leaves."""
        left = [request for request in self.arrived if request not in self.ended]
        if left and self.random.random() < 0.7:
            self.play(RequestCancelled(id=self.random.choice(left)))
        else:
            self.play(RequestsAbandoned(ids=tuple([id_ for id_ in left if self.arrived[id_].client == 0])))

    def change(self) -> None:
        """A model runs alone from now on, or not; or nobody will serve it; or an audit is wanted."""
        model = self.random.choice(list(self.models.values()))
        kind = self.random.randrange(3)
        if kind == 0:
            self.play(ModelRunsAlone(model=model.name, alone=self.random.random() < 0.5))
        elif kind == 1 and not self.slots:
            self.play(ModelUnavailable(model=model.name, message="as drawn"))
        elif not any(not start.requests for start in self.running.values()):
            sizes = tuple([min(bound or 3, 3) for bound in model.bounds or (None,) * len(model.dimensions)])
            self.play(
                AuditWanted(
                    model=model.name, sizes=sizes, slots=frozenset(self.slots) - {*self.wide.values()}
                )
            )

    def wake(self) -> None:
        """Time passes, mostly until the scheduler asked for it."""
        wakeup = self.scheduler.next_wakeup()
        self.now += self.random.choice([0.001, 0.1, 3.0])
        if wakeup is not None and self.random.random() < 0.7:
            self.now = max(self.now, wakeup)
        self.play(TimePassed())

    def step(self) -> None:
        """One event, as drawn."""
        self.rejoin()
        kinds = [self.arrive] * 4 + [self.report] * 6 + [self.wake] * 2
        kinds += [self.withdraw, self.leave, self.join, self.change]
        kind = self.random.choice(kinds)
        if kind != self.join or len(self.slots) < 8:
            kind()

    def finish(self) -> None:
        """Serve what is left."""
        self.play(DrainStarted())
        self.rejoin()
        while len(self.slots) < 4:
            self.join()
        for _ in range(3000):
            if self.active():
                start = self.active()[0]
                del self.running[start.batch]
                self.play(BatchFinished(batch=start.batch, busy_s=0.01))
            elif len(self.ended) == len(self.arrived):
                break
            else:
                self.now = max(self.now + 0.01, self.scheduler.next_wakeup() or 0.0)
                self.play(TimePassed())
        assert self.arrived.keys() == self.ended.keys(), "a request was lost"


def _nbytes(model: ModelProfile, sizes: tuple[int, ...]) -> int:
    held = 0
    for entry in model.inputs:
        nbytes = entry.nbytes
        for axis in entry.axes:
            nbytes *= sizes[axis]
        held += nbytes
    return held
