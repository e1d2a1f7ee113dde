"""The record of a batch, from the cut to its report."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from tests.pipeline.scheduling.planning_stage import Waiting, make_queue

from shapestream.scheduling.batches import Batch
from shapestream.scheduling.slots import Slot
from shapestream_engine.batch import BatchInputs, BatchReport


def _batch(*ids: int) -> Batch:
    waiting = Waiting(make_queue())
    waiting.count = ids[0]
    members = waiting.arrive(*[(1, 4)] * len(ids))
    return Batch(1, Slot(0, frozenset({"m"})), waiting.queue, members, (len(ids), 4))


def _sent_behind(at: float) -> Batch:
    batch = _batch(1)
    batch.behind = 7
    batch.queue_behind()
    batch.sent(BatchInputs(batch=1, model="m", sizes=(1, 4), members=()), at)
    return batch


@pytest.mark.parametrize(
    ("busy_s", "began"),
    [(0.2, 1.0), (0.5, 0.75), (9.0, 0.5)],
    ids=["when the one before was reported", "earlier, as it was busy for longer", "not before it was sent"],
)
def test_a_batch_that_was_queued_behind_began_when_its_slot_was_free(busy_s: float, began: float) -> None:
    """Sent at 0.5 s, behind one that is reported at 1.0 s; its own report comes at 1.25 s."""
    batch = _sent_behind(0.5)
    batch.begin()
    batch.started = 1.0
    batch.ran(BatchReport(batch=1, outputs=(), busy_s=busy_s), 1.25)
    assert began == batch.began


def test_a_batch_holds_its_slot_from_its_begin() -> None:
    """Not while it is queued behind another."""
    batch = _sent_behind(0.5)
    assert 0.0 == batch.held_s(1.0)
    batch.begin()
    batch.started = 1.0
    assert 0.25 == batch.held_s(1.25)
    first = _batch(1)
    first.sent(BatchInputs(batch=1, model="m", sizes=(1, 4), members=()), 2.0)
    assert 1.0 == first.held_s(3.0)


def test_results_are_found_for_some_of_the_members() -> None:
    """A member without a result was left out, where members have deadlines."""
    batch = _batch(1, 2, 3)
    inputs = BatchInputs(batch=1, model="m", sizes=(3, 4), members=(), start_before=(None, 1.0, None))
    batch.sent(inputs, 0.0)
    first, last = SimpleNamespace(), SimpleNamespace()
    outputs: Any = (first, None, last)
    batch.ran(BatchReport(batch=1, outputs=outputs), 1.0)
    assert frozenset({2}) == batch.left_out
    assert [last] == batch.outputs_of([batch.arrivals[2]])
    assert outputs == batch.outputs_of(batch.arrivals)
