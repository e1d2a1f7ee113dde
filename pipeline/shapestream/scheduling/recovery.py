"""Recovery: what follows when a batch ends, fails, hangs or is lost with its slot.

A batch that the *data* broke runs again in two parts, until the culprit is alone. The others get their results. The
culprit's client pays for the calls that run again (`Rework`), and the parts wait for their turn (`by_rerun`). That is enough
to protect others: later requests of the client share calls as before (docs/decisions.md).

A batch that was lost with its *slot* says nothing about its members: each runs again in a call of its own, a bounded
number of times, the last time alone in its worker. A batch whose *process* died, or that hung, makes suspects of its
members.

A process that dies ends everything that runs there, so only a request that ran alone can be blamed. A suspect runs in a
worker that was emptied for it (`Isolation`), and is `poisoned` if that dies or hangs too. Suspects go before everything
else; only the worker reserved for them gets less work.

Where slots are in the server's process, nothing is left to say which request ended it. So a client names as suspects those
that it had at a server that vanished. Each waits for its turn, and then runs where nothing else runs. It begins when its
client knows that (`TellLoneRun`): the client counts a loss after that, and no other. The client pays for the time in which
nothing runs meanwhile, or slow clients could keep slots from others.

Against a batch that hangs (hang_watch.py), the first step is to cancel it, the second to end its process. A slot that is
still there after both, as a thread of the server is, is lost; the members are answered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf, isfinite
from typing import Final, TypeAlias

from shapestream.scheduling.actions import Action, CancelBatch, KillSlot, ReportFault, StartBatch, TellLoneRun
from shapestream.scheduling.answer_waits import LONGEST_WAIT
from shapestream.scheduling.batches import Batch, BatchState, Suspicion
from shapestream.scheduling.costs import CostModel
from shapestream.scheduling.events import BatchFailed, BatchFinished, SlotLeft
from shapestream.scheduling.fairness import Rework
from shapestream.scheduling.hang_watch import HangWatch
from shapestream.scheduling.ledger import Ledger
from shapestream.scheduling.model_queue import AnsweredBatch, ModelQueue, Queues
from shapestream.scheduling.planner import unplanned
from shapestream.scheduling.queueing import RUNNING, ClientFlow, Request
from shapestream.scheduling.slots import Slot, SlotGroup, SlotPool, SlotState, SlotTable, rest_s
from shapestream.scheduling.wide_slots import WideSlots
from shapestream_engine.batch import ErrorCode

_IDLE: Final = SlotState.IDLE  # a look-up on an enum costs three times a global
_UNAVAILABLE: Final = SlotState.UNAVAILABLE
_CLOSING: Final = SlotState.CLOSING

Start: TypeAlias = Callable[[ModelQueue, Slot, float, list[Action]], StartBatch]


class _Told:
    """A suspect whose client was told that it is about to run alone."""

    __slots__ = ("at", "known", "request")

    def __init__(self, request: Request, at: float) -> None:
        self.request = request
        self.at = at
        """When its client was told."""
        self.known = False
        """Whether its client has said that it knows."""


class Isolation:
    """Chooses workers for suspects, empties them, and lets them go when no suspect is left for them."""

    __slots__ = ("_ledger", "_slots", "_start", "_told", "isolated", "suspected")

    def __init__(self, ledger: Ledger, slots: SlotTable, start: Start) -> None:
        """`start` runs the first suspect of a model on a slot."""
        self._ledger = ledger
        self._slots = slots
        self._start = start
        self.suspected: dict[str, ModelQueue] = {}
        """Models with suspects that wait; one that no longer has any is dropped at the next look."""
        self.isolated: dict[str, SlotGroup] = {}
        """The workers reserved for suspects, whether they run one or are still being emptied."""
        self._told: _Told | None = None
        """The suspect whose client was told last that it is about to run in the server's process."""

    def suspect(self, request: Request, queue: ModelQueue, call_s: float) -> None:
        """Let a request wait to run alone; its call is predicted to take `call_s` seconds."""
        queue.put_suspect(request, call_s)
        self.suspected[queue.name] = queue

    def run(self, now: float, actions: list[Action]) -> None:
        """Start the suspects that can be started, and keep as many workers for them as is right."""
        for worker in list(self.isolated.values()):
            self._use(worker, now, actions)
        for worker in list(self.isolated.values()):
            self._use(worker, now, actions)  # another worker may have taken its last suspect
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
        """Return the models with suspects, the one whose suspect goes first before the others."""
        for name in [name for name, queue in self.suspected.items() if not queue.suspect_count]:
            del self.suspected[name]
        return sorted(self.suspected.values(), key=_first_turn)

    def _use(self, worker: SlotGroup, now: float, actions: list[Action]) -> None:
        """Run the next suspect in a worker that is empty; let it go if there is none, or it could not run it."""
        if worker.suspect is not None:
            return
        places = [
            (_first_turn(pool.queue), pool.queue, slot)
            for slot in _usable(worker)
            for pool in slot.pools
            if pool.queue.suspect_count
        ]
        if not places:
            self._let_go(worker)
        elif worker.empty:
            _, queue, slot = min(places, key=lambda place: place[0])
            if not worker.in_server or self._is_known(queue, now, actions):
                actions.append(self._start(queue, slot, now, actions))

    def _is_known(self, queue: ModelQueue, now: float, actions: list[Action]) -> bool:
        """Tell whether the first suspect of a model may begin in the server's process; if its client must know first, tell
        it."""
        request = queue.next_suspect()
        assert request is not None
        if not request.arrival.suspect:
            return True
        told = self._told
        if told is None or told.request is not request:
            self._told = _Told(request, now)
            actions.append(TellLoneRun(request=request.arrival))
            return False
        if told.known:
            queue.shares.blame(request.flow, now - told.at)
            self._told = None
        return told.known

    def known(self, id_: int) -> None:
        """Let the suspect with this id begin, since its client knows. Other ids are ignored."""
        if self._told is not None and self._told.request.id == id_:
            self._told.known = True

    @property
    def told_at(self) -> float | None:
        """When the client was told that has not said yet that it knows; None while no suspect waits for that."""
        return None if self._told is None or self._told.known else self._told.at

    def _let_go(self, worker: SlotGroup) -> None:
        if worker.in_server:
            self._told = None
        del self.isolated[worker.name]
        self._slots.release(worker)

    def _being_emptied(self, queue: ModelQueue) -> SlotGroup | None:
        """Return the worker that will soon be free for a suspect of this model, if there is one."""
        for worker in self.isolated.values():
            if worker.suspect is None and _serves(worker, self._slots.pools[queue.name]):
                return worker
        return None

    def choose(self, queue: ModelQueue, now: float, instead_of: SlotGroup | None = None) -> SlotGroup | None:
        """Return the worker to keep for suspects of this model; None if none can be, or enough are kept already.

        It is the one that will be empty first. At most half of all workers are kept at a time. A worker without which some
        model would have no slot is kept only if no other serves this model, and only while no other is kept.

        `instead_of`: a worker that is kept and still being emptied. Only a worker that is empty now may replace it, such as
        one that has just joined.
        """
        workers = self._slots.workers
        pool = self._slots.pools[queue.name]
        kept = [worker for worker in self.isolated.values() if worker is not instead_of]
        if len(kept) >= max(1, len(workers) // 2):
            return None
        able = [
            worker
            for worker in workers.values()
            if not worker.reserved
            and _serves(worker, pool)
            and (instead_of is None or all(slot.batch is None for slot in worker.slots.values()))
        ]
        harmless = [worker for worker in able if not _starves(worker, kept)]
        if not harmless and (kept or (instead_of is not None and not _starves(instead_of, kept))):
            return None
        return min(harmless or able, key=lambda worker: _empty_in_s(worker, now), default=None)


def _starves(worker: SlotGroup, kept: Sequence[SlotGroup]) -> bool:
    """Tell whether some model of this worker would have no slot outside it and those that are kept."""
    held = [slot for other in (*kept, worker) for slot in other.slots.values()]
    pools = {pool.queue.name: pool for slot in worker.slots.values() for pool in slot.pools}
    return any(sum(pool in slot.pools for slot in held) >= pool.count for pool in pools.values())


def _first_turn(queue: ModelQueue) -> tuple[float, int]:
    first = queue.next_suspect()
    assert first is not None
    return first.rank, first.order


def _usable(worker: SlotGroup) -> list[Slot]:
    """Return the slots that may be given something once they are idle."""
    if worker.condemned:
        return []
    return [
        slot for slot in worker.slots.values() if slot.state not in (SlotState.CLOSING, SlotState.RESTING)
    ]


def _serves(worker: SlotGroup, pool: SlotPool) -> bool:
    return any(pool in slot.pools for slot in _usable(worker))


def _empty_in_s(worker: SlotGroup, now: float) -> float:
    """Return the predicted seconds until a worker is empty. A batch that is late counts as late by as much again."""
    seconds = [0.0]
    for slot in worker.slots.values():
        if slot.batch is not None:
            seconds.append(abs(slot.batch.ends_at - now) + slot.behind_s)
    return max(seconds)


class Recovery:
    """Changes the books by what slots report, and runs again what may run again."""

    __slots__ = ("_costs", "_isolation", "_max_attempts", "_queues", "_slots", "_watch", "_wide", "ledger")

    def __init__(
        self,
        ledger: Ledger,
        queues: Queues,
        slots: SlotTable,
        costs: CostModel,
        watch: HangWatch,
        isolation: Isolation,
        wide: WideSlots,
        max_attempts: int,
    ) -> None:
        if max_attempts < 1:
            raise ValueError("a request must be attempted at least once")
        self.ledger = ledger
        self._queues = queues
        self._slots = slots
        self._costs = costs
        self._watch = watch
        self._isolation = isolation
        self._wide = wide
        self._max_attempts = max_attempts

    # ------------------------------------------------------------ what slots report

    def finished(self, event: BatchFinished, now: float, actions: list[Action]) -> None:
        """Deliver the results of a batch that ran, and learn its cost."""
        batch = self._slots.batches.get(event.batch)
        if batch is None:
            return
        slot: Slot = batch.slot
        self._end(batch, now)
        slot.unavailable_count = 0
        if slot.state is _UNAVAILABLE:
            self._slots.owe_none(slot)
        if not batch.members:
            return  # an audit
        self._watch.observe(batch, event.busy_s)
        if event.expired:
            for request in batch.members:
                if request.state is RUNNING and request.arrival.id in event.expired:
                    actions.append(self.ledger.fail_late(request, now))
        elif event.busy_s > 0.0 and all(batch.sizes):
            # Nothing is learned from a call without the expired members, which had another shape, from one without
            # elements, and from a clock that saw no time pass.
            try:
                self._learn(batch, event)
            except Exception as error:  # noqa: BLE001 - results are delivered, whatever they teach
                actions.append(ReportFault(error=error, about="costs of a batch", requests=batch.ids))
        answered = _living(batch)
        if batch.queue.has_batch:
            _watch_returns(batch, answered, now)
        if answered:
            self.ledger.deliver(batch, answered, actions)

    def _learn(self, batch: Batch, event: BatchFinished) -> None:
        slot: Slot = batch.slot
        queue, sizes, busy_s = batch.queue, batch.sizes, event.busy_s
        if batch.predicted_s is not None:
            queue.predicted_s += batch.predicted_s
            queue.measured_s += busy_s
        if slot.worker.wide is not None and not event.preparations:
            self._wide.ran(batch, busy_s)
        queue.costs.observe(slot.id, sizes, busy_s, event.preparations, len(batch.members))
        if slot.state is not _CLOSING and not slot.wide:
            self.measure_pace(slot, queue, sizes)

    def measure_pace(self, slot: Slot, queue: ModelQueue, sizes: tuple[int, ...]) -> None:
        """Note how fast a slot is for a model beside the most common worker class, by a batch of these sizes."""
        pace = queue.costs.pace(slot.id, sizes)
        if pace is not None:
            self._slots.set_pace(slot, queue.name, pace)

    def failed(self, event: BatchFailed, now: float, actions: list[Action]) -> None:
        """Decide what follows from a batch that did not run."""
        batch = self._slots.batches.get(event.batch)
        if batch is None:
            return
        slot: Slot = batch.slot
        owes_rest = slot.state is SlotState.UNAVAILABLE
        self._end(batch, now)
        if event.code == ErrorCode.UNAVAILABLE:
            if not owes_rest:
                slot.unavailable_count += 1  # once for all that it has: they were handed over before
            owes_rest = True
            # The batch that was queued behind runs now, or fails in the same way.
            behind = self._slots.stop_prefetch(slot)
            if slot.batch is not None and slot.batch.state is BatchState.RUNNING:
                behind.insert(0, slot.batch)
            for other in behind:
                actions.append(self.ledger.recall(other, now, f"slot {slot.id} is unavailable"))
        elif event.code not in (ErrorCode.CANCELLED, ErrorCode.RECALLED):
            slot.unavailable_count = 0
            if owes_rest and slot.batch is not None:
                self._slots.owe_none(slot)
            owes_rest = False
        if owes_rest and slot.idle:
            pause_s = rest_s(slot.unavailable_count, batch.queue.costs.mean_batch_s)
            self._slots.rest(slot, now + pause_s)
            self.ledger.troubles.add(now, batch.ids, "slot {} rests for {} s", slot.id, pause_s)
        elif owes_rest:
            self._slots.owe_rest(slot)
        why = f"{event.code}: {event.message}"
        if event.code == ErrorCode.RECALLED:
            self.returned(batch, "it was taken back", now, actions)
        elif batch.hung:
            self.died(batch, f"it hung, and was stopped: {why}", now, actions)
        elif event.code in (ErrorCode.UNAVAILABLE, ErrorCode.CANCELLED):  # the slot or its device is to blame
            self.lost(batch, why, now, actions)
        else:
            self.broke(batch, event, now, actions)

    def slot_left(self, event: SlotLeft, now: float, actions: list[Action]) -> None:
        """Decide what becomes of the batches of a slot that is gone.

        Where its process died, what ran there is suspected, and so is the batch behind, which may have begun before the
        death was heard of; batches behind that one are not. Where the process was killed because a batch hung, only that
        batch is suspected: it would have gone on killing.
        """
        slot = self._slots.slots.get(event.slot)
        if slot is None:
            return
        died = event.died and not slot.worker.condemned
        self._costs.leave(slot.id)
        self._wide.forget(slot.id)
        batch, behind = self._slots.leave(slot.id)
        for place, queued in enumerate(behind):
            if died and not place:
                # If it is not to blame, its members lose only their company.
                self.ledger.troubles.add(
                    now, queued.ids, "worker {} died behind batch {}", slot.worker.name, queued.id
                )
                self._accuse(_living(queued), now, actions)
            else:
                self.returned(queued, f"slot {slot.id} left before the batch started", now, actions)
        if batch is None:
            return
        if batch.hung:
            self.died(batch, f"it hung, and its worker {slot.worker.name} was ended", now, actions)
        elif died:
            self.died(batch, f"its worker {slot.worker.name} died", now, actions)
        else:
            self.lost(batch, f"slot {slot.id} left", now, actions)

    def hang(self, now: float, actions: list[Action]) -> None:
        """Take the next step against each batch that has run too long."""
        ledger = self.ledger
        for batch in self._watch.look(self._slots.batches.values(), now):
            slot: Slot = batch.slot
            ran_s = now - batch.started
            asked = batch.state is BatchState.CANCELLED
            batch.escalate()
            ledger.troubles.add(
                now, batch.ids, "batch {} is {} after {} s", batch.id, batch.state.value, ran_s
            )
            match batch.state:
                case BatchState.HANGING:
                    if not asked:
                        actions.append(CancelBatch(batch=batch))
                    for behind in self._slots.stop_prefetch(slot):
                        actions.append(ledger.recall(behind, now, "the batch before it hangs"))
                case BatchState.CONDEMNED:
                    self._slots.condemn(slot.worker)
                    reason = f"batch {batch.id} of {batch.queue.name} has run for {ran_s:.1f} s"
                    actions.append(KillSlot(slot=slot, reason=reason))
                case BatchState.STUCK:
                    self._slots.lose(slot)
                    code = "poisoned" if batch.suspicion is Suspicion.ACCUSED else "worker_lost"
                    for request in batch.members:
                        if request.state is RUNNING:
                            message = "the call hangs, and nothing could end it"
                            if batch.suspicion is Suspicion.ACCUSED:
                                self._blame(request)
                            actions.append(ledger.fail(request, code, message, now))
                case _:
                    raise AssertionError(f"{batch} cannot hang: it is {batch.state.value}")

    def _end(self, batch: Batch, now: float) -> None:
        """Take a batch that is over off its slot, which then runs the first that was queued behind, if any."""
        successor = self._slots.end(batch, now)
        if successor is not None:
            self._watch.began(successor, now)
            if not successor.wanted:
                # It began while it was being recalled.
                self.ledger.unwanted.append(successor)

    # ------------------------------------------------------------ what becomes of the members

    def broke(self, batch: Batch, event: BatchFailed, now: float, actions: list[Action]) -> None:
        """Run a batch again in two parts, since its data may be to blame. A request that was alone fails."""
        living = _living(batch)
        if len(batch.members) == 1:
            for request in living:
                self._blame(request)
                actions.append(self.ledger.fail(request, event.code, event.message, now))
            return
        # Members that have ended meanwhile may be the culprits, so even one that is left gets its try.
        parts = [part for part in _parts(living) if part]
        seconds = sum([self.call_s(part) for part in parts])
        self._note_reruns(living, seconds, [request.flow for request in living])
        for part in parts:
            self._run_again(part, now, actions)

    def lost(self, batch: Batch, reason: str, now: float, actions: list[Action]) -> None:
        """Run each member of a batch again by itself, since its slot or device is gone."""
        self.ledger.troubles.add(now, batch.ids, "batch {} lost: {}", batch.id, reason)
        for request in self._may_run_again(batch, reason, now, actions):
            if batch.suspicion is not Suspicion.NONE or request.losses == self._max_attempts - 1:
                self._suspect(request, now, actions)
            else:
                self._run_again([request], now, actions)

    def died(self, batch: Batch, reason: str, now: float, actions: list[Action]) -> None:
        """Suspect the members of a batch that hung, or whose process died while it ran."""
        self.ledger.troubles.add(now, batch.ids, "batch {} died: {}", batch.id, reason)
        if batch.suspicion is Suspicion.ACCUSED:
            message = (
                f"what ran it died, or hung, and so did the next worker, where nothing else ran: {reason}"
            )
            for request in _living(batch):
                self._blame(request)
                actions.append(self.ledger.fail(request, "poisoned", message, now))
            return
        self._accuse(self._may_run_again(batch, reason, now, actions), now, actions)

    def returned(self, batch: Batch, reason: str, now: float, actions: list[Action]) -> None:
        """Run a batch again as it is, since it was queued behind another and did not begin. No attempt is lost."""
        self.ledger.troubles.add(now, batch.ids, "batch {} did not start: {}", batch.id, reason)
        if living := _living(batch):
            self._run_again(living, now, actions)

    def _may_run_again(self, batch: Batch, reason: str, now: float, actions: list[Action]) -> list[Request]:
        """Count the loss of a batch. The members that get another try; the others fail."""
        again = []
        idempotent = batch.queue.profile.idempotent
        for request in _living(batch):
            request.losses += 1
            if idempotent and request.losses < self._max_attempts:
                again.append(request)
                continue
            if idempotent:
                message = f"lost {request.losses} times with the slot that ran it; the last time: {reason}"
            else:
                message = f"it may have run, and may not be run twice: {reason}"
            actions.append(self.ledger.fail(request, "worker_lost", message, now))
        return again

    def _note_reruns(self, requests: Sequence[Request], seconds: float, payers: Sequence[ClientFlow]) -> None:
        """Note with each of these requests what all of them will take to run again, perhaps because of it.

        `seconds`: of one slot; 0.0 while nothing is measured. `payers` pay if none of them is found to be to blame.
        """
        if not requests:
            return
        again_s = seconds / self._slots.pools[requests[0].model].serving
        if not again_s:
            again_s = sum([request.share_s for request in requests])
        rework = Rework(again_s, len(requests), payers)
        for request in requests:
            request.reworks = (*request.reworks, rework)

    def _blame(self, request: Request) -> None:
        """Charge the client for the work that its faulty request made run again."""
        for rework in request.reworks:
            rework.pay(self._queues[request.model].shares, request.flow)

    def _accuse(self, requests: Sequence[Request], now: float, actions: list[Action]) -> None:
        """Suspect requests of which one may have ended a process.

        If a batch beside theirs did, they do not pay for what runs again.
        """
        self._note_reruns(requests, sum([self.call_s([request]) for request in requests]), ())
        for request in requests:
            request.accused = True
            self._suspect(request, now, actions)

    def _suspect(self, request: Request, now: float, actions: list[Action]) -> None:
        if self._has_nowhere_to_run([request], now, actions):
            return
        self.ledger.put_back([request], now)
        queue = self._queues[request.model]
        self._isolation.suspect(request, queue, self.call_s([request]))
        self._queues.waiting[queue] = None

    def _run_again(self, group: list[Request], now: float, actions: list[Action]) -> None:
        if self._has_nowhere_to_run(group, now, actions):
            return
        self.ledger.put_back(group, now)
        queue = self._queues[group[0].model]
        queue.put_rerun(group, self.call_s(group))
        self._queues.waiting[queue] = None

    def _has_nowhere_to_run(self, group: Sequence[Request], now: float, actions: list[Action]) -> bool:
        """Answer a group whose model is unavailable, and whose last slot closes or is gone."""
        queue = self._queues[group[0].model]
        if queue.unavailable is None or self._slots.pools[queue.name].count:
            return False
        for request in group:
            actions.append(self.ledger.fail(request, "unavailable", queue.unavailable, now))
        return True

    def call_s(self, group: Sequence[Request]) -> float:
        """Return the predicted seconds of a call of just these requests; 0.0 while nothing is measured."""
        queue = self._queues[group[0].model]
        try:
            sizes = unplanned(group).sizes(queue.has_batch)
            seconds = queue.costs.batch_s(sizes) or 0.0
        except Exception:  # noqa: BLE001 - what is wrong is reported when its batch is cut
            seconds = inf
        return seconds if isfinite(1e9 * seconds) else sum([request.cost_ns for request in group]) / 1e9


def _parts(members: list[Request]) -> tuple[list[Request], list[Request]]:
    """Divide members in two parts: between two clients, as near to the middle as possible; one client's in the middle.

    Mostly the requests of one client fail. So the others are apart from them after the first call that runs again.
    """
    members = sorted(members, key=lambda request: request.client)
    places = range(1, len(members))
    between = [place for place in places if members[place].client != members[place - 1].client]
    middle = (len(members) + 1) // 2
    at = min(between, key=lambda place: abs(2 * place - len(members)), default=middle)
    return members[:at], members[at:]


def _living(batch: Batch) -> list[Request]:
    living = []
    for request in batch.members:  # no comprehension, see `Dispatcher._start`
        if request.state is RUNNING:
            living.append(request)
    return living


def _watch_returns(batch: Batch, answered: Sequence[Request], now: float) -> None:
    """Watch how soon requests follow those that a batch answers."""
    queue = batch.queue
    slot: Slot = batch.slot
    returns = queue.returns
    rows = 0
    for request in answered:
        rows += request.rows
    ran_s = now - batch.started
    if slot.state is _IDLE:
        row = queue.name, now, ran_s, rows, batch.sizes[1:], returns.arrived_rows
        slot.answered = tuple.__new__(AnsweredBatch, row)  # see `member_of` in ends.py
    returns.answered(rows, now, LONGEST_WAIT * ran_s)
