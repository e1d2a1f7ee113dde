"""Room in the queue is shared as turns are: only clients above their share are refused."""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from tests.pipeline.scheduling.seen import Failed
from tests.pipeline.scheduling.stage import table
from tests.workers.lab.worlds import CheckedScheduler

from shapestream.scheduling.events import ModelProfile, ModelRemoved, SlotJoined, SlotLeft
from shapestream.telemetry.trace import TraceRequest
from shapestream_workers.lab.simulator import DONE, Scenario, simulate
from shapestream_workers.lab.true_cost import FormulaCost


def _served(rates: list[float], seconds: float, *, bound: int) -> Counter[int]:
    """Requests per client that were answered, of those that came in the last half; 200 a second are possible."""
    rng = random.Random(1)
    requests = []
    for client, rate in enumerate(rates):
        at_s = rng.expovariate(rate)
        while at_s < seconds:
            requests.append(TraceRequest(at_s, 0, client, (1,), None))
            at_s += rng.expovariate(rate)
    requests.sort()
    cost = {"fixed_s": 0.008, "per_row_s": 0.004}
    measured = FormulaCost(per_element_s=0.0, largest=(8,), **cost)
    simulated = simulate(
        CheckedScheduler(bound),
        Scenario(
            profiles=[
                ModelProfile(name="m", dimensions=("batch",), has_batch=True, paddable=(False,), max_batch=8)
            ],
            costs={"m": FormulaCost(per_element_s=0.0, **cost)},
            traffic=requests,
            believed={"m": measured},
            way_s=0.001,
        ),
    )
    done = np.asarray(simulated.requests.outcomes()) == DONE
    return Counter(
        request.client
        for request, is_done in zip(requests, done, strict=True)
        if is_done and request.at_s >= seconds / 2
    )


@pytest.mark.parametrize(("greedy", "bound"), [(1, 40), (1, 400), (10, 100), (10, 400)])
def test_modest_clients_are_not_refused_for_a_queue_that_others_fill(greedy, bound):
    """Each greedy client asks for as much as the slot can do, without deadlines; another for half of its share."""
    modest_hz = 0.5 * 200.0 / (greedy + 1)
    seconds = 20.0
    served = _served([modest_hz, *[200.0] * greedy], seconds, bound=bound)
    alone = _served([modest_hz], seconds, bound=bound)
    assert 0.95 * alone[0] <= served[0]
    assert 0.9 * 200.0 * seconds / 2 <= served.total()


def _refused(stage) -> list[int]:
    return [action.id for action in stage.last if isinstance(action, Failed)]


def test_one_client_alone_may_use_the_whole_queue(make_stage):
    """Nobody else asks, so nothing is kept."""
    stage = make_stage(max_queued_requests=12)
    stage.model()
    ids = stage.arrive(*[(1, 4)] * 14)
    assert ids[12:] == _refused(stage)


def test_a_client_above_its_share_leaves_one_share_free(make_stage):
    """Of three that asked, one may have eight of twelve: four are a share."""
    stage = make_stage(max_queued_requests=12)
    stage.model()
    stage.arrive((1, 4), client=2)
    stage.arrive((1, 4), client=3)
    many = stage.arrive(*[(1, 4)] * 9, client=1)
    assert many[6:] == _refused(stage)
    assert all("share" in action.message for action in stage.last)
    stage.arrive(*[(1, 4)] * 3, client=2)
    assert [] == _refused(stage)


def test_a_client_that_is_refused_finds_room_when_the_queue_has_drained_by_a_share(make_stage):
    """One other had the whole queue, and keeps asking: what drains is not its again."""
    stage = make_stage(max_queued_requests=8)
    stage.model(max_batch=1)
    stage.slots(0)
    stage.arrive((1, 4), client=1)
    stage.arrive(*[(1, 4)] * 8, client=1)
    stage.arrive((1, 4), client=2)
    assert 1 == len(_refused(stage))
    for _ in range(4):
        stage.finish(stage.started[-1], run_s=0.1, at=stage.now + 0.1)
        greedy = stage.arrive((1, 4), (1, 4), client=1)
        assert greedy == _refused(stage)
        stage.arrive((1, 4), client=2)
        assert [] == _refused(stage)


def test_room_is_shared_in_bytes_too(make_stage):
    """Two large requests are a client's share where another one asked."""
    stage = make_stage(max_queued_bytes=400)
    stage.model()
    stage.arrive((1, 4), client=2, nbytes=1)
    many = stage.arrive(*[(1, 4)] * 3, client=1, nbytes=100)
    assert many[2:] == _refused(stage)
    stage.arrive((1, 4), client=2, nbytes=199)
    assert [] == _refused(stage)


