"""The bounds of the queue, and what is turned away at once."""

from __future__ import annotations

import pytest
from tests.pipeline.scheduling.seen import Failed

from shapestream.scheduling import Scheduler
from shapestream.scheduling.events import RequestsAbandoned, SlotLeft
from shapestream_engine.cost_table import CostPoint, CostTable


def _failures(stage) -> list[tuple[int, str, float | None]]:
    return [(a.id, a.code, a.retry_after_s) for a in stage.last if isinstance(a, Failed)]


def test_the_queue_is_bounded_in_requests(make_stage):
    """What waits is bounded; what runs does not count."""
    stage = make_stage(max_queued_requests=2)
    stage.model()
    stage.slots(0)
    stage.arrive((1, 4))
    stage.arrive((1, 4), (1, 4), (1, 4))
    assert [(4, "overloaded", None)] == _failures(stage)
    assert "1 running, 2 queued" == repr(stage.scheduler.statistics())


def test_the_queue_is_bounded_in_bytes(make_stage):
    """A request that would exceed the bytes is refused, a smaller one after it is not."""
    stage = make_stage(max_queued_bytes=100)
    stage.model()
    stage.arrive((1, 4), nbytes=60)
    stage.arrive((1, 4), nbytes=41)
    assert [(2, "overloaded", None)] == _failures(stage)
    stage.arrive((1, 4), nbytes=40)
    assert 100 == stage.scheduler.statistics().queued_bytes
    stage.slots(0)
    assert 0 == stage.scheduler.statistics().queued_bytes


def test_a_request_that_can_never_fit_is_too_large(make_stage):
    """Waiting would not help a request that exceeds the whole queue."""
    stage = make_stage(max_queued_bytes=100)
    stage.model()
    stage.arrive((1, 4), nbytes=101)
    assert [(1, "too_large", None)] == _failures(stage)


def test_overload_says_when_to_come_back(make_stage):
    """Once calls were measured, the refusal estimates when the queue will have drained."""
    stage = make_stage(max_queued_requests=4)
    stage.model(max_batch=1)
    stage.slots(0, 1)
    stage.arrive((1, 4), (1, 4))
    stage.finish(stage.started[0], run_s=0.5)
    stage.arrive((1, 4))
    stage.arrive(*[(1, 4)] * 5)
    assert [(8, "overloaded", pytest.approx(4 * 0.5 / 2))] == _failures(stage)


def test_nobody_is_asked_to_wait_for_hours(make_stage):
    """The estimate is bounded, and holds without any slot as well."""
    stage = make_stage(max_queued_requests=1)
    stage.model()
    stage.slots(0)
    stage.arrive((1, 4))
    stage.finish(stage.started[0], run_s=1e6)
    stage.play(SlotLeft(slot=0))
    stage.arrive((1, 4), (1, 4))
    assert [(3, "overloaded", 60.0)] == _failures(stage)


def test_an_unknown_model_is_unavailable(stage):
    """No worker has ever named this model."""
    stage.arrive((1, 4), model="nobody")
    assert [(1, "unavailable", None)] == _failures(stage)


def test_a_deadline_that_has_passed_is_refused(stage):
    """The present moment is already too late."""
    stage.model()
    stage.slots(0)
    stage.wait(5.0)
    stage.arrive((1, 4), deadline=5.0)
    assert [(1, "deadline_exceeded", None)] == _failures(stage)
    assert "0 running, 0 queued" == repr(stage.scheduler.statistics())


@pytest.mark.parametrize("bounds", [(0, 1, 3), (1, 0, 3), (1, 1, 0)])
def test_bounds_must_leave_room(bounds):
    """A scheduler that could never run anything is refused when it is made."""
    with pytest.raises(ValueError, match="at least"):
        Scheduler(*bounds)


def test_sums_of_seconds_leave_no_rounding_errors(make_stage):
    """What is left in the queue costs exactly what it cost, after hours of other work came and were withdrawn."""
    stage = make_stage()
    stage.model(max_batch=1)
    points = [CostPoint(sizes=(1, seq), seconds=seconds) for seq, seconds in ((4, 1e-3), (1000, 1e6 / 3))]
    table = CostTable(key="k", dimensions=("batch", "seq"), points=tuple(points))
    stage.slots(0, costs={"text": table})
    stage.arrive((1, 4))
    stage.arrive((1, 4))
    queued_s = stage.scheduler.statistics().models[0].queued_s
    withdrawn = stage.arrive(*[(1, 100 + number) for number in range(900)])
    stage.play(RequestsAbandoned(ids=tuple(withdrawn)))
    assert queued_s == stage.scheduler.statistics().models[0].queued_s
