"""Predictions that are wrong, and the slots idle: the request is answered, and its batch corrects the prediction.

docs/scheduling.md lists the predictions. Those about clocks and hanging calls are tested in test_clock_questions.py and
test_hang_watch.py.
"""

from __future__ import annotations

from random import Random

import pytest
from tests.pipeline.scheduling.stage import Stage, table

from shapestream.scheduling.events import SlotJoined
from shapestream_engine.cost_table import CostPoint, CostTable

WRONG_S = 100.0
"""What a call is believed to take."""
TRUE_S = 0.01


@pytest.fixture
def wrong(make_stage):
    """A slot of the models `text` and `read`, whose calls are believed to take 100 s."""

    def make(**limits) -> Stage:
        stage = make_stage(**limits)
        for model in ("text", "read"):
            stage.model(model)
        costs = {model: table(WRONG_S, 0.0) for model in ("text", "read")}
        stage.play(SlotJoined(slot=0, models=frozenset(costs), costs=costs))
        return stage

    return make


def _is_answered(stage: Stage, **options) -> bool:
    """Whether a request that comes to idle slots, with a second left, runs and is answered."""
    (request,) = stage.arrive((1, 4), deadline=stage.now + 1.0, **options)
    assert [(request,)] == stage.starts()
    stage.finish(stage.started[-1], run_s=TRUE_S, at=stage.now + TRUE_S)
    return stage.ends[request] == "delivered"


def _finish_all(stage: Stage) -> None:
    """Finishes what runs, in the order in which it started, until nothing waits."""
    for start in stage.started:  # it grows
        if start.batch not in stage.finished:
            stage.finish(start, run_s=TRUE_S, at=stage.now + TRUE_S)
            stage.wait(stage.now + TRUE_S)  # a slot may wait for company


def _may_wait_2_s(stage: Stage) -> bool:
    """Whether a request with a deadline of 2 s is let in beside a running one."""
    stage.arrive((1, 4))
    (request,) = stage.arrive((1, 4), deadline=stage.now + 2.0)
    _finish_all(stage)
    return stage.ends[request] == "delivered"


def test_the_price_of_a_call(wrong):
    """It forbids what would have to wait; each answer brings it nearer to the truth, until it does so no longer."""
    stage = wrong()
    assert not _may_wait_2_s(stage)
    for _ in range(20):
        assert _is_answered(stage)
    assert _may_wait_2_s(stage)


@pytest.mark.parametrize("seed", range(3))
def test_the_price_of_sharing_where_each_call_prepares_a_shape(make_stage, seed):
    """Each call takes 1 s, of which one row of 4 was measured; all of 16 requests in flight share a call by the fifth."""
    stage, random = make_stage(), Random(seed)
    stage.model(padded=True, max_batch=64)
    known = CostTable(key="slot", dimensions=("batch", "seq"), points=(CostPoint(sizes=(1, 4), seconds=1.0),))
    stage.play(SlotJoined(slot=0, models=frozenset({"text"}), costs={"text": known}))
    prepared = set()

    def send(count: int) -> None:
        stage.arrive(*[(1, random.randint(4, 200)) for _ in range(count)], at=stage.now + 0.001)

    send(1)
    send(15)
    for number in range(5):
        batch = stage.started[number]
        is_new = batch.sizes not in prepared
        prepared.add(batch.sizes)
        stage.finish(batch, run_s=1.0, at=stage.now + 1.0, preparations=int(is_new))
        send(len(batch.requests))
        if len(stage.started) == number + 1:
            stage.wait(stage.now + 0.01)  # a slot may wait for company
    assert 16 in [len(batch.requests) for batch in stage.started[:5]]


def test_the_price_of_the_next_stages(wrong):
    """A first stage and a later one; the next stage's price is corrected by its own calls."""
    stage = wrong()
    assert _is_answered(stage, then=("read",))
    assert _is_answered(stage, model="read", since=0.0)


def test_the_wait_in_the_queue(wrong):
    """A request is refused while others wait; when these have been answered, one like it is not."""
    stage = wrong()
    stage.arrive((1, 4), (1, 5), (1, 6))
    (refused,) = stage.arrive((1, 4), deadline=stage.now + 150.0)
    assert "overloaded" == stage.ends[refused]
    _finish_all(stage)
    assert _is_answered(stage)
