"""Suspects: what may have killed a worker runs where nothing else runs, so that blame is certain."""

from __future__ import annotations

import pytest
from tests.pipeline.scheduling.seen import RecallAsked, Started

from shapestream.scheduling.events import (
    BatchFailed,
    RequestCancelled,
    RequestsAbandoned,
    SlotClosing,
    SlotLeft,
)


def _die(stage, *slots: int) -> None:
    """The process of these slots dies: they close, and then leave."""
    stage.finished.update(start.batch for start in stage.started if start.slot in slots)
    for slot in slots:
        stage.play(SlotClosing(slot=slot))
    for slot in slots:
        stage.play(SlotLeft(slot=slot, died=True))


def _running(stage) -> list[Started]:
    return [start for start in stage.started if start.batch not in stage.finished]


def _play_poison(stage, poison: set[int], slots: int = 1) -> int:
    """One worker of so many slots, started again whenever a poison kills it, until nothing is left. The deaths."""
    deaths, number, names = 0, 0, {}
    while True:
        if not names:
            names = {number + offset: f"w{deaths}" for offset in range(slots)}
            number += slots
            for slot in names:
                stage.slots(slot, worker=names[slot])
        running = _running(stage)
        if not running:
            return deaths
        if any(poison & set(start.requests) for start in running):
            deaths += 1
            _die(stage, *names)
            names = {}
        else:
            stage.finish(running[0])


@pytest.mark.parametrize(
    ("poison", "slots", "deaths"),
    [({3}, 1, 2), ({2, 7}, 1, 3), ({5}, 3, 2)],
    ids=["one", "two that share the first death", "one beside two other slots"],
)
def test_a_poison_is_found_by_two_deaths_and_takes_no_other_along(stage, poison, slots, deaths):
    """All that ran in the dead process runs again one by one; only a request that kills again is poisoned."""
    stage.model()
    stage.arrive(*[(1, 4)] * 12)
    assert deaths == _play_poison(stage, poison, slots)
    assert {id_: "poisoned" if id_ in poison else "delivered" for id_ in range(1, 13)} == stage.ends


def test_nothing_else_runs_in_the_worker_of_a_suspect(stage):
    """Its other slots are held back, those of other workers are not; afterwards all are as before."""
    stage.model(max_batch=2)
    stage.slots(0, worker="dying")
    stage.arrive((1, 4))
    stage.slots(1, 2, worker="a")
    stage.slots(3, worker="b")
    stage.arrive(*[(1, 4)] * 6)
    busy = {start.slot: start for start in stage.started}
    _die(stage, 0)
    assert 1 == stage.scheduler.statistics().suspects
    stage.finish(busy[1])
    assert [] == stage.starts(), "worker a is being emptied"
    stage.finish(busy[2])
    assert [((1,), 1)] == [(start.requests, start.slot) for start in _running(stage) if start.slot in (1, 2)]
    stage.arrive((1, 4), (1, 4), (1, 4))
    assert ([], 1) == (stage.starts(), stage.scheduler.statistics().slots_reserved)
    stage.finish(busy[3])
    assert [(8, 9)] == stage.starts(), "worker b works on"
    alone = next(start for start in stage.started if start.requests == (1,) and start.slot != 0)
    stage.finish(alone)
    assert [(10,)] == stage.starts()
    assert (0, "delivered") == (stage.scheduler.statistics().slots_reserved, stage.ends[1])


def test_a_worker_is_emptied_by_recalling_what_waits_there(stage):
    """What was sent ahead to the chosen worker comes back and goes elsewhere."""
    stage.model(max_batch=1)
    stage.measured_slots(0, worker="dying", key="a")
    stage.arrive((1, 4))
    stage.measured_slots(1, worker="w", key="a", prefetch_s=5.0)
    stage.arrive((1, 4), (1, 4), at=0.01)
    ahead = next(start for start in stage.started if start.behind is not None)
    _die(stage, 0)
    recalls = [action for actions in stage.played for action in actions if isinstance(action, RecallAsked)]
    assert [RecallAsked(batch=ahead.batch, slot=1)] == recalls
    stage.play(BatchFailed(batch=ahead.batch, code="recalled", message="as asked"))
    stage.finish(next(start for start in stage.started if start.requests == (2,)))
    assert [(1,)] == stage.starts()


