"""Equal shares in true seconds: of what calls take, not of what requests would cost in good company."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import count, cycle, islice
from statistics import median

import pytest
from tests.pipeline.scheduling.stage import Stage, table

from shapestream.scheduling.events import SlotJoined

CALL_S = 0.01
"""Seconds of any call, whatever its rows: company is free."""


class Client:
    """A client that asks `model` for these sizes in turn, and always has `in_flight` requests that have not ended."""

    def __init__(
        self, sizes: Sequence[tuple[int, ...]], in_flight: int, model: str = "text", *, fails: bool = False
    ) -> None:
        self.sizes: Iterator[tuple[int, ...]] = cycle(sizes)
        self.in_flight = in_flight
        self.model = model
        self.fails = fails
        self.busy_s = 0.0
        """Its part of the calls, by rows."""
        self.answered = 0
        self.waits_s: list[float] = []
        self.arrived: dict[int, float] = {}


def _play(
    stage: Stage, clients: Mapping[int, Sequence[Client]], seconds: Mapping[str, float], until: float
) -> None:
    """One slot serves all models, whose calls take these `seconds`, in closed loops until that time."""
    costs = {name: table(took_s, 0.0, key=name) for name, took_s in seconds.items()}
    stage.play(SlotJoined(slot=0, models=frozenset(seconds), costs=costs))
    owners: dict[int, Client] = {}
    for number, asks in clients.items():
        for client in asks:
            _ask(stage, number, client, client.in_flight, owners)
    while stage.now < until:
        start = stage.started[-1]
        took_s = seconds[start.model]
        members = [owners[id_] for id_ in start.requests]
        for member in members:
            member.busy_s += took_s / len(members)
        now = stage.now + took_s
        stage.now = now
        if any(member.fails for member in members):
            stage.fail(start)
        else:
            for id_, member in zip(start.requests, members, strict=True):
                member.waits_s.append(now - member.arrived[id_])
            stage.finish(start, run_s=took_s, at=now)
            for member in members:
                member.answered += 1
        for number, asks in clients.items():
            for client in asks:
                ended = sum(id_ in stage.ends for id_ in client.arrived)
                _ask(stage, number, client, client.in_flight - len(client.arrived) + ended, owners)


def _ask(stage: Stage, number: int, client: Client, requests: int, owners: dict[int, Client]) -> None:
    """Requests of one client arrive together."""
    client.arrived = {id_: at for id_, at in client.arrived.items() if id_ not in stage.ends}
    if requests > 0:
        ids = stage.arrive(*islice(client.sizes, requests), client=number, model=client.model)
        owners.update(dict.fromkeys(ids, client))
        client.arrived.update(dict.fromkeys(ids, stage.now))


def _share(one: Client, other: Client) -> float:
    return one.busy_s / (one.busy_s + other.busy_s)


@pytest.mark.parametrize("in_flight", [2, 5, 200])
def test_a_client_whose_requests_share_no_calls_gets_half_of_the_slot(stage, in_flight):
    """Each of its sizes runs alone, beside a client whose requests share calls of sixteen. Bound: five calls."""
    stage.model(max_batch=16)
    apart = Client([(1, 5 + step) for step in range(in_flight)], in_flight)
    batched = Client([(1, 4)], 64)
    _play(stage, {1: [apart], 2: [batched]}, {"text": CALL_S}, until=2.0)
    assert abs(apart.busy_s - batched.busy_s) <= 5 * CALL_S


def test_a_backlog_of_requests_that_share_no_calls_takes_no_more_than_its_half_at_any_time(stage):
    """Three hundred that arrived at once are charged one by one: after any of the calls the other client has as much."""
    stage.model(max_batch=16)
    apart = Client([(1, 5 + step) for step in range(300)], 300)
    batched = Client([(1, 4)], 64)
    for step in range(1, 40):
        stage = Stage()
        stage.model(max_batch=16)
        apart.busy_s = batched.busy_s = 0.0
        apart.arrived, batched.arrived = {}, {}
        _play(stage, {1: [apart], 2: [batched]}, {"text": CALL_S}, until=step * CALL_S)
        assert abs(apart.busy_s - batched.busy_s) <= 3 * CALL_S


def test_four_requests_that_fail_take_no_more_than_half_of_the_slot(stage):
    """A client that always has four failing ones in flight, beside one that is well batched: that gets its half.

    What runs again because of a failing request counts as the failing client's. Three of sixteen places in the other's
    batches stay empty, because the failing ones that wait were to take them.
    """
    stage.model(max_batch=16)
    failing = Client([(1, 4)], 4, fails=True)
    batched = Client([(1, 4)], 64)
    _play(stage, {1: [failing], 2: [batched]}, {"text": CALL_S}, until=5.0)
    alone = 16 * 5.0 / CALL_S
    assert 0.8 * alone / 2 <= batched.answered


def test_two_clients_share_equally_though_one_asks_two_models(stage):
    """Each gets half of the slot; the second client's half is divided between its models. Bound: what each asks at first."""
    for name in ("slow", "fast"):
        stage.model(name, max_batch=4)
    one = Client([(1, 4)], 16, "slow")
    slow, fast = Client([(1, 4)], 16, "slow"), Client([(1, 4)], 16, "fast")
    seconds = {"slow": 0.1, "fast": CALL_S}
    _play(stage, {1: [one], 2: [slow, fast]}, seconds, until=20.0)
    assert abs(one.busy_s - slow.busy_s - fast.busy_s) <= 4 * (0.1 + CALL_S)
    assert abs(slow.busy_s - fast.busy_s) <= 4 * (0.1 + CALL_S)


