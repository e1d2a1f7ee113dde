"""What a deep queue costs: counted in lines executed, since a test never asserts a time."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
from tests.pipeline.scheduling.planning_stage import Waiting, make_queue

from shapestream.scheduling import Scheduler
from shapestream.scheduling.actions import StartBatch
from shapestream.scheduling.events import (
    Arrival,
    BatchFinished,
    ModelAdded,
    ModelProfile,
    RequestCancelled,
    RequestsArrived,
    SlotJoined,
)
from shapestream.scheduling.queueing import DONE, QUEUED, LazyHeap, Request


def _lines(call: Callable[[], Any]) -> tuple[int, Any]:
    """Lines of Python executed by `call`, and what it returned."""
    lines = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal lines
        lines += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        result = call()
    finally:
        sys.settrace(before)
    return lines, result


def _arrivals(first: int, count: int, lengths: int) -> RequestsArrived:
    return RequestsArrived(
        requests=tuple(
            Arrival(
                id=id_,
                client=id_ % 7,
                model="m",
                sizes=(1, 16 + id_ % lengths),
                nbytes=64,
                deadline=1e6 + id_,
                priority=id_ % 3,
            )
            for id_ in range(first, first + count)
        )
    )


def _lines_of_a_batch(queued: int, lengths: int) -> int:
    """Lines for the arrival of 64 requests, a cancellation and a finished batch, with `queued` waiting."""
    scheduler = Scheduler(10**6, 10**9)
    profile = ModelProfile(
        name="m", dimensions=("batch", "seq"), has_batch=True, paddable=(False, True), max_batch=64
    )
    scheduler.handle(ModelAdded(model=profile), 0.0)
    scheduler.handle(_arrivals(0, queued, lengths), 0.0)
    (start,) = scheduler.handle(SlotJoined(slot=0, models=frozenset({"m"})), 0.0)
    (batch,) = start.batches
    arrived, _ = _lines(lambda: scheduler.handle(_arrivals(queued, 64, lengths), 1.0))
    cancelled, _ = _lines(lambda: scheduler.handle(RequestCancelled(id=queued // 2), 1.0))
    finished, _ = _lines(lambda: scheduler.handle(BatchFinished(batch=batch.id, busy_s=0.1), 2.0))
    scheduler.check_invariants()
    return arrived + cancelled + finished


@pytest.mark.pure("counts lines of Python")
@pytest.mark.parametrize("lengths", [1, 8])
def test_a_deep_queue_costs_no_more_per_batch(lengths):
    """Nothing is scanned: with fifty times the queue an event executes about the same lines."""
    shallow = _lines_of_a_batch(400, lengths)
    deep = _lines_of_a_batch(20_000, lengths)
    assert deep <= 1.5 * shallow


@pytest.mark.parametrize("ending", ["finished", "cancelled"])
def test_nothing_is_held_of_requests_that_ended(ending):
    """Deadlines, lanes and batches let go of what is over, without the garbage collector's help."""
    scheduler = Scheduler(10**6, 10**9)
    for name in ("m", "without_slots"):
        profile = ModelProfile(
            name=name, dimensions=("batch", "seq"), has_batch=True, paddable=(False, True), max_batch=8
        )
        scheduler.handle(ModelAdded(model=profile), 0.0)
    gc.disable()
    try:
        before = _held()
        # The first in every order stays, so that the dead behind it do not come to the front by themselves.
        staying = Arrival(
            id=-1,
            client=0,
            model="without_slots" if ending == "finished" else "m",
            sizes=(1, 16),
            nbytes=1,
            deadline=1e5,
        )
        scheduler.handle(RequestsArrived(requests=(staying,)), 0.0)
        scheduler.handle(_arrivals(0, 1000, 1), 0.0)
        if ending == "cancelled":
            for id_ in range(1000):
                scheduler.handle(RequestCancelled(id=id_), 1.0)
        else:
            actions = scheduler.handle(SlotJoined(slot=0, models=frozenset({"m"})), 0.0)
            while actions:
                (batch,) = next(action for action in actions if isinstance(action, StartBatch)).batches
                actions = scheduler.handle(BatchFinished(batch=batch.id, busy_s=0.1), 1.0)[1:]
        assert "0 running, 1 queued" == repr(scheduler.statistics())
        assert _held() - before <= 200
    finally:
        gc.enable()


def _held() -> int:
    return sum(type(thing) is Request for thing in gc.get_objects())


def test_a_request_that_ran_leaves_nothing_to_the_garbage_collector():
    """Each of a hundred, alone in its bucket, is freed when it is let go: no two objects refer to each other."""
    scheduler = Scheduler(10**6, 10**9)
    profile = ModelProfile(
        name="m", dimensions=("batch", "seq"), has_batch=True, paddable=(False, True), max_batch=8
    )
    scheduler.handle(ModelAdded(model=profile), 0.0)
    scheduler.handle(SlotJoined(slot=0, models=frozenset({"m"})), 0.0)
    gc.collect()
    gc.disable()
    try:
        before = _held()
        for id_ in range(100):
            arrival = Arrival(id=id_, client=0, model="m", sizes=(1, 16), nbytes=1)
            (start,) = scheduler.handle(RequestsArrived(requests=(arrival,)), 0.0)
            scheduler.handle(BatchFinished(batch=start.batches[0].id, busy_s=0.1), 1.0)
        del start
        assert before == _held()
    finally:
        gc.enable()


def test_the_dead_leave_a_heap_without_being_searched_for():
    """The heap stays proportional to the living, and its first entry is always alive."""
    heap = LazyHeap(QUEUED)
    entries = Waiting(make_queue()).arrive(*[(1, 4)] * 1000)
    for entry in entries:
        heap.push(float(1000 - entry.order), entry)
    for living, entry in zip(range(999, -1, -1), entries, strict=True):
        assert entries[-1] is heap.first()[2]
        if entry is not entries[-1]:
            entry.state = DONE
            heap.shrink(living)
            assert len(heap) <= 2 * living + 65
    entries[-1].state = DONE
    assert heap.first() is None
    assert 0 == len(heap)
