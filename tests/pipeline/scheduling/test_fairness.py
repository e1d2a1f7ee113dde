"""Fair shares between clients, by predicted cost. A row of 4 takes 0.1 s unless a test says otherwise."""

from __future__ import annotations

import tracemalloc
from collections import Counter
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.pipeline.scheduling.stage import Stage, table

from shapestream.scheduling.events import Arrival, RequestsAbandoned, SlotJoined
from shapestream.scheduling.fairness import LEAD_BATCHES, PATIENCE, FairShares, Flow, GroupRoom, QueueRoom


def _shares() -> FairShares[Flow]:
    return FairShares(lambda: None, GroupRoom(QueueRoom(1, 1), "m"))


def _order(stage, until: int = 10**6) -> list[int]:
    """Finishes batch after batch; the ids in the order in which they started."""
    done = 0
    while done < min(len(stage.started), until):
        stage.finish(stage.started[done], at=stage.now + 0.1)
        done += 1
    return [id_ for start in stage.started[:until] for id_ in start.requests]


@pytest.fixture
def alone(stage):
    """A slot that runs one request at a time, and is busy with request 1 of client 0."""
    stage.model(max_batch=1)
    stage.measured_slots(0)
    stage.arrive((1, 4))
    return stage


def test_a_client_that_sends_much_queues_behind_itself(alone):
    """A single request of another client goes next, though fifty are older."""
    alone.arrive(*[(1, 4)] * 50, client=1)
    alone.arrive((1, 4), client=2)
    assert 52 in _order(alone)[:3]


def test_two_backlogged_clients_take_turns(alone):
    """Equal costs: one of each, in turn, whoever sent first."""
    alone.arrive(*[(1, 4)] * 6, client=1)
    alone.arrive(*[(1, 4)] * 6, client=2)
    turns = [1 if id_ < 8 else 2 for id_ in _order(alone)[1:]]
    assert {1: 6, 2: 6} == Counter(turns)
    assert all({1, 2} == set(turns[at : at + 2]) for at in range(0, 12, 2))


def test_shares_are_counted_in_cost_not_in_requests(alone):
    """Requests that take about four times as long get a quarter of the turns."""
    alone.arrive(*[(1, 128)] * 10, client=1)  # 0.224 s each
    alone.arrive(*[(1, 4)] * 20, client=2)
    sizes = Counter(start.sizes[1] for start in alone.started)
    order = _order(alone, until=20)
    long, short = (sum(low < id_ <= high for id_ in order) for low, high in ((1, 11), (11, 31)))
    assert sizes
    assert abs(long * 0.224 - short * 0.1) <= 0.224 + 0.1


def test_clients_that_nobody_waits_for_go_in_the_order_of_arrival(alone):
    """Each has one request at a time; then who came first goes first."""
    for client in (5, 3, 9, 1):
        alone.arrive((1, 4), client=client)
    assert [1, 2, 3, 4, 5] == _order(alone)


def test_one_client_alone_goes_in_its_own_order(alone):
    """Whatever the shapes, where each runs by itself."""
    alone.arrive((1, 9), (1, 4), (1, 30), (1, 4), client=1)
    assert [1, 2, 3, 4, 5] == _order(alone)


def test_idle_clients_save_nothing_up(alone):
    """Who was away for long gets its share from now on, not what it did not use."""
    alone.arrive(*[(1, 4)] * 20, client=1)
    _order(alone, until=15)
    alone.arrive(*[(1, 4)] * 6, client=2)
    order = _order(alone)
    late = [at for at, id_ in enumerate(order) if id_ > 21]
    assert late[-1] - late[0] >= 9, "it would have gone six times in a row"


def test_a_debt_is_forgiven_when_nothing_waits(alone):
    """A client that had all slots while nobody else came is a client like any other afterwards."""
    alone.arrive(*[(1, 4)] * 20, client=1)
    _order(alone)
    alone.arrive((1, 4), client=3)
    alone.arrive((1, 4), client=1)
    alone.arrive((1, 4), client=2)
    assert [22, 23, 24] == _order(alone)[-3:]


