"""The scheduler's ordinary days: who runs with whom, and when."""

from __future__ import annotations

import pytest
from tests.pipeline.scheduling.seen import CancelAsked, Delivered, Failed, Forgotten, Started

from shapestream.scheduling import ledger
from shapestream.scheduling.events import (
    Arrival,
    BatchFinished,
    DrainStarted,
    RequestCancelled,
    RequestsAbandoned,
    RequestsArrived,
    SlotLeft,
)
from shapestream.scheduling.ledger import Troubles


def test_a_lone_request_starts_at_once(stage):
    """Under low load nothing waits for company."""
    stage.model()
    stage.slots(7)
    stage.arrive((1, 16))
    assert [Started(batch=1, slot=7, model="text", requests=(1,), sizes=(1, 16))] == stage.last


def test_a_finished_batch_delivers_its_members(stage):
    """The results of a batch go to all of its members, by one action."""
    stage.model()
    stage.slots(0)
    stage.arrive((1, 16), (2, 16))
    assert [Delivered(batch=1, requests=(1, 2))] == stage.finish(stage.started[0])
    assert "0 running, 0 queued" == repr(stage.scheduler.statistics())


def test_what_arrives_together_runs_together(stage):
    """Equal shapes of one turn share a call, and their rows add up."""
    stage.model()
    stage.slots(0)
    stage.arrive((1, 16), (3, 16), (2, 16))
    assert [(6, 16)] == [start.sizes for start in stage.started]


def test_the_queue_is_the_batching_window(stage):
    """While the slot is busy requests gather, and go together when it is free."""
    stage.model()
    stage.slots(0)
    stage.arrive((1, 16))
    stage.arrive((1, 16))
    stage.arrive((1, 16))
    assert "1 running, 2 queued" == repr(stage.scheduler.statistics())
    stage.finish(stage.started[0])
    assert [(2, 3)] == stage.starts()


def test_requests_wait_for_the_first_slot(stage):
    """Without any slot of their model requests wait, for workers may be starting."""
    stage.model()
    stage.slots(0, models=("other",))
    stage.arrive((1, 16))
    assert [] == stage.started
    stage.slots(1)
    assert [1] == [start.slot for start in stage.started]


def test_a_slot_may_join_before_its_model_is_known(stage):
    """Workers and models may come in either order."""
    stage.slots(0)
    stage.model()
    stage.arrive((1, 16))
    assert [(1,)] == stage.starts()


def test_shapes_that_must_not_be_padded_never_mix(stage):
    """Different sizes of a dimension that may not be padded go in different batches."""
    stage.model(padded=False)
    stage.slots(0)
    stage.arrive((1, 16), (1, 17), (1, 16), (1, 17))
    assert [(1, 3)] == stage.starts()
    stage.finish(stage.started[0])
    assert [(2, 4)] == stage.starts()


def test_padded_shapes_mix_as_far_as_the_padding_allows(stage):
    """Near sizes share a call at the largest of them; a far one waits for its own."""
    stage.model(padded=True, max_padding_ratio=0.125)
    stage.slots(0)
    stage.arrive((1, 16), (1, 15), (1, 200))
    assert [Started(batch=1, slot=0, model="text", requests=(1, 2), sizes=(2, 16))] == stage.last


def test_one_padded_and_one_exact_dimension(stage):
    """Requests share a call only if the exact dimension is equal, however near the padded one is."""
    stage.model(dimensions=("batch", "height", "width"), padded=(False, True), max_padding_ratio=0.5)
    stage.slots(0)
    stage.arrive((1, 4, 10), (1, 5, 10), (1, 4, 12))
    assert [(2, 4, 12)] == [start.sizes for start in stage.started]


def test_models_never_mix(stage):
    """Each batch is of one model, and the models of a slot take turns by age."""
    stage.model("a")
    stage.model("b")
    stage.slots(0, models=("a", "b"))
    stage.arrive((1, 4), model="a")
    stage.arrive((1, 4), model="b")
    stage.arrive((1, 4), model="a")
    stage.finish(stage.started[0])
    stage.finish(stage.started[1])
    assert [("a", (1,)), ("b", (2,)), ("a", (3,))] == [(s.model, s.requests) for s in stage.started]


def test_without_a_batch_axis_each_request_runs_alone(stage):
    """A model without a batch axis gets one request per call."""
    stage.model(dimensions=("length",), padded=True)
    stage.slots(0, 1)
    stage.arrive((9,), (9,), (9,))
    assert [(1,), (2,)] == stage.starts()
    assert (9,) == stage.started[0].sizes


def test_a_model_without_dynamic_dimensions(stage):
    """A static model without a batch axis has no sizes at all."""
    stage.model(dimensions=())
    stage.slots(0)
    stage.arrive((), ())
    assert [((1,), ())] == [(start.requests, start.sizes) for start in stage.started]


def test_max_batch_bounds_the_rows(stage):
    """A call holds at most `max_batch` rows; nobody overtakes an equal that does not fit."""
    stage.model(max_batch=8)
    stage.slots(0)
    stage.arrive((5, 4), (4, 4), (1, 4))
    assert [(1,)] == stage.starts()
    stage.finish(stage.started[0])
    assert [(2, 3)] == stage.starts()


