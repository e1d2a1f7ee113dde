"""The simulator against queueing theory, against itself, and the scheduler's promises on virtual time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.workers.lab.worlds import CheckedScheduler, play, profile

from shapestream.scheduling.actions import Action, StartBatch
from shapestream.scheduling.events import BatchFinished, Event, RequestsArrived
from shapestream.telemetry.trace import TraceRequest
from shapestream_workers.lab.plain_server import PlainServer
from shapestream_workers.lab.simulate import figures_of, latencies_s
from shapestream_workers.lab.simulator import LEFT, Policy, SimulationError
from shapestream_workers.lab.traffic import SizedModel, Traffic, parse_sizes

LENGTHS = parse_sizes("seq=lognormal:24,0.9,4..256")


def traffic(count: int, rate: float, model: SizedModel = LENGTHS, seed: int = 0, **fields: Any) -> Traffic:
    """Poisson arrivals of that model's requests."""
    return Traffic(models=[model], rate=rate, requests=count, seed=seed, **fields)


@pytest.mark.parametrize(("load", "sigma"), [(0.3, 0.0), (0.8, 0.0), (0.6, 0.8)])
def test_one_slot_waits_as_pollaczek_and_khinchine_say(load: float, sigma: float) -> None:
    """M/G/1: rate x E[S^2] / (2 (1 - load)); of a lognormal factor of mean 1, E[f^2] = exp(sigma^2)."""
    simulated = play(
        PlainServer(1), traffic(25_000, load / 0.01), fixed_s=0.01, per_element_s=0.0, noise=sigma
    )
    summary = figures_of(simulated)
    expected = 0.01 + load * 0.01 * np.exp(sigma**2) / (2 * (1 - load))
    assert expected == pytest.approx(summary["mean_s"], rel=0.04)
    assert load == pytest.approx(summary["utilisation"], rel=0.02)


def test_several_slots_wait_less_than_one_and_work_as_much() -> None:
    """M/D/2 at the same load per slot: less than half the wait of M/D/1."""
    one = figures_of(play(PlainServer(1), traffic(10_000, 70), fixed_s=0.01, per_element_s=0.0))
    two = figures_of(play(PlainServer(1), traffic(10_000, 140), slots=2, fixed_s=0.01, per_element_s=0.0))
    assert two["mean_s"] - 0.01 < 0.6 * (one["mean_s"] - 0.01)
    assert one["utilisation"] == pytest.approx(two["utilisation"], rel=0.03)


@settings(max_examples=25, deadline=None)
@given(
    offered=st.fixed_dictionaries(
        {
            "seed": st.integers(0, 2**31),
            "rate": st.sampled_from([20.0, 200.0, 2000.0]),
            "deadline_s": st.sampled_from([None, 0.02, 0.5]),
        }
    ),
    world=st.fixed_dictionaries(
        {
            "slots": st.integers(1, 5),
            "in_flight": st.sampled_from([None, 1, 40]),
            "noise": st.sampled_from([0.0, 0.3]),
            "way_s": st.sampled_from([0.0, 0.002]),
            "prepare_s": st.sampled_from([0.0, 0.01]),
            "calibrated": st.booleans(),
            "wide": st.sampled_from([None, 0.8, 1.7]),
            "slots_per_worker": st.sampled_from([1, 2]),
        }
    ),
    bound=st.sampled_from([8, 100_000]),
    plain=st.booleans(),
)
def test_every_request_ends_once_and_no_slot_does_more_than_there_is_time(
    offered: dict[str, Any], world: dict[str, Any], bound: int, plain: bool
) -> None:
    """Arrived = answered + refused + expired; the scheduler's own books are checked on the way."""
    models = [
        parse_sizes("a/seq=lognormal:24,0.9,4..256"),
        parse_sizes("b*0.5/batch=uniform:1..20;seq=16;width=choice:2,3"),
    ]
    wide = profile("b", dimensions=("batch", "seq", "width"), paddable=(True, False, True))
    policy: Policy = PlainServer(8) if plain else CheckedScheduler(bound, every=7)
    offer = Traffic(models=models, burst=5, requests=300, clients=3, **offered)
    simulated = play(
        policy,
        [request._replace(priority=number % 2) for number, request in enumerate(offer)],
        profiles=[profile("a"), wide],
        speeds=(1.0, 2.0),
        **world,
    )
    summary = figures_of(simulated)
    assert 300 == summary["requests"]
    assert (0, 0) == (summary["left"], summary["failed"])
    assert summary["requests"] == summary["done"] + summary["late"] + summary["refused"]
    assert LEFT not in simulated.requests.outcome
    assert 0.0 <= summary["utilisation"] <= 1.0 + 1e-9
    assert 0.0 <= summary["padding_ratio"] < 1.0
    waits = latencies_s(simulated)
    least_s = 0.003 / max(1.0, world["wide"] or 1.0)
    assert (waits > least_s * 0.2 if world["noise"] else waits >= 0.999 * least_s).all()


