"""Holds a scheduler's actions against its promises (docs/scheduling.md), whatever the events.

The referee keeps books of its own, from events and actions alone, and never looks into the scheduler.
"""

from __future__ import annotations

from itertools import count
from math import inf, prod

from hypothesis.stateful import RuleBasedStateMachine, invariant
from tests.pipeline.scheduling.books import (
    HANG_GRACE_S,
    HANG_MIN_S,
    LONGEST_FIRST_PAUSE_S,
    MAX_ASIDE_S,
    MAX_ATTEMPTS,
    MAX_QUEUED_BYTES,
    MAX_QUEUED_REQUESTS,
    MIN_ASIDE_S,
    PROFILES,
    Known,
    Running,
)
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
from shapestream.scheduling.actions import ReportFault
from shapestream.scheduling.answer_waits import LONGEST_WAIT
from shapestream.scheduling.events import (
    AuditWanted,
    BatchFailed,
    BatchFinished,
    Event,
    ModelProfile,
    RequestCancelled,
    RequestsAbandoned,
    RequestsArrived,
)
from shapestream.scheduling.hang_watch import STALL_S, HangLimits
from shapestream.scheduling.slots import BUNDLE


class Referee(RuleBasedStateMachine):
    """Plays events at a scheduler and watches; the rules that make up events are the subclass's."""

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = self._new_scheduler()
        self.now = 0.0
        self.log: list[tuple[Event, float, list[Seen]]] = []
        self.ids = count(1)
        self.orders = count()
        self.known: dict[int, Known] = {}
        self.ended: dict[int, str] = {}
        self.refused: set[int] = set()
        self.slots: dict[int, frozenset[str]] = {}
        self.processes: dict[int, str] = {}
        """Of each slot."""
        self.condemned: set[str] = set()
        """Processes that are to be killed."""
        self.closing: set[int] = set()
        self.refusals: dict[int, tuple[int, float]] = {}
        """Slots that answered their last batches `unavailable`: how many in a row, and when the last time."""
        self.owing: set[int] = set()
        """Slots that did so while another batch waited there: they rest when that one has ended."""
        self.answered: dict[int, tuple[str, float]] = {}
        """By slot, the model of the batch that it has just answered, and until when it may wait for company."""
        self.slot_ids = count()
        self.batches: dict[int, Running] = {}
        self.models: set[str] = set()
        self.alone: set[str] = set()
        """Models whose requests share no calls."""
        self.draining = False

    @staticmethod
    def _new_scheduler() -> Scheduler:
        hangs = HangLimits(min_s=HANG_MIN_S, grace_s=HANG_GRACE_S)
        return Scheduler(MAX_QUEUED_REQUESTS, MAX_QUEUED_BYTES, MAX_ATTEMPTS, hangs=hangs)

    # ------------------------------------------------------------ what the machine knows

    def _is_late(self, id_: int) -> bool:
        deadline = self.known[id_].arrival.deadline
        return deadline is not None and deadline <= self.now

    def _running(self) -> list[Running]:
        return [running for running in self.batches.values() if not running.over]

    def _active(self) -> list[Running]:
        """Those that run, not those that wait behind them."""
        return [running for running in self._running() if running.behind is None]

    def _audits(self) -> list[Running]:
        """The audit that runs, if any."""
        return [running for running in self._running() if not running.start.requests]

    def _finish_off(self, running: Running) -> None:
        """A batch is over; what waited behind it runs, or waits behind what that waited for."""
        running.over = True
        for other in self._running():
            if other.behind == running.start.batch:
                other.behind = running.behind
                if other.behind is None:
                    other.began = self.now
        self._reprieve(self.processes[running.start.slot])

    def _reprieve(self, process: str) -> None:
        """A process is not killed any more once the batches are over, or given up, because of which it should be."""
        if not any(running.killed_at is not None and not running.given_up for running in self._in(process)):
            self.condemned.discard(process)

    def _in(self, process: str) -> list[Running]:
        """What a process runs."""
        return [running for running in self._active() if self.processes[running.start.slot] == process]

    def _die(self, running: Running) -> None:
        """What the death of its process, or its hanging, means for the members of a batch."""
        self._finish_off(running)
        for id_ in running.wanted:
            known = self.known[id_]
            known.lost += 1
            known.deaths += 1
            known.batch = None
            known.blamed = running.alone and known.accused
            known.accused = True
            known.suspect = True
            known.group = None

    def _queued(self) -> list[Known]:
        return [k for i, k in self.known.items() if i not in self.ended and k.batch is None]

    def _idle_slots(self) -> set[int]:
        return set(self.slots) - {running.start.slot for running in self._running()} - self.closing

    def _free_slots(self, *, for_certain: bool) -> set[int]:
        """Idle and not put aside, `for_certain` or perhaps: how long a rest is depends on measured times."""
        last = self.log[-1][1] if self.log else 0.0
        pause_s = LONGEST_FIRST_PAUSE_S if for_certain else MIN_ASIDE_S
        return {
            slot
            for slot in self._idle_slots()
            if slot not in self.refusals
            or self.refusals[slot][1] + min(MAX_ASIDE_S, pause_s * 2 ** (self.refusals[slot][0] - 1)) <= last
        }

    # ------------------------------------------------------------ what the scheduler promises

    def _play(self, event: Event) -> list[Seen]:
        actions = in_order(seen(self.scheduler.handle(event, self.now)))
        self.log.append((event, self.now, list(actions)))
        self._give_up()
        self._note_refusals(event)
        for action in actions:
            match action:
                case Started():
                    self._started(action)
                case Delivered():
                    assert self.batches[action.batch].over, "a batch was delivered while it ran"
                    for id_ in action.requests:
                        assert id_ in self.batches[action.batch].start.requests
                        assert not self._is_late(id_), "a late result was delivered"
                        self._end(id_, "delivered")
                case Failed():
                    self._failed(action, event)
                case Forgotten():
                    assert isinstance(event, RequestsAbandoned)
                    assert action.id in event.ids
                    self._end(action.id, "forgotten")
                case CancelAsked():
                    running = self.batches[action.batch]
                    assert not running.over, "a batch was cancelled that is over"
                    assert not running.cancelled, "a batch was cancelled twice"
                    assert running.behind is None, "a batch was cancelled that has not started"
                    assert running.start.slot == action.slot
                    running.hung = bool(running.wanted)
                    assert running.start.requests or self._stops(running), "an audit was stopped for nothing"
                    assert not running.hung or self._ran_s(running) >= HANG_MIN_S, (
                        "cancelled, and somebody waits"
                    )
                    running.cancelled = True
                case KillAsked():
                    self._killed(action)
                case RecallAsked():
                    self._recalled(action, event)
                case ReportFault():
                    raise action.error
        return actions

    def _ran_s(self, running: Running) -> float:
        limit_s = PROFILES[running.start.model].hang_after_s
        assert limit_s != inf, "what may take any time was taken to hang"
        # Sums of floats: it may look a little less than it was when the time was reckoned.
        return self.now - running.began + 1e-9

    def _stops(self, audit: Running) -> bool:
        """Whether there was a reason to stop an audit: a drain, its slot's end, what waits or came, or that it hangs."""
        slot = audit.start.slot
        event = self.log[-1][0]
        return (
            self.draining
            or slot in self.closing
            or self.processes[slot] in self.condemned
            or bool(self._queued())
            or isinstance(event, RequestsArrived)
            or self.now - audit.began >= HANG_MIN_S - 1e-9
        )

    def _check_audit(self, start: Started) -> None:
        """An audit starts where nothing waits, on a slot that is free, while another is."""
        wanted = next(event for event, _, _ in reversed(self.log) if isinstance(event, AuditWanted))
        assert (start.model, start.sizes) == (wanted.model, wanted.sizes)
        assert start.slot in wanted.slots
        assert not self._queued(), "an audit starts while a request waits"
        assert not self.draining, "an audit starts in a drain"
        assert not self._audits(), "two audits at once"
        self._check_place(start)
        serving = [slot for slot in set(self.slots) - self.closing if start.model in self.slots[slot]]
        free = [slot for slot in self._free_slots(for_certain=False) if start.model in self.slots[slot]]
        assert len(serving) == 1 or len(free) > 1, "an audit takes the last free slot"
        self.batches[start.batch] = Running(start, began=self.now)

    def _killed(self, action: KillAsked) -> None:
        running = next(running for running in self._active() if running.start.slot == action.slot)
        assert running.cancelled, "a process is killed though nobody asked its batch to stop"
        assert running.killed_at is None, "a process is killed twice because of one batch"
        assert self._ran_s(running) >= HANG_MIN_S + HANG_GRACE_S
        running.killed_at = self.now
        self.condemned.add(self.processes[action.slot])

    def _give_up(self) -> None:
        """A process that could not be killed keeps the slot; before the actions that follow from that."""
        for running in self._active():
            if running.killed_at is None or running.given_up or self.now < running.killed_at + HANG_GRACE_S:
                continue
            if self.now > running.killed_at + HANG_GRACE_S + STALL_S:
                running.killed_at = (
                    self.now
                )  # a look that comes so late proves nothing: the grace begins anew
                continue
            running.given_up = True
            self.closing.add(running.start.slot)
            self._reprieve(self.processes[running.start.slot])

    def _recalled(self, action: RecallAsked, event: Event) -> None:
        running = self.batches[action.batch]
        assert not running.over, "a batch was recalled that is over"
        assert not running.recalled, "a batch was recalled twice"
        assert running.start.slot == action.slot
        running.recalled = True
        if running.behind is None:
            assert isinstance(event, BatchFailed), "a batch was recalled that had started"
            assert event.code == "unavailable"
            return
        event_is_refusal = isinstance(event, BatchFailed) and event.code == "unavailable"
        kept = any(known.suspect for known in self._queued()) or any(r.alone for r in self._active())
        ahead = self._first_of(running)
        assert (
            kept or ahead.hung or event_is_refusal or not running.wanted or action.slot in self.closing
            or self._ran_s(ahead) >= HANG_MIN_S
        ), "recalled without a reason"  # fmt: skip

    def _note_refusals(self, event: Event) -> None:
        """Before the starts that the event caused: of those a slot that just refused must have none."""
        match event:
            case BatchFailed(code="unavailable"):
                slot = self.batches[event.batch].start.slot
                more = slot not in self.owing  # what it had when it refused counts once
                self.refusals[slot] = (self.refusals.get(slot, (0, 0.0))[0] + more, self.now)
                if slot in self._idle_slots():
                    self.owing.discard(slot)
                else:
                    self.owing.add(slot)
            case BatchFailed(code="recalled" | "cancelled"):
                slot = self.batches[event.batch].start.slot
                if slot in self.owing and slot in self._idle_slots():
                    self.owing.discard(slot)
                    self.refusals[slot] = (self.refusals[slot][0], self.now)
            case BatchFinished() | BatchFailed(code="model_error" | "invalid" | "internal"):
                running = self.batches[event.batch]
                self.refusals.pop(running.start.slot, None)
                self.owing.discard(running.start.slot)
                if isinstance(event, BatchFinished):
                    until = self.now + LONGEST_WAIT * (self.now - running.began)
                    self.answered[running.start.slot] = running.start.model, until
            case _:
                pass

    def _end(self, id_: int, how: str) -> None:
        assert id_ in self.known
        assert id_ not in self.ended, f"request {id_} ended twice"
        self.ended[id_] = how
        for running in self.batches.values():
            running.wanted.discard(id_)

    def _failed(self, action: Failed, event: Event) -> None:
        known = self.known[action.id]
        match action.code:
            case "deadline_exceeded":
                left_out = isinstance(event, BatchFinished) and action.id in event.expired
                assert left_out or self._is_late(action.id) or self._is_hopeless(known)
            case "cancelled":
                assert isinstance(event, RequestCancelled)
                assert action.id == event.id
            case "worker_lost":
                once = not PROFILES[known.arrival.model].idempotent
                given_up = known.batch is not None and self.batches[known.batch].given_up
                assert known.lost == (1 if once else MAX_ATTEMPTS) or given_up
            case "poisoned":
                given_up = known.batch is not None and self.batches[known.batch].given_up
                alone = given_up and self.batches[known.batch].alone and known.accused
                assert known.blamed or alone, "an innocent is blamed"
            case "model_error" | "invalid" | "internal" if isinstance(event, BatchFailed):
                assert (action.id,) == self.batches[event.batch].start.requests, "not alone to blame"
                assert (action.code, action.message) == (event.code, event.message)
            case _:
                assert isinstance(event, RequestsArrived)
                assert action.id in {arrival.id for arrival in event.requests}
        self._end(action.id, action.code)

    def _is_hopeless(self, known: Known) -> bool:
        """Ended before its deadline: only while it waits. How long before, test_deadlines.py asks, with known costs."""
        assert known.batch is None, "failed before its deadline although it ran"
        assert known.arrival.deadline is not None
        return True

    def _started(self, start: Started) -> None:
        if not start.requests:
            self._check_audit(start)
            return
        profile = PROFILES[start.model]
        members = [self.known[id_] for id_ in start.requests]
        assert start.batch not in self.batches
        assert start.model in self.slots[start.slot]
        self._check_place(start)
        assert members
        assert len(members) == len(set(start.requests))
        for id_, member in zip(start.requests, members, strict=True):
            assert id_ not in self.ended, "what has ended was started"
            assert member.batch is None, "a request runs twice at once"
            assert not self._is_late(id_), "an inference started after its request's deadline"
        assert {start.model} == {member.arrival.model for member in members}
        assert len({member.lane for member in members}) == 1, "a batch mixes what may not mix"
        assert len(members) == 1 or start.model not in self.alone, "company for a request that runs alone"
        assert len(members) == 1 or not any(member.empty for member in members), "company without elements"
        self._check_sizes(start, members, profile)
        self._check_order(start, members)
        for member in members:
            member.batch = start.batch
            for other in self.known.values() if start.model in self.alone else ():
                if other.group is not None and id_ in other.group:
                    other.group -= {id_}
            member.group = None
            member.starts += 1
            assert profile.idempotent or member.starts == 1, "what may not run twice was started again"
            assert member.deaths < 2, "it may have killed two processes, and is started again"
        self.answered.pop(start.slot, None)
        alone = members[0].suspect
        self.batches[start.batch] = Running(
            start,
            start.behind,
            began=self.now,
            alone=alone,
            wanted=set(start.requests),
        )

    def _check_place(self, start: Started) -> None:
        process = self.processes[start.slot]
        beside = [running for running in self._in(process) if not running.given_up]
        if any(self.known[id_].suspect for id_ in start.requests):
            assert len(start.requests) == 1, "a suspect has company"
            assert not beside, "something runs in the process in which a suspect is started"
        assert not any(running.alone for running in beside), "a suspect does not stay alone"
        assert process not in self.condemned, "something is started in a process that is to be killed"
        kept = self.scheduler.statistics().slots_reserved
        if start.behind is None:
            assert start.slot in self._idle_slots(), (
                "a slot runs one batch at a time, and none once it closes"
            )
            assert start.slot in self._free_slots(for_certain=False), (
                "a slot that must rest was given a batch"
            )
            return
        ahead = self.batches[start.behind]
        assert not ahead.over, "a batch waits behind one that is over"
        if ahead.behind is not None:
            self._check_bundle(start)
        assert start.slot == ahead.start.slot
        assert start.slot not in self.closing, "a batch was sent ahead to a slot that closes"
        assert all(other.behind != start.behind for other in self._running()), "two batches behind one"
        free = self._free_slots(for_certain=True)
        serving = [slot for slot in free if start.model in self.slots[slot]]
        assert len(serving) <= kept, "sent ahead although a slot is free"
        assert PROFILES[start.model].idempotent, "what may not run twice is sent ahead"

    def _first_of(self, running: Running) -> Running:
        """What runs on the slot of a batch."""
        while running.behind is not None:
            running = self.batches[running.behind]
        return running

    def _check_bundle(self, start: Started) -> None:
        """Behind a batch that waits only a request alone is queued, while others are left."""
        waiting = [other for other in self._running() if other.start.slot == start.slot and other.behind]
        assert len(waiting) < BUNDLE, "too many batches wait on one slot"
        for other in (start, *[other.start for other in waiting]):
            assert len(other.requests) == 1, "a shared call is in a bundle"
        assert start.facts.left, "a bundle takes the last request"

    def _check_sizes(self, start: Started, members: list[Known], profile: ModelProfile) -> None:
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
            ratio = 1.0 if profile.max_padding_ratio is None else profile.max_padding_ratio
            assert wanted >= (1.0 - ratio) * rows * prod(shape) * (1.0 - 1e-9), "too much padding"

    def _check_order(self, start: Started, members: list[Known]) -> None:
        """What must run again goes in its group; nobody overtakes an equal of the same client that did not run yet."""
        if members[0].suspect:
            return
        if (group := members[0].group) is not None:
            left = {i for i in group if i not in self.ended}
            apart = start.model in self.alone and set(start.requests) <= left
            assert apart or set(start.requests) == left, "a group was changed"
            return
        assert all(member.group is None for member in members), "a newcomer joined what runs again"
        others = [
            k
            for k in self._queued()
            if k.arrival.model == start.model
            and self._admitted(k)
            and not k.suspect
            and k.group is None
            and k.arrival.id not in start.requests
        ]
        for member in members:
            for other in others:
                if other.equals(member):
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
        assert (statistics.slots, statistics.closing_slots) == (len(self.slots), len(self.closing))
        idle = statistics.free_slots + statistics.slots_resting + statistics.slots_reserved
        assert idle == len(self._idle_slots())
        suspects = [known for known in self._queued() if known.suspect]
        assert statistics.suspects == len(suspects)
        if not suspects and not self.condemned and not any(running.alone for running in self._active()):
            assert statistics.slots_reserved == 0, "slots are kept for nobody"

    @invariant()
    def no_free_slot_idles(self) -> None:
        """A free slot never idles while a request that it could run waits, unless for its delay, or for company."""
        free = self._free_slots(for_certain=True)
        kept = self.scheduler.statistics().slots_reserved
        last = self.log[-1][1] if self.log else 0.0
        for known in self._queued():
            serving = [slot for slot in free if known.arrival.model in self.slots[slot]]
            if len(serving) > kept and not known.suspect:
                model = known.arrival.model
                delay_s = PROFILES[model].max_delay_s
                assert known.group is None, "a free slot idles while a request waits to run again"
                if delay_s:
                    assert known.arrived + delay_s > last, "a request waited longer than its delay"
                    continue
                answered = [self.answered.get(slot, ("", -inf)) for slot in serving]
                assert {model} == {name for name, _ in answered}, "a free slot idles while a request waits"
                assert any(until > last for _, until in answered), "a request waited too long for company"

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
    def unwanted_batches_are_stopped(self) -> None:
        """A batch that nobody waits for has been cancelled, or called back while it had not started; no other was."""
        for running in self._running():
            if not running.start.requests:
                continue  # an audit, which has no members
            if running.behind is None:
                assert running.cancelled == (running.hung or not running.wanted)
            else:
                assert running.recalled or running.wanted
                assert not running.cancelled
