"""What is told of the queue: the oldest request, the seconds waited, the seconds of each slot."""

from __future__ import annotations

import pytest
from tests.pipeline.scheduling.stage import table

from shapestream.scheduling.events import RequestCancelled
from shapestream.scheduling.queueing import Occupancy


def test_seconds_are_those_of_everything_that_was_there():
    """Also of what is still there; exact to a nanosecond after a year."""
    place, year_s = Occupancy(), 365 * 86400.0
    place.enter(2, year_s)
    place.leave(1, year_s + 0.25)
    place.enter(1, year_s + 0.5)
    assert (2, 0.25 + 1.0 + 0.5) == (place.present, place.seconds(year_s + 1.0))
    place.leave(2, year_s + 2.0)
    assert 0.25 + 2.0 + 1.5 == place.seconds(2 * year_s)


def told(stage, now):
    """Requests in the queue, age of the oldest, and seconds waited, of the one model."""
    (model,) = stage.scheduler.statistics(now).models
    return model.queued, model.oldest_s, model.waited_s


def test_the_oldest_request_is_the_one_that_came_first_of_all_that_wait(stage):
    """Whatever its priority; when it is withdrawn, the next; time passes without any event, too."""
    stage.model(max_batch=1)
    stage.slots(0)
    stage.arrive((1, 4), at=0.0)
    assert (0, 0.0, 0.0) == told(stage, 5.0)
    stage.arrive((1, 4), at=1.0)
    stage.arrive((1, 4), priority=5, at=2.0)
    assert (2, 2.0, 2.0 + 1.0) == told(stage, 3.0)
    stage.now = 3.0
    stage.finish(stage.started[0])
    assert [(3,)] == stage.starts()
    assert (1, 3.0, 3.0 + 1.0) == told(stage, 4.0)
    stage.play(RequestCancelled(id=2), at=4.0)
    assert (0, 0.0, 3.0 + 1.0) == told(stage, 9.0)


def test_what_runs_again_is_as_old_as_it_is(stage):
    """A request whose batch failed goes before those that came after it, and waits a second time."""
    stage.model(max_batch=2)
    stage.slots(0)
    stage.arrive((2, 4), at=0.0)
    stage.arrive((1, 4), (1, 4), at=1.0)
    stage.finish(stage.started[0])
    stage.arrive((1, 4), at=2.0)
    stage.now = 3.0
    stage.fail(stage.started[1])
    # The first half runs; the second waits again since 3.0, and the last one since 2.0.
    assert (2, 4.0 - 1.0, 1.0 + 2.0) == told(stage, 4.0)


def test_seconds_per_slot_are_those_of_all_models_on_the_same_slots(make_stage):
    """Each model's seconds divided by its slots; a model on another slot has its own."""
    stage = make_stage()
    for name in ("a", "b", "apart"):
        stage.model(name, max_batch=1)
    costs = {name: table(0.096, 0.001) for name in ("a", "b", "apart")}
    stage.slots(0, 1, models=("a", "b"), costs={name: costs[name] for name in ("a", "b")})
    stage.slots(2, models=("apart",), costs={"apart": costs["apart"]})
    stage.arrive(*[(1, 4)] * 4, model="a")
    stage.arrive((1, 4), model="b")
    stage.arrive(*[(1, 4)] * 3, model="apart")
    found = {
        model.name: (model.queued, model.queued_s_per_slot) for model in stage.scheduler.statistics().models
    }
    shared, apart = pytest.approx((0.2 + 0.1) / 2), pytest.approx(0.2)
    assert {"a": (2, shared), "b": (1, shared), "apart": (2, apart)} == found
