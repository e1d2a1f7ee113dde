"""Any sequence of events: every promise of docs/scheduling.md is checked after each of them."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule
from tests.pipeline.scheduling.books import (
    LATE,
    MAX_ATTEMPTS,
    MAX_QUEUED_BYTES,
    MAX_QUEUED_REQUESTS,
    MODELS,
    PROFILES,
    Known,
    Running,
)
from tests.pipeline.scheduling.referee import Referee
from tests.pipeline.scheduling.seen import Delivered, Failed, in_order, seen

from shapestream.scheduling import bundles
from shapestream.scheduling.events import (
    Arrival,
    AuditWanted,
    BatchFailed,
    BatchFinished,
    DrainStarted,
    ModelAdded,
    ModelProfile,
    ModelRunsAlone,
    RequestCancelled,
    RequestsAbandoned,
    RequestsArrived,
    SlotClosing,
    SlotJoined,
    SlotLeft,
    SlotsJoined,
    TimePassed,
)
from shapestream_engine.cost_table import CostPoint, CostTable


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
            st.sampled_from([1, 1, 1, 5]),
        ),
        min_size=2,
        max_size=9,
    )


def _costs(seconds: float) -> dict[str, CostTable]:
    """What a worker has measured: calls of up to so many seconds."""
    return {
        name: CostTable(
            key=f"{name} {seconds}",
            dimensions=profile.dimensions,
            points=tuple(
                CostPoint(
                    sizes=(size,) * len(profile.dimensions),
                    seconds=seconds * (0.5 + size / 12),
                    first_seconds=None,
                )
                for size in (1, 6)
            ),
        )
        for name, profile in PROFILES.items()
    }


COSTS = {"unknown": {}, "quick": _costs(0.002), "fast": _costs(0.05), "slow": _costs(0.4)}
TURNS = st.one_of(*[_turn(st.just(name)) for name in PROFILES], _turn(st.sampled_from(MODELS)))


class SchedulerMachine(Referee):
    """Makes up events; the referee judges what comes of them."""

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
        for model, sizes, client, nbytes, remaining, priority, submitted in specs:
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
                    submitted=submitted,
                )
            )
        queued_before = [known for known in self._queued() if not self._is_late(known.arrival.id)]
        for arrival in arrivals:
            self.known[arrival.id] = Known(arrival, next(self.orders), self.now)
        actions = self._play(RequestsArrived(requests=tuple(arrivals)))
        failed = {action.id: action.code for action in actions if isinstance(action, Failed)}
        admitted = [arrival for arrival in arrivals if arrival.id not in failed]
        # What became hopeless made room, too.
        queued_before = [known for known in queued_before if known.arrival.id not in failed]
        room = MAX_QUEUED_REQUESTS - len(queued_before)
        for arrival in arrivals:
            self._check_refusal(arrival, failed.get(arrival.id))
        assert len(admitted) <= max(0, room), "the queue's bound in requests"
        if admitted:
            held = sum(request.arrival.nbytes for request in queued_before)
            assert held + sum(a.nbytes for a in admitted) <= MAX_QUEUED_BYTES, "the queue's bound in bytes"
        # With a deadline, the wait may be too long though there is room.
        if any(failed.get(arrival.id) == "overloaded" and arrival.deadline is None for arrival in arrivals):
            held = sum(k.arrival.nbytes for k in queued_before) + sum(a.nbytes for a in admitted)
            full = len(admitted) >= room or held + max(a.nbytes for a in arrivals) > MAX_QUEUED_BYTES
            assert full or self._above_a_share(arrivals, failed, queued_before), (
                "a request was refused although there was room"
            )

    def _above_a_share(
        self, arrivals: list[Arrival], failed: dict[int, str], queued_before: list[Known]
    ) -> bool:
        """Whether each client that was refused would have more than a third of a part of the room: there are three clients.

        Or more than a third for one of the models that it asked, divided by their number; or more than a part is taken.
        There are no more parts than models, since those that share slots have one.
        """
        parts = len(self.models)
        waiting = [*(known.arrival for known in queued_before), *(a for a in arrivals if a.id not in failed)]
        refused = [a for a in arrivals if failed.get(a.id) == "overloaded" and a.deadline is None]

        def exceeds(held: list[Arrival], more: int, part: int) -> bool:
            requests, nbytes = 1 + len(held), more + sum(a.nbytes for a in held)
            return part * requests > MAX_QUEUED_REQUESTS or part * nbytes > MAX_QUEUED_BYTES

        for arrival in refused:
            own = [a for a in waiting if a.client == arrival.client]
            alike = [a for a in own if a.model == arrival.model]
            known = [known.arrival for known in self.known.values()]
            models = {a.model for a in known if a.client == arrival.client}
            most = max(a.nbytes for a in refused)
            shares = (own, 3 * parts), (alike, 3 * parts * len(models)), (waiting, parts)
            if not any(exceeds(held, most, part) for held, part in shares):
                return False
        return True

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
        elif arrival.deadline is None:
            assert code in (None, "overloaded")
        else:
            assert code in (None, "overloaded", "deadline_exceeded")

    @rule(
        models=st.sampled_from(
            [
                frozenset(MODELS),
                frozenset(MODELS),
                frozenset({"text", LATE}),
                frozenset({"image", "alone", "patient"}),
            ]
        ),
        worker=st.sampled_from(sorted(COSTS)),
        prefetch_s=st.sampled_from([None, 0.0, 0.1, 5.0]),
        count=st.integers(1, 2),
    )
    def slots_join(self, models, worker, prefetch_s, count) -> None:
        """A slot, or two of one process, serves some models, or all; with measured costs or without."""
        if len(self.slots) < 4:
            self._add_slot(models, worker, prefetch_s, count)

    def _add_slot(
        self,
        models: frozenset[str],
        worker: str = "unknown",
        prefetch_s: float | None = None,
        count: int = 1,
    ) -> None:
        joined = []
        for _ in range(count):
            slot = next(self.slot_ids)
            self.slots[slot] = models
            self.processes[slot] = worker
            joined.append(
                SlotJoined(
                    slot=slot, models=models, worker=worker, costs=COSTS[worker], prefetch_s=prefetch_s
                )
            )
        self._play(joined[0] if count == 1 else SlotsJoined(slots=tuple(joined)))

    @precondition(lambda self: self._running())
    @rule(data=st.data())
    def slot_leaves(self, data) -> None:
        """A slot dies, with its batch if it had one."""
        slot = data.draw(st.sampled_from(sorted(self.slots)))
        del self.slots[slot]
        self.closing.discard(slot)
        held = [running for running in self._running() if running.start.slot == slot]
        # What waited first, the last of it before the others, since the end of one lets the next run.
        for running in reversed(held):
            if running.hung:
                self._die(running)
            elif running.behind is None:
                self._lose(running)
            else:
                self._give_back(running)
        self._play(SlotLeft(slot=slot))

    @precondition(lambda self: self._running())
    @rule(data=st.data())
    def process_dies(self, data) -> None:
        """A process dies with all its slots, by itself or because it was killed; perhaps of what it ran."""
        process = data.draw(st.sampled_from(sorted({self.processes[slot] for slot in self.slots})))
        slots = [slot for slot in self.slots if self.processes[slot] == process]
        for slot in slots:
            self.closing.add(slot)
            self._play(SlotClosing(slot=slot))
        # Of the process as it was: what is left of it, once the batch that hung is gone, would not be killed any more.
        condemned = process in self.condemned
        for slot in slots:
            self.closing.discard(slot)
            held = [running for running in self._running() if running.start.slot == slot]
            for running in reversed(held):
                self._take_along(running, condemned)
            del self.slots[slot]
            self._play(SlotLeft(slot=slot, died=True))
            for running in held:
                self._check_blame(running)
        self.condemned.discard(process)

    def _take_along(self, running: Running, condemned: bool) -> None:
        """A process that was killed because of a batch that hung blames only that; else what ran, and the batch behind."""
        if running.hung or (running.behind is None and not condemned):
            self._die(running)
        elif running.behind is None:
            self._lose(running)
        elif condemned or self.batches[running.behind].behind is not None:
            self._give_back(running)
        else:
            self._finish_off(running)
            for id_ in running.wanted:
                known = self.known[id_]
                known.deaths += 1
                known.batch, known.suspect, known.group, known.accused = None, True, None, True

    def _check_blame(self, running: Running) -> None:
        """Whoever was alone when it happened is poisoned, unless it had ended."""
        for id_ in running.start.requests:
            if self.known[id_].blamed:
                assert self.ended[id_] in ("poisoned", "deadline_exceeded", "cancelled", "forgotten")

    def _give_back(self, running: Running) -> None:
        """A batch that did not start is over: its members go again as they are, and none has lost anything."""
        left = frozenset(i for i in running.wanted if not self._is_late(i))
        self._finish_off(running)
        for id_ in running.wanted:
            self.known[id_].batch = None
            self.known[id_].group = left

    def _stop_hung(self, running: Running, code: str) -> None:
        """A batch that hung has ended after all, in whatever way."""
        self._die(running)
        self._play(BatchFailed(batch=running.start.batch, code=code, message="stopped"))
        self._check_blame(running)

    @precondition(lambda self: any(running.recalled for running in self._running()))
    @rule(data=st.data())
    def recall_succeeds(self, data) -> None:
        """A batch that was called back had not started; otherwise it goes its way like any other."""
        running = data.draw(st.sampled_from([running for running in self._running() if running.recalled]))
        self._give_back(running)
        actions = self._play(BatchFailed(batch=running.start.batch, code="recalled", message="as asked"))
        assert not any(isinstance(action, Delivered) for action in actions)

    @precondition(lambda self: len(self.slots) > 1)
    @rule(data=st.data())
    def slot_closes(self, data) -> None:
        """A slot, idle or busy, is about to leave."""
        slot = data.draw(st.sampled_from(sorted(self.slots)))
        self.closing.add(slot)
        self._play(SlotClosing(slot=slot))

    @precondition(lambda self: self.closing & self._unused())
    @rule(data=st.data())
    def closed_slot_leaves(self, data) -> None:
        """It has finished what it ran; nobody notices."""
        slot = data.draw(st.sampled_from(sorted(self.closing & self._unused())))
        del self.slots[slot]
        self.closing.discard(slot)
        self._play(SlotLeft(slot=slot))

    def _unused(self) -> set[int]:
        return set(self.slots) - {running.start.slot for running in self._running()}

    def _lose(self, running: Running) -> None:
        """What the loss of a batch means for its members, before the scheduler has said anything."""
        self._finish_off(running)
        for id_ in running.wanted:
            known = self.known[id_]
            known.lost += 1
            known.batch = None
            # The last attempt is made where nothing else runs.
            known.suspect = running.alone or known.lost == MAX_ATTEMPTS - 1
            known.group = None if known.suspect else frozenset({id_})

    @precondition(lambda self: self._running())
    @rule(data=st.data(), run_s=st.sampled_from([0.0, 0.2, 1.0]))
    def batch_finishes(self, data, run_s) -> None:
        """A batch ends well; members with a deadline may have been left out by their slot."""
        running = data.draw(st.sampled_from(self._active()))
        may_expire = [i for i in running.start.requests if self.known[i].arrival.deadline is not None]
        expired = frozenset(i for i in may_expire if data.draw(st.integers(0, 3)) == 0)
        self._finish(running, run_s, expired)

    @precondition(lambda self: self._active())
    @rule(times=st.integers(1, 6), trip_s=st.sampled_from([0.0, 0.001]), more=st.integers(0, 3))
    def answers_are_followed(self, times, trip_s, more) -> None:
        """Clients have a number of requests in flight: one follows each answer, and others of them wait meanwhile."""
        for turn in range(times):
            running = next((other for other in self._active() if other.wanted and not other.cancelled), None)
            if running is None:
                return
            self.now = max(self.now, running.began + 0.4)
            self._play(TimePassed())
            if running.cancelled or running.hung or not running.wanted:
                return
            answered = [self.known[id_].arrival for id_ in sorted(running.wanted)]
            alike = [(a.model, a.sizes, a.client, 1, None, a.priority, a.submitted) for a in answered]
            if not turn and more:
                self.requests_arrive(specs=alike[:more])
            self._finish(running, 0.4)
            self.now += trip_s
            self.requests_arrive(specs=alike)

    def _finish(self, running: Running, run_s: float, expired: frozenset[int] = frozenset()) -> None:
        self._finish_off(running)
        wanted = set(running.wanted)
        batch = running.start.batch
        late = {i for i in wanted if self._is_late(i)} | (wanted & expired)
        actions = self._play(BatchFinished(batch=batch, busy_s=run_s, expired=expired))
        assert all(self.ended[id_] == "deadline_exceeded" for id_ in late), "a late result was delivered"
        delivered = [set(a.requests) for a in actions if isinstance(a, Delivered)]
        assert delivered == ([wanted - late] if wanted - late else []), "a result that was ready is missing"

    @precondition(lambda self: self._running())
    @rule(data=st.data(), code=st.sampled_from(["model_error", "invalid", "internal"]))
    def batch_is_broken(self, data, code) -> None:
        """A batch fails because of its data."""
        running = data.draw(st.sampled_from(self._active()))
        if running.hung:
            self._stop_hung(running, code)
            return
        self._finish_off(running)
        self._halve(running)
        self._play(BatchFailed(batch=running.start.batch, code=code, message="broken"))

    @precondition(lambda self: self._running())
    @rule(data=st.data(), code=st.sampled_from(["unavailable", "cancelled"]))
    def batch_is_lost(self, data, code) -> None:
        """A batch fails because of its device; its slot stays."""
        running = data.draw(st.sampled_from(self._active()))
        if running.hung:
            self._stop_hung(running, code)
            return
        self._lose(running)
        self._play(BatchFailed(batch=running.start.batch, code=code, message="gone"))

    def _halve(self, running: Running) -> None:
        """Which groups must run again: parted between clients, or in the middle. A batch of one has no second try."""
        left = [i for i in running.start.requests if i in running.wanted and not self._is_late(i)]
        left.sort(key=lambda id_: self.known[id_].arrival.client)
        middle = (len(left) + 1) // 2
        clients = [self.known[id_].arrival.client for id_ in left]
        if len(set(clients)) > 1:
            between = [place for place in range(1, len(left)) if clients[place] != clients[place - 1]]
            middle = min(between, key=lambda place: abs(place - len(left) / 2))
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
    @rule(client=st.integers(0, 2), sessions=st.integers(1, 2))
    def caller_leaves(self, client, sessions) -> None:
        """It takes along whatever it had: all that its client has, or only its part of that."""
        own = [i for i, k in self.known.items() if k.arrival.client == client and i not in self.ended]
        own = [i for i in own if i % sessions == 0 and not self._is_late(i)]
        self._play(RequestsAbandoned(ids=tuple(own)))
        assert {} == {id_: self.ended[id_] for id_ in own if self.ended[id_] != "forgotten"}

    @precondition(lambda self: self.slots and not self._audits())
    @rule(
        model=st.sampled_from(sorted(PROFILES)),
        sizes=st.tuples(st.integers(0, 4), st.integers(1, 4), st.integers(3, 4)),
        every=st.booleans(),
    )
    def audit_is_wanted(self, model, sizes, every) -> None:
        """An answered request should run again, on one slot or any."""
        slots = sorted(self.slots) if every else [max(self.slots)]
        sizes = sizes[: len(PROFILES[model].dimensions)]
        self._play(AuditWanted(model=model, sizes=sizes, slots=frozenset(slots)))

    @precondition(lambda self: self.models)
    @rule(data=st.data())
    def model_runs_alone(self, data) -> None:
        """Requests of a model share no calls any more, or do again."""
        model = data.draw(st.sampled_from(sorted(self.models)))
        self.alone ^= {model}
        self._play(ModelRunsAlone(model=model, alone=model in self.alone))

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

    def teardown(self) -> None:
        """With a slot for everything, all that is left ends well; and the same events give the same actions."""
        if self.models:
            self._add_slot(frozenset(MODELS))
            for _ in range(500):
                while self._running():
                    running = self._active()[0]
                    self._finish_off(running)
                    self._play(BatchFinished(batch=running.start.batch, busy_s=0.1))
                if not self._queued():
                    break
                self.timer_fires()
        assert set(self.known) == set(self.ended), "a request was lost"
        assert self.scheduler.statistics().idle
        again = self._new_scheduler()
        for event, now, actions in self.log:
            assert actions == in_order(seen(again.handle(event, now))), "the same events gave other actions"


class BundlingMachine(SchedulerMachine):
    """Bundles have no bound in seconds, so that what would run alone is handed over in bundles most of the time."""

    def __init__(self) -> None:
        self._patches = pytest.MonkeyPatch()
        self._patches.setattr(bundles, "BUNDLE_S", inf)
        self._patches.setattr(bundles, "SHARED_BUNDLE", 6)
        self._patches.setattr(bundles, "LEFT", 0)
        super().__init__()

    def teardown(self) -> None:
        """As before, and the next machine has its own."""
        try:
            super().teardown()
        finally:
            self._patches.undo()


SchedulerMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)
BundlingMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=50, deadline=None)


class TestScheduler(SchedulerMachine.TestCase):
    """Hypothesis searches for a sequence of events that breaks a promise."""


class TestBundlingScheduler(BundlingMachine.TestCase):
    """The same with many bundles."""
