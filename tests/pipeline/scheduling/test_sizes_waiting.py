"""The queue by size, as the page shows it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from tests.pipeline.scheduling.stage import Stage

from shapestream.scheduling.model_queue import MOST_COUNTED, size_bin


def test_requests_are_counted_by_the_bins_of_their_sizes(stage):
    """Rows are no size; what runs does not wait; a model without waiting requests is left out."""
    stage.model(max_batch=1)
    stage.measured_slots(0)
    assert {} == stage.scheduler.sizes_waiting()
    stage.arrive((1, 4), (1, 4), (2, 5), (1, 6), (1, 100))
    queued = stage.scheduler.sizes_waiting()["text"]
    assert (4, ("seq",), {(4,): 2, (6,): 1, (96,): 1}) == queued


def test_of_many_dimensions_the_two_with_the_largest_spread_are_told_apart(stage):
    """By the ratio of their ends: 3 to 40, 1 to 2, 10 to 200."""
    stage.model(dimensions=("batch", "a", "b", "c"))
    stage.arrive((1, 3, 1, 10), (1, 40, 2, 200), (1, 40, 1, 200))
    queued = stage.scheduler.sizes_waiting()["text"]
    assert (3, ("a", "c"), {(3, 8): 1, (32, 192): 2}) == queued


def test_without_dynamic_dimensions_requests_are_only_counted(stage):
    """Nothing tells them apart."""
    stage.model(dimensions=("batch",))
    stage.arrive((1,), (2,))
    assert (2, (), {(): 2}) == stage.scheduler.sizes_waiting()["text"]


def test_of_very_many_shapes_some_stand_for_the_others():
    """So that a count of the queue takes a bounded time."""
    stage = Stage(max_queued_requests=10_000)
    stage.model()
    stage.arrive(*[(1, size) for size in range(1, 3 * MOST_COUNTED + 1)])
    queued = stage.scheduler.sizes_waiting()["text"]
    assert 3 * MOST_COUNTED == queued.waiting == sum(queued.cells.values())


@given(st.integers(0, 1 << 62))
def test_a_bin_begins_at_or_below_its_sizes(size):
    """And is at most half as wide as it begins at."""
    begin = size_bin(size)
    assert begin <= size < max(begin + 1, 1.5 * begin)
    assert begin == size_bin(begin)


def test_the_standing_of_a_slot_is_told(stage):
    """Also of one that has left."""
    stage.model()
    stage.slots(0)
    assert "idle" == stage.scheduler.standing(0)
    stage.arrive((1, 4))
    assert ("busy", "gone") == (stage.scheduler.standing(0), stage.scheduler.standing(1))
