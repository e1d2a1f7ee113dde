"""Bundles: several calls are queued on a slot, where sharing a call does not pay.

All requests have lengths of their own, and the model takes no padding. A call takes a little less than a hand-over.
"""

from __future__ import annotations

from itertools import count

import pytest
from tests.pipeline.scheduling.seen import CancelAsked, Delivered, Failed, RecallAsked, Started

from shapestream.scheduling import bundles
from shapestream.scheduling import scheduler as module
from shapestream.scheduling.actions import StartBatch
from shapestream.scheduling.batches import Batch
from shapestream.scheduling.bundles import LEFT, SHARED_BUNDLE
from shapestream.scheduling.events import (
    Arrival,
    BatchFailed,
    BatchFinished,
    DrainStarted,
    RequestCancelled,
    RequestsArrived,
    SlotClosing,
    SlotLeft,
    TimePassed,
)
from shapestream.scheduling.hang_watch import HangLimits
from shapestream.scheduling.slots import BUNDLE

MS = 1e-3


@pytest.fixture(autouse=True)
def all_but_one(monkeypatch):
    """A bundle takes all that is queued but one; some tests undo that."""
    monkeypatch.setattr(bundles, "LEFT", 0)


@pytest.fixture
def exact(stage):
    """One slot with prefetch; a call of any length takes 0.9 ms."""
    return _ready(stage)


def _ready(stage, slots=1, **model):
    stage.model(max_batch=8, **model)
    stage.measured_slots(*range(slots), call_s=0.9 * MS, token_s=0.0, prefetch_s=0.1 * MS, worker="worker")
    return stage


def _lengths(number, *, first=1):
    """Sizes of so many requests, all of different lengths."""
    return [(1, length) for length in range(first, first + number)]


def test_one_hand_over_carries_the_requests_whose_turns_are_next(exact):
    """In the order of their arrival, in one action, each in a batch of its own behind the one before."""
    actions = _handled(exact, 6)
    (start,) = [action for action in actions if isinstance(action, StartBatch)]
    assert [(1,), (2,), (3,), (4,), (5,)] == [batch.ids for batch in start.batches]
    assert [None, 1, 2, 3, 4] == [batch.behind for batch in start.batches]
    assert 1 == exact.scheduler.statistics().queued


def _handled(stage, number):
    requests = [
        Arrival(id=id_, client=0, model="text", sizes=sizes, nbytes=10, deadline=None, priority=0)
        for id_, sizes in enumerate(_lengths(number), 1)
    ]
    return stage.scheduler.handle(RequestsArrived(requests=tuple(requests)), 0.0)


def test_the_last_queued_request_waits_for_its_time(exact):
    """Nothing shows yet that it would run alone: it is queued behind the bundle as late as without one."""
    exact.arrive(*_lengths(3))
    assert [(1,), (2,)] == exact.starts()
    exact.finish(exact.started[0], 1 * MS, at=1 * MS)
    assert [] == exact.starts()
    exact.wait(exact.scheduler.next_wakeup())
    assert [(3,)] == exact.starts()


def test_a_bundle_has_a_bound_in_calls(exact):
    """When one of them has ended, another joins."""
    exact.arrive(*_lengths(BUNDLE + 3))
    assert [(id_,) for id_ in range(1, BUNDLE + 1)] == exact.starts()
    exact.finish(exact.started[0], 0.9 * MS, at=0.9 * MS)
    assert [(BUNDLE + 1,)] == exact.starts()


def test_as_many_requests_wait_as_a_bundle_has_calls(exact, monkeypatch):
    """It grows again as its calls end."""
    monkeypatch.undo()
    exact.arrive(*_lengths(16))
    held = len(exact.starts())
    assert held * LEFT >= exact.scheduler.statistics().queued > (held - 1) * LEFT - 1
    exact.finish(exact.started[0], 0.9 * MS, at=0.9 * MS)
    assert 1 >= len(exact.starts())


def test_a_short_queue_is_left_for_the_slot_that_is_free_first(stage, monkeypatch):
    """Two slots, and two requests that wait: each slot holds one batch."""
    monkeypatch.undo()
    _ready(stage, slots=2)
    stage.arrive(*_lengths(4))
    assert [(1,), (2,)] == stage.starts()


