"""Wide slots: which requests run on all threads of a process, and that nothing else counts the slot.

A row of 4 takes 0.1 s on a slot, and 0.06 s on the wide one, where the tests do not say otherwise.
"""

from __future__ import annotations

import pytest
from tests.pipeline.scheduling.seen import CancelAsked, Delivered
from tests.pipeline.scheduling.stage import Stage, table

from shapestream.scheduling.events import (
    AuditWanted,
    ContractError,
    ModelRunsAlone,
    SlotClosing,
    SlotJoined,
    SlotLeft,
    SlotsJoined,
)
from shapestream.scheduling.hang_watch import HangLimits
from shapestream.scheduling.wide_slots import FIRST_RUNS, TRY_EVERY

NARROW, WIDE = table(0.096, 0.001, key="narrow"), table(0.056, 0.001, key="wide")
HANGS = HangLimits(min_s=2.0, grace_s=0.5)


def _join(stage, *numbers: int, wide=WIDE, worker: str = "w", **options) -> None:
    """The slots of a worker join; the last one is wide."""
    *narrow, last = numbers
    models = frozenset({"text"})
    joined = [
        SlotJoined(slot=number, models=models, worker=worker, costs={"text": NARROW}, **options)
        for number in narrow
    ]
    joined.append(
        SlotJoined(
            slot=last,
            models=models,
            worker=worker,
            costs={} if wide is None else {"text": wide},
            wide=True,
            **{**options, "prefetch_s": None},
        )
    )
    stage.play(SlotsJoined(slots=tuple(joined)))


@pytest.fixture
def process(stage):
    """A process with the slots 0 and 1, and the wide slot 2, which has run so much that nothing is tried any more."""
    stage.__init__(hangs=HANGS)
    stage.model()
    _join(stage, 0, 1, 2, prefetch_s=0.001)
    _run_lone(stage, FIRST_RUNS)
    return stage


def _run_lone(stage, count: int, *, size: int = 4, wide_s: float = 0.06, narrow_s: float = 0.1) -> list[int]:
    """Requests come one after the other, each when the last was answered; the slots that they ran on."""
    slots = []
    for _ in range(count):
        stage.arrive((1, size))
        start = stage.started[-1]
        slots.append(start.slot)
        seconds = wide_s if start.slot == 2 else narrow_s
        stage.finish(start, seconds, at=stage.now + seconds)
    return slots


def test_a_lone_request_runs_wide(process):
    """Nothing runs and nothing waits, so it takes all threads; and the next one as well."""
    assert [2, 2, 2] == _run_lone(process, 3)


def test_several_requests_run_on_slots_of_their_own(process):
    """What arrives together is not lone: each has a slot, and the wide one stays empty."""
    process.arrive((1, 4), (1, 200))
    assert [0, 1] == sorted(start.slot for start in process.started[-2:])


def test_what_comes_beside_a_wide_call_begins_at_once(process):
    """A free slot does not wait for the end of a wide call, and no second call is wide."""
    process.arrive((1, 4))
    assert 2 == process.started[-1].slot
    process.arrive((1, 4))
    assert process.started[-1].slot in (0, 1)


def test_nothing_runs_wide_beside_another_call(process):
    """A slot that is free beside a busy one gets the request itself."""
    process.arrive((1, 4), (1, 200))
    first, second = process.started[-2:]
    process.finish(first, 0.1, at=process.now + 0.1)
    process.arrive((1, 4))
    assert first.slot == process.started[-1].slot
    assert second.slot != first.slot


def test_a_wide_call_that_is_not_faster_is_not_made(stage):
    """The slots' own threads are enough where all of them gain nothing."""
    stage.model()
    _join(stage, 0, 1, 2, wide=table(0.2, 0.001, key="wide"))
    _run_lone(stage, FIRST_RUNS, wide_s=0.204)
    assert 3 == _run_lone(stage, 3 * TRY_EVERY, wide_s=0.204).count(2)  # the tries


def test_a_request_with_a_deadline_is_never_tried_on(stage):
    """It runs where it is predicted to end first."""
    stage.model()
    _join(stage, 0, 1, 2, wide=table(0.2, 0.001, key="wide"))
    for _ in range(2 * TRY_EVERY):
        stage.arrive((1, 4), deadline=stage.now + 60.0)
        stage.finish(stage.started[-1], 0.1, at=stage.now + 0.1)
    assert 2 not in {start.slot for start in stage.started}


def test_a_caller_that_meets_nobody_runs_wide_however_fast_it_asks(process):
    """Its next request never comes while its last one runs, so a wide call costs nobody anything."""
    slots = _run_lone(process, 10 * TRY_EVERY)
    assert 10 == sum(slot != 2 for slot in slots)  # the tries


def test_where_many_requests_meet_calls_none_is_wide(process):
    """A request that comes while a call runs would share the cores with a wide one; where many do, that costs more."""
    for _ in range(200):
        process.arrive((1, 4))
        first = process.started[-1]
        process.arrive((1, 4), at=process.now + 0.01)
        second = process.started[-1]
        process.finish(first, 0.1, at=process.now + 0.09)
        process.finish(second, 0.1, at=process.now + 0.01)
    wide = [start.slot for start in process.started[-100:]].count(2)
    assert wide <= 2  # a try, at most


