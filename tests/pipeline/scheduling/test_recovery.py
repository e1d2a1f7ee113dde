"""Batches that did not run: nobody is lost, and only the culprit fails."""

from __future__ import annotations

import pytest
from tests.pipeline.scheduling.seen import Started

from shapestream.scheduling.events import RequestCancelled, SlotLeft


def _run_all(stage, breaks, code="model_error") -> list[tuple[int, ...]]:
    """Plays every started batch until none is left: it fails so if `breaks(ids)`. The batches, in order."""
    ran = []
    while len(ran) < len(stage.started):
        start = stage.started[len(ran)]
        ran.append(start.requests)
        if breaks(start.requests):
            stage.fail(start, code)
        else:
            stage.finish(start)
    return ran


@pytest.mark.parametrize("code", ["model_error", "invalid", "internal"])
def test_one_bad_request_fails_alone(stage, code):
    """A batch is run again in halves until the culprit is alone; its batch-mates get their answers."""
    stage.model()
    stage.slots(0)
    stage.arrive(*[(1, 4)] * 8)
    ran = _run_all(stage, lambda ids: 3 in ids, code)
    assert [(1, 2, 3, 4, 5, 6, 7, 8), (1, 2, 3, 4), (1, 2), (5, 6, 7, 8), (3, 4), (3,), (4,)] == ran
    expected = dict.fromkeys(range(1, 9), "delivered") | {3: code}
    assert expected == stage.ends


def test_several_bad_requests_are_all_found(stage):
    """Every culprit ends alone with the engine's words, everybody else with a result."""
    stage.model()
    stage.slots(0, 1)
    stage.arrive(*[(1, 4)] * 8)
    _run_all(stage, lambda ids: bool({1, 2, 7} & set(ids)))
    bad = {id_ for id_, how in stage.ends.items() if how == "model_error"}
    assert ({1, 2, 7}, 8) == (bad, len(stage.ends))


def test_halves_keep_their_turn_and_take_no_company(stage):
    """A half runs exactly as given, after a request of higher priority and its company."""
    stage.model()
    stage.slots(0)
    stage.arrive((1, 4), (1, 4))
    stage.arrive((1, 4))
    stage.arrive((1, 4), priority=9)
    stage.fail(stage.started[0])
    order = [stage.started[-1].requests]
    for _ in range(2):
        stage.finish(stage.started[-1])
        order.append(stage.started[-1].requests)
    assert [(4, 3), (1,), (2,)] == order


def test_a_half_has_the_sizes_of_its_own_members(stage):
    """The call of a half is as small as the half allows."""
    stage.model(padded=True, max_padding_ratio=0.5)
    stage.slots(0)
    stage.arrive((1, 16), (2, 12), (1, 10))
    assert [(4, 16)] == [start.sizes for start in stage.started]
    stage.fail(stage.started[0])
    stage.finish(stage.started[1])
    assert [((1, 2), (3, 16)), ((3,), (1, 10))] == [(s.requests, s.sizes) for s in stage.started[1:]]


def test_a_survivor_of_a_failed_batch_gets_its_own_try(stage):
    """When its mates were cancelled meanwhile, one of them may have been the culprit."""
    stage.model()
    stage.slots(0)
    stage.arrive((1, 4), (1, 4))
    stage.play(RequestCancelled(id=1))
    stage.fail(stage.started[0])
    assert [(2,)] == stage.starts()
    stage.fail(stage.started[1])
    assert {1: "cancelled", 2: "model_error"} == stage.ends


def test_a_failure_keeps_the_code_of_its_slot(stage):
    """An internal error is not passed off as the model's."""
    stage.model()
    stage.slots(0)
    stage.arrive((1, 4))
    stage.fail(stage.started[0], "internal", "a defect")
    assert {1: "internal"} == stage.ends


