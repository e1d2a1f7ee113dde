"""The race: which candidates reach the final, how its time is divided, and when the file as it is gives way."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shapestream_workers.lab.candidates import Candidate, Placement
from shapestream_workers.lab.race import (
    LEAST_ROUND_S,
    MOST_FINALISTS,
    OVERRUN,
    ROUNDS,
    Objective,
    Trial,
    choose,
    finalists,
    plan_rounds,
)
from shapestream_workers.lab.replay import Round

PLACE = Placement(processes=None, slots=1, threads=1)


def played(value: float, objective: Objective) -> Round:
    """A round that came to this value."""
    if objective == "throughput":
        return Round(requests=100, seconds=100 / value, latencies_s=(0.1,) * 100)
    return Round(requests=100, seconds=1.0, latencies_s=(value,) * 100 if value < inf else ())


def trial(
    *values: float,
    objective: Objective = "throughput",
    baseline: bool = False,
    heat: float | None = None,
    startup_s: float = 0.0,
) -> Trial:
    """A candidate with these rounds."""
    return Trial(
        candidate=Candidate(placement=PLACE, shapes={}, is_baseline=baseline),
        heat=None if heat is None else played(heat, objective),
        rounds=[played(value, objective) for value in values],
        startup_s=startup_s,
    )


@pytest.mark.parametrize(("objective", "better"), [("throughput", 150.0), ("latency", 0.05)])
def test_a_candidate_that_is_better_in_every_round_is_chosen(objective: Objective, better: float) -> None:
    """Higher throughput, lower latency; of several the best median."""
    mine = trial(*([0.1, 0.1, 0.1] if objective == "latency" else [100, 101, 99]), objective=objective)
    mine = trial(*mine.values(objective), objective=objective, baseline=True)
    other = trial(better, better, better, objective=objective)
    best = trial(*[better + (1 if objective == "throughput" else -0.01)] * 3, objective=objective)
    assert other is choose([mine, other], objective)
    assert best is choose([mine, other, best], objective)
    worse = trial(*other.values(objective), objective=objective, baseline=True)
    assert worse is choose([worse, trial(*mine.values(objective), objective=objective)], objective)


def test_one_lost_round_keeps_the_file_as_it_is() -> None:
    """A lucky median is not believed; nor is a gain below 2 %, nor fewer than three rounds."""
    mine = trial(100, 100, 100, 100, 100, baseline=True)
    for values in ([150, 150, 150, 150, 99], [101] * 5):
        assert mine is choose([mine, trial(*values)], "throughput")
    short = trial(100, 100, baseline=True)
    assert short is choose([short, trial(200, 200)], "throughput")


def test_what_is_common_to_a_round_decides_nothing() -> None:
    """Rounds of other requests, or at a slower minute, hit all alike."""
    mine, other = trial(100, 50, 200, baseline=True), trial(110, 55, 220)
    assert other is choose([mine, other], "throughput")


def test_a_candidate_that_never_answers_in_time_is_not_chosen() -> None:
    """An infinite p99 is worse than any."""
    mine = trial(inf, inf, inf, objective="latency", baseline=True)
    other = trial(0.2, 0.2, 0.2, objective="latency")
    assert other is choose([mine, other], "latency")
    assert mine is choose([mine, trial(inf, inf, inf, objective="latency")], "latency")


def test_what_failed_or_was_not_measured_is_not_chosen() -> None:
    """Without the file as it is the best of the others is, and nothing where nothing was measured."""
    mine, other = trial(100, 100, 100, baseline=True), trial(200, 200, 200)
    other.problem = "failed"
    assert mine is choose([mine, other, trial(300, 300)], "throughput")
    mine.problem, other.problem = "failed", None
    assert other is choose([mine, other], "throughput")
    assert choose([mine, trial()], "throughput") is None


@given(left_s=st.floats(-10, 1000), count=st.integers(1, MOST_FINALISTS))
def test_a_plan_fits_the_time_that_is_left(left_s: float, count: int) -> None:
    """Warming up and all rounds; only the least that means anything is done whatever it takes."""
    rounds, round_s = plan_rounds(left_s, count)
    assert round_s >= LEAST_ROUND_S
    assert count * (rounds + 1) * round_s * OVERRUN <= left_s + 1e-6 or round_s == LEAST_ROUND_S


@given(left_s=st.floats(-10, 1000), startups_s=st.lists(st.floats(0, 60), min_size=1, max_size=9))
def test_the_final_takes_no_more_than_there_is_time_for(left_s: float, startups_s: list[float]) -> None:
    """But for the first two, without which nothing could be compared."""
    trials = [trial(heat=100.0 - n, startup_s=s, baseline=n == 0) for n, s in enumerate(startups_s)]
    chosen = finalists(trials, "throughput", left_s)
    assert trials[: len(chosen)] == chosen
    assert min(2, len(trials)) <= len(chosen) <= MOST_FINALISTS
    if len(chosen) > 2:
        rounds_s = len(chosen) * (ROUNDS[-1] + 1) * LEAST_ROUND_S * OVERRUN
        assert sum(each.startup_s for each in chosen) + rounds_s <= left_s


def test_the_best_of_the_heats_meet_the_file_as_it_is() -> None:
    """It is there however slow it was; what failed, or had no heat, is not."""
    mine, poor, good, failed, unknown = (
        trial(heat=1.0, baseline=True),
        trial(heat=50.0),
        trial(heat=90.0),
        trial(heat=99.0),
        trial(),
    )
    failed.problem = "refused"
    assert [mine, good, poor] == finalists([mine, poor, good, failed, unknown], "throughput", 1000.0)