def test_models_on_the_same_slots_share_one_account(stage):
    """A flood for one model does not delay another client's request for the other."""
    stage.model("text", max_batch=1)
    stage.model("image", max_batch=1)
    stage.slots(0, models=("text", "image"))
    stage.arrive((1, 4), client=0)
    stage.arrive(*[(1, 4)] * 30, client=1, model="text")
    stage.arrive((1, 4), client=2, model="image")
    assert 32 in _order(stage)[:3]


def test_models_on_other_slots_have_an_account_of_their_own(stage):
    """A client that floods one model is not behind with another that shares no slot; it is once a slot serves both."""
    stage.model("text", max_batch=1)
    stage.model("image", max_batch=1)
    stage.slots(0, models=("text",))
    stage.slots(1, models=("image",))
    stage.arrive((1, 4), client=3, model="image")
    stage.arrive(*[(1, 4)] * 30, client=1, model="text")
    stage.arrive((1, 4), client=1, model="image")
    stage.arrive((1, 4), client=2, model="image")
    stage.finish(next(start for start in stage.started if start.model == "image"))
    assert [(32,)] == stage.starts()
    stage.slots(2, models=("text", "image"))
    assert 33 in _order(stage, until=6)


@pytest.mark.parametrize("slots", [1, 3])
def test_a_flood_delays_a_lone_request_by_about_a_batch(make_stage, slots):
    """For a long time one client keeps hundreds waiting; another's request starts with the next batch or the one
    after."""
    stage = make_stage(max_queued_requests=10_000)
    stage.model(max_batch=8)
    stage.measured_slots(*range(slots))
    stage.arrive(*[(1, 4)] * 400, client=1)
    done = 0
    for turn in range(150):
        lone = None
        if turn % 7 == 0:
            (lone,) = stage.arrive((1, 4 + turn % 3), client=2)
            before = len(stage.started)
        for _ in range(2 * slots):
            start = stage.started[done]
            stage.finish(
                start, run_s=0.096 + 0.001 * start.sizes[0] * start.sizes[1], at=stage.now + 0.1 / slots
            )
            done += 1
            stage.arrive(*[(1, 4)] * len(start.requests), client=1)
        if lone is not None:
            waited = [lone in start.requests for start in stage.started[before:]].index(True)
            assert waited <= slots, "more than one batch per slot went before it"


@pytest.mark.parametrize(("call_s", "clients"), [(0.1, 5), (1.0, 20)])
def test_a_client_of_small_requests_gets_its_share_beside_others_with_long_calls(stage, call_s, clients):
    """Each has a request running or waiting at any time; the small ones take a hundredth of the others' time each."""
    stage.model("small", max_batch=1)
    stage.model("large", max_batch=1)
    seconds = {"small": call_s / 100, "large": call_s}
    costs = {name: table(took_s, 0.0, key=name) for name, took_s in seconds.items()}
    stage.play(SlotJoined(slot=0, models=frozenset(costs), costs=costs))
    for client in range(clients + 1):
        stage.arrive((1, 4), (1, 4), client=client, model="large" if client else "small")
    owner = {id_: client for client in range(clients + 1) for id_ in (2 * client + 1, 2 * client + 2)}
    served = Counter[int]()
    while stage.now < 30 * call_s * (clients + 1):
        start = stage.started[-1]
        client, took_s = owner[start.requests[0]], seconds[start.model]
        served[client] += took_s
        (following,) = stage.arrive((1, 4), client=client, model=start.model)
        owner[following] = client
        stage.finish(start, run_s=took_s, at=stage.now + took_s)
    assert abs(served[0] - served[clients]) <= 2 * call_s


