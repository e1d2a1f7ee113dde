"""Sizes that callers claim and no byte stands for: they are priced, planned and run without harm to anybody else."""

from __future__ import annotations

from itertools import count
from math import prod

import numpy as np
import pytest
from tests.pipeline.scheduling.seen import Failed, Started
from tests.pipeline.scheduling.stage import Stage, table

from shapestream.scheduling.costs import CostModel
from shapestream.scheduling.events import (
    Arrival,
    BatchFinished,
    InputBytes,
    ModelProfile,
    RequestCancelled,
    RequestsArrived,
    SlotJoined,
)
from shapestream.scheduling.hang_watch import HangLimits
from shapestream_engine.cost_table import CostPoint, CostTable, LearnedCosts

HUGE = 2**60
MANY = ("batch", *[f"n{number}" for number in range(17)])
"""The dimensions of a model of 17 inputs."""
LARGEST_S = 0.096 + 0.001 * 64 * 256
"""Seconds of the largest call that `Stage.measured_slots` knows."""


def many_table(dimensions: tuple[str, ...] = MANY) -> CostTable:
    """Points as a calibration of many dimensions finds them: one size at a time differs from the smallest."""
    ones = (1,) * len(dimensions)
    points = {ones: 0.001}
    for axis in range(len(dimensions)):
        for size in (2, 8):
            points[(*ones[:axis], size, *ones[axis + 1 :])] = 0.001 * size
    return CostTable(
        key="k",
        dimensions=dimensions,
        points=tuple(CostPoint(sizes=sizes, seconds=seconds) for sizes, seconds in points.items()),
    )


def join(stage: Stage, costs: CostTable | None) -> None:
    """A slot, with what it has measured."""
    costs_of = {} if costs is None else {"text": costs}
    stage.play(SlotJoined(slot=0, models=frozenset({"text"}), costs=costs_of))


def run_all(stage: Stage, busy_s: float = 0.001) -> None:
    """Lets whatever runs end, one after the other, until nothing does."""
    while running := [start for start in stage.started if start.batch not in stage.finished]:
        stage.finish(running[0], busy_s)


@pytest.mark.parametrize("taught", ["by nothing", "by traffic", "by a table"])
@pytest.mark.parametrize("rows", [0, 1], ids=["no rows", "one row"])
def test_sizes_whose_product_no_float_holds_are_served(stage, taught, rows):
    """17 inputs of [rows, 2**60], beside a request of ordinary sizes: both run, also where lengths may be padded."""
    stage.model(dimensions=MANY, padded=True)
    join(stage, many_table() if taught == "by a table" else None)
    if taught == "by traffic":
        stage.arrive((1,) * len(MANY))
        run_all(stage)
    odd = (rows, *[HUGE] * 17)
    stage.arrive(odd, (1,) * len(MANY), odd, (2,) * len(MANY))
    run_all(stage)
    assert {"delivered"} == set(stage.ends.values())


def test_an_arrival_that_cannot_be_taken_in_fails_alone(stage):
    """Sizes that are none are the server's own defect: that request is `internal`, its neighbours run, books agree."""
    stage.faults = []
    stage.model()
    stage.slots(0)
    stage.arrive((1, 4), (1,), (1, 4), (1, -4), (1, 4, 4), (1, 4))
    assert {2: "internal", 4: "internal", 5: "internal"} == stage.ends
    assert [(2,), (4,), (5,)] == [fault.requests for fault in stage.faults]
    run_all(stage)
    assert ["delivered"] * 3 == [stage.ends[id_] for id_ in (1, 3, 6)]


def test_an_event_that_cannot_be_taken_in_ends_all_requests(stage):
    """The slots are forgotten with them; when they have joined again, the next event is an ordinary one."""
    stage.faults = []
    stage.model()
    stage.arrive((1, 4))
    stage.slots(0)
    stage.play(RequestCancelled(id=[]))  # type: ignore[arg-type] # a list is no id
    assert 1 == len(stage.faults)
    assert {1: "internal"} == stage.ends
    stage.slots(0)
    stage.arrive((1, 4))
    run_all(stage)
    assert {1: "internal", 2: "delivered"} == stage.ends


def test_arrivals_behind_a_defect_are_answered(stage):
    """A priority that is no number breaks the taking in itself: all arrivals of the event have a code."""
    stage.faults = []
    stage.model()
    arrivals = [
        Arrival(id=number, client=0, model="text", sizes=(1, 4), nbytes=1, priority=priority)
        for number, priority in enumerate((0, "high", 0), 1)
    ]
    stage.play(RequestsArrived(requests=tuple(arrivals)))
    stage.slots(0)
    run_all(stage)
    assert {1: "internal", 2: "internal", 3: "internal"} == stage.ends


