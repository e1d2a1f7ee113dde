"""Chains in the simulator: a stage's requests come when those before it have ended, as far as slots and room allow."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.workers.lab.worlds import CheckedScheduler, profile
from typer.testing import CliRunner

from shapestream.telemetry.trace import (
    Sent,
    TraceChain,
    TracePart,
    TraceRequest,
    TraceStage,
    chain_line,
    chain_request_line,
    header_line,
    request_line,
)
from shapestream_workers.cli import app
from shapestream_workers.lab.plain_server import PlainServer
from shapestream_workers.lab.played_chains import chain_of
from shapestream_workers.lab.simulate import figures_by_chain, figures_of, latencies_s
from shapestream_workers.lab.simulator import LEFT, Policy, Scenario, Simulated, simulate
from shapestream_workers.lab.true_cost import FormulaCost

FIND, READ = 0, 1
PROFILES = [profile("find", max_batch=1), profile("read", max_batch=1)]
STAGES = {"find": TraceStage(()), "read": TraceStage(("find",), 200)}
READING = chain_of("reading", STAGES)
COSTS = {"find": FormulaCost(fixed_s=0.010), "read": FormulaCost(fixed_s=0.005)}


def reading(at_s: float = 0.0, rows: int = 2, client: int = 0, **fields: Any) -> TraceChain:
    """A request: 10 ms to find so many rows, and 5 ms for each."""
    parts = [[(FIND, (1, 8))], [(READ, (1, 8))] * rows]
    return TraceChain(at_s, 0, client, rows=parts, **fields)


def play(traffic: Sequence[Sent], policy: Policy | None = None, **world: Any) -> Simulated:
    """A simulation of these, whose costs are known."""
    given: dict[str, Any] = {"profiles": PROFILES, "believed": COSTS, "chains": [READING], **world}
    return simulate(policy or CheckedScheduler(every=1), Scenario(costs=COSTS, traffic=traffic, **given))


def ms(simulated: Simulated) -> list[float]:
    """The latencies of clients' requests, in milliseconds."""
    return [round(1e3 * each, 3) for each in latencies_s(simulated)]


@pytest.mark.parametrize(
    ("rows", "world", "expected"),
    [
        (2, {}, 20.0),
        (0, {}, 10.0),
        (4, {"slots": 2}, 20.0),
        (2, {"slots_of": {"read": 1}}, 15.0),
        (4, {"slots_of": {"read": 1}}, 20.0),
        (4, {"slots_of": {"find": 3}}, 30.0),
    ],
)
def test_a_lone_chain_takes_one_stage_after_the_other(
    rows: int, world: dict[str, Any], expected: float
) -> None:
    """Find, then its rows on the slots that serve their model; further slots of a model help it alone."""
    simulated = play([reading(rows=rows)], **world)
    assert [expected] == ms(simulated)
    assert 1 == figures_of(simulated)["requests"] == figures_of(simulated)["done"]


def test_stages_that_need_nothing_of_each_other_run_at_the_same_time() -> None:
    """A chain whose second stage needs nothing."""
    apart = chain_of("reading", STAGES | {"read": TraceStage((), 200)})
    assert [10.0] == ms(play([reading()], chains=[apart], slots=3))
    assert [15.0] == ms(play([reading()], slots=3))


def test_a_chain_that_began_first_ends_first() -> None:
    """Of one client, rows of the older chain go before the younger one's detector, as in the server."""
    assert [20.0, 39.0] == ms(play([reading(), reading(0.001)]))


def test_a_chain_waits_for_room_for_what_it_may_fan_out_to() -> None:
    """Half of 700 requests is room for one chain of at most 200 whose rows are not counted."""
    world: dict[str, Any] = {"slots_of": {"find": 1, "read": 1}}
    traffic = [reading(rows=200), reading(rows=1, client=1)]
    wide = play(traffic, max_queued_requests=800, **world)
    narrow = play(traffic, max_queued_requests=700, **world)
    assert ms(wide)[1] < ms(narrow)[1]
    assert 0 == len([each for each in narrow.requests.outcome if each == LEFT])