def test_a_request_that_is_left_waiting_saves_nothing_up(alone):
    """A client with a request of low priority that nobody serves gets no more than turns about when it sends others."""
    alone.arrive((1, 4), client=1, priority=-32)
    alone.arrive(*[(1, 4)] * 400, client=2)
    _order(alone, until=200)
    before = len(alone.started)
    alone.arrive(*[(1, 4)] * 400, client=1)
    turns = Counter(id_ > 402 for id_ in _order(alone, until=before + 300)[before:])
    # At most its share of what was served meanwhile comes back to it, and then every other turn.
    assert turns[True] <= before / 3 + 150


COSTS = st.floats(0.001, 0.3)


def _flow(shares: FairShares[Flow], number: int) -> Flow:
    """The flow of a client, for the only model that there is."""
    client = shares.client(number)
    return client.flows.setdefault("m", Flow(client, "m"))


def _stamp(
    shares: FairShares[Flow], flow: Flow, share_s: float, priority: int
) -> tuple[float, float, float, float]:
    """A request of 1 x 4 is queued; place, rank, and the two bonuses of its priority."""
    arrival = Arrival(id=0, client=0, model="m", sizes=(1, 4), nbytes=16, priority=priority)
    return shares.stamp(flow, arrival, share_s)


def _leave(flow: Flow, share_s: float) -> None:
    """One request of this flow is queued no longer."""
    flow.queued -= 1
    flow.queued_s -= share_s
    if not flow.queued:
        flow.run_empty()


def _run(
    shares: FairShares[Flow], flow: Flow, share_s: float, priority: tuple[float, float] = (0.0, 0.0)
) -> None:
    """A request of this flow gets a batch, alone; `priority` as it was stamped."""
    shares.start(flow, *priority, {flow: share_s}, share_s)
    _leave(flow, share_s)


@settings(max_examples=60, deadline=None)
@given(costs=st.tuples(COSTS, COSTS), counts=st.integers(2, 60))
def test_backlogged_clients_get_equal_cost_within_one_request(costs, counts):
    """Two clients that always have something waiting, in any number of turns: within the largest cost of one request
    each."""
    shares = _shares()
    flows = [_flow(shares, client) for client in (1, 2)]
    served = [0.0, 0.0]
    for flow in flows:
        _stamp(shares, flow, 0.1, 0)
    for _ in range(counts):
        which = min((0, 1), key=lambda which: flows[which].client.start_s)
        _stamp(shares, flows[which], 0.1, 0)
        _run(shares, flows[which], costs[which])
        served[which] += costs[which]
    assert abs(served[0] - served[1]) <= sum(costs) + 1e-9


@settings(max_examples=60, deadline=None)
@given(
    steps=st.lists(
        st.tuples(st.integers(1, 4), st.integers(-32, 32), COSTS, st.integers(0, 9)), min_size=1, max_size=60
    )
)
def test_ranks_of_requests_that_are_alike_never_turn_around(steps):
    """However many clients come and go meanwhile: first come, first served, of those that are queued."""
    shares = _shares()
    others: list[Flow] = []
    waiting: list[tuple[Flow, int, float, float, tuple[float, float]]] = []
    for client, priority, cost_s, clients in steps:
        while len(others) < clients:
            others.append(_flow(shares, 100 + len(others)))
            _stamp(shares, others[-1], 0.0, 0)
        while len(others) > clients:
            _leave(others[-1], 0.0)
            shares.ended(others.pop())
        flow = _flow(shares, client)
        place, rank, *bonus = _stamp(shares, flow, cost_s, priority)
        before = [each for each in waiting if each[:2] == (flow, priority)]
        assert place >= max([each[2] for each in before], default=place)
        assert rank >= max([each[3] for each in before], default=rank)
        waiting.append((flow, priority, place, rank, (bonus[0], bonus[1])))
        if (
            len(waiting) > 2
        ):  # of three that wait the second runs, for a thousandth of what it was taken to cost
            flow, _, _, _, stamped = waiting.pop(1)
            _run(shares, flow, cost_s / 1000, stamped)


