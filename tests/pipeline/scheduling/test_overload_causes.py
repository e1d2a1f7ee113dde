"""The bound that each `overloaded` request met, as metrics count it."""

from __future__ import annotations

from tests.pipeline.scheduling.seen import Failed

from shapestream.scheduling.events import Overload


def causes(stage):
    """The causes of all refusals so far; every `overloaded` one has one, and no other does."""
    failed = [action for actions in stage.played for action in actions if isinstance(action, Failed)]
    assert [action.code == "overloaded" for action in failed] == [
        action.cause is not None for action in failed
    ]
    return {action.cause for action in failed}


def test_the_queue_is_full(make_stage):
    """By its requests, and by its bytes."""
    for bounds, nbytes in (({"max_queued_requests": 2}, 1), ({"max_queued_bytes": 100}, 40)):
        stage = make_stage(**bounds)
        stage.model()
        stage.arrive(*[(1, 4)] * 3, nbytes=nbytes)
        assert {Overload.QUEUE} == causes(stage)


def test_a_client_has_its_share(make_stage):
    """Where another one has asked."""
    stage = make_stage(max_queued_requests=10)
    stage.model()
    stage.arrive((1, 4), client=1)
    stage.arrive(*[(1, 4)] * 8, client=0)
    assert {Overload.CLIENT_SHARE} == causes(stage)


def test_a_client_has_its_share_for_one_of_its_models(make_stage):
    """Where it asks two."""
    stage = make_stage(max_queued_requests=10)
    for name in ("text", "other"):
        stage.model(name)
    stage.slots(0, models=("text", "other"))
    stage.arrive((1, 4), model="other")
    stage.arrive(*[(1, 4)] * 9)
    assert {Overload.MODEL_SHARE} == causes(stage)


def test_a_deadline_would_pass_in_the_queue(make_stage):
    """A request that has less time than the wait; another one without a deadline comes in."""
    stage = make_stage()
    stage.model(max_batch=1)
    stage.measured_slots(0)
    stage.arrive(*[(1, 4)] * 10)
    stage.arrive((1, 4), deadline=0.5)
    assert {Overload.DEADLINE} == causes(stage)


def test_a_request_that_is_refused_for_another_reason_has_no_cause(make_stage):
    """A deadline that has passed, and a model that nobody serves."""
    stage = make_stage()
    stage.model()
    stage.arrive((1, 4), deadline=0.0)
    stage.arrive((1, 4), model="nobody")
    assert {None} == causes(stage)