def test_a_request_larger_than_max_batch_runs_alone(stage):
    """More rows than `max_batch` in one request are not refused."""
    stage.model(max_batch=8)
    stage.slots(0)
    stage.arrive((20, 4), (1, 4))
    assert [(1,)] == stage.starts()


def test_requests_without_rows_are_bounded_too(stage):
    """Rows of 0 add nothing to the call, but a batch still holds at most `max_batch` of them."""
    stage.model(max_batch=4)
    stage.slots(0)
    stage.arrive(*[(0, 4)] * 6)
    stage.finish(stage.started[0])
    stage.finish(stage.started[1])
    assert all(len(start.requests) <= 4 for start in stage.started)
    assert {"delivered"} == {stage.ends.get(id_, "delivered") for id_ in range(1, 7)}


def test_several_free_slots_share_the_queue(stage):
    """The queue is divided over the free slots instead of emptied into the first."""
    stage.model(max_batch=64)
    stage.slots(0, 1, 2)
    stage.arrive(*[(1, 4)] * 8)
    assert [(1, 2, 3), (4, 5, 6), (7, 8)] == stage.starts()


def test_two_shapes_on_two_slots_are_not_cut_in_halves(stage):
    """The share counts everything that waits, so a lane that is half of the queue stays whole."""
    stage.model(max_batch=64)
    stage.slots(0, 1)
    stage.arrive(*[(1, 4)] * 5, *[(1, 9)] * 5)
    assert [(1, 2, 3, 4, 5), (6, 7, 8, 9, 10)] == stage.starts()