@given(stream=st.lists(st.tuples(st.integers(0, 32), COSTS), min_size=1, max_size=20))
@settings(max_examples=40, deadline=None)
def test_an_endless_stream_passes_nobody_for_ever(stream):
    """Newcomers of any priority, each from a client that was never here: after bounded work a waiting request goes
    first."""
    shares = _shares()
    waiting = _flow(shares, 0)
    _stamp(shares, waiting, 0.1, 0)
    _stamp(shares, _flow(shares, -1), 0.0, 0)
    clients, work_s = 3, 0.0
    while True:
        priority, cost_s = stream[int(work_s * 1e6) % len(stream)]
        newcomer = _flow(shares, 1 + int(work_s * 1e9))
        _, _, bonus_s, lead_s = _stamp(shares, newcomer, cost_s, priority)
        if newcomer.client.start_s - lead_s > waiting.client.start_s:
            break
        _run(shares, newcomer, cost_s, (bonus_s, lead_s))
        shares.ended(newcomer)
        work_s += cost_s
    # The lead of the largest priority in virtual time, which passes at 1 / (clients + 1) at least, and a call each.
    longest_s = max(cost_s for _, cost_s in stream)
    assert work_s <= (LEAD_BATCHES * longest_s / clients) * (clients + 1) + 3 * longest_s * (clients + 1)


def test_clients_that_are_gone_are_forgotten():
    """Memory follows those that are here, not all that ever came: 2 MB and more."""
    shares = _shares()
    tracemalloc.start()
    try:
        for client in range(20_000):
            flow = _flow(shares, client)
            _, _, bonus_s, lead_s = _stamp(shares, flow, 0.01, client % 3)
            _run(shares, flow, 0.01, (bonus_s, lead_s))
            shares.ended(flow)
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept <= 100_000


def test_the_short_pass_the_long_of_their_client(alone):
    """A request of 0.224 s waits, and three of 0.1 s come later. One goes first: the others follow twice its work."""
    alone.arrive((1, 128))
    alone.arrive(*[(1, 4)] * 3)
    assert [1, 3, 2, 4, 5] == _order(alone)


def test_what_is_submitted_together_is_passed_by_what_comes_alone(alone):
    """Ten rows of one call, all of 0.1 s, and then two single requests: the singles go first."""
    alone.arrive(*[(1, 4)] * 10, submitted=10)
    alone.arrive((1, 4))
    alone.arrive((1, 4))
    assert [1, 12, 13, *range(2, 12)] == _order(alone)


def test_nothing_is_passed_for_longer_than_twice_its_own_work(alone):
    """A call of ten rows of 0.1 s, and singles without end, one after each batch: of at most 2 s, and some pass it."""
    alone.arrive(*[(1, 4)] * 10, submitted=10)
    alone.arrive((1, 4))
    done = 0
    while 2 not in [id_ for start in alone.started for id_ in start.requests]:
        alone.finish(alone.started[done], at=alone.now + 0.1)
        done += 1
        alone.arrive((1, 4))
    passed = [id_ for start in alone.started for id_ in start.requests if id_ > 11]
    assert 5 <= len(passed) <= 20


@given(
    drawn=st.lists(
        st.tuples(st.sampled_from([4, 16, 128]), st.sampled_from([1, 8]), st.booleans()),
        min_size=2,
        max_size=30,
    ),
    seconds=st.lists(st.floats(0.001, 2.0), min_size=1, max_size=5),
)
@settings(max_examples=60, deadline=None)
def test_requests_that_are_alike_start_in_their_order(drawn, seconds):
    """Whatever comes between them, and whatever the calls turn out to take: prices change while they wait."""
    stage = Stage()
    stage.model(max_batch=1)
    stage.measured_slots(0)
    kinds: dict[int, tuple[int, int]] = {}
    done = 0
    for length, submitted, runs in drawn:
        (id_,) = stage.arrive((1, length), submitted=submitted)
        kinds[id_] = length, submitted
        if runs and done < len(stage.started):
            took_s = seconds[done % len(seconds)]
            stage.finish(stage.started[done], took_s, at=stage.now + took_s)
            done += 1
    while done < len(stage.started):
        stage.finish(stage.started[done], at=stage.now + 0.1)
        done += 1
    started = [id_ for start in stage.started for id_ in start.requests]
    assert sorted(kinds) == sorted(started)
    for kind in set(kinds.values()):
        own = [id_ for id_ in started if kinds[id_] == kind]
        assert sorted(own) == own


