"""Audits: when a request that was answered runs again in the background, what stops it, and whom it can hurt: nobody.

A row of 4 takes 0.1 s.
"""

from __future__ import annotations

import pytest
from tests.pipeline.scheduling.seen import CancelAsked, KillAsked, Started

from shapestream.scheduling.events import (
    AuditWanted,
    BatchFailed,
    BatchFinished,
    ContractError,
    DrainStarted,
    ModelRunsAlone,
    SlotClosing,
    SlotLeft,
)
from shapestream.scheduling.hang_watch import HangLimits
from shapestream_engine.cost_table import CostPoint, CostTable

SIZES = (1, 4)


def _want(stage, *slots: int, sizes: tuple[int, ...] = SIZES) -> None:
    """A request of slot 0, or these, should run again."""
    stage.play(AuditWanted(model="text", sizes=sizes, slots=frozenset(slots or (0,))))


@pytest.fixture
def idle(stage):
    """One slot with prefetch that idles."""
    stage.model(max_batch=8)
    stage.measured_slots(0, prefetch_s=0.02)
    return stage


@pytest.fixture
def auditing(idle):
    """The same, and batch 1 is an audit that began at 0.1 s."""
    _want(idle)
    idle.wait(idle.scheduler.next_wakeup())
    return idle


def test_an_audit_starts_when_its_slot_has_idled_as_long_as_it_takes(idle):
    """A batch without members, at the request's own sizes."""
    _want(idle)
    assert [] == idle.last
    assert pytest.approx(0.1) == idle.scheduler.next_wakeup()
    idle.wait(idle.scheduler.next_wakeup())
    assert [Started(batch=1, slot=0, model="text", requests=(), sizes=SIZES)] == idle.last
    assert idle.scheduler.next_wakeup() is None


def test_a_shape_that_takes_long_to_prepare_needs_a_longer_pause(stage):
    """No device compiles for an audit as soon as it idles, nor is that taken to hang."""
    stage.__init__(hangs=HangLimits(min_s=2.0, grace_s=0.5))
    stage.model(max_batch=8)
    points = [((1, size), 0.1, 30.0 + size) for size in (4, 8, 16)] + [((8, 16), 0.2, 60.0)]
    costs = CostTable(
        key="compiles",
        dimensions=("batch", "seq"),
        points=tuple(
            CostPoint(sizes=sizes, seconds=seconds, first_seconds=first) for sizes, seconds, first in points
        ),
    )
    stage.slots(0, costs={"text": costs})
    _want(stage, sizes=(1, 6))
    started_at = stage.scheduler.next_wakeup()
    assert started_at > 20
    stage.wait(started_at)
    assert [()] == stage.starts()
    assert stage.scheduler.next_wakeup() > started_at + 60


def test_a_pause_between_requests_is_no_time_for_it(idle):
    """Each request that comes in between lets the waiting begin anew."""
    _want(idle)
    for turn in range(3):
        idle.arrive(SIZES, at=0.09 + turn)
        idle.finish(idle.started[-1], at=0.1 + turn)
    assert [(1,), (2,), (3,)] == [start.requests for start in idle.started]
    while [()] != idle.starts():
        idle.wait(idle.scheduler.next_wakeup())
    assert pytest.approx(2.2) == idle.now


def test_work_that_arrives_stops_it_and_starts_when_the_slot_is_free(auditing):
    """Nothing is queued behind it, and it is stopped once."""
    auditing.arrive(SIZES, at=0.11)
    assert [CancelAsked(batch=1, slot=0)] == auditing.last
    auditing.arrive(SIZES, at=0.12)
    assert [] == auditing.last
    auditing.wait(0.19)
    assert [] == auditing.last
    auditing.play(BatchFailed(batch=1, code="cancelled", message="as asked"), at=0.195)
    assert [(2, 1)] == [(start.batch, start.requests[0]) for start in auditing.last]
    auditing.finish(auditing.started[-1], at=0.3)
    assert {1: "delivered", 2: "delivered"} == auditing.ends


def test_what_ended_before_it_could_be_stopped_frees_its_slot(auditing):
    """Its report may say that it ran."""
    auditing.arrive(SIZES, at=0.11)
    auditing.play(BatchFinished(batch=1, busy_s=0.01), at=0.12)
    assert [(1,)] == auditing.starts()