@pytest.mark.parametrize("policy", [CheckedScheduler, PlainServer])
def test_the_same_seed_gives_the_same_future(policy: Any) -> None:
    """Decisions depend on events and times only."""
    runs = [
        play(policy(), traffic(300, 150, seed=seed), slots=2, noise=0.2).requests.ended.tobytes()
        for seed in (1, 1, 2)
    ]
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]


def test_the_scheduler_serves_more_than_arrival_order() -> None:
    """The order that the whole project is about: 16 in arrival order, one at a time, planned."""
    load = traffic(3000, float("inf"))
    rates = [
        figures_of(play(policy, load, in_flight=256))["goodput"]
        for policy in (PlainServer(16), PlainServer(1), CheckedScheduler())
    ]
    assert rates == sorted(rates)


def test_a_closed_loop_keeps_so_many_in_flight() -> None:
    """Never more, and as many as there are left."""
    simulated = play(PlainServer(1), traffic(100, float("inf")), in_flight=10)
    arrived, ended = simulated.requests.arrived, simulated.requests.ended
    in_flight = [sum(begin <= at < end for begin, end in zip(arrived, ended, strict=True)) for at in arrived]
    assert 10 == max(in_flight)


def test_slots_of_unequal_speed_take_unequal_time() -> None:
    """Twice the seconds on a slot of speed 2."""
    lone = [TraceRequest(0.0, 0, 0, (1, 10))]
    slow, fast = (
        figures_of(play(PlainServer(1), lone, speeds=(speed,), fixed_s=0.01, per_element_s=0.0))["mean_s"]
        for speed in (2.0, 1.0)
    )
    assert (0.02, 0.01) == (pytest.approx(slow), pytest.approx(fast))


def test_a_new_shape_is_prepared_once_per_worker() -> None:
    """Its first call costs extra, and says so."""
    requests = [TraceRequest(float(at), 0, 0, (1, size)) for at, size in enumerate([10, 10, 20, 10])]
    simulated = play(PlainServer(1), requests, prepare_s=0.5, fixed_s=0.01, per_element_s=0.0)
    assert [0.51, 0.01, 0.51, 0.01] == pytest.approx(latencies_s(simulated).tolist())
    assert 2 == simulated.preparations


def test_rows_are_covered_by_the_calls_that_are_allowed() -> None:
    """Three rows on sizes 1 and 2 take two calls."""
    covered = ((), (1,), (2,), (2, 1))
    requests = [TraceRequest(0.0, 0, 0, (3, 10))]
    simulated = play(
        PlainServer(4), requests, profiles=[profile(max_batch=3, row_calls=covered)], per_element_s=0.0
    )
    assert pytest.approx(0.006) == simulated.busy_s


def test_the_way_to_a_slot_takes_its_time() -> None:
    """There and back: once each."""
    simulated = play(PlainServer(1), [TraceRequest(0.0, 0, 0, (1, 1))], fixed_s=0.01, way_s=0.002)
    assert 0.01 + 0.00013 + 0.004 == pytest.approx(latencies_s(simulated)[0])


def test_a_plain_server_closes_its_batch_at_another_model_or_size() -> None:
    """It never mixes what may not be mixed, and keeps the order of arrival."""
    models = [
        profile("a"),
        profile("b", dimensions=("batch", "height", "width"), paddable=(True, True, False)),
    ]
    sizes = [(0, (1, 5)), (0, (1, 9)), (1, (1, 4, 4)), (1, (1, 5, 4)), (1, (1, 4, 6)), (0, (1, 5))]
    requests = [TraceRequest(0.0, 0, 0, (1, 1))]
    requests += [TraceRequest(0.001, model, 0, shape) for model, shape in sizes]
    simulated = play(PlainServer(8), requests, profiles=models)
    # The first alone, then {5, 9}, {4x4, 5x4}, {4x6}, {5}.
    assert (5, 7) == (simulated.batches, simulated.members)
    assert 1 + 18 + 40 + 24 + 5 == simulated.computed
    ended = list(simulated.requests.ended)
    assert ended == sorted(ended)


def test_a_plain_server_keeps_its_bounds() -> None:
    """Of the queue, and of the rows in a call."""
    requests = [TraceRequest(0.0, 0, 0, (1, 1))] * 6
    plain = PlainServer(8, max_queued_requests=3)
    simulated = play(plain, requests, profiles=[profile(max_batch=2)])
    assert (2, 3, 3) == (simulated.batches, simulated.members, figures_of(simulated)["refused"])