def test_a_client_that_leaves_and_returns_under_a_flood_is_not_better_off():
    """Its tag outlives its requests while others wait."""
    stage = Stage()
    stage.model(max_batch=1)
    stage.measured_slots(0)
    stage.arrive(*[(1, 4)] * 5, client=1)
    stage.arrive(*[(1, 4)] * 5, client=2)
    order = _order(stage, until=6)
    assert 3 == sum(id_ <= 5 for id_ in order)


def _backlogs(stage: Stage) -> None:
    """Client 1 has thirty requests waiting, and client 2 came later with thirty."""
    stage.arrive(*[(1, 4)] * 30, client=1)
    stage.arrive(*[(1, 4)] * 30, client=2)


def test_what_was_dropped_before_it_ran_is_not_charged(alone):
    """A caller goes, and is back with something else while others wait: it goes in turn, not behind what it had."""
    _backlogs(alone)
    alone.play(RequestsAbandoned(ids=tuple(range(2, 32))))
    alone.arrive((1, 4), client=1)
    assert 62 in _order(alone, until=3)


def test_what_ran_is_charged_though_its_caller_left(alone):
    """Coming back again and again buys no turns: half of them go to the other, however often it comes back."""
    alone.arrive(*[(1, 4)] * 30, client=2)
    for turn in range(20):
        alone.arrive((1, 4), (1, 4), client=1)
        own = (30 + 2 * turn + 2, 30 + 2 * turn + 3)
        alone.finish(alone.started[-1], at=alone.now + 0.1)
        alone.play(RequestsAbandoned(ids=own))
    turns = Counter(2 if 2 <= id_ <= 31 else 1 for start in alone.started[1:] for id_ in start.requests)
    assert abs(turns[1] - turns[2]) <= 2


@given(
    share_s=st.lists(st.sampled_from([0.0, 0.1, 0.3, 7.0]), min_size=1, max_size=12),
    dropped=st.sets(st.integers(0, 11)),
    newest_first=st.booleans(),
    priority=st.sampled_from([0, 3, -3]),
)
def test_withdrawing_never_lets_a_client_pass_itself(share_s, dropped, newest_first, priority):
    """Whatever is dropped, in whatever order: the next request goes behind those that are left, and nothing is charged."""
    shares = _shares()
    flow = _flow(shares, 1)
    ranks = [_stamp(shares, flow, share, priority)[0] for share in share_s]
    for at in sorted(dropped & set(range(len(ranks))), reverse=newest_first):
        _leave(flow, share_s[at])
        shares.ended(flow)
    left = [ranks[at] for at in range(len(ranks)) if at not in dropped]
    again, _, bonus_s, _ = _stamp(shares, flow, 0.1, priority)
    assert again >= max(left, default=-bonus_s)
    assert 0.0 == flow.client.start_s
    if not left:
        assert PATIENCE * 0.1 - bonus_s == again


def test_a_client_that_never_waited_is_owed_nothing(stage):
    """Its requests overlap while they run, beside a flood: none of its turns was missed, so it saves up none."""
    stage.model(max_batch=1)
    stage.measured_slots(*range(8))
    stage.arrive(*[(1, 4)] * 1000, client=2)
    done = 0
    for number in range(400):
        if number % 4 == 0:
            stage.arrive((1, 4), client=1)
        stage.finish(stage.started[number], at=stage.now + 0.0125)
        done += 1
    burst = set(stage.arrive(*[(1, 4)] * 100, client=1))
    before = len(stage.started)
    for number in range(done, done + 60):
        stage.finish(stage.started[number], at=stage.now + 0.0125)
    turns = [id_ in burst for start in stage.started[before:] for id_ in start.requests]
    assert abs(turns.count(True) - turns.count(False)) <= 4