def test_its_slot_counts_as_free_in_predictions(auditing):
    """A request whose deadline leaves hardly more time than its call is admitted."""
    auditing.arrive(SIZES, at=0.11, deadline=0.11 + 0.15)
    assert [CancelAsked(batch=1, slot=0)] == auditing.last


def test_one_more_slot_stays_idle_where_there_are_several(stage):
    """It starts only if another is free, and is stopped when none is left."""
    stage.model(max_batch=1)
    stage.measured_slots(0, 1)
    stage.arrive(SIZES)
    _want(stage, 0, 1)
    stage.wait(5.0)
    assert [(1,)] == [start.requests for start in stage.started]
    stage.finish(stage.started[0], at=6.0)
    assert [()] == stage.starts()
    stage.arrive(SIZES)
    assert [(2,)] == stage.starts()
    stage.arrive(SIZES)
    assert [CancelAsked(batch=stage.started[1].batch, slot=stage.started[1].slot)] == stage.last


def test_only_the_slots_that_were_named_run_it(stage):
    """They belong to the process that answered the request; when they are gone it never runs."""
    stage.model(max_batch=8)
    stage.measured_slots(0, 1, 2)
    _want(stage, 1)
    stage.play(SlotClosing(slot=1))
    stage.play(SlotLeft(slot=1))
    stage.wait(5.0)
    assert [] == stage.started
    assert stage.scheduler.next_wakeup() is None
    _want(stage, 2)
    stage.wait(10.0)
    assert [2] == [start.slot for start in stage.started]


@pytest.mark.parametrize("event", [DrainStarted(), SlotClosing(slot=0)], ids=["drain", "its slot closes"])
def test_nothing_that_ends_waits_for_it(auditing, event):
    """It is stopped at once."""
    assert [CancelAsked(batch=1, slot=0)] == auditing.play(event)


def test_none_starts_during_a_drain(idle):
    """However long slots idle."""
    idle.play(DrainStarted())
    _want(idle)
    idle.wait(100.0)
    assert [] == idle.started


@pytest.mark.parametrize("died", [True, False])
def test_a_lost_worker_blames_nobody(auditing, died):
    """What waited meanwhile runs elsewhere, in company, as if nothing had been."""
    auditing.arrive(SIZES, SIZES, at=0.11)
    auditing.play(SlotLeft(slot=0, died=died))
    assert 0 == auditing.scheduler.statistics().suspects
    auditing.measured_slots(1)
    assert [(1, 2)] == auditing.starts()


@pytest.mark.parametrize("code", ["model_error", "invalid", "internal", "unavailable", "recalled"])
def test_an_audit_that_fails_is_not_run_again(auditing, code):
    """Its slot rests where its device is to blame, as it always does."""
    auditing.play(BatchFailed(batch=1, code=code, message="no"))
    assert [] == auditing.last
    auditing.arrive(SIZES, at=50.0)
    assert [(1,)] == auditing.starts()


def test_an_audit_that_hangs_ends_its_process_as_any_batch_does(stage):
    """First it is stopped, then its worker is killed."""
    stage.__init__(hangs=HangLimits(min_s=2.0, grace_s=0.5))
    stage.model()
    stage.measured_slots(0)
    _want(stage)
    stage.wait(stage.scheduler.next_wakeup())
    stage.arrive(SIZES)
    seen = [type(action) for action in stage.last]
    while KillAsked not in seen:
        stage.wait(stage.scheduler.next_wakeup())
        seen += [type(action) for action in stage.last]
    assert [CancelAsked, KillAsked] == seen
    stage.play(SlotLeft(slot=0, died=True))
    assert 0 == stage.scheduler.statistics().suspects
    stage.measured_slots(1)
    assert [(1,)] == stage.starts()


def test_it_teaches_no_costs(auditing):
    """However long it took, or was interrupted after."""
    auditing.play(BatchFinished(batch=1, busy_s=99.0))
    assert [] == auditing.scheduler.learned_costs(0.0)
    (model,) = auditing.scheduler.statistics().models
    assert (0.0, 0.0) == (model.predicted_s, model.measured_s)