def test_a_name_with_two_versions_gets_no_more_of_its_clients_share_than_a_name_with_one(stage):
    """Half of the slot each; the versions take turns in order of arrival, so neither waits for ever."""
    names = ("m@3", "m@4", "other")
    for name in names:
        stage.model(name, max_batch=1)
    three, four, other = (Client([(1, 4)], 8, name) for name in names)
    _play(stage, {1: [three, four, other]}, dict.fromkeys(names, CALL_S), until=10.0)
    assert abs(three.busy_s + four.busy_s - other.busy_s) <= 2 * CALL_S
    assert abs(three.busy_s - four.busy_s) <= 8 * CALL_S


@pytest.mark.parametrize("clients", [1, 3])
def test_a_models_light_work_does_not_wait_behind_the_same_clients_queue_for_another(stage, clients):
    """Each client has fifty requests for a slow model in flight, and one at a time for a fast one: that goes next, or
    after one request of each other client."""
    for name in ("slow", "fast"):
        stage.model(name, max_batch=1)
    fast = [Client([(1, 4)], 1, "fast") for _ in range(clients)]
    slow = [Client([(1, 4)], 50, "slow") for _ in range(clients)]
    asks = {number: [slow[number], fast[number]] for number in range(clients)}
    _play(stage, asks, {"slow": 0.1, "fast": CALL_S}, until=20.0)
    for client in fast:
        assert median(client.waits_s) <= clients * (0.1 + CALL_S) + 1e-9


def test_a_deadline_of_light_work_is_not_refused_for_the_same_clients_queue_for_another(stage):
    """A hundred calls of 0.1 s wait for the slow model; the fast one's request is due in 0.3 s, and is answered."""
    for name in ("slow", "fast"):
        stage.model(name, max_batch=1)
    costs = {"slow": table(0.1, 0.0, key="slow"), "fast": table(CALL_S, 0.0, key="fast")}
    stage.play(SlotJoined(slot=0, models=frozenset(costs), costs=costs))
    stage.arrive(*[(1, 4)] * 100, model="slow")
    (light,) = stage.arrive((1, 4), model="fast", deadline=0.3)
    while light not in stage.ends:
        start = stage.started[-1]
        stage.finish(start, at=stage.now + (0.1 if start.model == "slow" else CALL_S))
    assert "delivered" == stage.ends[light]


def test_a_client_that_asks_model_after_model_gets_no_more_than_one_share(stage):
    """It has two requests in flight, of ten models in turn, beside a client with a backlog for one. Bound: two calls."""
    names = [f"model {number}" for number in range(10)]
    for name in names:
        stage.model(name, max_batch=1)
    seconds = dict.fromkeys(names, 0.1)
    stage.play(
        SlotJoined(
            slot=0,
            models=frozenset(names),
            costs={name: table(took_s, 0.0, key=name) for name, took_s in seconds.items()},
        )
    )
    stage.arrive(*[(1, 4)] * 300, client=1, model=names[0])
    models = cycle(names[1:])
    owned = set[int]()
    served = Counter[bool]()
    for turn in count():
        while len(owned - stage.ends.keys()) < 2:
            owned.update(stage.arrive((1, 4), client=2, model=next(models)))
        if turn == 200:
            break
        start = stage.started[-1]
        served[start.requests[0] in owned] += 1
        stage.finish(start, at=stage.now + 0.1)
    assert abs(served[True] - served[False]) <= 2


def test_an_urgent_stream_for_one_model_does_not_starve_the_same_clients_other_model(stage):
    """Ageing holds between the models of one client: a step of priority is worth a second of its work."""
    for name in ("urgent", "plain"):
        stage.model(name, max_batch=1)
    costs = {name: table(0.1, 0.0, key=name) for name in ("urgent", "plain")}
    stage.play(SlotJoined(slot=0, models=frozenset(costs), costs=costs))
    stage.arrive((1, 4), model="urgent", priority=2)
    stage.arrive((1, 4), model="urgent", priority=2)
    (plain,) = stage.arrive((1, 4), model="plain")
    while (plain,) != stage.started[-1].requests and stage.now < 10.0:
        stage.arrive((1, 4), model="urgent", priority=2)
        stage.finish(stage.started[-1], at=stage.now + 0.1)
    assert 1.8 <= stage.now <= 2.4