def test_a_lone_run_that_is_faster_than_its_price_is_learned(stage):
    """The price of a slot is that of a busy process. Where a lone call takes half of it, the wide one is of no use."""
    stage.model()
    _join(stage, 0, 1, 2, wide=table(0.086, 0.001, key="wide"))
    _run_lone(stage, 20 * TRY_EVERY, wide_s=0.09, narrow_s=0.06)
    assert 1 >= _run_lone(stage, TRY_EVERY, wide_s=0.09, narrow_s=0.06).count(2)


def test_a_wide_slot_counts_in_nothing(process):
    """Slots that are free, and those of a model, are the two others, whether a wide call runs or not."""
    for _ in range(2):
        told = process.scheduler.statistics()
        assert (2, 2, 2, 2) == (told.slots, told.free_slots, told.models[0].slots, told.models[0].free_slots)
        assert 0 == told.slots_reserved
        process.arrive((1, 4))


def test_a_request_that_must_not_share_the_process_runs_alone_there(process):
    """A suspect empties its worker, also of a wide call; it runs on a slot itself."""
    process.arrive((1, 4))
    wide = process.started[-1]
    assert 2 == wide.slot
    process.play(SlotLeft(slot=0, died=False))
    process.arrive((1, 4), suspect=True)
    before = len(process.started)
    process.finish(wide, 0.06, at=process.now + 0.06)
    assert all(start.slot != 2 for start in process.started[before:])


def test_after_an_audit_found_a_difference_nothing_runs_wide(process):
    """Requests of the model run alone at their sizes from then on, each on its own slot."""
    process.play(ModelRunsAlone(model="text", alone=True))
    assert 2 not in _run_lone(process, 2 * TRY_EVERY)


def test_no_audit_runs_on_it_and_none_beside_it(process):
    """An audit is for the slots; a lone request that meets one runs on another slot."""
    process.play(AuditWanted(model="text", sizes=(1, 4), slots=frozenset({0, 1})))
    process.wait(process.scheduler.next_wakeup())
    audit = process.started[-1]
    assert () == audit.requests
    assert audit.slot in (0, 1)
    process.arrive((1, 4))
    assert process.started[-1].slot not in (audit.slot, 2)


def test_a_wide_call_that_hangs_is_found_and_its_request_ends(process):
    """It has the steps of any call that hangs; other requests go on."""
    process.arrive((1, 4))
    while not process.wait(process.scheduler.next_wakeup()):
        pass  # looks that the batches before it have left
    assert [CancelAsked(batch=process.started[-1].batch, slot=2)] == process.last
    process.arrive((1, 4))
    assert process.started[-1].slot in (0, 1)


def test_a_request_of_a_wide_slot_that_leaves_runs_again(process):
    """As of any slot: on one that is left."""
    [number] = process.arrive((1, 4))
    assert 2 == process.started[-1].slot
    for slot in (2, 1):
        process.play(SlotClosing(slot=slot))
        process.play(SlotLeft(slot=slot))
    assert (number,) == process.started[-1].requests
    assert 0 == process.started[-1].slot
    process.finish(process.started[-1], 0.1, at=process.now + 0.1)
    assert Delivered in {type(each) for each in process.last}
    process.arrive((1, 4))
    assert 0 == process.started[-1].slot


def test_the_next_request_goes_to_another_process_rather_than_beside_a_wide_call(stage):
    """Its slots have idled for longer, but their cores are taken."""
    stage.model()
    _join(stage, 0, 1, 2, worker="one")
    _join(stage, 3, 4, 5, worker="two")
    stage.arrive((1, 4))
    first = stage.started[-1]
    assert first.slot in (2, 5)
    stage.arrive((1, 4))
    assert (first.slot in (0, 1, 2)) != (stage.started[-1].slot in (0, 1, 2))


def test_without_prices_it_gets_nothing(stage):
    """Nobody can tell whether it is faster."""
    stage.model()
    _join(stage, 0, 1, 2, wide=None)
    assert 2 not in _run_lone(stage, TRY_EVERY)


def test_prices_of_wide_slots_are_nobody_elses(process):
    """What waits is priced by the slots, whatever wide calls took."""
    plain = Stage()
    plain.model()
    plain.measured_slots(0, 1)
    _run_lone(process, 50, wide_s=0.02)
    for stage in (plain, process):
        stage.arrive((1, 200), (1, 200))
        stage.arrive((1, 4))
    expected, found = [stage.scheduler.statistics().models[0].queued_s for stage in (plain, process)]
    assert expected > 0.01
    assert pytest.approx(expected, rel=0.01) == found


def test_a_worker_has_one(process):
    """A second wide slot breaks the contract of events."""
    with pytest.raises(ContractError, match="wide slot already"):
        process.play(SlotJoined(slot=9, models=frozenset({"text"}), worker="w", wide=True))


def test_a_report_of_a_wide_call_teaches_its_own_price(process):
    """Wide calls that become slow are made no more, but for the tries."""
    _run_lone(process, 20 * TRY_EVERY, wide_s=0.15)
    assert 1 >= _run_lone(process, TRY_EVERY, wide_s=0.15).count(2)


def test_wide_calls_come_back_when_a_neighbour_has_left(process):
    """It made them slow at all sizes for a while; some tries, at any size, show that it has gone."""
    for size in (4, 16, 64, 128):
        for _ in range(2 * TRY_EVERY):
            _run_lone(process, 1, size=size, wide_s=0.3, narrow_s=0.1)
    assert 1 >= _run_lone(process, TRY_EVERY, size=64, wide_s=0.3).count(2)
    for _ in range(12 * TRY_EVERY):
        _run_lone(process, 1, size=128)
    assert TRY_EVERY - 2 <= _run_lone(process, TRY_EVERY, size=128).count(2)