def test_what_was_admitted_is_never_dropped_to_make_room(make_stage):
    """However many others come, what waits ends with its results."""
    stage = make_stage(max_queued_requests=6)
    stage.model(max_batch=1)
    many = stage.arrive(*[(1, 4)] * 6, client=1)
    for client in range(2, 9):
        stage.arrive((1, 4), client=client)
    stage.slots(0)
    while stage.started[-1].batch not in stage.finished:
        stage.finish(stage.started[-1])
    assert {"delivered"} == {stage.ends[id_] for id_ in many}
    assert all(earlier.batch < later.batch for earlier, later in pairwise(stage.started))


@pytest.mark.parametrize(
    ("nbytes", "bound"), [(10, {"max_queued_requests": 12}), (100, {"max_queued_bytes": 1200})]
)
def test_a_model_above_its_part_leaves_one_part_free(make_stage, nbytes, bound):
    """A client that asked two models may queue six of twelve requests for one of them, or of twelve hundred bytes."""
    stage = _models(make_stage(**bound), {0: ("slow", "fast")})
    stage.arrive((1, 4), (1, 4), model="fast", nbytes=nbytes)
    many = stage.arrive(*[(1, 4)] * 9, model="slow", nbytes=nbytes)
    assert many[6:] == _refused(stage)
    stage.arrive(*[(1, 4)] * 3, model="fast", nbytes=nbytes)
    assert [] == _refused(stage)


def test_a_client_of_two_models_leaves_another_client_its_share(make_stage):
    """Of twelve places six are another client's, and three are a part for the client's other model."""
    stage = _models(make_stage(max_queued_requests=12), {0: ("slow", "fast")})
    stage.arrive((1, 4), client=2, model="slow")  # it runs
    stage.arrive((1, 4), client=2, model="slow")
    stage.arrive((1, 4), client=1, model="fast")
    many = stage.arrive(*[(1, 4)] * 6, client=1, model="slow")
    assert many[3:] == _refused(stage)
    stage.arrive((1, 4), (1, 4), client=1, model="fast")
    assert [] == _refused(stage)
    stage.arrive(*[(1, 4)] * 5, client=2, model="slow")
    assert [] == _refused(stage)


# ------------------------------------------------------------ models on other slots


def _models(stage, slots: dict[int, tuple[str, ...]]):
    for slot, models in slots.items():
        for name in models:
            stage.model(name, max_batch=1)
        stage.slots(slot, models=models)
    return stage


@pytest.mark.parametrize("client", [1, 2])
@pytest.mark.parametrize(
    ("nbytes", "bound"), [(10, {"max_queued_requests": 12}), (100, {"max_queued_bytes": 1200})]
)
def test_the_flood_of_a_model_leaves_room_for_a_model_on_other_slots(make_stage, client, nbytes, bound):
    """It has half of the room where nothing waits for the other, from the same client or another."""
    stage = _models(make_stage(**bound), {0: ("slow",), 1: ("fast",)})
    many = stage.arrive(*[(1, 4)] * 9, model="slow", client=1, nbytes=nbytes)
    assert many[6:] == _refused(stage)
    assert stage.ends[many[-1]] == "overloaded"
    stage.arrive(*[(1, 4)] * 6, model="fast", client=client, nbytes=nbytes)
    assert [] == _refused(stage)


def test_the_flood_of_a_client_leaves_room_for_its_own_model_on_other_slots(make_stage):
    """However often both were asked before: what a client holds elsewhere is not counted here."""
    stage = _models(make_stage(max_queued_requests=12), {0: ("slow",), 1: ("fast",)})
    for _ in range(3):
        for model in ("slow", "fast"):
            for client in (1, 2, 3):
                stage.arrive((1, 4), model=model, client=client)
                for start in [start for start in stage.started if start.batch not in stage.finished]:
                    stage.finish(start)
    stage.arrive(*[(1, 4)] * 12, model="slow", client=1)
    assert _refused(stage)
    stage.arrive(*[(1, 4)] * 2, model="fast", client=1)
    assert [] == _refused(stage)


def test_models_on_other_slots_that_wait_have_equal_parts(make_stage):
    """Two that wait and others that do not: a third of the room for each, and one for the first that comes."""
    stage = _models(make_stage(max_queued_requests=12), {0: ("a",), 1: ("b",), 2: ("c",), 3: ("d",)})
    assert 6 == len(stage.arrive(*[(1, 4)] * 9, model="a", client=1)) - len(_refused(stage))
    assert 4 == len(stage.arrive(*[(1, 4)] * 9, model="b", client=2)) - len(_refused(stage))
    stage.arrive((1, 4), (1, 4), model="c", client=3)
    assert [] == _refused(stage)