@pytest.mark.parametrize(("call_ms", "calls"), [(4.0, 4), (7.0, 3), (20.0, 1)])
def test_a_bundle_has_a_bound_in_seconds(stage, call_ms, calls):
    """None joins one that takes 16 ms already. A call that takes longer than that is handed over as ever."""
    stage.model(max_batch=8)
    stage.measured_slots(0, call_s=call_ms * MS, token_s=0.0, prefetch_s=0.1 * MS)
    stage.arrive(*_lengths(10))
    assert calls == len(stage.starts())


def test_every_free_slot_has_its_part(stage):
    """Each request goes to the slot that is predicted to end first."""
    _ready(stage, slots=2)
    stage.arrive(*_lengths(7))
    assert {0: [1, 3, 5], 1: [2, 4, 6]} == {
        slot: [start.requests[0] for start in stage.started if start.slot == slot] for slot in (0, 1)
    }


def test_requests_that_may_share_a_call_end_a_bundle(exact):
    """The batch of the next turn has two members, so it is cut when the slot needs it, from all that is queued then."""
    exact.arrive((1, 1), (1, 2), (1, 3), (1, 3), (1, 4), (1, 5))
    assert [(1,), (2,)] == exact.starts()


@pytest.mark.parametrize(
    ("model", "slot"),
    [({"idempotent": False}, {}), ({"max_delay_s": 1.0}, {}), ({}, {"prefetch_s": None})],
    ids=["no request may run twice", "it waits for company", "the slot takes none"],
)
def test_no_bundle_where(stage, model, slot):
    """Then a slot holds one batch."""
    stage.model(max_batch=1, **model)
    stage.measured_slots(0, **{"call_s": MS, "token_s": 0.0, "prefetch_s": 0.1 * MS, **slot})
    stage.arrive(*_lengths(4))
    stage.wait(0.0)
    assert 1 >= len(stage.started)


