"""Recovery: what follows when a batch fails, hangs or is lost, and which requests must run apart.

A batch that the *data* broke is run again in two halves, each exactly as given, until the culprit is alone; its
batch-mates get their answers. A batch that was lost with its *slot* says nothing about its members: each is run again
alone in its call, a bounded number of times, the last time where nothing else runs. A batch whose *process* died, or that
hung, has suspects for members: each is run again where nothing else runs, and one that ends that worker, too, is
`poisoned`.

A process that dies ends everything that runs there, so only a request that ran alone can be blamed. A suspect waits until
some worker is empty, and while it runs nothing else is started on any slot of that worker. Suspects go before
everything else; only the worker that is emptied for them gets less work.

A hang is a batch that runs far longer than batches of its model do. First the slot is asked to cancel it; after a grace
its process is to be killed; if its slot is still there after another, as a thread of the server would be, the members
are answered and the slot is lost.

Clients and shapes whose requests failed lately run apart, so that the next failure costs no other client a call. A batch
that fails costs up to two calls per member before any other turn. So requests of a culprit's client run one at a time. A
client whose request killed a process shares calls only with itself, and so does a shape that failed in company. It ends
when as many of their requests in a row as a full batch holds have run well.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import ceil, inf
from typing import TypeAlias

from shapestream.scheduling.costs import CostModel
from shapestream.scheduling.events import (
    Action,
    BatchFailed,
    BatchFinished,
    CancelBatch,
    KillSlot,
    RecallBatch,
    ReportFault,
    SlotLeft,
    StartBatch,
)
from shapestream.scheduling.ledger import Ledger
from shapestream.scheduling.planner import unplanned
from shapestream.scheduling.queueing import ModelQueue, Queues
from shapestream.scheduling.state import (
    RUNNING,
    Batch,
    BatchState,
    Request,
    Slot,
    SlotState,
    SlotTable,
    Trial,
    Worker,
    rest_s,
)
from shapestream_engine.batch import ErrorCode

Mark: TypeAlias = tuple[int | None, tuple[int, ...] | None]

MAX_APART = 1024
"""Clients and shapes that are remembered; when another comes, the first one is forgotten. It bounds memory."""


class Apart:
    """The clients and shapes of each model that run apart."""

    __slots__ = ("_models",)

    def __init__(self) -> None:
        self._models: dict[str, ModelApart] = {}
        """The models of which a request was ever to blame."""

    def blame(self, request: Request, *, singly: bool) -> None:
        """Let the like of a request that was to blame run apart; `singly`: its client's requests one at a time."""
        profile = request.queue.profile
        model = self._models.get(profile.name)
        if model is None:
            model = self._models[profile.name] = ModelApart(profile.max_batch)
        model.failed(request, singly=singly)

    def ran_well(self, model: str, requests: Iterable[Request]) -> None:
        """Count requests of a model that had their results."""
        if apart := self._models.get(model):
            apart.ran_well(requests)

    def of(self, model: str) -> ModelApart | None:
        """The clients and shapes of a model that run apart; None if there are none."""
        return self._models.get(model) or None


class ModelApart:
    """The clients and shapes of one model that run apart."""

    __slots__ = ("_left", "_needed", "_singly")

    def __init__(self, needed: int) -> None:
        """`needed`: requests in a row that have to run well before there is company again."""
        self._needed = needed
        self._left: dict[int | tuple[int, ...], int] = {}
        """By client, or by shape: how many of those are still to run."""
        self._singly: set[int] = set()
        """Clients, of those, whose requests run one at a time."""

    def __bool__(self) -> bool:
        return bool(self._left)

    def __repr__(self) -> str:
        return f"<apart: {list(self._left)}>"

    def failed(self, request: Request, *, singly: bool) -> None:
        """A request was to blame. The shapes of a client that runs apart already are not: it could mark all of them."""
        alone = request.client in self._left
        self._mark(request.client)
        if singly:
            self._singly.add(request.client)
        if not alone:
            # As it was queued: its like are rounded up as it was, before it ran alone at its own sizes.
            self._mark(request.bucket.shape)

    def _mark(self, who: int | tuple[int, ...]) -> None:
        self._left.pop(who, None)
        if len(self._left) >= MAX_APART:
            self._forget(next(iter(self._left)))
        self._left[who] = self._needed

    def ran_well(self, requests: Iterable[Request]) -> None:
        """These had their results."""
        left = self._left
        for request in requests:
            for who in (request.client, request.shape):
                if who in left:
                    left[who] -= 1
                    if not left[who]:
                        self._forget(who)

    def _forget(self, who: int | tuple[int, ...]) -> None:
        del self._left[who]
        if isinstance(who, int):
            self._singly.discard(who)

    def runs_alone(self, request: Request) -> bool:
        """Whether a request of this client failed lately, and killed nothing."""
        return request.client in self._singly

    def mark(self, request: Request) -> Mark:
        """What a request must share with its company."""
        client, shape = request.client, request.shape
        return (client if client in self._left else None, shape if shape in self._left else None)