class Broken:
    """Answers wrongly, in one of the ways that the simulator must see."""

    def __init__(self, fault: str) -> None:
        self.fault = fault
        self.plain = PlainServer(1)

    def handle(self, event: Event, now: float) -> Sequence[Action]:
        """Whatever a plain server does, and then something else."""
        actions = self.plain.handle(event, now)
        if self.fault == "delivers twice" and isinstance(event, BatchFinished):
            actions.append(actions[0])
        if self.fault == "starts on a busy slot" and isinstance(event, RequestsArrived):
            actions += [a for a in actions if isinstance(a, StartBatch)]
        return actions

    def next_wakeup(self) -> float | None:
        """Now, for ever."""
        return 1.0 if self.fault == "wakes for ever" else None


@pytest.mark.parametrize("fault", ["delivers twice", "starts on a busy slot", "wakes for ever"])
def test_a_policy_that_breaks_its_contract_is_found_out(fault: str) -> None:
    """The simulator is a referee, too."""
    with pytest.raises(SimulationError):
        play(Broken(fault), [TraceRequest(float(at), 0, 0, (1, 9)) for at in range(3)])  # type: ignore[arg-type]


def test_a_flood_of_mixed_lengths_delays_a_steady_client_by_few_batches() -> None:
    """What the flood's batches take along from far behind must not let its stragglers go before others' requests."""
    sent = sorted([*[(at / 20, 0) for at in range(80)], *[(1.0, 1)] * 1000])
    sizes = [size for _, size in LENGTHS.draw(np.random.default_rng(7), len(sent))]
    requests = [
        TraceRequest(at_s, 0, client, (1, size)) for (at_s, client), size in zip(sent, sizes, strict=True)
    ]
    simulated = play(CheckedScheduler(), requests, slots=2)
    arrived, ended = (
        np.array(simulated.requests.column(times))
        for times in (simulated.requests.arrived, simulated.requests.ended)
    )
    steady = np.array([client == 0 for _, client in sent])
    met = steady & (arrived > 1.0) & (arrived < ended[~steady].max())
    waits_s = (ended - arrived)[met]
    # Batches take 0.04 s in the mean here, and one of 16 rows of 64 tokens 0.14 s.
    assert np.median(waits_s) <= 0.15
    assert max(waits_s) <= 0.4


def test_a_lone_caller_is_answered_as_soon_as_its_wide_slot_can() -> None:
    """Calls of 10 ms, twice as fast on all cores: but for the first ones and the tries, each takes 5."""
    lone = traffic(2000, float("inf"))
    calls = {"fixed_s": 0.01, "per_element_s": 0.0, "in_flight": 1, "slots": 2, "slots_per_worker": 2}
    narrow = figures_of(play(CheckedScheduler(), lone, **calls))
    wide = figures_of(play(CheckedScheduler(), lone, wide=2.0, **calls))
    assert 0.01 == pytest.approx(narrow["p50_s"])
    assert 0.005 == pytest.approx(wide["p50_s"])
    assert 0.01 == pytest.approx(wide["max_s"])
    assert wide["mean_s"] < 0.0055


def test_what_begins_beside_a_wide_call_shares_the_cores() -> None:
    """Of two slots and the wide one, each gets two thirds of what it asks for, while both run."""
    pair = [TraceRequest(at_s, 0, 0, (1, 16)) for at_s in (0.0, 0.002)]
    simulated = play(
        CheckedScheduler(),
        pair,
        fixed_s=0.012,
        per_element_s=0.0,
        slots=2,
        slots_per_worker=2,
        wide=2.0,
    )
    first, second = simulated.requests.ended
    # 2 ms alone; then 4 ms of work at 2/3. The other one has done 4 of 12 ms by then, and goes on alone.
    assert (0.008, 0.016) == pytest.approx((first, second))


@pytest.mark.parametrize(("share", "most"), [(0.3, 0.9), (0.6, 1.0), (0.8, 1.01), (1.0, 1.01)])
def test_wide_slots_help_where_few_wait_and_cost_little_elsewhere(share: float, most: float) -> None:
    """Two slots of 10 ms calls, 1.6 times as fast on all cores; loads as shares of what one slot can do."""
    load = traffic(8000, share * 100)
    calls = {"fixed_s": 0.01, "per_element_s": 0.0, "slots": 2, "slots_per_worker": 2}
    narrow = figures_of(play(CheckedScheduler(), load, **calls))
    wide = figures_of(play(CheckedScheduler(), load, wide=1.6, **calls))
    assert wide["mean_s"] <= most * narrow["mean_s"]