def test_what_cannot_be_planned_runs_alone(stage):
    """A profile that contradicts itself breaks the planning of four rows: the request whose turn it is runs, unplanned."""
    stage.faults = []
    stage.model(static_shapes=((4,),))
    stage.slots(0)
    stage.arrive((4, 4))
    stage.arrive((1, 4), (2, 4), (1, 4))
    run_all(stage)
    assert {"delivered"} == set(stage.ends.values())
    assert stage.faults


@pytest.mark.parametrize("sizes", [(0, 2**26), (0, HUGE), (HUGE, 0)])
def test_requests_without_elements_cost_as_little_as_any(stage, sizes):
    """A hundred of them that claim any length: another client's deadlines are not refused because of them."""
    stage.model(padded=True)
    stage.measured_slots(0)
    stage.arrive(*[sizes] * 100, client=1)
    (own,) = stage.arrive((1, 4), client=2, deadline=2.0)
    assert own not in stage.ends
    run_all(stage, 0.097)
    assert "delivered" == stage.ends[own]
    assert {"delivered" if sizes[0] == 0 else "too_large", "delivered"} == set(stage.ends.values())


@pytest.mark.parametrize("measured", [False, True])
def test_requests_without_elements_enlarge_nobodys_call(stage, measured):
    """A neighbour's [1, 4] runs as [1, 4], whichever comes first, and theirs are of their own sizes."""
    stage.model(padded=True)
    if measured:
        stage.measured_slots(0)
    else:
        stage.slots(0)
    stage.arrive((1, 8))
    stage.arrive((0, 2**26), (1, 4), (0, 2**26), (1, 4), (3, 0))
    run_all(stage)
    sizes = sorted(start.sizes for start in stage.started)
    assert [(0, 2**26), (0, 2**26), (1, 8), (2, 4), (3, 0)] == sizes


@pytest.mark.parametrize("odd", [(0, HUGE), (1, HUGE), (HUGE, 1)])
def test_fairness_survives_any_claim(stage, odd):
    """After two requests of absurd sizes, a flood of one client still leaves another client every second turn."""
    stage.model(max_batch=1)
    stage.measured_slots(0)
    stage.arrive(odd, odd, client=1)
    run_all(stage, 0.1)
    flood = stage.arrive(*[(1, 4)] * 40, client=1)
    other = stage.arrive(*[(1, 4)] * 10, client=2)
    before = len(stage.started)
    run_all(stage, 0.1)
    order = [start.requests[0] for start in stage.started[before - 1 :]]
    last = max(order.index(id_) for id_ in other)
    assert last < 24, "the other client's ten had every second turn"
    assert set(order) >= set(flood)


@pytest.mark.parametrize("odd", [(1, 2**40), (2**40, 1)])
def test_no_prediction_is_longer_than_what_was_ever_measured(stage, odd):
    """While a request beyond all measured sizes runs, another client's deadline counts the longest known call."""
    stage.model(max_batch=1)
    stage.measured_slots(0)
    stage.arrive(odd, client=1)
    (own,) = stage.arrive((1, 4), client=2, deadline=2.0 * LARGEST_S)
    assert own not in stage.ends
    run_all(stage, 0.1)
    assert "delivered" == stage.ends[own]


def test_the_longest_call_that_ran_counts_from_then_on(stage):
    """A size beyond the table that really took long is predicted to: a deadline before its end is refused."""
    stage.model(max_batch=1)
    stage.measured_slots(0)
    stage.arrive((1, 2**20))
    stage.finish(stage.started[-1], 900.0)
    stage.arrive((1, 2**20))
    (late,) = stage.arrive((1, 4), client=2, deadline=stage.now + 100.0)
    assert "deadline_exceeded" == stage.ends[late]


@pytest.mark.parametrize("dimensions", [2, 7, 64])
def test_predictions_are_bounded_for_any_number_of_dimensions(make_stage, dimensions):
    """A thousand shapes that no two are alike of, each in a batch of its own: their number is all that counts."""
    stage = make_stage(max_queued_requests=2000)
    names = ("batch", *[f"n{number}" for number in range(dimensions - 1)])
    stage.model(dimensions=names)
    join(stage, many_table(names))
    shapes = [(1, *[2 + (number >> axis) % 7 for axis in range(dimensions - 1)]) for number in range(1000)]
    stage.scheduler.handle(
        RequestsArrived(
            requests=tuple(
                [
                    Arrival(id=number, client=number, model="text", sizes=shape, nbytes=1, deadline=1e9)
                    for number, shape in enumerate(shapes, 1)
                ]
            )
        ),
        0.0,
    )
    statistics = stage.scheduler.statistics()
    assert 1000 == statistics.queued + statistics.running


