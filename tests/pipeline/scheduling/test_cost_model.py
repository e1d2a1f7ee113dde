"""What the cost model knows of kinds of slots, workers and requests."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from shapestream.scheduling.cost_model import CostModel
from shapestream.scheduling.events import ModelProfile
from shapestream_engine.cost_table import CostPoint, CostTable

PROFILE = ModelProfile(
    name="m", dimensions=("batch", "seq"), has_batch=True, paddable=(False, True), max_batch=16
)


def table(key: str = "k", *, scale: float = 1.0) -> CostTable:
    """A call costs 1 ms and 10 us per element."""
    return CostTable(
        key=key,
        dimensions=("batch", "seq"),
        points=tuple(
            CostPoint(
                sizes=(rows, seq),
                seconds=scale * (0.001 + 1e-5 * rows * seq),
                first_seconds=scale * (0.001 + 1e-5 * rows * seq) + 0.05,
            )
            for rows in (1, 4, 16)
            for seq in (8, 64, 512)
        ),
    )


def costs_with(*workers: tuple[str, CostTable | None], profile: ModelProfile = PROFILE) -> CostModel:
    """A cost model with a slot per worker, numbered from 0."""
    costs = CostModel()
    costs.add_model(profile)
    for slot, (worker, own) in enumerate(workers):
        costs.join(slot, worker, {} if own is None else {"m": own}, ["m"])
    return costs


def test_nothing_is_known_before_the_first_batch():
    """Without a table no seconds are invented, though calls can be compared."""
    costs = costs_with(("a", None))
    assert not costs.measured("m")
    assert (None, None) == (costs.batch_s("m", (4, 16)), costs.request_s("m", (16,)))
    assert (None, None, 0) == (costs.request_s("m"), costs.call_s("m"), costs.shapes("m"))
    surface = costs.surface("m")
    assert surface.second(4, (16,)) < surface.second(4, (32,))
    assert 2 * surface.second(1, (16,)) > surface.second(2, (16,))


def test_the_first_batch_is_the_first_estimate():
    """One measurement is an estimate, also per request."""
    costs = costs_with(("a", None))
    costs.observe(0, "m", (4, 16), 2.0, requests=4)
    assert costs.measured("m")
    assert pytest.approx(2.0) == costs.batch_s("m", (4, 16))
    assert (2.0, 0.5) == (costs.call_s("m"), costs.request_s("m"))


@pytest.mark.parametrize("busy_s", [-1.0, math.nan, math.inf])
def test_impossible_times_are_ignored(busy_s):
    """A worker's nonsense does not poison the estimates."""
    costs = costs_with(("a", None))
    costs.observe(0, "m", (1, 1), busy_s)
    assert not costs.measured("m")


def test_a_batch_of_an_unknown_model_is_ignored():
    """Only what was added can be learned about."""
    costs = costs_with(("a", None))
    costs.observe(0, "other", (1, 1), 1.0)
    assert costs.call_s("other") is None


def test_a_table_is_believed_from_the_start():
    """What a worker measured is what is predicted."""
    costs = costs_with(("a", table()))
    assert costs.measured("m")
    assert pytest.approx(0.001 + 1e-5 * 4 * 64) == costs.batch_s("m", (4, 64))


def test_slots_that_join_before_their_model_count():
    """A worker may be there before its model is added."""
    costs = CostModel()
    costs.join(0, "a", {"m": table()}, ["m"])
    costs.add_model(PROFILE)
    assert pytest.approx(0.00108) == costs.batch_s("m", (1, 8), 0)


def test_equal_keys_share_a_surface_and_others_do_not():
    """What one worker shows is known of all that are alike, and of no other."""
    costs = costs_with(("a", table("k")), ("b", table("k")), ("c", table("other")))
    before = costs.batch_s("m", (4, 64), 2)
    for _ in range(200):
        costs.observe(0, "m", (4, 64), 0.01)
        costs.observe(1, "m", (4, 64), 0.01)
    assert pytest.approx(0.01, rel=0.06) == costs.surface("m", 1).second(4, (64,))
    assert before == costs.batch_s("m", (4, 64), 2)


def test_workers_of_one_kind_have_speeds_of_their_own():
    """Of two alike on paper one is twice as fast: predictions for each are its own, and a new one is in between."""
    costs = costs_with(("slow", table()), ("fast", table()))
    for _ in range(100):
        costs.observe(0, "m", (4, 64), 0.004)
        costs.observe(1, "m", (4, 64), 0.002)
    assert pytest.approx(2.0, rel=0.05) == costs.speed("m", 0) / costs.speed("m", 1)
    assert pytest.approx(0.004, rel=0.08) == costs.batch_s("m", (4, 64), 0)
    assert pytest.approx(0.002, rel=0.08) == costs.batch_s("m", (4, 64), 1)
    costs.join(2, "new", {"m": table()}, ["m"])
    assert pytest.approx(1.0) == costs.speed("m", 2)