TIMES_P99 = 10.0
"""A batch hangs that takes so many times what all but one of a hundred of its model's batches take."""
TIMES_PREDICTED = 20.0
"""And so many times what it was itself predicted to take: predictions are rougher, and wrong for what is new."""
TIMES_AT_MOST = 5.0
"""But no longer than so many times what it should take, and a first call's time besides: what takes minutes by itself is
late by a factor when others crowd the machine, and by a time when it had to be prepared for; not by twenty times."""
FIRST_CALL_TIMES = 20.0
"""Times `HangLimits.min_s` that a call may take of which nothing is known: it may have to compile."""
MOST_FIRST_CALL_S = 600.0
"""But no longer than this, unless `min_s` is."""
ENOUGH = 20
"""Batches, from which on the 99th percentile says something; the largest of fewer than a hundred is taken for it."""
REMEMBERED = 512
"""Batches per model that it is taken of."""
STALL_S = 1.0
"""A look that comes so late proves nothing: reports have waited, too, and are read first."""
RECKON_EVERY = 32
"""Sorting them takes some 30 us, so it is done once in so many batches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HangLimits:
    """What is a hang, at least, and how much patience there is."""

    min_s: float
    """No batch is said to hang before it has run so long, except where its model has a limit of its own."""
    grace_s: float
    """From one step to the next."""

    @property
    def first_call_s(self) -> float:
        """How long a call may take of which nothing is known."""
        return max(self.min_s, min(FIRST_CALL_TIMES * self.min_s, MOST_FIRST_CALL_S))

    def __post_init__(self) -> None:
        if not (self.min_s > 0.0 and self.grace_s > 0.0):
            raise ValueError("a batch cannot hang from the start: the limits must be more than 0 s")


class HangWatch:
    """When each running batch will have run too long. Without limits it never looks."""

    __slots__ = ("_busy", "limits", "next_look")

    def __init__(self, limits: HangLimits | None) -> None:
        self.limits = limits
        self._busy: dict[str, _BusyTimes] = {}
        self.next_look = inf
        """When `look` is wanted. Batches end without a word here, so it may be in vain, once per limit at most."""

    def observe(self, batch: Batch, busy_s: float) -> None:
        """A batch ran so long."""
        if self.limits is None:
            return
        model = batch.queue.profile.name
        times = self._busy.get(model)
        if times is None:
            times = self._busy[model] = _BusyTimes(measured=batch.predicted_s is not None)
        times.add(busy_s, batch.sizes)

    def began(self, batch: Batch, now: float) -> None:
        """A batch begins to run."""
        if self.limits is None:
            return
        batch.hang_at = hang_at = now + self.limit_s(batch)
        if hang_at < self.next_look:
            self.next_look = hang_at

    def limit_s(self, batch: Batch) -> float:
        """How long it may run: what its model says, or by what is known. While nothing is, as long as a first call may
        take; and so, where costs are learned from traffic alone, what has sizes that none of the first batches had."""
        assert self.limits is not None
        own_s = batch.queue.profile.hang_after_s
        if own_s is not None:
            return own_s
        first_s = self.limits.first_call_s
        times = self._busy.get(batch.queue.profile.name)
        predicted_s = batch.predicted_s
        if predicted_s is not None:
            # Beyond all that was measured nothing is promised, so there is more patience, but not without end.
            predicted_s = max(predicted_s, min(batch.guess_s, MOST_FIRST_CALL_S))
        if times is None or (predicted_s is None and times.count < ENOUGH):
            return first_s if predicted_s is None else self._limit_s(0.0, predicted_s)
        limit_s = self._limit_s(times.p99_s if times.count >= ENOUGH else 0.0, predicted_s or 0.0)
        return max(limit_s, first_s) if times.new_to(batch) else limit_s

    def _limit_s(self, p99_s: float, predicted_s: float) -> float:
        """By what is known of a batch and its like; 0.0 for what is not."""
        assert self.limits is not None
        times_s = max(TIMES_P99 * p99_s, TIMES_PREDICTED * predicted_s)
        most_s = TIMES_AT_MOST * max(p99_s, predicted_s) + self.limits.first_call_s
        return max(self.limits.min_s, min(times_s, most_s))

    def look(self, batches: Iterable[Batch], now: float) -> list[Batch]:
        """The running batches against which it is time to take the next step, which the caller takes."""
        assert self.limits is not None
        due = []
        self.next_look = inf
        for batch in batches:
            if batch.behind or batch.state is BatchState.ABANDONED:
                continue
            if batch.hang_at + STALL_S < now:
                # Nobody looked in time, so this process stood still, and perhaps the worker's as well (a paused machine).
                batch.hang_at = now + self.limits.grace_s
            elif batch.hang_at <= now:
                last = batch.state is BatchState.CONDEMNED
                batch.hang_at = inf if last else now + self.limits.grace_s
                due.append(batch)
            self.next_look = min(self.next_look, batch.hang_at)
        return due


class _BusyTimes:
    """The last so many, and what all but one of a hundred of them do not exceed."""

    __slots__ = ("_last", "_sizes", "count", "p99_s")

    def __init__(self, *, measured: bool) -> None:
        """`measured`: its first batch had a prediction, by a calibration, which has met what is new."""
        self._sizes: set[tuple[int, ...]] | None = None if measured else set()
        """Of the first batches, where nothing was measured before; None when there were enough."""
        self._last: deque[float] = deque(maxlen=REMEMBERED)
        self.count = 0
        self.p99_s = 0.0

    def new_to(self, batch: Batch) -> bool:
        """Whether its sizes may have to be prepared for, for all that is known."""
        return self._sizes is not None and batch.sizes not in self._sizes

    def add(self, busy_s: float, sizes: tuple[int, ...]) -> None:
        if self._sizes is not None:
            self._sizes.add(sizes)
            if self.count + 1 >= ENOUGH:
                self._sizes = None  # first calls are among those that the 99th percentile is taken of
        self._last.append(busy_s)
        self.count += 1
        if self.count < 100:
            self.p99_s = max(self.p99_s, busy_s)
        elif self.count % RECKON_EVERY == 0:
            self.p99_s = sorted(self._last)[ceil(0.99 * len(self._last)) - 1]


Start: TypeAlias = Callable[[ModelQueue, Slot, float, list[Action]], StartBatch]


class Isolation:
    """Chooses workers for suspects, empties them, and lets them go when no suspect is left for them."""

    __slots__ = ("_ledger", "_slots", "_start", "isolated", "suspected")

    def __init__(self, ledger: Ledger, slots: SlotTable, start: Start) -> None:
        """`start` runs the first suspect of a model on a slot."""
        self._ledger = ledger
        self._slots = slots
        self._start = start
        self.suspected: dict[str, ModelQueue] = {}
        """Models with suspects that wait; one that no longer has any is dropped at the next look."""
        self.isolated: dict[str, Worker] = {}
        """The workers that are kept for suspects, whether they run one or are still being emptied."""

    def suspect(self, request: Request, call_s: float, *, accused: bool) -> None:
        """Let a request wait to run alone, for so many seconds. `accused`: a process died, or hung, that may have run it."""
        queue = request.queue
        queue.put_suspect(request, call_s, accused=accused)
        self.suspected[queue.profile.name] = queue

    def run(self, now: float, actions: list[Action]) -> None:
        """Starts the suspects that can be started, and keeps as many workers for them as is right."""
        for worker in list(self.isolated.values()):
            self._use(worker, now, actions)
        for queue in self._in_order():
            while queue.suspect_count:
                emptied = self._being_emptied(queue)
                chosen = self.choose(queue, now, emptied)
                if chosen is None:
                    break
                if emptied is not None:
                    self._let_go(emptied)
                self.isolated[chosen.name] = chosen
                for batch in self._slots.reserve(chosen):
                    reason = f"worker {chosen.name} is kept for a suspect"
                    actions.append(self._ledger.recall(batch, now, reason))
                self._use(chosen, now, actions)

    def _in_order(self) -> list[ModelQueue]:
        """The models with suspects, the one whose suspect goes first before the others."""
        for name in [name for name, queue in self.suspected.items() if not queue.suspect_count]:
            del self.suspected[name]
        return sorted(self.suspected.values(), key=_first_turn)

    def _use(self, worker: Worker, now: float, actions: list[Action]) -> None:
        """Runs the next suspect in a worker that is empty; lets it go if there is none, or it could not run it."""
        if worker.suspect is not None:
            return
        places = [
            (_first_turn(queue), slot)
            for slot in _usable(worker)
            for queue in slot.queues
            if queue.suspect_count
        ]
        if not places:
            self._let_go(worker)
        elif all(
            slot.batch is None or slot.batch.state is BatchState.ABANDONED for slot in worker.slots.values()
        ):
            turn, slot = min(places, key=lambda place: place[0])
            queue = next(queue for queue in slot.queues if queue.suspect_count and _first_turn(queue) == turn)
            actions.append(self._start(queue, slot, now, actions))

    def _let_go(self, worker: Worker) -> None:
        del self.isolated[worker.name]
        self._slots.release(worker)

    def _being_emptied(self, queue: ModelQueue) -> Worker | None:
        """The worker that will soon be free for a suspect of this model, if there is one."""
        for worker in self.isolated.values():
            if worker.suspect is None and _serves(worker, queue):
                return worker
        return None

    def choose(self, queue: ModelQueue, now: float, instead_of: Worker | None = None) -> Worker | None:
        """The worker to keep for suspects of this model; None if none can be, or enough are kept already.

        The one that will be empty first. At most half of all are kept at a time, and one after which some model would
        have no slot left only if there is no other, and alone. `instead_of` one that is still being emptied, only one
        that is empty now, such as a worker that has just come.
        """
        workers = self._slots.workers
        kept = [worker for worker in self.isolated.values() if worker is not instead_of]
        if len(kept) >= max(1, len(workers) // 2):
            return None
        able = [
            worker
            for worker in workers.values()
            if not worker.reserved
            and _serves(worker, queue)
            and (instead_of is None or all(slot.batch is None for slot in worker.slots.values()))
        ]
        harmless = [worker for worker in able if not _starves(worker, kept)]
        if not harmless and (kept or (instead_of is not None and not _starves(instead_of, kept))):
            return None
        return min(harmless or able, key=lambda worker: _empty_in_s(worker, now), default=None)


def _starves(worker: Worker, kept: Sequence[Worker]) -> bool:
    """Whether some model of this worker would have no slot outside it and those that are kept."""
    held = [slot for other in (*kept, worker) for slot in other.slots.values()]
    models = {queue.profile.name: queue for slot in worker.slots.values() for queue in slot.queues}
    return any(sum(queue in slot.queues for slot in held) >= queue.slot_count for queue in models.values())


def _first_turn(queue: ModelQueue) -> tuple[float, int]:
    first = queue.next_suspect()
    assert first is not None
    return first.rank, first.order


def _usable(worker: Worker) -> list[Slot]:
    """The slots that may be given something once they are idle."""
    if worker.condemned:
        return []
    return [
        slot for slot in worker.slots.values() if slot.state not in (SlotState.CLOSING, SlotState.RESTING)
    ]


def _serves(worker: Worker, queue: ModelQueue) -> bool:
    return any(queue in slot.queues for slot in _usable(worker))


def _empty_in_s(worker: Worker, now: float) -> float:
    """In how many seconds it is predicted to be empty; a batch that is late already is taken to stay as late again."""
    seconds = [0.0]
    for slot in worker.slots.values():
        if slot.batch is not None:
            behind_s = 0.0 if slot.behind is None else slot.behind.predicted_s or 0.0
            seconds.append(abs(slot.batch.ends_at - now) + behind_s)
    return max(seconds)


class Recovery:
    """Runs again what may be run again."""

    __slots__ = ("apart", "costs", "isolation", "ledger", "max_attempts", "queues")

    def __init__(
        self,
        ledger: Ledger,
        queues: Queues,
        costs: CostModel,
        max_attempts: int,
        isolation: Isolation,
        apart: Apart,
    ) -> None:
        if max_attempts < 1:
            raise ValueError("a request must be attempted at least once")
        self.ledger = ledger
        self.queues = queues
        self.costs = costs
        self.max_attempts = max_attempts
        self.isolation = isolation
        self.apart = apart

    def failed(self, batch: Batch, event: BatchFailed, now: float, actions: list[Action]) -> None:
        """A batch is over and its slot reported an error."""
        if event.code == ErrorCode.RECALLED:
            self.returned(batch, "it was taken back", now, actions)
            return
        if batch.hung:
            self.died(batch, f"it hung, and was stopped: {event.code}: {event.message}", now, actions)
            return
        if event.code in (ErrorCode.UNAVAILABLE, ErrorCode.CANCELLED):  # the slot or its device is to blame
            self.lost(batch, f"{event.code}: {event.message}", now, actions)
            return
        self.ledger.story.note(now, batch.ids, "batch {} failed: {}: {}", batch.id, event.code, event.message)
        if len(batch.ids) > 1:
            _ran_in_vain(batch)
        living = _living(batch)
        if len(batch.ids) == 1:
            for request in living:
                if request.shape != request.own_shape and request.queue.profile.idempotent:
                    # The model may take the request's own sizes, and not those that they were rounded up to.
                    _ran_in_vain(batch)
                    request.shape = request.own_shape
                    self._run_again([request], now, actions)
                    continue
                actions.append(self.ledger.fail(request, event.code, event.message, now))
                self._blame(request, killed=False)
            return
        # Members that have ended meanwhile may be the culprits, so even one that is left gets its try.
        middle = (len(living) + 1) // 2
        for half in (living[:middle], living[middle:]):
            if half:
                self._run_again(half, now, actions)

    def lost(self, batch: Batch, reason: str, now: float, actions: list[Action]) -> None:
        """A batch is over because its slot, or the device, is gone."""
        self.ledger.story.note(now, batch.ids, "batch {} lost: {}", batch.id, reason)
        for request in self._may_run_again(batch, reason, now, actions):
            if batch.trial is not Trial.NONE or request.losses == self.max_attempts - 1:
                self._suspect(request, now, actions, accused=batch.trial is Trial.ACCUSED)
            else:
                self._run_again([request], now, actions)

    def died(self, batch: Batch, reason: str, now: float, actions: list[Action]) -> None:
        """A batch is over because its process died while it ran, or because it hung: one of its members may be to blame."""
        self.ledger.story.note(now, batch.ids, "batch {} died: {}", batch.id, reason)
        if batch.trial is Trial.ACCUSED:
            message = (
                f"what ran it died, or hung, and so did the next worker, where nothing else ran: {reason}"
            )
            for request in _living(batch):
                actions.append(self.ledger.fail(request, "poisoned", message, now))
                self._blame(request, killed=True)
            return
        _ran_in_vain(batch)
        for request in self._may_run_again(batch, reason, now, actions):
            self._suspect(request, now, actions, accused=True)

    def may_have_begun(self, batch: Batch, reason: str, now: float, actions: list[Action]) -> None:
        """A batch waited behind another in a process that died. It may have begun before that was heard of, and then be to
        blame; if it was not, its members lose no more than their company."""
        self.ledger.story.note(now, batch.ids, "batch {} may have begun: {}", batch.id, reason)
        for request in _living(batch):
            self._suspect(request, now, actions, accused=True)

    def given_up(self, batch: Batch, now: float, actions: list[Action]) -> None:
        """A batch hangs, and its slot cannot be ended: its members are answered. The slot keeps what is left of it."""
        code, message = "worker_lost", "the call hangs, and nothing could end it"
        if batch.trial is Trial.ACCUSED:
            code = "poisoned"
        for request in batch.members:
            if request.state is RUNNING:
                actions.append(self.ledger.fail(request, code, message, now))

    def _blame(self, request: Request, *, killed: bool) -> None:
        """What ran because of a request that was to blame is charged to its client, and its like runs apart for a while.

        `killed`: it ended processes. Others of its client still share calls: one death then accuses all of them at once.
        """
        request.queue.shares.charge(request.client, request.failed_s, len(self.ledger.clients))
        self.apart.blame(request, singly=not killed)

    def _may_run_again(self, batch: Batch, reason: str, now: float, actions: list[Action]) -> list[Request]:
        """Counts the loss of a batch. The members that get another try; the others fail."""
        again = []
        idempotent = batch.queue.profile.idempotent
        for request in _living(batch):
            request.losses += 1
            if not idempotent:
                message = f"it may have run, and may not be run twice: {reason}"
                actions.append(self.ledger.fail(request, "worker_lost", message, now))
            elif request.losses < self.max_attempts:
                again.append(request)
            else:
                message = f"lost {request.losses} times with the slot that ran it; the last time: {reason}"
                actions.append(self.ledger.fail(request, "worker_lost", message, now))
        return again

    def returned(self, batch: Batch, reason: str, now: float, actions: list[Action]) -> None:
        """A batch that waited behind another has not started, so nothing was lost: it goes again as it is."""
        self.ledger.story.note(now, batch.ids, "batch {} did not start: {}", batch.id, reason)
        if living := _living(batch):
            self._run_again(living, now, actions)

    def _suspect(self, request: Request, now: float, actions: list[Action], *, accused: bool) -> None:
        if self._has_nowhere_to_run([request], now, actions):
            return
        self.ledger.put_back([request])
        request.shape = request.own_shape  # what it was rounded up to may be to blame
        self.isolation.suspect(request, self._call_s([request]), accused=accused)
        self.queues.wait(request.queue)

    def _run_again(self, group: list[Request], now: float, actions: list[Action]) -> None:
        if self._has_nowhere_to_run(group, now, actions):
            return
        self.ledger.put_back(group)
        queue = group[0].queue
        queue.put_rerun(group, self._call_s(group))
        self.queues.wait(queue)

    def _has_nowhere_to_run(self, group: Sequence[Request], now: float, actions: list[Action]) -> bool:
        """Answers a group of a model that was given up, and whose last slot closes or is gone."""
        queue = group[0].queue
        if queue.given_up is None or queue.slot_count:
            return False
        actions.extend([self.ledger.fail(request, "unavailable", queue.given_up, now) for request in group])
        return True

    def _call_s(self, group: Sequence[Request]) -> float:
        """Predicted seconds of a call of just these requests; 0.0 while nothing is measured."""
        queue = group[0].queue
        try:
            sizes = unplanned(group).sizes(queue.has_batch)
            return self.costs.batch_s(queue.profile.name, sizes) or 0.0
        except Exception:  # noqa: BLE001 - what is wrong is reported when its batch is cut
            return sum([request.cost_s for request in group])


def _ran_in_vain(batch: Batch) -> None:
    """Notes with each member what a batch took that failed, perhaps because of it."""
    share_s = sum([request.share_s for request in batch.members])
    for request in batch.members:
        request.failed_s += share_s


def _living(batch: Batch) -> list[Request]:
    living = [request for request in batch.members if request.state is RUNNING]
    batch.release_members()
    return living


class Reports:
    """Changes the books by what slots report."""

    __slots__ = ("_apart", "_costs", "_ledger", "_recovery", "_slots", "_watch")

    def __init__(
        self,
        ledger: Ledger,
        slots: SlotTable,
        costs: CostModel,
        recovery: Recovery,
        apart: Apart,
        watch: HangWatch,
    ) -> None:
        self._ledger = ledger
        self._slots = slots
        self._costs = costs
        self._recovery = recovery
        self._apart = apart
        self._watch = watch

    def finished(self, event: BatchFinished, now: float, actions: list[Action]) -> None:
        """A batch ran."""
        batch = self._slots.batches.get(event.batch)
        if batch is None:
            return
        self._end(batch, now)
        batch.slot.refusals = 0
        ledger = self._ledger
        self._watch.observe(batch, event.busy_s)
        if event.expired:
            for request in batch.members:
                if request.state is RUNNING and request.id in event.expired:
                    actions.append(ledger.fail_late(request, now))
        elif event.busy_s > 0.0 and all(batch.sizes):
            # Nothing is learned from a call without the expired members, which had another shape, from one without
            # elements, and from a clock that saw no time pass.
            try:
                self._learn(batch, event)
            except Exception as error:  # noqa: BLE001 - results are delivered, whatever they teach
                actions.append(ReportFault(error=error, about="costs of a batch", requests=batch.ids))
        self._apart.ran_well(batch.queue.profile.name, ledger.deliver(batch, now, actions))
        batch.release_members()

    def _learn(self, batch: Batch, event: BatchFinished) -> None:
        slot, queue = batch.slot, batch.queue
        name = queue.profile.name
        if batch.predicted_s is not None:
            queue.predicted_s += batch.predicted_s
            queue.measured_s += event.busy_s
        self._costs.observe(slot.id, name, batch.sizes, event.busy_s, event.preparations, len(batch.ids))
        if not slot.closing:
            self.measure_pace(slot, queue, batch.sizes)

    def measure_pace(self, slot: Slot, queue: ModelQueue, sizes: tuple[int, ...]) -> None:
        """How fast a slot is for a model, beside the most common kind of slot, by a batch of these sizes."""
        pace = self._costs.pace(queue.profile.name, slot.id, sizes)
        if pace is not None:
            self._slots.set_pace(slot, queue, pace)

    def failed(self, event: BatchFailed, now: float, actions: list[Action]) -> None:
        """A batch did not run."""
        batch = self._slots.batches.get(event.batch)
        if batch is None:
            return
        slot = batch.slot
        owes_rest = slot.state is SlotState.REFUSED
        self._end(batch, now)
        if event.code == ErrorCode.UNAVAILABLE:
            slot.refusals += 1
            owes_rest = True
            # What was waiting there has just become the one that runs, or fails in the same way.
            if (refused := self._slots.refuse(slot)) is not None:
                actions.append(RecallBatch(batch=refused.id, slot=slot.id))
        elif event.code not in (ErrorCode.CANCELLED, ErrorCode.RECALLED):
            slot.refusals = 0
            owes_rest = False
        if owes_rest and slot.idle:
            self._rest(batch, now)
        elif owes_rest:
            self._slots.owe_rest(slot)
        self._recovery.failed(batch, event, now, actions)

    def _rest(self, batch: Batch, now: float) -> None:
        """Puts a slot aside that could not run its batch, longer each time in a row."""
        slot = batch.slot
        pause_s = rest_s(slot.refusals, self._costs.call_s(batch.queue.profile.name))
        self._slots.rest(slot, now + pause_s)
        self._ledger.story.note(now, batch.ids, "slot {} is put aside for {} s", slot.id, pause_s)

    def slot_left(self, event: SlotLeft, now: float, actions: list[Action]) -> None:
        """A slot is gone: what it ran is lost, what waited there is not.

        Where its process died, what ran there is suspected. Where that was killed because of a batch that hung, only
        that batch is: it would have gone on killing, and the others were in no one's way.
        """
        id = event.slot  # noqa: A001 - as events call it
        slot = self._slots.slots.get(id)
        if slot is None:
            return
        died = event.died and not slot.worker.condemned
        self._costs.leave(id)
        batch, behind = self._slots.leave(id)
        if behind is not None:
            if died:
                self._recovery.may_have_begun(behind, f"its worker {slot.worker.name} died", now, actions)
            else:
                self._recovery.returned(behind, f"slot {id} left before the batch started", now, actions)
        if batch is None:
            return
        if batch.hung:
            self._recovery.died(batch, f"it hung, and its worker {slot.worker.name} was ended", now, actions)
        elif died:
            self._recovery.died(batch, f"its worker {slot.worker.name} died", now, actions)
        else:
            self._recovery.lost(batch, f"slot {id} left", now, actions)

    def hang(self, now: float, actions: list[Action]) -> None:
        """Takes the next step against each batch that has run too long."""
        for batch in self._watch.look(self._slots.batches.values(), now):
            slot = batch.slot
            ran_s = now - batch.started
            asked = batch.state is BatchState.CANCELLED
            batch.escalate()
            self._ledger.story.note(
                now, batch.ids, "batch {} is {} after {} s", batch.id, batch.state.value, ran_s
            )
            match batch.state:
                case BatchState.HANGING:
                    if not asked:
                        actions.append(CancelBatch(batch=batch.id, slot=slot.id))
                    if (behind := self._slots.send_no_more(slot)) is not None:
                        actions.append(self._ledger.recall(behind, now, "the batch before it hangs"))
                case BatchState.CONDEMNED:
                    self._slots.condemn(slot.worker)
                    reason = f"batch {batch.id} of {batch.queue.profile.name} has run for {ran_s:.1f} s"
                    actions.append(KillSlot(slot=slot.id, reason=reason))
                case BatchState.ABANDONED:
                    self._slots.give_up(slot)
                    self._recovery.given_up(batch, now, actions)
                case _:
                    raise AssertionError(f"{batch} cannot hang: it is {batch.state.value}")

    def _end(self, batch: Batch, now: float) -> None:
        """Take a batch that is over off its slot, which then runs the batch that was queued behind, if any."""
        successor = self._slots.end(batch, now)
        if successor is not None:
            self._watch.began(successor, now)
            if not successor.wanted:
                # It began while it was being recalled.
                self._ledger.unwanted.append(successor)