def test_what_waited_behind_the_batch_of_a_dead_process_is_a_suspect_too(stage):
    """It may have begun before that was heard of; if it was not to blame, it loses only its company."""
    stage.model(max_batch=1)
    stage.measured_slots(0, worker="w", prefetch_s=5.0)
    stage.arrive((1, 4), (1, 4))
    assert 0 == next(start for start in stage.started if start.behind is not None).slot
    _die(stage, 0)
    assert 2 == stage.scheduler.statistics().suspects
    deaths = _play_poison(stage, {2})
    assert (1, {1: "delivered", 2: "poisoned"}) == (deaths, stage.ends)


def test_a_lost_connection_blames_nobody(stage):
    """A suspect whose worker is only lost is a suspect still, and is given up after as many losses as any other."""
    stage.model()
    stage.slots(0)
    stage.arrive((1, 4), (1, 4))
    _die(stage, 0)
    stage.slots(1, worker="again")
    stage.play(SlotLeft(slot=1))
    assert (2, {}) == (stage.scheduler.statistics().suspects, stage.ends)
    stage.slots(2, worker="again")
    stage.play(SlotLeft(slot=2))
    assert {1: "worker_lost"} == stage.ends


def test_the_only_worker_of_another_model_is_left_alone_if_there_is_a_choice(stage):
    """A suspect waits for a busy worker rather than taking the last slot that another model has."""
    for name in ("text", "other"):
        stage.model(name, max_batch=1)
    stage.slots(0, worker="dying")
    stage.arrive((1, 4))
    stage.slots(1, worker="shared", models=("text", "other"))
    stage.slots(2, worker="own")
    stage.arrive((1, 4), model="other")
    stage.arrive((1, 4))
    busy = {start.slot: start for start in stage.started}
    stage.finish(busy[1])
    _die(stage, 0)
    stage.arrive((1, 4), model="other")
    assert [(4,)] == stage.starts()
    stage.finish(busy[2])
    assert [(1,)] == stage.starts()


def test_with_a_single_worker_suspects_run_there_one_after_the_other(stage):
    """Newcomers wait until all of them have run, even those of another model."""
    for name in ("text", "other"):
        stage.model(name)
    stage.slots(0)
    stage.arrive((1, 4), (1, 4))
    _die(stage, 0)
    stage.arrive((1, 4), model="other")
    stage.slots(1, 2, worker="w", models=("text", "other"))
    order = []
    while running := _running(stage):
        order.append([start.requests for start in running])
        stage.finish(running[0])
    assert [[(1,)], [(2,)], [(3,)]] == order


def test_a_worker_that_comes_is_taken_instead_of_one_that_is_still_busy(stage):
    """The suspect does not wait for a long batch, and the busy worker serves everybody again."""
    stage.model(max_batch=1)
    stage.slots(0, worker="dying")
    stage.arrive((1, 4))
    stage.slots(1, 2, worker="busy")
    stage.arrive((1, 4))
    _die(stage, 0)
    assert ([], 1) == (stage.starts(), stage.scheduler.statistics().slots_reserved)
    stage.slots(3, worker="fresh")
    assert [(1,)] == stage.starts()
    stage.slots(4, worker="fresh")
    assert (1, 1) == (stage.scheduler.statistics().slots_reserved, stage.scheduler.statistics().free_slots)
    stage.arrive((1, 4))
    assert [(2, (3,))] == [(start.slot, start.requests) for start in stage.last]


def test_half_of_the_workers_at_most_are_kept(stage):
    """The others go on with what else there is."""
    stage.model(max_batch=8)
    stage.slots(0)
    stage.arrive(*[(1, 4)] * 8)
    for slot in range(1, 5):
        stage.slots(slot, worker=f"w{slot}")
    _die(stage, 0)
    assert 2 == len(_running(stage))
    assert 2 == stage.scheduler.statistics().free_slots