def test_clients_of_other_slots_take_nothing_from_a_priority(alone):
    """A step is worth a second of waiting among those that share the slots, however many have requests elsewhere."""
    alone.model("other", max_batch=1)
    alone.play(SlotJoined(slot=1, models=frozenset({"other"})))
    for client in range(10, 70):
        alone.arrive((1, 4), client=client, model="other")
    alone.arrive(*[(1, 4)] * 30, client=2)
    (urgent,) = alone.arrive((1, 4), client=2, priority=32)
    alone.finish(alone.started[0], at=alone.now + 0.1)
    assert (urgent,) == alone.started[-1].requests


def test_the_largest_priority_holds_others_up_by_a_few_batches(alone):
    """However much is sent with it, and each time that its client comes back."""
    for _ in range(3):
        before = len(alone.started)
        alone.arrive(*[(1, 4)] * 100, client=1, priority=2**31 - 1)
        (other,) = alone.arrive((1, 4), client=2)
        while len(alone.started) < before + LEAD_BATCHES + 3:  # the lead, a turn of each, its own
            alone.finish(alone.started[-1], 0.1, at=alone.now + 0.1)
        assert "delivered" == alone.ends.get(other), [start.requests for start in alone.started[before:]]
        while len(alone.finished) < len(alone.started):
            alone.finish(alone.started[-1], 0.1, at=alone.now + 0.1)


def test_priorities_of_one_client_go_first_in_its_own_backlog(alone):
    """By a second of all clients' work per step, whatever others do: before 3 s of it, or in its middle."""
    alone.arrive((1, 4), client=2)
    usual = alone.arrive(*[(1, 4)] * 30, client=1)
    (little,) = alone.arrive((1, 4), client=1, priority=2)
    (much,) = alone.arrive((1, 4), client=1, priority=16)
    own = [id_ for id_ in _order(alone) if id_ in (*usual, little, much)]
    assert much in own[:2]
    assert 10 < own.index(little) < 30


def test_a_priority_that_was_withdrawn_leaves_nothing_behind(alone):
    """The next request of that priority goes before one without, as if the others had never come."""
    alone.arrive(*[(1, 4)] * 10, client=2)
    ids = alone.arrive(*[(1, 4)] * 100, client=1, priority=1)
    alone.play(RequestsAbandoned(ids=tuple(ids)))
    (plain,) = alone.arrive((1, 4), client=1)
    (prior,) = alone.arrive((1, 4), client=1, priority=1)
    order = _order(alone, until=13)
    assert order.index(prior) < order.index(plain)


def test_blame_leaves_a_client_what_it_is_owed_for_turns_that_it_waits_for():
    """Only an account that nothing is queued for is first brought up to virtual time, or it would pay with the past."""
    shares = _shares()
    waiting, other = (Flow(shares.client(number), "m") for number in (1, 2))
    for flow in (waiting, other):
        _stamp(shares, flow, 1.0, 0)
    for _ in range(10):
        shares.start(other, 0.0, 0.0, {other: 1.0}, None)
    assert shares.virtual_s > waiting.client.start_s
    shares.blame(waiting, 1.0)
    assert waiting.client.start_s == 1.0


def test_when_another_client_asked_last():
    """Of a group, and of two groups that a slot joins: each client that asked last in one of them is another's other."""
    whole = QueueRoom(100, 100)
    group, joined = GroupRoom(whole, "m"), GroupRoom(whole, "n")
    group.ask(1, "m", 1.0)
    group.ask(1, "m", 2.0)
    assert -inf == group.others_at
    group.ask(2, "m", 3.0)
    assert 2.0 == group.others_at
    group.ask(2, "m", 4.0)
    assert 2.0 == group.others_at
    joined.ask(3, "n", 3.5)
    group.absorb(joined)
    assert 3.5 == group.others_at
    group.ask(2, "m", 5.0)
    assert 3.5 == group.others_at
    group.ask(3, "n", 6.0)
    assert 5.0 == group.others_at