def test_a_chain_that_is_too_late_ends_once_and_its_rows_are_withdrawn() -> None:
    """The deadline passes while its rows are queued."""
    simulated = play([reading(rows=50, deadline_s=0.1)])
    figures = figures_of(simulated)
    assert 1 == figures["requests"] == figures["late"]
    assert 0 == figures["left"]
    assert simulated.batches < 30


def test_a_row_that_fails_fails_its_chain_and_the_others_are_withdrawn() -> None:
    """One of ten rows fails; those behind it do not run."""
    simulated = play([reading(rows=100)], failing={0: 0.1}, seed=3)
    assert 1 == figures_of(simulated)["failed"]
    assert 0 == simulated.requests.outcome.count(LEFT)
    assert 1 < simulated.batches < 50


def test_a_closed_loop_counts_chains_and_not_their_stages() -> None:
    """The next one follows the answer."""
    simulated = play([reading() for _ in range(10)], in_flight=1, round_trip_s=0.001)
    assert [20.0] * 10 == ms(simulated)
    assert 0.21 == pytest.approx(simulated.ended_s, abs=0.002)


mixed = st.lists(
    st.tuples(st.booleans(), st.integers(0, 6), st.integers(0, 20), st.sampled_from([None, 0.02, 0.5])),
    min_size=1,
    max_size=30,
)


@settings(max_examples=40, deadline=None)
@given(
    sent=mixed,
    slots=st.integers(1, 3),
    loop=st.sampled_from([None, 1, 4]),
    bound=st.sampled_from([8, 1000]),
    bad=st.sampled_from([0.0, 0.2]),
    plain=st.booleans(),
)
def test_every_request_ends_once(
    sent: list[Any], slots: int, loop: int | None, bound: int, bad: float, plain: bool
) -> None:
    """Chains and single requests, in time, late, failed or refused; the scheduler's books are checked on the way."""
    traffic: list[Sent] = []
    for is_chain, rows, after_ms, deadline_s in sent:
        at_s = (traffic[-1].at_s if traffic else 0.0) + after_ms / 1e3
        one = TraceRequest(at_s, READ, 0, (1, 8), deadline_s)
        traffic.append(reading(at_s, rows, deadline_s=deadline_s) if is_chain else one)
    policy = PlainServer(2, max_queued_requests=bound) if plain else CheckedScheduler(bound, every=1)
    failing = {} if plain else {0: bad}  # a plain server knows no failures
    world: dict[str, Any] = {"slots": slots, "in_flight": loop, "failing": failing}
    simulated = play(traffic, policy, max_queued_requests=bound, **world)
    figures = figures_of(simulated)
    assert len(traffic) == figures["requests"]
    assert 0 == figures["left"]
    assert figures["requests"] == sum(figures[each] for each in ("done", "late", "refused", "failed"))
    assert bytes(simulated.requests.outcome).count(LEFT) == 0
    by_chain = figures_by_chain(simulated, [READING])["reading"]
    assert sum(isinstance(each, TraceChain) for each in traffic) == by_chain["requests"]


def test_the_command_tells_what_a_second_slot_for_one_model_gives(tmp_path: Path) -> None:
    """A trace's chain, by name; other models are refused."""
    lines = [header_line({"find": ("batch", "seq"), "read": ("batch", "seq")}), chain_line("reading", STAGES)]
    for number in range(20):
        lines.append(chain_request_line(TraceChain(number / 10, 0, 0, number=number)))
        lines.append(request_line(TraceRequest(number / 10, FIND, 0, (1, 8), part=TracePart(number, 0))))
        lines += [request_line(TraceRequest(number / 10, READ, 0, (1, 8), part=TracePart(number, 1)))] * 8
    path = tmp_path / "t.jsonl"
    path.write_text("".join(lines))
    command = ["simulate", "--trace", str(path), "--cost", "fixed_ms=5", "--max-batch", "1"]
    table = CliRunner().invoke(app, command)
    assert "reading p99 ms" in table.stdout
    assert "45.0" in table.stdout
    assert "25.0" in CliRunner().invoke(app, [*command, "--slots-of", "read=1"]).stdout
    for wrong in ("write=1", "read=0", "read"):
        refused = CliRunner().invoke(app, [*command, "--slots-of", wrong])
        assert 2 == refused.exit_code
        assert "find, read" in refused.stderr