def test_planning_takes_any_number_of_padded_dimensions(stage):
    """200 different shapes of 20 padded dimensions, whose combinations no 64-bit integer counts, share batches."""
    names = ("batch", *[f"n{number}" for number in range(20)])
    stage.model(dimensions=names, padded=True)
    join(stage, None)
    numbers = count()
    shapes = [(1, *[1 + (next(numbers) * 7919) % 251 for _ in range(20)]) for _ in range(200)]
    stage.arrive(*shapes)
    run_all(stage)
    assert {"delivered"} == set(stage.ends.values())


def test_what_is_larger_than_all_that_was_measured_may_take_long(make_stage):
    """A line through the measured calls says 1,000 s: that the bounded price is shorter makes it no hang."""
    stage = make_stage(hangs=HangLimits(min_s=10.0, grace_s=5.0))
    stage.model(max_batch=1)
    stage.measured_slots(0)
    stage.arrive((1, 10**6))
    stage.wait(1000.0)
    stage.finish(stage.started[-1], 1000.0)
    assert {1: "delivered"} == stage.ends


def test_what_prepared_counts_as_the_longest_call_that_ran(stage):
    """One short call is all that was ever measured by itself; what came later was new each time, and took a second."""
    stage.model(max_batch=1)
    stage.slots(0)
    stage.arrive((1, 4), (1, 4))
    run_all(stage, 0.001)
    stage.arrive((1, 5000))
    start = stage.started[-1]
    stage.finished.add(start.batch)
    stage.play(BatchFinished(batch=start.batch, busy_s=1.0, preparations=1))
    stage.arrive((1, 5001))
    (late,) = stage.arrive((1, 4), client=2, deadline=stage.now + 0.25)
    assert "deadline_exceeded" == stage.ends[late]


# ---------------------------------------------------------------- bytes of calls

MIB = 1 << 20
FLOATS = (InputBytes(nbytes=4, axes=(0, 1)),)
"""One input [batch, seq] of f32."""


def refusals(stage: Stage) -> list[tuple[int, str]]:
    """Of the last event."""
    return [(action.id, action.code) for action in stage.last if isinstance(action, Failed)]


