"""Requests whose parent, a request of a chain, was admitted: not refused for lack of room, the oldest parent first."""

from __future__ import annotations

import pytest
from tests.pipeline.scheduling.stage import Stage, table

from shapestream.scheduling.events import BatchFinished, DrainStarted, SlotJoined, TimePassed


def test_a_request_with_a_parent_is_not_refused_for_lack_of_room(make_stage):
    """Its parent was admitted, with room for it; a request without one is refused beside it."""
    stage = make_stage(max_queued_requests=2, max_queued_bytes=100)
    stage.model()
    stage.arrive((1, 4), (1, 4))
    stage.arrive((1, 4), nbytes=90, since=0.0)
    stage.arrive((1, 4))
    assert {4: "overloaded"} == stage.ends


def test_a_request_with_a_parent_is_admitted_while_the_server_drains(make_stage):
    """What was begun is finished."""
    stage = make_stage()
    stage.model()
    stage.play(DrainStarted())
    stage.arrive((1, 4), since=0.0)
    stage.arrive((1, 4))
    assert {2: "draining"} == stage.ends


def test_a_request_with_a_parent_is_refused_after_its_deadline(make_stage):
    """No call starts for it."""
    stage = make_stage()
    stage.model()
    stage.arrive((1, 4), since=0.0, deadline=1.0, at=2.0)
    assert {1: "deadline_exceeded"} == stage.ends


def _two_models(stage: Stage, first: float | None, later: float | None) -> list[str]:
    """Requests for `find` come first, those for `read` later, both of one client; return whose batches start, in order."""
    stage.model("find", max_batch=1)
    stage.model("read", max_batch=1)
    stage.slots(0, models=("find", "read"))
    stage.arrive((1, 4), model="find")
    for at in (2.0, 3.0, 4.0):
        stage.arrive((1, 4), model="find", at=at, since=first)
    for at in (5.0, 6.0, 7.0):
        stage.arrive((1, 4), model="read", at=at, since=later)
    models = {1: "find", 2: "find", 3: "find", 4: "find", 5: "read", 6: "read", 7: "read"}
    order = []
    while len(order) < 7:
        started = stage.started[-1]
        order.append(models[started.requests[0]])
        stage.finish(started, run_s=0.1)
    return order[1:]


def test_the_oldest_parent_goes_first_within_a_client(make_stage):
    """Stages of chains that began earlier go before first stages of younger ones; without parents the models take turns."""
    assert ["read"] * 3 + ["find"] * 3 == _two_models(make_stage(), None, 1.0)
    assert ["find"] * 3 + ["read"] * 3 == _two_models(make_stage(), 0.5, 1.0)
    mixed = _two_models(make_stage(), None, None)
    assert sorted(mixed) == ["find"] * 3 + ["read"] * 3
    assert mixed not in (["read"] * 3 + ["find"] * 3, ["find"] * 3 + ["read"] * 3)


@pytest.mark.parametrize(("began", "passes"), [(0.4, True), (1.9, True), (2.1, False)])
def test_a_cheap_stage_fills_the_queue_of_a_dear_one(make_stage, began, passes):
    """It goes first though its chain is younger, by at most twice the seconds of what it passes."""
    stage = make_stage()
    stage.model("tokenise", max_batch=1)
    stage.model("embed", max_batch=1)
    costs = {name: table(took_s, 0.0, key=name) for name, took_s in (("tokenise", 0.01), ("embed", 1.0))}
    stage.play(SlotJoined(slot=0, models=frozenset(costs), costs=costs))
    stage.arrive(*[(1, 4)] * 4, model="embed", since=0.0)
    stage.arrive(*[(1, 4)] * 3, model="tokenise", at=began + 0.1, since=began)
    order = []
    while len(order) < 7:
        started = stage.started[-1]
        order.append("embed" if started.requests[0] <= 4 else "tokenise")
        stage.finish(started, run_s=1.0 if order[-1] == "embed" else 0.01)
    cheap, dear = ["tokenise"] * 3, ["embed"] * 3
    assert ["embed", *(cheap + dear if passes else dear + cheap)] == order


def test_no_batch_starts_between_a_batch_and_what_follows_from_it(make_stage):
    """What is queued waits for the next event of the same time, which has an older request, or none."""
    for follows, expected in ((True, [1, 3]), (False, [1, 2])):
        stage = make_stage()
        stage.model("find", max_batch=1)
        stage.model("read", max_batch=1)
        stage.slots(0, models=("find", "read"))
        stage.arrive((1, 4), (1, 4), model="find")
        (started,) = stage.started
        stage.play(BatchFinished(batch=started.batch, busy_s=0.1, followed=True))
        assert [started] == stage.started
        if follows:
            stage.arrive((1, 4), model="read", since=0.0)
        else:
            stage.play(TimePassed())
        assert expected == [start.requests[0] for start in stage.started]


def test_a_parent_gives_nothing_before_other_clients(make_stage):
    """A client with the oldest parent has its share of the slots, and no more."""
    stage = make_stage()
    stage.model("find", max_batch=1)
    stage.model("read", max_batch=1)
    stage.slots(0, models=("find", "read"))
    stage.arrive((1, 4), model="find", client=9)
    stage.arrive(*[(1, 4)] * 4, model="find", client=1, at=2.0)
    stage.arrive(*[(1, 4)] * 4, model="read", client=2, at=3.0, since=1.0)
    for _ in range(9):
        stage.finish(stage.started[-1], run_s=0.1)
    clients = [1 if 2 <= start.requests[0] <= 5 else 2 for start in stage.started[1:]]
    assert 4 == clients.count(1)
    assert 1 in clients[:2]
    assert 2 in clients[:2]


def _a_busy_slot_of_two_models(stage: Stage) -> None:
    """A slot whose calls take 0.1 s, and that has just begun one."""
    for model in ("text", "read"):
        stage.model(model, max_batch=1)
    costs = {model: table(0.1, 0.0) for model in ("text", "read")}
    stage.play(SlotJoined(slot=0, models=frozenset(costs), costs=costs))
    stage.arrive((1, 4))


def test_time_is_kept_for_the_next_stages_of_a_chain(make_stage):
    """Half of the wait and the call fits in what is left, but not before the next stage, whose call takes 0.1 s at least."""
    stage = make_stage()
    _a_busy_slot_of_two_models(stage)
    stage.arrive((1, 4), since=0.0, deadline=0.15)
    stage.arrive((1, 4), since=0.0, deadline=0.15, then=("nothing",))
    assert {} == stage.ends
    (before,) = stage.arrive((1, 4), since=0.0, deadline=0.15, then=("read",))
    assert {before: "deadline_exceeded"} == stage.ends
    assert "0.050 s are left before read" in stage.last[0].message


def test_a_stage_that_cannot_be_in_time_ends_while_it_waits(make_stage):
    """It leaves the next stage the least that its call takes."""
    stage = make_stage()
    _a_busy_slot_of_two_models(stage)
    (waiting,) = stage.arrive((1, 4), since=0.0, deadline=0.35, then=("read",))
    stage.wait(0.19)
    assert {} == stage.ends
    stage.wait(0.21)
    assert {waiting: "deadline_exceeded"} == stage.ends