def test_what_waits_for_other_slots_says_nothing_about_when_to_come_back(make_stage):
    """The queue of `fast` has drained within a second, whatever waits for `slow`."""
    stage = make_stage(max_queued_requests=40)
    for slot, (name, call_s) in enumerate({"slow": 10.0, "fast": 0.1}.items()):
        stage.model(name, max_batch=1)
        costs = {name: table(call_s, 0.0, key=name)}
        stage.play(SlotJoined(slot=slot, models=frozenset({name}), costs=costs))
    stage.arrive(*[(1, 4)] * 6, model="slow")
    stage.arrive(*[(1, 4)] * 60, model="fast", client=2)
    (last,) = [action for action in stage.last if isinstance(action, Failed)][-1:]
    assert last.retry_after_s is not None
    assert last.retry_after_s < 2.5


def test_models_share_their_parts_when_a_slot_comes_that_serves_both(make_stage):
    """Two parts become one, with all that waits in them; the third is as large."""
    stage = _models(make_stage(max_queued_requests=12), {0: ("a",), 1: ("b",), 2: ("c",)})
    stage.arrive(*[(1, 4)] * 5, model="a", client=1)
    stage.arrive(*[(1, 4)] * 4, model="b", client=2)
    stage.slots(3, models=("a", "b"))
    held = stage.scheduler.statistics().queued
    stage.arrive(*[(1, 4)] * 9, model="b", client=3)
    assert 6 - held == 9 - len(_refused(stage))
    stage.arrive(*[(1, 4)] * 6, model="c", client=1)
    assert [] == _refused(stage)


def test_one_request_larger_than_its_part_may_wait(make_stage):
    """As long as the whole queue holds it; the next one may not."""
    stage = _models(make_stage(max_queued_bytes=1000), {0: ("slow",), 1: ("fast",)})
    stage.arrive((1, 4), model="slow")  # it runs
    stage.arrive((1, 4), model="slow", nbytes=900)
    assert [] == _refused(stage)
    assert stage.arrive((1, 4), model="slow", nbytes=10) == _refused(stage)


def test_a_canary_that_hangs_fills_half_of_its_names_room_and_takes_none_of_others(make_stage):
    """The name `m` has two versions on slots of their own, and half of the room, as a name with one version has.

    The canary's requests wait and wait: it fills half of that half. The rest and the other model find theirs.
    """
    stage = _models(make_stage(max_queued_requests=16), {0: ("m@3",), 1: ("m@4",), 2: ("other",)})
    stage.arrive((1, 4), model="other", client=2)
    assert 4 == len(stage.arrive(*[(1, 4)] * 9, model="m@4", client=1)) - len(_refused(stage))
    stage.arrive((1, 4), model="other", client=2)
    assert 4 == len(stage.arrive(*[(1, 4)] * 9, model="m@3", client=1)) - len(_refused(stage))
    stage.arrive(*[(1, 4)] * 7, model="other", client=2)
    assert [] == _refused(stage)
    stage.arrive((1, 4), model="other", client=2)
    assert 1 == len(_refused(stage))


def test_a_client_that_asks_two_versions_of_a_name_asks_one_name(make_stage):
    """All run on one slot. Its share is divided between two names, so the versions together have half of it."""
    stage = _models(make_stage(max_queued_requests=12), {0: ("m@3", "m@4", "other")})
    stage.arrive((1, 4), model="other", client=1)  # it runs
    stage.arrive((1, 4), model="m@4", client=1)
    many = stage.arrive(*[(1, 4)] * 9, model="m@3", client=1)
    assert many[5:] == _refused(stage)
    stage.arrive(*[(1, 4)] * 6, model="other", client=1)
    assert [] == _refused(stage)


def test_a_version_that_leaves_gives_its_part_of_the_room_back(make_stage):
    """The name has the whole half again, also after the canary has come and gone."""
    stage = _models(make_stage(max_queued_requests=16), {0: ("m@3",), 1: ("m@4",), 2: ("other",)})
    stage.play(SlotLeft(slot=1))
    stage.play(ModelRemoved(model="m@4"))
    stage.arrive((1, 4), model="other", client=2)
    assert 8 == len(stage.arrive(*[(1, 4)] * 12, model="m@3", client=1)) - len(_refused(stage))