def test_a_suspect_that_ends_meanwhile_gives_its_worker_back(stage):
    """Cancelled, late, or its client gone: the worker serves everybody again."""
    stage.model(max_batch=2)
    stage.slots(0, worker="dying")
    stage.arrive((1, 4), (1, 4))
    stage.slots(1, 2, worker="w")
    stage.arrive((1, 4), client=1)
    _die(stage, 0)
    assert (1, 2) == (stage.scheduler.statistics().slots_reserved, stage.scheduler.statistics().suspects)
    stage.play(RequestCancelled(id=1))
    stage.play(RequestsAbandoned(ids=(1, 2)))
    assert (0, 1) == (stage.scheduler.statistics().slots_reserved, stage.scheduler.statistics().free_slots)


def test_a_suspect_that_the_model_refuses_ends_as_such(stage):
    """Alone, its error is its own; the worker lives."""
    stage.model()
    stage.slots(0)
    stage.arrive((1, 4), (1, 4))
    _die(stage, 0)
    stage.slots(1, worker="w")
    stage.fail(stage.started[1])
    stage.finish(stage.started[2])
    assert {1: "model_error", 2: "delivered"} == stage.ends


def test_a_suspect_that_its_slot_cannot_run_waits_for_another(stage):
    """`unavailable` blames the slot, which rests; the suspect stays one."""
    stage.model()
    stage.slots(0)
    stage.arrive((1, 4))
    _die(stage, 0)
    stage.slots(1, worker="w")
    stage.fail(stage.started[1], "unavailable")
    assert ([], 1) == (stage.starts(), stage.scheduler.statistics().suspects)
    stage.wait(stage.scheduler.next_wakeup())
    stage.finish(stage.started[2])
    assert {1: "delivered"} == stage.ends


def test_the_last_attempt_is_made_alone_in_a_worker(stage):
    """Who loses workers without killing them takes the same neighbour along twice at most."""
    stage.model(max_batch=1)
    worker = 0
    while "worker_lost" not in stage.ends.values():
        stage.slots(2 * worker, 2 * worker + 1, worker=f"w{worker}")
        if not worker:
            stage.arrive((1, 4), (1, 4))
        running = _running(stage)
        if not any(start.requests == (1,) for start in running):
            break
        stage.finished.update(start.batch for start in running)
        for slot in (2 * worker, 2 * worker + 1):
            stage.play(SlotClosing(slot=slot))
        for slot in (2 * worker, 2 * worker + 1):
            stage.play(SlotLeft(slot=slot))
        worker += 1
    assert (3, {1: "worker_lost"}) == (worker, stage.ends)
    stage.slots(100)
    stage.finish(stage.started[-1])
    assert {1: "worker_lost", 2: "delivered"} == stage.ends


def test_one_death_is_not_enough_for_a_verdict(stage):
    """Whoever was alone for another reason, when the process died, gets another try, if there is one left."""
    stage.model(max_batch=1)
    for slot in range(2):
        stage.slots(slot, worker=f"w{slot}")
        if not slot:
            stage.arrive((1, 4))
        stage.play(SlotLeft(slot=slot))
    assert 1 == stage.scheduler.statistics().suspects
    stage.slots(2, worker="w2")
    _die(stage, 2)
    assert {1: "worker_lost"} == stage.ends


def test_a_worker_is_let_go_when_another_takes_the_last_suspect(stage):
    """Two are emptied for suspects of two models, and the one that serves both is empty first."""
    stage.model("text")
    stage.model("image")
    models = {0: ("text",), 1: ("text",), 2: ("text", "image"), 3: ("image",), 4: ("image",), 5: ("text",)}
    for slot, names in models.items():
        stage.slots(slot, models=names)
        stage.arrive((1, 4), model=names[-1])
    running = {start.slot: start for start in stage.started}
    _die(stage, 0)
    _die(stage, 4)
    stage.play(RequestCancelled(id=running[4].requests[0]))
    stage.finish(running[2])
    assert [running[0].requests] == stage.starts()
    assert 0 == stage.scheduler.statistics().suspects
