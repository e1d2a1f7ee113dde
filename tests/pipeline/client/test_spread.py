"""Which of several servers gets a request, in virtual time; and what a session gives up for the others.

The comparison plays clients that know nothing of each other against servers with slots, one request a call: what a rule
costs beside one queue for all, and beside the rules that clients have without it.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.entries import Cancel, Goodbye, RunsAlone
from tests.pipeline.client.bench import SETTINGS, Bench, refusal, result

from shapestream.client.spread import UNKNOWN_S, Prices, least_loaded
from shapestream.client.tickets import Moved
from shapestream.errors import Draining

MEDIAN_S, CLIENTS, REQUESTS = 0.010, 6, 12_000


class Server:
    """Slots, and a queue in order of arrival."""

    def __init__(self, slots: int, pace: float = 1.0) -> None:
        self.pace = pace
        self.free_at = [0.0] * slots

    def run(self, now: float, seconds: float) -> float:
        """When a request that comes now is done."""
        ends = max(now, heapq.heappop(self.free_at)) + seconds * self.pace
        heapq.heappush(self.free_at, ends)
        return ends


class Spreading:
    """A client by the rule: what it knows is its own requests, and the times of their calls."""

    def __init__(self, chance: random.Random, servers: Sequence[Server]) -> None:
        self.chance, self.prices = chance, Prices()
        self.slots = [len(server.free_at) for server in servers]
        self.loads = dict.fromkeys(range(len(servers)), 0.0)
        self.out: list[tuple[float, int, float, int, float]] = []

    def choose(self, now: float, nbytes: int) -> int:
        """Take the answers that have come, and choose."""
        while self.out and self.out[0][0] <= now:
            _, place, charge, size, seconds = heapq.heappop(self.out)
            self.loads[place] -= charge
            self.prices.learn("m", size, seconds)
        places = {place: (load, self.slots[place]) for place, load in self.loads.items()}
        return least_loaded(places, self.prices.of("m", nbytes), self.chance)

    def sent(self, place: int, nbytes: int, seconds: float, ends: float) -> None:
        """It will be answered at `ends`."""
        charge = self.prices.of("m", nbytes)
        self.loads[place] += charge
        heapq.heappush(self.out, (ends, place, charge, nbytes, seconds))


def played(
    servers: Sequence[Server],
    load: float,
    choose: Callable[[float, int, int], int],
    told: Callable[..., None] | None = None,
) -> tuple[float, float]:
    """Median and 99th percentile of the latency, in seconds, of clients that send by a Poisson process together."""
    rng = np.random.default_rng(7)
    sizes = np.clip(rng.lognormal(np.log(24), 0.9, REQUESTS), 4, 256)
    work = MEDIAN_S * sizes / 24
    capacity = sum(len(server.free_at) / server.pace for server in servers) / work.mean()
    arrivals = np.cumsum(rng.exponential(1 / (load * capacity), REQUESTS))
    taken = []
    for number, (now, size, seconds) in enumerate(
        zip(arrivals.tolist(), sizes.tolist(), work.tolist(), strict=True)
    ):
        client, nbytes = number % CLIENTS, int(size) * 8
        place = choose(now, client, nbytes)
        ends = servers[place].run(now, seconds)
        if told is not None:
            told(client, place, nbytes, seconds * servers[place].pace, ends)
        taken.append(ends - now)
    settled = taken[REQUESTS // 6 :]
    return float(np.median(settled)), float(np.quantile(settled, 0.99))


def by_the_rule(servers: Sequence[Server], load: float) -> tuple[float, float]:
    """Latencies under the rule."""
    clients = [Spreading(random.Random(number), servers) for number in range(CLIENTS)]
    return played(
        servers,
        load,
        lambda now, client, nbytes: clients[client].choose(now, nbytes),
        lambda client, *told: clients[client].sent(*told),
    )


@pytest.mark.parametrize(
    "slots",
    [
        pytest.param([2, 2, 2, 2], id="equal"),
        pytest.param([2, 8], id="a-small-and-a-large-one"),
        pytest.param([1, 2, 8], id="three"),
    ],
)
def test_the_rule_beside_others(slots: list[int]) -> None:
    """At 80 % of the capacity: far below pinned clients and turns, and near one queue."""

    def servers() -> list[Server]:
        return [Server(each) for each in slots]

    p50, p99 = by_the_rule(servers(), 0.8)
    _, pinned = played(servers(), 0.8, lambda now, client, nbytes: client % len(slots))
    turns = iter(range(10 * REQUESTS))
    _, in_turn = played(servers(), 0.8, lambda now, client, nbytes: next(turns) % len(slots))
    one_p50, one_p99 = played([Server(sum(slots))], 0.8, lambda now, client, nbytes: 0)
    assert p99 < 0.8 * min(pinned, in_turn)
    assert p99 < 1.2 * one_p99
    assert p50 < 1.5 * one_p50


def test_a_slow_server_gets_less() -> None:
    """Its requests stay out longer, and so count for longer: no knowledge of it is needed."""
    servers = [Server(2), Server(2), Server(2, pace=4.0)]
    given: list[int] = []
    clients = [Spreading(random.Random(number), servers) for number in range(CLIENTS)]

    def told(client: int, place: int, *rest: Any) -> None:
        given.append(place)
        clients[client].sent(place, *rest)

    played(servers, 0.7, lambda now, client, nbytes: clients[client].choose(now, nbytes), told)
    shares = np.bincount(given) / len(given)
    assert 0.04 < shares[2] < 0.2
    assert abs(shares[0] - shares[1]) < 0.05


def test_prices_follow_answers() -> None:
    """Of the same size, of the nearest one, of all; a mean of late answers for the most part."""
    prices = Prices()
    assert UNKNOWN_S == prices.of("m", 100)
    prices.learn("m", 100, 0.2)
    assert 0.2 == prices.of("m", 100) == prices.of("m", 9_000) == prices.of("other", 5)
    prices.learn("m", 10_000, 2.0)
    assert (0.2, 2.0) == (prices.of("m", 300), prices.of("m", 5_000))
    for _ in range(200):
        prices.learn("m", 100, 0.4)
    assert prices.of("m", 100) == pytest.approx(0.4, rel=0.01)


def test_equal_loads_are_drawn() -> None:
    """Or all clients would begin with the same server."""
    chance = random.Random(1)
    assert {"a", "b"} == {
        least_loaded({"a": (0.0, 1), "b": (1.0, 2), "c": (1.0, 1)}, 1.0, chance) for _ in range(20)
    }


@pytest.fixture
def giving() -> Bench:
    """A session beside others, to which its requests may go."""
    return Bench(replace(SETTINGS, gives_up=True))


def moved(bench: Bench) -> list[Any]:
    """What came out of it as moved."""
    return [ticket.outcome for ticket in bench.finished if isinstance(ticket.outcome, Moved)]


def test_a_server_that_vanishes_gives_up_what_it_had(giving: Bench) -> None:
    """Suspect is what was sent, the one that ran alone more so; when it is back, it is told to cancel them."""
    model = giving.open(requests=2)
    sent = [giving.submit(model) for _ in range(3)]
    giving.turn()
    giving.receive(RunsAlone(sequence=sent[0].id))
    giving.turn()
    giving.session.broke(giving.now)
    giving.turn()
    assert [Moved(True, 1), Moved(True, 0), Moved(False, None)] == moved(giving)
    giving.wait_until_due()
    giving.session.connected(giving.now)
    giving.turn()
    giving.welcome(epoch=b"a")
    assert {sent[0].id, sent[1].id} == {
        entry.sequence for entry in giving.sent() if isinstance(entry, Cancel)
    }


def test_a_server_that_says_goodbye_has_killed_nobody(giving: Bench) -> None:
    """What it took may have run, and is no suspect."""
    model = giving.open()
    giving.submit(model)
    giving.turn()
    giving.receive(Goodbye())
    giving.turn()
    assert [Moved(True, None)] == moved(giving)
    assert not giving.session.takes_requests


def test_a_draining_server_gives_up_what_it_refuses(giving: Bench) -> None:
    """And what waits for credit; the rest it answers."""
    model = giving.open(requests=2)
    first, second, _ = [giving.submit(model) for _ in range(3)]
    giving.turn()
    giving.receive(refusal(first.id, Draining.code))
    giving.turn()
    assert [Moved(False, None)] * 2 == moved(giving)
    giving.receive(result(second.id))
    giving.turn()
    assert [Moved(False, None)] * 2 == moved(giving)
    assert second.outcome is not None


def test_a_request_for_a_server_that_is_not_there_is_given_back(giving: Bench) -> None:
    """In the next turn, unsent."""
    model = giving.open()
    giving.session.broke(giving.now)
    giving.turn()
    giving.submit(model)
    giving.turn()
    assert [Moved(False, None)] == moved(giving)
