"""What one scheduler learned about costs, the next one begins with, and unlearns as quickly where it is wrong."""

from __future__ import annotations

from dataclasses import replace
from math import exp, log

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shapestream.scheduling.cost_grid import Line
from shapestream.scheduling.costs import CostModel
from shapestream.scheduling.events import (
    Arrival,
    FailRequest,
    ModelAdded,
    ModelProfile,
    RequestsArrived,
    SlotJoined,
)
from shapestream.scheduling.scheduler import Scheduler
from shapestream_engine.cost_table import MAX_SECONDS, CostPoint, CostTable, LearnedCosts

PROFILE = ModelProfile(
    name="m", dimensions=("batch", "seq"), has_batch=True, paddable=(False, True), max_batch=16
)
SIZES = [(1, 8), (3, 40), (4, 64), (16, 64), (9, 300), (16, 512), (16, 700)]
"""At measured points, between them, and beyond."""


def seconds_of(rows: int, seq: int) -> float:
    """A call costs 1 ms and 10 us per element."""
    return 0.001 + 1e-5 * rows * seq


TABLE = CostTable(
    key="k",
    dimensions=("batch", "seq"),
    points=tuple(
        CostPoint(
            sizes=(rows, seq), seconds=seconds_of(rows, seq), first_seconds=seconds_of(rows, seq) + 0.05
        )
        for rows in (1, 4, 16)
        for seq in (8, 64, 512)
    ),
)


def started(
    known: list[LearnedCosts] | None = None,
    *workers: str,
    table: CostTable | None = TABLE,
    profile: ModelProfile = PROFILE,
) -> CostModel:
    """A cost model as a server has it at its start: a slot per worker, numbered from 0."""
    costs = CostModel({learned.table: learned for learned in known or []})
    costs.add_model(profile)
    for slot, worker in enumerate(workers or ("w",)):
        costs.join(slot, worker, {} if table is None else {"m": table}, ["m"])
    return costs


def ran(costs: CostModel, sizes: tuple[int, ...], factor: float, times: int, slot: int = 0) -> None:
    """So many batches took `factor` times what the table says."""
    for _ in range(times):
        costs.observe(slot, "m", sizes, factor * seconds_of(*sizes))


def predictions(costs: CostModel, *asked: tuple[int, ...]) -> list[float]:
    """Of these sizes, else of all `SIZES`, by all that was observed: what is held back until it is 5 % is published."""
    (kind,) = costs._models["m"].kinds.values()
    kind._publish()
    return [costs.surface("m").second(sizes[0], sizes[1:]) for sizes in asked or SIZES]


@given(
    st.lists(st.tuples(st.sampled_from(SIZES), st.floats(0.2, 5.0), st.integers(1, 30)), max_size=8),
    st.sampled_from([("w",), ("v", "w")]),
)
@settings(max_examples=40, deadline=None)
def test_the_next_server_predicts_what_this_one_did(traffic, workers):
    """At measured sizes, between and beyond: within the 1 % by which a node must be off to be kept."""
    before = started(None, *workers)
    for number, (sizes, factor, times) in enumerate(traffic):
        ran(before, sizes, factor, times, slot=number % len(workers))
    after = started(before.learned(1.0), *workers)
    assert predictions(before) == pytest.approx(predictions(after), rel=0.011)


@given(st.floats(-2.0, 2.0).map(exp), st.sampled_from(SIZES[:6]))
@settings(max_examples=40, deadline=None)
def test_what_is_wrong_is_unlearned_as_quickly_as_by_who_learned_it(factor, sizes):
    """A machine that was loaded, or idle, then and is not now: as many batches correct it, after a restart or without."""

    def until_right(costs: CostModel) -> int:
        count = 0
        while abs(log(predictions(costs, sizes)[0] / seconds_of(*sizes))) > log(1.1):
            ran(costs, sizes, 1.0, 1)
            count += 1
        return count

    stayed = started()
    ran(stayed, sizes, factor, 200)
    again = started(stayed.learned(1.0))
    batches = until_right(stayed)
    assert until_right(again) <= batches + 1
    assert batches < 60  # where it is off by up to seven times


def test_corrections_belong_to_the_table_that_they_correct():
    """Measured anew, with another outcome, a model begins with what was measured."""
    before = started()
    ran(before, (4, 64), 3.0, 100)
    point = replace(TABLE.points[0], seconds=0.5)
    other = replace(TABLE, points=(point, *TABLE.points[1:]))
    assert predictions(started(table=other)) == predictions(started(before.learned(1.0), table=other))
    of_another_key = started(before.learned(1.0), table=replace(TABLE, key="other"))
    assert predictions(started()) == predictions(of_another_key)