def test_slots_of_one_worker_share_its_speed():
    """A slow process is slow on all of its slots."""
    costs = costs_with(("a", table()), ("a", table()), ("b", table()))
    for _ in range(50):
        costs.observe(0, "m", (4, 64), 0.008)
        costs.observe(2, "m", (4, 64), 0.004)
    assert costs.speed("m", 0) == costs.speed("m", 1) > 1.3


def test_what_is_known_survives_the_last_worker():
    """A worker that is replaced finds what its predecessor has shown."""
    costs = costs_with(("a", table()))
    for _ in range(100):
        costs.observe(0, "m", (4, 64), 0.01)
    costs.leave(0)
    costs.join(1, "b", {"m": table()}, ["m"])
    assert pytest.approx(0.01, rel=0.02) == costs.batch_s("m", (4, 64), 1)
    # But not what its predecessor's devices had prepared.
    assert costs.surface("m").preparation_s(4, (64,)) > 0.0


def test_a_table_for_other_dimensions_is_no_table():
    """What does not fit the model is left aside, not misread."""
    wrong = replace(table(), dimensions=("batch", "width"))
    costs = costs_with(("a", wrong))
    assert not costs.measured("m")


def test_requests_cost_what_they_cost_in_good_company():
    """A short request alone pays for a call; with 15 others of its length it pays a sixteenth."""
    costs = costs_with(("a", table()))
    assert pytest.approx((0.001 + 1e-5 * 16 * 8) / 16) == costs.request_s("m", (8,))
    assert pytest.approx((0.001 + 1e-5 * 16 * 8) / 2) == costs.request_s("m", (8,), rows=8)
    alone = replace(PROFILE, dimensions=("seq",), has_batch=False, paddable=(False,))
    points = (CostPoint(sizes=(8,), seconds=0.5),)
    single = costs_with(("a", CostTable(key="", dimensions=("seq",), points=points)), profile=alone)
    assert 0.5 == single.request_s("m", (8,))


def test_a_request_without_elements_costs_what_the_smallest_call_does():
    """It takes a call of its own, however long it claims to be."""
    costs = costs_with(("w", table()))
    smallest_s = costs.batch_s("m", (1, 1))
    assert [smallest_s] * 3 == [costs.request_s("m", (length,), 0) for length in (1, 64, 2**60)]
    assert smallest_s == costs.batch_s("m", (0, 2**60)) == costs.batch_s("m", (2**60, 0))


def test_preparing_batches_teach_what_preparing_costs_and_nothing_else():
    """The first call of a shape is dear; that it is says nothing about the second."""
    costs = costs_with(("a", table()))
    surface = costs.surface("m")
    assert pytest.approx(0.05, rel=0.1) == surface.preparation_s(4, (64,))
    before = surface.second(4, (64,))
    for seq in range(1, 60):
        costs.observe(0, "m", (4, seq), 0.2, preparations=1)
    assert before == surface.second(4, (64,))
    assert pytest.approx(0.2, rel=0.1) == surface.preparation_s(4, (64,))
    assert 0.0 == surface.preparation_s(4, (59,))


def test_shapes_are_known_per_worker():
    """What one device has prepared, another has not."""
    costs = costs_with(("a", table()), ("b", table()))
    costs.observe(0, "m", (4, 64), 0.004)
    assert 0.0 == costs.surface("m", 0).preparation_s(4, (64,))
    assert 0.0 < costs.surface("m", 1).preparation_s(4, (64,))


def test_known_shapes_are_bounded():
    """However many shapes come, so many are remembered, the newest among them."""
    costs = costs_with(("a", table()))
    for size in range(5000):
        costs.observe(0, "m", (1, size), 0.001)
    assert 4096 == costs.shapes("m")
    surface = costs.surface("m")
    assert 0.0 == surface.preparation_s(1, (4999,)) < surface.preparation_s(1, (1,))


def test_the_most_common_kind_speaks_for_the_model():
    """Without a slot, predictions are those of most slots."""
    costs = costs_with(
        ("a", table("few", scale=10.0)), ("b", table("many")), ("c", table("many")), ("d", table("many"))
    )
    assert pytest.approx(0.00108) == costs.batch_s("m", (1, 8))
    assert pytest.approx(0.0108) == costs.batch_s("m", (1, 8), 0)


def test_a_description_is_plain_data():
    """Kinds, workers and speeds, for people."""
    (kind,) = costs_with(("a", table())).describe("m")
    assert ("k", 9, True, {"a": 1}, {"a": 1.0}) == (
        kind["key"], kind["points"], kind["measured"], kind["slots"], kind["speeds"],
    )  # fmt: skip
