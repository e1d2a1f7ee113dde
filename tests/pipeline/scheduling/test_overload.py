"""Ten times what the slots can do, on virtual time: what is answered in time is nearly all that they can do.

A call takes 8 ms and 4 ms per row, of which it has 8 at most: 200 requests per second and slot.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import count

import numpy as np
import pytest
from tests.pipeline.scheduling.seen import Failed
from tests.workers.lab.worlds import CheckedScheduler

from shapestream.scheduling.events import ModelProfile
from shapestream.telemetry.trace import TraceRequest
from shapestream_workers.lab.simulator import DONE, Scenario, simulate
from shapestream_workers.lab.true_cost import FormulaCost

CAPACITY = 200.0
CALL = {"fixed_s": 0.008, "per_row_s": 0.004}


def _poisson(rates: list[float], seconds: float, deadline_s: float, seed: int) -> list[TraceRequest]:
    """Requests of one row, of a client for each of the rates."""

    def client(number: int, rate: float) -> Iterator[TraceRequest]:
        rng = random.Random(seed * 1000 + number)
        at_s = rng.expovariate(rate)
        while at_s < seconds:
            yield TraceRequest(at_s, 0, number, (1,), deadline_s)
            at_s += rng.expovariate(rate)

    return sorted(request for number, rate in enumerate(rates) for request in client(number, rate))


def _served(
    requests: list[TraceRequest], *, slots: int = 1, wrong: float = 1.0, noise: float = 0.0, seed: int = 0
) -> np.ndarray:
    """When each was answered in time by a new server, whose calibration is `wrong` times too quick; inf if it was not."""
    believed = FormulaCost(
        per_element_s=0.0, largest=(8,), **{part: seconds / wrong for part, seconds in CALL.items()}
    )
    profile = ModelProfile(name="m", dimensions=("batch",), has_batch=True, paddable=(False,), max_batch=8)
    simulated = simulate(
        CheckedScheduler(10_000),
        Scenario(
            profiles=[profile],
            costs={"m": FormulaCost(per_element_s=0.0, **CALL)},
            traffic=requests,
            believed={"m": believed},
            slots=slots,
            noise=noise,
            way_s=0.001,
            seed=seed,
        ),
    )
    ends = simulated.requests
    return np.where(ends.outcomes() == DONE, ends.column(ends.ended), np.inf)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    ("clients", "world"),
    [
        (4, {}),
        (1, {}),
        (4, {"noise": 0.3}),
        (4, {"wrong": 1.1}),
        (4, {"wrong": 1.4}),
        (4, {"wrong": 0.7}),
        (4, {"slots": 4, "noise": 0.1}),
        (40, {}),
        (400, {"wrong": 1.2}),
    ],
)
def test_the_first_second_and_a_half_of_an_overload_is_not_lost(clients, world, seed):
    """Nothing is known yet of how good estimates are, or whose turn will come; and calibrations are never quite right."""
    capacity = CAPACITY * world.get("slots", 1)
    requests = _poisson([10 * capacity / clients] * clients, 1.5, 0.5, seed)
    answered = _served(requests, seed=seed, **world)
    assert 0.9 * 1.5 * capacity <= (answered <= 1.5).sum()


@pytest.mark.parametrize("deadline_s", [0.2, 0.5])
def test_modest_clients_do_not_feel_a_flood(deadline_s):
    """Three ask for half of their fair share, beside one that asks for ten times everything."""
    requests = _poisson([10 * CAPACITY, 25.0, 25.0, 25.0], 3.0, deadline_s, seed=1)
    served = _served(requests) < np.inf
    clients = np.array([request.client for request in requests])
    assert 0.9 * 3.0 * CAPACITY <= served.sum()
    assert 0.95 <= min(served[clients == client].mean() for client in (1, 2, 3))


def _late_turn(stage, *, crowded: bool, deadline: float = 1.3) -> list[str]:
    """Request 2's turn comes 0.3 s before its deadline; a call of 8 rows takes 0.6 s, and nine others wait."""
    stage.model(max_batch=8)
    stage.measured_slots(0)
    stage.arrive((8, 64))
    stage.arrive((1, 64), deadline=deadline)
    stage.arrive(*[(1, 64)] * 9)
    if crowded:
        stage.arrive((1, 64), deadline=0.7)
        assert ["overloaded"] == [action.code for action in stage.last if isinstance(action, Failed)]
    stage.finish(stage.started[0], at=1.0)
    return [action.code for action in stage.last if isinstance(action, Failed)]


