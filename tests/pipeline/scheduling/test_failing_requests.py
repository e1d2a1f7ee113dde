"""Requests that fail cost their own client: it pays for what ran in vain, and others leave its company at once."""

from __future__ import annotations

from collections.abc import Callable
from math import log2

import numpy as np
import pytest
from tests.pipeline.scheduling.stage import table

from shapestream.scheduling import Scheduler
from shapestream.scheduling.events import ModelProfile, SlotJoined, SlotLeft
from shapestream.telemetry.trace import TraceRequest
from shapestream_workers.lab.simulator import DONE, FAILED, Scenario, Simulated, simulate
from shapestream_workers.lab.true_cost import FormulaCost

CALL_S, ROW_S = 0.02, 0.001


def _beside(stage, bad_client: Callable[[int], int | None], *, seconds: float = 20.0) -> int:
    """Results of a client that always has 32 requests without a result, beside one request in flight that fails.

    `bad_client`: the client of each of these, by number; None: there are none.
    """
    stage.model(max_batch=8)
    stage.measured_slots(0, call_s=CALL_S, token_s=ROW_S / 4)
    bad: set[int] = set()

    def fail_another() -> None:
        client = bad_client(len(bad))
        if client is not None:
            bad.update(stage.arrive((1, 4), client=client))

    stage.arrive(*[(1, 4)] * 32, client=1)
    fail_another()
    done = 0
    while stage.now < seconds:
        start = stage.started[-1]
        stage.now += CALL_S + ROW_S * start.sizes[0]
        if bad.intersection(start.requests):
            stage.fail(start)
            if bad <= stage.ends.keys():
                fail_another()
        else:
            done += len(start.requests)
            stage.arrive(*[(1, 4)] * len(start.requests), client=1)
            stage.finish(start, run_s=CALL_S + ROW_S * start.sizes[0])
    assert {"model_error"} >= {stage.ends[id_] for id_ in bad & stage.ends.keys()}
    return done


def test_a_failing_request_in_flight_costs_others_no_more_than_its_turns(make_stage):
    """Two clients, so the good one keeps at least half of the slot's time, in full batches."""
    alone = _beside(make_stage(), lambda _: None)
    assert 0.5 * alone <= _beside(make_stage(), lambda _: 2)


def test_others_leave_the_company_of_a_client_that_fails_with_the_first_call(stage):
    """The batch is divided between the clients, not in the middle."""
    stage.model(max_batch=16)
    stage.slots(0)
    stage.arrive((1, 4), client=3)
    failing = stage.arrive(*[(1, 4)] * 13, client=2)
    others = stage.arrive(*[(1, 4)] * 3, client=1)
    stage.finish(stage.started[-1])
    assert {*failing, *others} == set(stage.started[-1].requests)
    stage.fail(stage.started[-1])
    while not set(others) <= stage.ends.keys():
        start = stage.started[-1]
        assert set(start.requests) in (set(failing), set(others))
        (stage.finish if start.requests[0] in others else stage.fail)(start)


def _turns_before_the_next(stage, *, fails: bool) -> int:
    """Requests of others that go before the next one of client 2, after one of its own has failed, or not."""
    stage.model(max_batch=8)
    stage.measured_slots(0)
    stage.arrive((1, 4), client=1)
    stage.arrive(*[(1, 4)] * 100, client=1)
    (bad,) = stage.arrive((1, 4), client=2)
    stage.finish(stage.started[-1])
    while bad not in stage.ends:
        start = stage.started[-1]
        (stage.fail if fails and bad in start.requests else stage.finish)(start)
    first = len(stage.started)
    (following,) = stage.arrive((1, 4), client=2)
    while following not in stage.started[-1].requests:
        stage.finish(stage.started[-1])
    return [id_ for start in stage.started[first:] for id_ in start.requests].index(following)


def test_what_runs_again_is_charged_to_the_client_whose_request_failed(make_stage):
    """Eight requests ran again because of its one, so others go before its next."""
    assert _turns_before_the_next(make_stage(), fails=False) < _turns_before_the_next(
        make_stage(), fails=True
    )


def _turns_after_a_death(stage, *, kills: bool) -> int:
    """The same, where a worker died, and a request of client 2 was in the batch that was queued behind the running one."""
    stage.model(max_batch=8)
    stage.measured_slots(9, worker="busy")
    stage.arrive((1, 4), client=3)
    stage.arrive(*[(1, 4)] * 8, *[(1, 8)] * 200, client=1)
    (bad,) = stage.arrive((1, 8), client=2)
    stage.measured_slots(0, worker="w", prefetch_s=5.0)
    _, running, behind = stage.started
    assert (None, True, 8) == (running.behind, bad in behind.requests, len(behind.requests))
    stage.play(SlotLeft(slot=0, died=True))
    stage.measured_slots(1, worker="w")
    while bad not in stage.ends:
        start = stage.started[-1]
        if kills and bad in start.requests:
            stage.play(SlotLeft(slot=1, died=True))
            stage.measured_slots(2, worker="w")
        else:
            stage.finish(start)
    first = len(stage.started)
    (following,) = stage.arrive((1, 8), client=2)
    while following not in stage.started[-1].requests:
        stage.finish(stage.started[-1])
    return [id_ for start in stage.started[first:] for id_ in start.requests].index(following)


def test_a_request_that_ends_a_worker_is_charged_for_its_batch_also_from_behind_another(make_stage):
    """Each of the eight ran alone because of it."""
    assert _turns_after_a_death(make_stage(), kills=False) < _turns_after_a_death(make_stage(), kills=True)