def test_a_slot_that_leaves_gives_its_batch_to_others(stage):
    """A worker killed mid-batch: its requests run again elsewhere, each alone, before newcomers."""
    stage.model()
    stage.slots(0)
    stage.arrive((1, 4), (1, 4))
    stage.arrive((1, 4))
    stage.play(SlotLeft(slot=0))
    assert "0 running, 3 queued" == repr(stage.scheduler.statistics())
    stage.slots(1, 2)
    assert [(1,), (2,)] == [start.requests for start in stage.started[1:]]
    for start in stage.started[1:]:
        stage.finish(start)
    stage.finish(stage.started[3])
    assert {1: "delivered", 2: "delivered", 3: "delivered"} == stage.ends


@pytest.mark.parametrize("max_attempts", [1, 3])
def test_a_request_that_loses_its_slots_is_lost(make_stage, max_attempts):
    """After `max_attempts` losses the request is `worker_lost`; it may be what kills them."""
    stage = make_stage(max_attempts=max_attempts)
    stage.model()
    stage.arrive((1, 4))
    for slot in range(max_attempts):
        assert {} == stage.ends
        stage.slots(slot)
        stage.play(SlotLeft(slot=slot))
    assert {1: "worker_lost"} == stage.ends


@pytest.mark.parametrize(
    ("code", "again"), [("cancelled", [(1, (1,)), (0, (2,))]), ("unavailable", [(1, (1,))])]
)
def test_an_error_of_the_device_is_not_blamed_on_the_data(stage, code, again):
    """The members run again alone, on another slot if one is free; a slot that cannot run anything rests."""
    stage.model()
    stage.slots(0)
    stage.arrive((1, 4), (1, 4))
    stage.slots(1)
    stage.fail(stage.started[0], code)
    starts = [action for action in stage.last if isinstance(action, Started)]
    assert again == [(start.slot, start.requests) for start in starts]


def test_the_bound_of_the_queue_does_not_drop_what_must_run_again(make_stage):
    """Requests that were admitted come back even when the queue is full; newcomers are refused."""
    stage = make_stage(max_queued_requests=2)
    stage.model()
    stage.slots(0)
    stage.arrive((1, 4), (1, 4))
    stage.arrive((1, 4), (1, 4))
    stage.play(SlotLeft(slot=0))
    assert "0 running, 4 queued" == repr(stage.scheduler.statistics())
    stage.arrive((1, 4))
    assert {5: "overloaded"} == stage.ends


def test_what_waits_to_run_again_can_still_end(stage):
    """Deadlines and cancellation reach the members of a group that waits for its second try."""
    stage.model()
    stage.slots(0)
    stage.arrive((1, 4), (1, 4), (1, 4), deadline=5.0)
    stage.play(SlotLeft(slot=0))
    stage.play(RequestCancelled(id=2))
    stage.wait(5.0)
    assert {1: "deadline_exceeded", 2: "cancelled", 3: "deadline_exceeded"} == stage.ends
    assert stage.scheduler.statistics().idle


@pytest.mark.parametrize(("code", "died"), [("unavailable", False), ("cancelled", True)])
def test_what_may_not_run_twice_is_lost_at_once(stage, code, died):
    """A request of a model that is not idempotent runs alone and is started once, whatever became of that."""
    stage.model(max_batch=1, idempotent=False)
    stage.slots(0, 1)
    stage.arrive((1, 4), (1, 4), (1, 4))
    assert [(1,), (2,)] == [start.requests for start in stage.started]
    stage.play(SlotLeft(slot=0, died=died))
    stage.fail(stage.started[1], code)
    assert {1: "worker_lost", 2: "worker_lost"} == stage.ends
    stage.slots(2)
    stage.finish(stage.started[2])
    assert {1: "worker_lost", 2: "worker_lost", 3: "delivered"} == stage.ends


def test_a_model_that_is_not_idempotent_runs_requests_alone(stage):
    """Larger batches are refused where the model is declared."""
    with pytest.raises(ValueError, match="max_batch must be 1"):
        stage.model(max_batch=2, idempotent=False)