@pytest.mark.parametrize(("factor", "refused"), [(1.0, []), (5.0, [2])])
def test_the_first_requests_are_judged_by_it(factor, refused):
    """An idle slot takes one; beside it, the next server refuses what would be late, though it has run nothing yet."""
    before = started()
    ran(before, (4, 64), factor, 200)
    (learned,) = before.learned(1.0)
    scheduler = Scheduler(100, 10**6, learned={learned.table: learned})
    scheduler.handle(ModelAdded(model=PROFILE), 0.0)
    scheduler.handle(SlotJoined(slot=0, models=frozenset(["m"]), costs={"m": TABLE}), 0.0)
    deadline = 3.0 * seconds_of(4, 64)
    requests = [
        Arrival(id=number, client=1, model="m", sizes=(4, 64), nbytes=1, deadline=deadline)
        for number in (1, 2)
    ]
    actions = scheduler.handle(RequestsArrived(requests=tuple(requests)), 0.0)
    assert refused == [action.id for action in actions if isinstance(action, FailRequest)]


def test_what_preparing_costs_is_learned_too():
    """Traffic has shown that new shapes cost 0.2 s rather than 0.05: the next server knows, and unlearns it, too."""
    before = started()
    for seq in range(1, 100):
        before.observe(0, "m", (4, seq), seconds_of(4, seq) + 0.2, preparations=1)
    after = started(before.learned(1.0))
    assert 0.2 == pytest.approx(after.surface("m").preparation_s(4, (64,)), rel=0.1)
    for seq in range(1, 60):
        after.observe(0, "m", (4, seq), seconds_of(4, seq) + 0.05, preparations=1)
    assert 0.05 == pytest.approx(after.surface("m").preparation_s(4, (64,)), rel=0.2)


@given(st.floats(0.0, 1.0), st.floats(0.0, 1e-3), st.floats(1.0, 1e4), st.floats(1.0, 100.0))
@settings(max_examples=60, deadline=None)
def test_a_line_goes_on_from_its_ends(fixed_s, element_s, fewest, times):
    """Two points say all of a straight line, and replace what made it."""
    ends = {elements: fixed_s + element_s * elements for elements in (fewest, fewest * times)}
    line = Line()
    line.recall(ends)
    for elements, seconds in ends.items():
        assert seconds == pytest.approx(line.second(elements), rel=1e-6, abs=2e-7)


def test_a_line_that_met_nothing_has_no_ends():
    """And nothing is recalled of it."""
    line = Line()
    line.recall(Line().ends())
    assert ({}, False) == (line.ends(), line.measured)


def test_static_shapes_and_models_without_a_batch_axis_are_kept_too():
    """By the model's own dimensions, whether or not they hold a number of rows."""
    profile = replace(
        PROFILE, dimensions=("seq",), has_batch=False, paddable=(False,), static_shapes=((16,),)
    )
    points = tuple(CostPoint(sizes=(seq,), seconds=seq / 1000) for seq in (8, 16, 64))
    table = CostTable(key="k", dimensions=("seq",), points=points)
    before = started(table=table, profile=profile)
    for seq in (8, 16) * 100:
        before.observe(0, "m", (seq,), 0.5)
    (learned,) = before.learned(1.0)
    after = started([learned], table=table, profile=profile)
    assert {1} == {len(sizes) for sizes in learned.seconds}
    assert [0.5, 0.5] == pytest.approx([after.batch_s("m", (seq,)) for seq in (8, 16)], rel=0.06)


def test_without_a_table_or_before_the_first_batch_nothing_is_kept():
    """There is nothing that it would be a correction of, or no correction."""
    without = started(table=None)
    ran(without, (4, 64), 1.0, 10)
    assert ([], []) == (without.learned(1.0), started().learned(1.0))


def test_batches_are_counted_over_restarts():
    """How much a correction rests on; of a table that serves under two names, the one that rests on more is kept."""
    costs = started()
    ran(costs, (4, 64), 2.0, 10)
    costs = started(costs.learned(1.0))
    ran(costs, (4, 64), 2.0, 5)
    costs.add_model(replace(PROFILE, name="also"))
    costs.join(7, "v", {"also": TABLE}, ["also"])
    (learned,) = costs.learned(2.0)
    assert (15, 2.0, TABLE.digest) == (learned.batches, learned.saved_at, learned.table)


@given(st.dictionaries(st.tuples(st.integers(0, 600), st.integers(0, 600)), st.floats(0.0, MAX_SECONDS)))
@settings(max_examples=50, deadline=None)
def test_whatever_a_file_says_predictions_stay_sensible(seconds):
    """Finite, not negative, never falling where a call grows; sizes that the table has not are nobody's."""
    learned = LearnedCosts(
        table=TABLE.digest, batches=1, saved_at=0.0, seconds=seconds, preparation={0.0: MAX_SECONDS}
    )
    costs = started([learned])
    over = costs.surface("m")
    rows = np.array([1, 2, 4, 16])
    found = [over.seconds(rows, np.full((4, 1), seq)) for seq in (8, 20, 64, 512)]
    assert np.isfinite(found).all()
    assert (np.min(found) >= 0.0, (np.diff(found, axis=0) >= -1e-9 * np.max(found)).all()) == (True, True)