def test_two_models_on_two_slots_are_not_cut_in_halves(stage):
    """The share counts what waits for the other models of the slot as well."""
    stage.model("a")
    stage.model("b")
    stage.slots(0, 1, models=("a", "b"))
    arrivals = [Arrival(id=id_, client=0, model="ab"[id_ // 4], sizes=(1, 4), nbytes=1) for id_ in range(8)]
    stage.play(RequestsArrived(requests=tuple(arrivals)))
    assert [(0, 1, 2, 3), (4, 5, 6, 7)] == stage.starts()


def test_the_slot_that_is_free_longest_goes_first(stage):
    """Work spreads over the slots by turns."""
    stage.model()
    stage.slots(0, 1)
    for _ in range(4):
        stage.arrive((1, 4))
        stage.finish(stage.started[-1])
    assert [0, 1, 0, 1] == [start.slot for start in stage.started]


def test_a_waiting_request_fails_at_its_deadline(stage):
    """No inference starts after the deadline, and the caller hears of it when it passes."""
    stage.model()
    stage.slots(0)
    stage.arrive((1, 4))
    stage.arrive((1, 4), deadline=5.0)
    assert 5.0 == stage.scheduler.next_wakeup()
    stage.wait(4.999)
    assert {} == stage.ends
    stage.wait(5.0)
    assert {2: "deadline_exceeded"} == stage.ends
    assert stage.scheduler.next_wakeup() is None


def test_a_running_request_fails_at_its_deadline_and_its_mates_do_not(stage):
    """A late result is not delivered; the batch goes on for the others."""
    stage.model()
    stage.slots(0)
    stage.arrive((1, 4))
    stage.arrive((1, 4), deadline=5.0)
    stage.arrive((1, 4))
    stage.finish(stage.started[0], at=1.0)
    stage.wait(5.0)
    assert [Delivered(batch=2, requests=(3,))] == stage.finish(stage.started[1], at=6.0)
    assert {1: "delivered", 2: "deadline_exceeded", 3: "delivered"} == stage.ends


def test_a_result_that_is_late_itself_is_deadline_exceeded(stage):
    """When the result comes before the timer, the deadline still counts."""
    stage.model()
    stage.slots(0)
    stage.arrive((1, 4), deadline=5.0)
    actions = stage.finish(stage.started[0], at=5.5)
    assert ["deadline_exceeded"] == [a.code for a in actions if isinstance(a, Failed)]
    assert 1 == len(actions), "a batch that is over is not cancelled as well"


def test_members_that_the_slot_left_out_are_deadline_exceeded(stage):
    """A slot's own clock may find a member expired before the scheduler's does."""
    stage.model()
    stage.slots(0)
    stage.arrive((1, 4), (1, 4), deadline=5.0)
    actions = stage.finish(stage.started[0], at=4.9, expired=frozenset({1}))
    assert {1: "deadline_exceeded", 2: "delivered"} == stage.ends
    assert not any("running" in action.message for action in actions if isinstance(action, Failed))


def test_a_cancelled_request_leaves_the_queue_at_once(stage):
    """Cancelling a waiting request answers it and frees its place."""
    stage.model()
    stage.slots(0)
    stage.arrive((1, 4))
    stage.arrive((1, 4), (1, 4), (1, 4))
    stage.play(RequestCancelled(id=3))
    assert {3: "cancelled"} == stage.ends
    stage.finish(stage.started[0])
    assert [(2, 4)] == stage.starts()


def test_a_running_batch_is_cancelled_when_nobody_wants_it(stage):
    """The last wanted member takes the batch with it; the slot stays busy until it reports."""
    stage.model()
    stage.slots(0)
    stage.arrive((1, 4), (1, 4))
    stage.arrive((1, 4))
    assert [] == [a for a in stage.play(RequestCancelled(id=1)) if isinstance(a, CancelAsked)]
    assert CancelAsked(batch=1, slot=0) == stage.play(RequestCancelled(id=2))[-1]
    assert 1 == len(stage.started)
    stage.finish(stage.started[0])
    assert [(3,)] == stage.starts()
    assert {1: "cancelled", 2: "cancelled"} == stage.ends


def test_cancelling_what_is_not_here_does_nothing(stage):
    """Unknown and finished ids are ignored."""
    stage.model()
    stage.slots(0)
    stage.arrive((1, 4))
    stage.finish(stage.started[0])
    assert [] == stage.play(RequestCancelled(id=1))
    assert [] == stage.play(RequestCancelled(id=99))


def test_a_client_that_leaves_takes_its_work_along(stage):
    """Queued requests are dropped without an answer, running ones are not delivered, others stay."""
    stage.model()
    stage.slots(0)
    stage.arrive((1, 4), client=1)
    stage.arrive((1, 4), client=2)
    stage.arrive((1, 4), client=1)
    actions = stage.play(RequestsAbandoned(ids=(1, 3)))
    assert [Forgotten(id=1), Forgotten(id=3), CancelAsked(batch=1, slot=0)] == actions
    assert [] == stage.play(RequestsAbandoned(ids=(1, 3)))
    stage.finish(stage.started[0])
    assert [(2,)] == stage.starts()


def test_after_drain_the_old_is_finished_and_the_new_refused(stage):
    """Draining ends with an idle scheduler, and nothing that was admitted is lost."""
    stage.model()
    stage.slots(0)
    stage.arrive((1, 4))
    stage.arrive((1, 4))
    stage.play(DrainStarted())
    stage.arrive((1, 4))
    assert {3: "draining"} == stage.ends
    stage.finish(stage.started[0])
    assert not stage.scheduler.statistics().idle
    stage.finish(stage.started[1])
    assert stage.scheduler.statistics().idle
    assert {1: "delivered", 2: "delivered", 3: "draining"} == stage.ends


def test_reports_of_unknown_batches_are_ignored(stage):
    """A report may cross the news that its slot has left."""
    stage.model()
    stage.slots(0)
    stage.arrive((1, 4))
    stage.play(SlotLeft(slot=0))
    assert [] == stage.play(BatchFinished(batch=1, busy_s=0.1))
    assert [] == stage.play(SlotLeft(slot=0))
    assert {} == stage.ends


def test_time_that_goes_backwards_counts_as_the_latest(stage):
    """A caller's clock that slips does not revive a deadline."""
    stage.model()
    stage.slots(0)
    stage.wait(10.0)
    stage.arrive((1, 4), at=3.0, deadline=9.0)
    assert {1: "deadline_exceeded"} == stage.ends


def test_an_id_is_used_once(stage):
    """A second request with the id of a live one is the caller's defect."""
    stage.model()
    stage.arrive((1, 4))
    stage.repeat_ids()
    with pytest.raises(ValueError, match="request 1 is here already"):
        stage.arrive((1, 4))


def test_a_slot_joins_once(stage):
    """A second slot with the id of a live one is the caller's defect."""
    stage.slots(0)
    with pytest.raises(ValueError, match="slot 0 has joined already"):
        stage.slots(0)


def test_a_model_keeps_its_profile(stage):
    """A model cannot change while requests for it may wait."""
    stage.model()
    with pytest.raises(ValueError, match="'text' is here already, with another profile"):
        stage.model(max_batch=99)


def test_a_model_may_be_added_again_unchanged(stage):
    """Workers that name the same model do no harm."""
    stage.model()
    stage.slots(0)
    stage.model()
    stage.arrive((1, 4))
    assert [(1,)] == stage.starts()


def test_a_batch_tells_why_it_was_cut_so(stage):
    """Its padding, whose turn it was, how many were queued before each member; and the state can be read."""
    stage.model(padded=True, max_padding_ratio=0.5)
    stage.slots(0)
    stage.arrive((1, 8), (1, 4), at=1.0)
    facts = stage.started[0].facts
    assert (4, True, 1, (0, 1)) == (facts.padding, facts.new_shape, facts.first, facts.ahead)
    stage.finish(stage.started[0], at=2.0)
    assert "text: 0 queued, 1 of 1 slots free" == repr(stage.scheduler.statistics().models[0])
    assert [] == stage.scheduler.troubles(2)


def test_troubles_are_bounded(monkeypatch):
    """Only the last are remembered."""
    monkeypatch.setattr(ledger, "MOST_TROUBLES", 2)
    troubles = Troubles()
    for time in range(4):
        troubles.add(float(time), (1,), "batch {} lost", time)
    assert [(2.0, "batch 2 lost"), (3.0, "batch 3 lost")] == troubles.of(1)
    assert [] == troubles.of(2)
