"""Defects in the midst of an event: no request is lost or ends twice, and the scheduler serves on."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.pipeline.scheduling.any_server import AnyServer, profiles

from shapestream.scheduling.actions import RejoinSlots
from shapestream.scheduling.deadlines import Deadlines
from shapestream.scheduling.events import (
    ModelProfile,
    ModelRunsAlone,
    RequestCancelled,
    SlotClosing,
    SlotLeft,
)
from shapestream.scheduling.fairness import FairShares, GroupRoom, Rework
from shapestream.scheduling.hang_watch import HangWatch
from shapestream.scheduling.ledger import Ledger
from shapestream.scheduling.model_queue import ModelQueue
from shapestream.scheduling.queueing import Bucket, Request
from shapestream.scheduling.recovery import Isolation, Recovery
from shapestream.scheduling.slots import SlotTable

pytestmark = pytest.mark.pure("replaces functions that the scheduler calls")

PLACES = [
    (Bucket, "drop_dead"), (Deadlines, "due"), (Deadlines, "shrink"), (Deadlines, "watch"),
    (FairShares, "ended"), (FairShares, "stamp"), (FairShares, "start"),
    (HangWatch, "began"), (HangWatch, "look"), (Isolation, "run"), (Isolation, "suspect"),
    (Ledger, "put_back"), (Ledger, "start"), (ModelQueue, "add"), (ModelQueue, "meet"),
    (ModelQueue, "put_rerun"), (ModelQueue, "take"), (GroupRoom, "enter"), (GroupRoom, "leave"),
    (Recovery, "finished"), (Recovery, "failed"), (Request, "end"), (Request, "start"), (SlotTable, "close"),
    (Rework, "leave"), (Rework, "pay"), (SlotTable, "end"), (SlotTable, "leave"), (SlotTable, "start"),
]  # fmt: skip
"""Functions that the scheduler calls in the midst of its events."""
TEXT = ModelProfile(
    name="m", dimensions=("batch", "seq"), has_batch=True, paddable=(False, True), max_batch=8
)


class Defect(Exception):
    """What goes wrong in these tests."""


class Defects:
    """Lets calls of one function fail, by their numbers, before it does anything or after all."""

    def __init__(self, owner: Any, name: str, failing: range, *, after: bool) -> None:
        self._owner, self._name, self._original = owner, name, getattr(owner, name)
        self._failing, self._after = failing, after
        self.calls = 0
        self.met = 0

    def __enter__(self) -> Defects:
        original, failing = self._original, self._failing

        def defective(*given: Any, **named: Any) -> Any:
            self.calls += 1
            fails = self.calls in failing
            self.met += fails
            if fails and not self._after:
                raise Defect
            result = original(*given, **named)
            if fails:
                raise Defect
            return result

        setattr(self._owner, self._name, defective)
        return self

    def __exit__(self, *_: object) -> None:
        setattr(self._owner, self._name, self._original)


@settings(max_examples=80, deadline=None)
@given(
    place=st.sampled_from(PLACES),
    models=st.tuples(st.just(TEXT)) | st.tuples(profiles("m"), profiles("n")),
    seed=st.integers(0, 2**32),
    first=st.integers(1, 30),
    count=st.sampled_from([1, 1, 3]),
    after=st.booleans(),
)
def test_a_defect_costs_requests_never_the_scheduler(place, models, seed, first, count, after):
    """Every admitted request ends once, the books agree, and no slot that may be busy is given a batch."""
    with Defects(*place, range(first, first + count), after=after) as defects:
        server = AnyServer(list(models), seed)
        for _ in range(40):
            server.step()
            server.scheduler.check_invariants()
    assert not defects.met or server.faults
    assert all(isinstance(fault.error, Defect | AssertionError | KeyError) for fault in server.faults)
    server.finish()


def test_a_defect_that_persists_is_no_endless_loop():
    """Every event of a request fails it; the scheduler wants no wakeup in the past, and is as good as new afterwards."""
    server = AnyServer([TEXT], 0)
    with Defects(SlotTable, "start", range(1, 1000), after=False):
        for _ in range(20):
            server.arrive()
            assert (server.scheduler.next_wakeup() or 1e9) > server.now
            server.rejoin()
    assert set(server.ended.values()) <= {"internal", "deadline_exceeded", "overloaded", "too_large"}
    assert server.arrived.keys() == server.ended.keys()
    server.faults.clear()
    server.arrive()
    server.finish()
    assert [] == server.faults
    assert "delivered" in server.ended.values()


@pytest.mark.parametrize("after", [False, True])
def test_a_slot_closes_although_closing_it_fails(after):
    """The scheduler forgets it, as all others: what ran there ends once, and nothing more starts there."""
    server = AnyServer([TEXT], 3, slots=1)
    server.arrive()
    assert server.running
    with Defects(SlotTable, "close", range(1, 1000), after=after):
        server.play(SlotClosing(slot=0))
    assert server.arrived.keys() == server.ended.keys()
    assert "gone" == server.scheduler.standing(0)
    server.play(SlotLeft(slot=0, died=False))
    server.finish()


def test_a_defect_of_any_event_ends_all_requests_and_keeps_the_models():
    """Whatever it is about; the slots are to join again, and what is decided of a model holds."""
    server = AnyServer([TEXT], 1)
    server.play(ModelRunsAlone(model="m", alone=True))
    server.arrive()
    with Defects(Deadlines, "due", range(1, 2), after=False):
        *_, last = server.play(RequestCancelled(id=99))
    assert RejoinSlots() == last
    assert 1 == len(server.faults)
    assert {"internal"} == set(server.ended.values()) - {"overloaded", "too_large"}
    server.rejoin()
    server.arrive()
    assert {1} == {len(start.requests) for start in server.running.values()}
    server.finish()
