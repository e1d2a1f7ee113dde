"""Order: priorities, ageing, and first come, first served."""

from __future__ import annotations

from itertools import count

import pytest
from tests.pipeline.scheduling.stage import table

from shapestream.scheduling.events import SlotJoined


def _busy(stage) -> None:
    """One slot that has run one request, and so knows that a call takes 0.1 s."""
    stage.model(max_batch=1)
    stage.slots(0)
    stage.arrive((1, 4))
    stage.finish(stage.started[0], run_s=0.1)


def _order(stage) -> list[int]:
    """Finishes batch after batch; the ids in the order in which they started."""
    done = 0
    while done < len(stage.started):
        stage.finish(stage.started[done])
        done += 1
    return [id_ for start in stage.started for id_ in start.requests]


@pytest.mark.parametrize(
    ("priorities", "order"),
    [
        ((0, 2, -1), [2, 1, 3]),
        ((32, 10**9, -(10**9), -32), [1, 2, 3, 4]),
        ((5,) * 12, list(range(1, 13))),
    ],
    ids=["highest first", "beyond the bounds as the bounds", "equal as they came"],
)
@pytest.mark.parametrize("max_batch", [1, 3])
def test_requests_that_wait_start_by_priority_and_then_as_they_came(stage, priorities, order, max_batch):
    """Whether each runs alone or three share a batch."""
    stage.model(max_batch=max_batch)
    for priority in priorities:
        stage.arrive((1, 4), priority=priority)
    stage.slots(0)
    assert order == _order(stage)


def test_priority_chooses_between_shapes_too(stage):
    """The lane of the most urgent request is served first."""
    stage.model()
    stage.arrive((1, 4), (1, 4))
    stage.arrive((1, 9), priority=1)
    stage.slots(0)
    assert [(3,)] == stage.starts()


@pytest.mark.parametrize(
    ("priority", "size", "earliest_s", "latest_s"),
    [(2, 4, 1.9, 2.2), (3, 4, 2.8, 3.3), (3, 9, 2.8, 3.3)],
    ids=["two steps", "three steps", "a rare shape"],
)
def test_waiting_a_second_is_worth_a_step_of_priority(stage, priority, size, earliest_s, latest_s):
    """A request of priority 0 starts after so many seconds beside endless urgent ones, though none shares its shape."""
    _busy(stage)
    stage.arrive((1, 4), priority=priority)
    stage.arrive((1, size), priority=0)
    for tenth in range(60):
        stage.arrive((1, 4), priority=priority, at=tenth / 10)
        stage.finish(stage.started[-1], run_s=0.1)
        if (3,) in stage.starts():
            break
    # Each urgent request that came before then has gone, and none that came after.
    assert earliest_s <= stage.now <= latest_s


@pytest.mark.parametrize("clients", [1, 5])
def test_new_clients_do_not_starve_anybody_either(stage, clients):
    """Each urgent request comes from somebody who was never seen before; the common one still has its turn."""
    _busy(stage)
    stage.arrive((1, 4), client=1, priority=2)
    stage.arrive((1, 9), client=1, priority=0)
    for step in range(1000):
        for client in range(clients if step < 5 else 1):
            stage.arrive((1, 4), client=10 + step * clients + client, priority=2)
        stage.finish(stage.started[-1], run_s=0.1, at=step / 10)
        if (3,) in stage.starts():
            break
    # Two steps and the one that a new client may start before virtual time, which passes at half of the time at least;
    # and the work of those that were here before.
    before = 5 * clients
    assert stage.now <= (2.0 + 1.0) * 2 + 0.1 * before + 0.5


def _waits(
    stage, *, long_s: float, clients: int, strangers: bool, long_first: bool, long_priority: int
) -> float:
    """How long a request of priority 0 waits, besides one long call, beside endless requests of priority 1.

    Of these there are always as many as `clients`, 10 ms each: of the same clients, or each of one that is new.
    """
    stage.model("text", max_batch=1)
    stage.model("long", max_batch=1)
    costs = {"text": table(0.01, 0.0, key="text"), "long": table(max(long_s, 0.01), 0.0, key="long")}
    stage.play(SlotJoined(slot=0, models=frozenset(costs), costs=costs))
    numbers = count(100)
    stage.arrive((1, 4), client=next(numbers), priority=1)
    for _ in range(clients - 1):
        stage.arrive((1, 4), client=next(numbers), priority=1)
    common = None
    for turn in count():
        if turn == 3 * clients:
            for is_long in (long_first, not long_first):
                if is_long and long_s:
                    stage.arrive((1, 4), client=1, model="long", priority=long_priority)
                if not is_long:
                    (common,) = stage.arrive((1, 9), client=2)
            came = stage.now
        start = stage.started[-1]
        if common is not None and (common in start.requests or stage.now - came > 10.0 + long_s):
            return stage.now - came - long_s
        took_s = long_s if start.model == "long" else 0.01
        stage.arrive((1, 4), client=next(numbers) if strangers else 100 + turn % clients, priority=1)
        stage.finish(start, run_s=took_s, at=stage.now + took_s)
    raise AssertionError("an endless count has ended")


@pytest.mark.parametrize("long_priority", [0, 32])
@pytest.mark.parametrize("long_first", [True, False])
@pytest.mark.parametrize("strangers", [True, False])
@pytest.mark.parametrize("clients", [1, 3, 30])
@pytest.mark.parametrize("long_s", [0.0, 0.3, 1.0, 2.0, 60.0])
def test_no_call_however_long_stops_ageing(stage, long_s, clients, strangers, long_first, long_priority):
    """A step of priority is worth the same work of the slots after any call: one second, and one more for new clients."""
    waited_s = _waits(
        stage,
        long_s=long_s,
        clients=clients,
        strangers=strangers,
        long_first=long_first,
        long_priority=long_priority,
    )
    # Virtual time counts one client more than there are: three at least, this one, the other and one more.
    assert waited_s <= (1.0 + 1.0) * 3 / 2 + 0.01 * 2 * (clients + 2)


def test_equal_shape_and_priority_keep_their_order(stage):
    """First come, first served, through several batches."""
    stage.model(max_batch=3)
    stage.slots(0)
    for _ in range(3):
        stage.arrive(*[(1, 4)] * 4)
    assert list(range(1, 13)) == _order(stage)