def test_what_is_filled_up_beyond_the_bytes_of_a_call_is_refused(stage):
    """Calls have 8 rows: a request without rows that claims a length would hold 8 rows of it."""
    calls = ((8,), *[(8,)] * 8)
    stage.model(inputs=FLOATS, max_batch_bytes=MIB, row_calls=calls, bounds=(8, None))
    stage.slots(0)
    stage.arrive((0, 2**26), (0, HUGE), (1, MIB // 32), (1, MIB // 32 + 1), (8, MIB))
    assert [(1, "too_large"), (2, "too_large"), (4, "too_large")] == refusals(stage)
    run_all(stage)
    assert ["delivered", "delivered"] == [stage.ends[3], stage.ends[5]]


def test_a_request_alone_may_be_as_large_as_it_is(stage):
    """Its own bytes were received: nothing is added to them."""
    stage.model(inputs=FLOATS, max_batch_bytes=MIB, padded=True)
    stage.slots(0)
    stage.arrive((1, MIB), (1, 4), (16, MIB))
    run_all(stage)
    assert {"delivered"} == set(stage.ends.values())


def test_what_no_byte_stands_for_is_bounded_as_if_it_had_some(stage):
    """A size of 0 counts as 1, and rows are those of a batch at most, since outputs may be as large as what is claimed."""
    stage.model(inputs=FLOATS, max_batch_bytes=MIB, max_batch=8)
    stage.slots(0)
    stage.arrive((0, MIB // 4), (0, MIB // 4 + 1), (0, HUGE), (8, 0), (9, 0), (HUGE, 0), (0, 0))
    assert [(2, "too_large"), (3, "too_large"), (5, "too_large"), (6, "too_large")] == refusals(stage)
    run_all(stage)
    assert ["delivered"] * 3 == [stage.ends[id_] for id_ in (1, 4, 7)]


@pytest.mark.parametrize("measured", [False, True])
@pytest.mark.parametrize("max_shapes", [None, 16])
def test_no_batch_holds_more_than_a_call_may(stage, measured, max_shapes):
    """Requests of many lengths: padding and filled rows included, several together never pass the bound."""
    most = 4 * 8 * 200
    stage.model(
        inputs=FLOATS, max_batch_bytes=most, padded=True, max_shapes=max_shapes, bounds=(8, 256), max_batch=8
    )
    if measured:
        stage.play(SlotJoined(slot=0, models=frozenset({"text"}), costs={"text": table(0.05, 1e-6)}))
    else:
        stage.slots(0)
    stage.arrive(*[(1, 1 + number * 37 % 256) for number in range(100)])
    run_all(stage)
    together = [start for start in stage.started if len(start.requests) > 1]
    assert together
    assert all(4 * prod(start.sizes) <= most for start in together)


def test_rows_are_not_filled_up_beyond_the_bytes_of_a_call(stage):
    """A cap of two shapes leaves calls of 1 and of 100 rows: each request runs alone if 100 rows are too many bytes."""
    stage.model(
        inputs=FLOATS,
        max_batch_bytes=4 * 16 * 50,
        max_shapes=2,
        fills_rows=True,
        bounds=(100, 16),
        max_batch=6,
    )
    stage.measured_slots(0, token_s=0.0)
    stage.arrive(*[(1, 16)] * 4)
    run_all(stage)
    assert [(1, 16)] * 4 == [start.sizes for start in stage.started]


# ---------------------------------------------------------------- without calibration


def test_shapes_that_never_come_again_are_charged_what_they_took(stage):
    """Every batch has a new shape, so no call is ever measured; still the slot's time is divided between two clients."""
    stage.model(max_batch=1)
    stage.slots(0)
    lengths = count(1)
    spent = {1: 0.0, 2: 0.0}
    seconds = {1: 1.0, 2: 0.01}
    client_of: dict[int, int] = {}

    def ask(client: int) -> None:
        # Long requests take long; no two are equal.
        length = next(lengths) + (100_000 if client == 1 else 1_000)
        client_of.update(dict.fromkeys(stage.arrive((1, length), client=client), client))

    for client in (1, 2) * 4:
        ask(client)
    now = 0.0
    for _ in range(600):
        start = next(start for start in stage.started if start.batch not in stage.finished)
        assert isinstance(start, Started)
        client = client_of[start.requests[0]]
        now += seconds[client]
        spent[client] += seconds[client]
        stage.finished.add(start.batch)
        report = BatchFinished(batch=start.batch, busy_s=seconds[client], preparations=1)
        stage.play(report, at=now)
        ask(client)
    assert 0.5 < spent[1] / spent[2] < 2.0


# ---------------------------------------------------------------- many dimensions, and what is kept of them


@pytest.mark.parametrize("dimensions", [3, 7, 40])
def test_one_prediction_and_many_agree_in_any_number_of_dimensions(dimensions):
    """Within the measured sizes, between them, beyond them, and without elements."""
    names = ("batch", *[f"n{number}" for number in range(dimensions - 1)])
    costs = CostModel()
    costs.add_model(
        ModelProfile(name="m", dimensions=names, has_batch=True, paddable=(False,) * dimensions, max_batch=8)
    )
    costs.join(0, "w", {"m": many_table(names)}, ["m"])
    prices = costs["m"].on().worker_class
    calls = [
        tuple([(number * 7919 + axis * 104729) % size for axis in range(dimensions)])
        for size in (3, 9, 50, HUGE)
        for number in range(20)
    ]
    rows = np.array([call[0] for call in calls], np.intp)
    shapes = np.array([call[1:] for call in calls], np.intp)
    together = prices.seconds(rows, shapes)
    assert np.isfinite(together).all()
    one_by_one = [prices.second(call[0], call[1:]) for call in calls]
    assert pytest.approx(one_by_one, rel=1e-6) == together.tolist()


@pytest.mark.parametrize("dimensions", [4, 9])
def test_what_is_learned_of_large_sizes_can_be_kept(stage, dimensions):
    """Nodes that nobody measured lie beyond all that a file may hold; the others are kept, and read again."""
    names = ("batch", *[f"n{number}" for number in range(dimensions - 1)])
    ones = (1,) * dimensions
    sizes = [ones, *[(*ones[:axis], 2**20, *ones[axis + 1 :]) for axis in range(dimensions)]]
    costs = CostTable(
        key="k",
        dimensions=names,
        points=tuple(CostPoint(sizes=own, seconds=0.01, first_seconds=0.02) for own in sizes),
    )
    stage.model(dimensions=names)
    join(stage, costs)
    for _ in range(20):
        stage.arrive(ones)
        stage.finish(stage.started[-1], 0.1)
    (learned,) = stage.scheduler.learned_costs(1.0)
    assert learned.seconds
    assert learned == LearnedCosts.from_dict(learned.to_dict())
    again = Stage(learned={learned.table: learned})
    again.model(dimensions=names)
    join(again, costs)
    again.arrive(ones)
    (hopeless,) = again.arrive(ones, deadline=0.02)
    assert "deadline_exceeded" == again.ends[hopeless]