def test_where_the_queue_is_full_of_deadlines_nobody_is_saved_at_everybodys_cost(stage):
    """The call that could still bring it in time would be of one row, and those behind would have to wait for that."""
    assert ["deadline_exceeded"] == _late_turn(stage, crowded=True)
    assert 7 <= len(stage.started[-1].requests)


def test_where_it_is_not_the_call_is_cut_for_whoever_is_in_a_hurry(stage):
    """Those behind have time, as far as anybody knows."""
    assert [] == _late_turn(stage, crowded=False)
    assert 2 in stage.started[-1].requests
    assert len(stage.started[-1].requests) < 8


def test_a_quick_slot_runs_what_would_be_too_late_for_a_slow_one(stage):
    """Request 4's turn comes on slot 0, 0.65 s before its deadline: a call of 8 rows takes 0.6 s there, elsewhere 2.4 s."""
    stage.model(max_batch=8)
    stage.measured_slots(0, key="quick")
    stage.measured_slots(1, 2, key="slow", call_s=0.384, token_s=0.004)
    stage.arrive(*[(8, 64)] * 3)
    stage.arrive((1, 64), deadline=2.0)
    stage.arrive(*[(1, 64)] * 9)
    stage.arrive((1, 64), deadline=1.2)
    assert ["overloaded"] == [action.code for action in stage.last if isinstance(action, Failed)]
    (first,) = [start for start in stage.started if start.slot == 0]
    stage.finish(first, at=1.35)
    assert [] == [action for action in stage.last if isinstance(action, Failed)]
    assert (0, True) == (stage.started[-1].slot, 4 in stage.started[-1].requests)


def test_who_had_little_time_from_the_start_is_not_given_up(stage):
    """Its deadline is near because it is short: it did not wait for long."""
    stage.model(max_batch=8)
    stage.measured_slots(0)
    stage.arrive((1, 4))
    stage.arrive(*[(1, 64)] * 9)
    stage.arrive((1, 64), deadline=0.3)
    assert ["overloaded"] == [action.code for action in stage.last if isinstance(action, Failed)]
    stage.arrive((1, 32), client=2, deadline=0.57, priority=9)
    stage.finish(stage.started[0], at=0.1)
    assert [] == [action for action in stage.last if isinstance(action, Failed)]
    assert 12 in stage.started[-1].requests


def test_a_crowd_of_strangers_is_counted(stage):
    """Each is new and has nothing waiting, so fair shares alone would promise each of them to go first."""
    stage.model(max_batch=1)
    stage.measured_slots(0)
    for client in count(1):
        stage.arrive((1, 4), client=client, deadline=stage.now + 1.0)
        if any(isinstance(action, Failed) for action in stage.last):
            break
    assert 8 <= client <= 12


@pytest.mark.parametrize("hopeless_s", [0.008, 0.0115])
def test_hopeless_deadlines_of_one_client_refuse_no_other(hopeless_s):
    """A call takes 12 ms at least: those that are tried all the same, and end late, say nothing of another's wait."""
    good = _poisson([100.0], 6.0, 0.1, seed=1)
    hopeless = [TraceRequest(at.at_s, 0, 7, (1,), hopeless_s) for at in _poisson([60.0], 6.0, 0.1, seed=5)]
    requests = sorted([*good, *hopeless])
    served = _served(requests) < np.inf
    assert served[[request.client == 0 for request in requests]].all()