def test_clients_alternate_in_a_bundle(exact):
    """Turns are those of start-time fair queueing, as without bundles; of several clients each has a call."""
    exact.arrive(*_lengths(8))
    for start in exact.started[:7]:
        exact.finish(start, 1 * MS, at=exact.now + 1 * MS)
    exact.wait(exact.scheduler.next_wakeup())
    first = len(exact.started)
    for client in range(1, 6):
        exact.arrive(*_lengths(8, first=20 + 20 * client), client=client)
    exact.finish(exact.started[-1], 1 * MS, at=exact.now + 1 * MS)
    bundle = exact.started[first:]
    assert 5 == len(bundle)
    assert 5 == len({(start.requests[0] - 9) // 8 for start in bundle})


def test_a_newcomer_waits_for_a_small_bundle(exact):
    """While several clients ask, and one of them has all that is queued."""
    exact.arrive((1, 100), client=1)
    exact.finish(exact.started[0], 1 * MS, at=1 * MS)
    exact.arrive(*_lengths(9), client=0)
    assert SHARED_BUNDLE == len(exact.starts())


def test_a_client_that_asks_no_more_does_not_shorten_the_bundles_of_another(exact):
    """A second after its last request they are as long as ever; until then it may come back with light work."""
    exact.arrive((1, 100), client=1)
    exact.finish(exact.started[0], 1 * MS, at=1 * MS)
    exact.arrive(*_lengths(9), client=0, at=0.9)
    assert SHARED_BUNDLE == len(exact.starts())
    exact.finish(exact.started[1], 1 * MS, at=1.5)
    assert 1 + 8 == len(exact.started)


def test_each_batch_of_a_bundle_is_answered_when_it_has_run(exact):
    """The rest stays on the slot, which is free after the last one."""
    exact.arrive(*_lengths(4))
    bundle = exact.started[:]
    for number, start in enumerate(bundle, 1):
        exact.finish(start, 1 * MS, at=number * MS)
        assert Delivered(batch=start.batch, requests=start.requests) == exact.last[0]
    exact.finish(exact.started[-1], 1 * MS, at=5 * MS)
    assert dict.fromkeys(range(1, 5), "delivered") == exact.ends
    assert 1 == exact.scheduler.statistics().free_slots


def test_a_request_that_is_withdrawn_is_recalled_from_the_bundle(exact):
    """The others keep their order, and nothing runs again."""
    exact.arrive(*_lengths(5))
    assert RecallAsked(batch=3, slot=0) == exact.play(RequestCancelled(id=3))[-1]
    exact.fail(exact.started[2], "recalled", "as asked")
    for number in (0, 1, 3):
        exact.finish(exact.started[number], 1 * MS, at=(number + 1) * MS)
    exact.finish(exact.started[-1], 1 * MS, at=6 * MS)
    assert {1: "delivered", 2: "delivered", 3: "cancelled", 4: "delivered", 5: "delivered"} == exact.ends


def test_a_deadline_that_passes_in_a_bundle_ends_its_request_alone(exact):
    """It had not begun: it is recalled."""
    exact.arrive(*_lengths(3))
    exact.arrive((1, 50), at=0.1 * MS, deadline=20 * MS)
    exact.arrive(*_lengths(5, first=60), at=0.2 * MS)
    exact.finish(exact.started[0], 1 * MS, at=1 * MS)
    exact.finish(exact.started[1], 1 * MS, at=2 * MS)
    exact.wait(exact.scheduler.next_wakeup())
    assert (4,) in [start.requests for start in exact.started]
    held = next(start for start in exact.started if start.requests == (4,))
    exact.wait(20 * MS)
    assert "deadline_exceeded" == exact.ends[4]
    assert RecallAsked(batch=held.batch, slot=0) in exact.last


def test_a_request_that_the_bundle_would_make_late_is_not_failed_early(exact):
    """It stays queued until its turn on a slot has come."""
    exact.arrive(*_lengths(BUNDLE + 4), deadline=1.0)
    assert {} == exact.ends
    assert 4 == exact.scheduler.statistics().queued


def test_a_batch_may_be_reported_before_one_that_comes_back(exact):
    """A slot's reports and what it gives back come on two connections, so there is no order between them."""
    exact.arrive(*_lengths(5))
    exact.play(RequestCancelled(id=2))
    exact.finish(exact.started[0], 1 * MS, at=1 * MS)
    assert [Delivered(batch=3, requests=(3,))] == exact.finish(exact.started[2], 1 * MS, at=2 * MS)
    exact.fail(exact.started[1], "recalled", "as asked")
    exact.finish(exact.started[3], 1 * MS, at=3 * MS)
    exact.finish(exact.started[4], 1 * MS, at=5 * MS)
    assert {1: "delivered", 2: "cancelled", 3: "delivered", 4: "delivered", 5: "delivered"} == exact.ends


@pytest.mark.parametrize("begun", [0, 1])
def test_a_closing_slot_gives_back_what_has_not_begun(exact, begun):
    """All that is queued there is recalled; what runs goes on."""
    exact.arrive(*_lengths(5))
    assert [RecallAsked(batch=batch, slot=0) for batch in (2, 3, 4)] == exact.play(SlotClosing(slot=0))
    if begun:  # the recall crossed its start
        exact.finish(exact.started[0], 1 * MS, at=1 * MS)
        exact.finish(exact.started[1], 1 * MS, at=2 * MS)
    for start in exact.started[1 + begun : 4]:
        exact.fail(start, "recalled", "as asked")
    if not begun:
        exact.finish(exact.started[0], 1 * MS, at=1 * MS)
    exact.play(SlotLeft(slot=0))
    exact.measured_slots(1, call_s=MS, token_s=0.0, prefetch_s=0.1 * MS)
    _finish_all(exact)
    assert dict.fromkeys(range(1, 6), "delivered") == exact.ends


def _finish_all(stage):
    done = {start.batch for start in stage.started if start.slot == 0} | stage.finished
    for _ in count():
        left = [start for start in stage.started if start.batch not in done]
        if not left and not stage.scheduler.statistics().queued:
            return
        if left:
            done.add(left[0].batch)
            stage.finish(left[0], 1 * MS, at=stage.now + 1 * MS)
        else:
            stage.wait(max(stage.now, stage.scheduler.next_wakeup()))


def test_the_death_of_a_worker_accuses_what_ran_and_what_may_have_begun(make_stage):
    """The batch behind may have begun before the death was heard of. The others run again and lose no attempt."""
    stage = _ready(make_stage(max_attempts=2))
    stage.arrive(*_lengths(6))
    stage.play(SlotClosing(slot=0))
    stage.play(SlotLeft(slot=0, died=True))
    assert (2, 6) == (stage.scheduler.statistics().suspects, stage.scheduler.statistics().queued)
    stage.measured_slots(1, 2, call_s=MS, token_s=0.0, prefetch_s=0.1 * MS, worker="another")
    _finish_all(stage)
    assert dict.fromkeys(range(1, 7), "delivered") == stage.ends


def test_a_slot_that_leaves_costs_only_what_ran_an_attempt(make_stage):
    """With one attempt, the first request of the bundle is lost, and no other."""
    stage = _ready(make_stage(max_attempts=1))
    stage.arrive(*_lengths(6))
    stage.play(SlotLeft(slot=0))
    assert {1: "worker_lost"} == stage.ends
    stage.measured_slots(1, call_s=MS, token_s=0.0, prefetch_s=0.1 * MS)
    _finish_all(stage)
    assert {1: "worker_lost"} | dict.fromkeys(range(2, 7), "delivered") == stage.ends


def test_a_batch_hangs_by_the_time_since_it_began(make_stage):
    """Not since the bundle was handed over; then the rest of the bundle is recalled, and the batch stopped."""
    stage = _ready(make_stage(hangs=HangLimits(min_s=1.0, grace_s=0.5)))
    stage.arrive(*_lengths(4))
    stage.finish(stage.started[0], 1 * MS, at=0.9)
    stage.wait(1.85)
    assert not any(isinstance(action, CancelAsked) for action in stage.last)
    stage.wait(1.95)
    asked = [action for action in stage.last if isinstance(action, CancelAsked | RecallAsked)]
    assert [CancelAsked(batch=2, slot=0), RecallAsked(batch=3, slot=0)] == asked[:2]


def test_a_slot_that_is_unavailable_gives_its_bundle_back_and_rests_once(exact):
    """All of it failed or was recalled because of one cause, so the pause is the first one, 0.1 s."""
    exact.arrive(*_lengths(5))
    recalled = exact.play(BatchFailed(batch=1, code="unavailable", message="no device"))
    assert {2, 3, 4} == {action.batch for action in recalled if isinstance(action, RecallAsked)}
    exact.fail(exact.started[1], "unavailable", "no device")
    for start in exact.started[2:4]:
        exact.fail(start, "recalled", "as asked")
    assert 1 == exact.scheduler.statistics().slots_resting
    assert [] == exact.starts()
    exact.wait(exact.now + 0.1)
    assert exact.starts()


def test_a_slot_that_ran_a_batch_of_the_bundle_after_all_does_not_rest(exact):
    """It was unavailable for a moment."""
    exact.arrive(*_lengths(5))
    exact.fail(exact.started[0], "unavailable", "no device")
    exact.finish(exact.started[1], 1 * MS, at=2 * MS)
    for start in exact.started[2:4]:
        exact.fail(start, "recalled", "as asked")
    assert 0 == exact.scheduler.statistics().slots_resting


def test_a_drain_lets_a_bundle_end(exact):
    """What was admitted is answered; newcomers are refused."""
    exact.arrive(*_lengths(4))
    exact.play(DrainStarted())
    exact.arrive((1, 90))
    assert {5: "draining"} == exact.ends
    for number, start in enumerate(exact.started[:3], 1):
        exact.finish(start, 1 * MS, at=number * MS)
    exact.finish(exact.started[-1], 1 * MS, at=5 * MS)
    assert {5: "draining"} | dict.fromkeys(range(1, 5), "delivered") == exact.ends


def test_a_request_of_a_bundle_that_fails_is_the_only_one_that_fails(exact):
    """Each has a call of its own."""
    exact.arrive(*_lengths(5))
    failed = exact.fail(exact.started[0])
    assert [1] == [action.id for action in failed if isinstance(action, Failed)]
    assert 4 == exact.scheduler.statistics().running + exact.scheduler.statistics().queued


def test_predictions_of_waits_count_the_whole_bundle(exact):
    """Otherwise a request with a deadline would be let in that the bundle makes late."""
    exact.arrive(*_lengths(BUNDLE + 1))
    exact.arrive((1, 90), deadline=5 * MS)
    assert BUNDLE + 2 in exact.ends


@pytest.mark.pure("replaces a function of the scheduler")
def test_a_fault_in_the_middle_of_a_bundle_loses_nothing(exact, monkeypatch):
    """What was handed over so far reaches its slot, and the books agree."""
    calls = count()

    def failing(*given, **named):
        if next(calls) == 2:
            raise ArithmeticError("a defect")
        return Batch(*given, **named)

    monkeypatch.setattr(module, "Batch", failing)
    exact.faults = []
    exact.arrive(*_lengths(5))
    monkeypatch.undo()
    assert exact.faults
    for start in [one for one in exact.last if isinstance(one, Started)]:
        exact.play(BatchFinished(batch=start.batch, busy_s=MS))
    exact.play(TimePassed())
    assert {1, 2, 3, 4, 5} == set(exact.ends) | {request.id for request in exact.scheduler.requests.values()}
