"""Buckets keep the order of ranks, whatever order they come in; lanes find neighbours."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shapestream.scheduling.costs import CostModel
from shapestream.scheduling.events import Arrival, ModelProfile
from shapestream.scheduling.fairness import QueueRoom
from shapestream.scheduling.model_queue import ModelQueue
from shapestream.scheduling.queueing import DONE, QUEUED, Bucket, Lane, Request


def _queue() -> ModelQueue:
    profile = ModelProfile(
        name="m", dimensions=("batch", "seq"), has_batch=True, paddable=(False, True), max_batch=8
    )
    return ModelQueue(profile, CostModel().add_model(profile), QueueRoom(1000, 10**9))


def _request(queue: ModelQueue, order: int, rank: float, rows: int = 1, length: int = 4) -> Request:
    arrival = Arrival(id=order, client=0, model="m", sizes=(rows, length), nbytes=1)
    return Request(arrival, queue.flow_of(0), rank, order, 0.0, has_batch=True)


@given(
    st.lists(
        st.tuples(st.integers(0, 9), st.integers(0, 3)) | st.integers(0, 60),
        max_size=60,
    ),
    st.integers(1, 12),
)
def test_a_bucket_is_always_in_order(steps, max_rows):
    """Arrivals of any rank and departures from anywhere, beside a plain sorted list."""
    queue = _queue()
    bucket = Bucket((4,), Lane(()), (4,), 4)
    living: list[Request] = []
    for order, step in enumerate(steps):
        if isinstance(step, tuple):
            rank, rows = step
            request = _request(queue, order, float(rank), rows)
            bucket.add(request)
            living.append(request)
            living.sort(key=lambda request: (request.rank, request.order))
        elif living:
            gone = living.pop(step % len(living))
            gone.state = DONE
            bucket.count -= 1
            bucket.rows -= gone.rows
            bucket.drop_dead()
        assert living == [request for request in bucket.held if request.state is QUEUED]
        assert len(bucket.held) <= 2 * len(living) + 32
        if living:
            assert living[0] is bucket.first()
        expected: list[Request] = []
        for request in living[:max_rows]:
            if sum(other.rows for other in expected) + request.rows > max_rows:
                break
            expected.append(request)
        assert expected == bucket.prefix(max_rows)
        assert expected[:1] == bucket.prefix(max_rows, 1)


@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=60),
    st.integers(0, 59),
    st.integers(1, 70),
)
def test_a_window_holds_the_nearest_requests(lengths, choice, size):
    """Contiguous, around the bucket, of the wanted size where so many wait, and not far more to one side."""
    queue = _queue()
    for order, length in enumerate(lengths):
        queue.add(_request(queue, order, 0.0, length=length), 0.0)
    (lane,) = queue.lanes.values()
    bucket = queue.buckets[(lengths[choice % len(lengths)],)]
    window = lane.window(bucket, size)
    assert min(size, len(lengths)) == sum(count for _, count in window)
    assert bucket in [part for part, _ in window]
    places = [lane.position(part) for part, _ in window]
    assert list(range(places[0], places[-1] + 1)) == places
    assert all(0 < count <= part.count for part, count in window)
    smaller = sum(count for part, count in window if part.key < bucket.key)
    larger_held = sum(part.count for part in lane.buckets if not part.key < bucket.key)
    assert smaller <= max(size // 2, size - larger_held)