def test_a_later_one_takes_the_place_of_one_that_has_not_started(idle):
    """None may come while one runs."""
    _want(idle, sizes=(1, 4))
    _want(idle, sizes=(2, 4))
    idle.wait(5.0)
    assert [(2, 4)] == [start.sizes for start in idle.started]
    with pytest.raises(ContractError):
        _want(idle)


CAPPED = {
    "padded": True,
    "max_batch": 4,
    "max_shapes": 4,
    "fills_rows": True,
    "free_sizes": True,
    "bounds": (4, 64),
}


def test_it_has_the_request_s_own_sizes_whatever_the_cap_on_shapes(stage):
    """It counts under no cap: what shares calls afterwards has as many shapes as before."""
    stage.model(**CAPPED)
    stage.slots(0)
    shapes = []
    for size in range(3, 40, 3):
        _want(stage, sizes=(1, size))
        shapes.append(stage.started[-1].sizes)
        stage.play(BatchFinished(batch=stage.started[-1].batch, busy_s=0.0))
    assert [(1, size) for size in range(3, 40, 3)] == shapes
    stage.arrive((1, 5))
    assert [((1,), (1, 5))] == [(start.requests, start.sizes) for start in stage.started[-1:]], (
        "a first shape"
    )


# ---------------------------------------------------------------- models whose requests run alone


def test_each_request_of_a_model_runs_alone_until_it_may_share_calls_again(stage):
    """At its own sizes, without padding."""
    stage.model(padded=True, max_batch=8)
    stage.measured_slots(0)
    stage.play(ModelRunsAlone(model="text", alone=True))
    stage.arrive((1, 3), (1, 3), (2, 4))
    for _ in range(3):
        stage.finish(stage.started[-1])
    assert [((1,), (1, 3)), ((2,), (1, 3)), ((3,), (2, 4))] == [
        (start.requests, start.sizes) for start in stage.started
    ]
    stage.arrive((1, 3))
    stage.arrive((1, 3), (1, 3))
    stage.play(ModelRunsAlone(model="text", alone=False))
    stage.finish(stage.started[-1])
    assert [(5, 6)] == stage.starts()


def test_each_has_its_own_sizes_whatever_the_cap_on_shapes(stage):
    """When requests share calls again, the cap holds as if nothing had run meanwhile."""
    stage.model(**CAPPED)
    stage.slots(0)
    stage.play(ModelRunsAlone(model="text", alone=True))
    for size in range(3, 40, 3):
        stage.arrive((1, size))
        stage.finish(stage.started[-1])
    assert [(1, size) for size in range(3, 40, 3)] == [start.sizes for start in stage.started]
    stage.play(ModelRunsAlone(model="text", alone=False))
    for size in range(3, 40, 3):
        stage.arrive((1, size))
        stage.finish(stage.started[-1])
    assert [(1, 3), *[(1, 64)] * 12] == [start.sizes for start in stage.started[13:]]


def test_requests_that_run_again_do_so_alone_as_well(stage):
    """A batch from before that fails is not halved, but taken apart."""
    stage.model(max_batch=8)
    stage.measured_slots(0)
    stage.arrive(*[(1, 4)] * 4)
    stage.finish(stage.started[0]) if len(stage.started[0].requests) == 1 else None
    batch = stage.started[-1]
    assert len(batch.requests) > 1
    stage.play(ModelRunsAlone(model="text", alone=True))
    stage.fail(batch)
    while len(stage.finished) < 1 + len(batch.requests) and len(stage.ends) < 4:
        stage.finish(stage.started[-1])
    assert {1} == {len(start.requests) for start in stage.started[stage.started.index(batch) + 1 :]}
    assert {"delivered"} == set(stage.ends.values())


def test_a_request_is_priced_alone_while_it_runs_alone(stage):
    """Not as a part of a call in good company, of which eight take 0.128 s."""
    stage.model(max_batch=8)
    stage.measured_slots(0)
    stage.arrive((1, 4))
    stage.arrive((1, 4))
    shared_s = stage.scheduler.statistics().models[0].queued_s
    stage.play(ModelRunsAlone(model="text", alone=True))
    stage.arrive((1, 4))
    assert pytest.approx(0.016) == shared_s
    assert pytest.approx(0.1) == stage.scheduler.statistics().models[0].queued_s - shared_s