def _part_of_the_slot(stage, fails: Callable[[int], bool], *, seconds: float = 20.0) -> float:
    """Part of a slot's time that the calls of model `bad` take, of which those of so many rows fail, beside model `text`.

    Each model has a client of its own, which always has requests queued.
    """
    for name in ("text", "bad"):
        stage.model(name, max_batch=16)
    costs = {name: table(CALL_S, ROW_S / 4) for name in ("text", "bad")}
    stage.play(SlotJoined(slot=0, models=frozenset(costs), costs=costs))
    clients = {"text": 1, "bad": 2}
    for name, client in clients.items():
        stage.arrive(*[(1, 4)] * 48, model=name, client=client)
    took = dict.fromkeys(clients, 0.0)
    while stage.now < seconds:
        start, ended = stage.started[-1], len(stage.ends)
        run_s = CALL_S + ROW_S * start.sizes[0]
        took[start.model] += run_s
        stage.now += run_s
        if start.model == "bad" and fails(start.sizes[0]):
            stage.fail(start)
        else:
            stage.finish(start, run_s=run_s)
        if ended := len(stage.ends) - ended:
            stage.arrive(*[(1, 4)] * ended, model=start.model, client=clients[start.model])
    return took["bad"] / seconds


def test_what_fails_in_any_company_is_paid_for_by_those_that_were_in_it(stage):
    """No request is to blame where each runs well alone: the model still takes half of the slot, and no more."""
    assert _part_of_the_slot(stage, lambda rows: rows > 1) == pytest.approx(0.5, abs=0.05)


def test_calls_that_run_again_because_of_several_requests_are_paid_for_once(stage):
    """Each request fails alone too: its client still gets half of the slot."""
    assert _part_of_the_slot(stage, lambda rows: True) == pytest.approx(0.5, abs=0.05)


def test_company_from_far_behind_waits_no_longer_than_what_its_client_has_queued_now(stage):
    """It was in a call, and paid, so its place is where its client is, not where its turn would have come."""
    stage.model(max_batch=2)
    stage.measured_slots(0)
    stage.arrive((1, 8), client=1)
    anchor, *_ = stage.arrive((1, 4), *[(1, 8)] * 100, client=1)
    (far,) = stage.arrive((1, 4), client=1)
    stage.finish(stage.started[-1])
    assert {anchor, far} == set(stage.started[-1].requests)
    stage.fail(stage.started[-1])
    failed = len(stage.started)
    while far not in stage.ends:
        stage.finish(stage.started[-1])
        stage.arrive((1, 8), client=1)
    assert len(stage.started) - failed < 10


# ---------------------------------------------------------------- on virtual time

MAX_BATCH = 64
PROFILE = ModelProfile(
    name="m", dimensions=("batch", "seq"), has_batch=True, paddable=(False, False), max_batch=MAX_BATCH
)
COST = FormulaCost(fixed_s=2e-3, per_row_s=2e-5, largest=(MAX_BATCH, 256))


def _simulated(failing: float, in_flight_of: dict[int, int]) -> Simulated:
    """Client 0, of whose requests a share fails, beside others; each has a closed loop."""
    traffic = [TraceRequest(0.0, 0, client, (1, 16)) for _ in range(1500) for client in in_flight_of]
    scenario = Scenario(
        profiles=[PROFILE],
        costs={"m": COST},
        traffic=traffic,
        believed={"m": COST},
        in_flight_of=in_flight_of,
        failing={0: failing},
        way_s=0.25e-3,
    )
    return simulate(Scheduler(8192, 1 << 40), scenario)


def test_a_failing_request_costs_no_more_calls_than_halving_its_batch_takes():
    """One request in a hundred fails; without failures the same loop makes a call for every batch."""
    whole, halved = _simulated(0.0, {0: MAX_BATCH}), _simulated(0.01, {0: MAX_BATCH})
    failed = halved.requests.outcome.count(FAILED)
    assert 10 < failed < 25
    assert halved.batches <= whole.batches + failed * 2 * log2(MAX_BATCH)


@pytest.mark.parametrize("failing", [0.01, 0.1])
def test_a_client_with_one_request_in_flight_keeps_its_rate_beside_failing_requests(failing):
    """Halves wait for their turn, so it is not behind a whole failed batch of another client's requests."""

    def rate(simulated: Simulated) -> float:
        requests = simulated.requests
        others = np.array(requests.client) == 1
        until = requests.column(requests.arrived)[~others].max()
        return float(
            (others & (requests.outcomes() == DONE) & (requests.column(requests.ended) <= until)).sum()
            / until
        )

    loops = {0: MAX_BATCH, 1: 1}
    assert 0.8 * rate(_simulated(0.0, loops)) < rate(_simulated(failing, loops))


def test_requests_that_end_workers_end_two_each_and_take_no_other_along():
    """One in a hundred, of one client; whom they ran beside is accused, runs alone, and is answered."""
    traffic = [TraceRequest(0.0, 0, client, (1, 16)) for _ in range(400) for client in (0, 1)]
    scenario = Scenario(
        profiles=[PROFILE],
        costs={"m": COST},
        traffic=traffic,
        believed={"m": COST},
        slots=4,
        in_flight_of={0: 32, 1: 8},
        killing={0: 0.01},
        restart_s=0.1,
    )
    simulated = simulate(Scheduler(8192, 1 << 40), scenario)
    outcomes, clients = simulated.requests.outcomes(), np.array(simulated.requests.client)
    poisoned = int((outcomes == FAILED).sum())
    assert 2 <= poisoned <= 8
    assert poisoned < simulated.deaths <= 2 * poisoned
    assert {DONE} == set(outcomes[clients == 1].tolist())
