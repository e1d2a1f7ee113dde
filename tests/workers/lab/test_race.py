"""The race: which candidates reach the final, how its time is divided, and when the file as it is gives way."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shapestream_workers.lab.candidates import Candidate, Placement
from shapestream_workers.lab.race import (
    LEAST_ROUND_S,
    MOST_FINALISTS,
    OVERRUN,
    ROUNDS,
    CandidateRun,
    choose,
    finalists,
    plan_rounds,
)

PLACE = Placement(processes=None, slots=1, threads=1)


def trial(
    *scores: float, baseline: bool = False, alone: float | None = None, startup_s: float = 0.0
) -> CandidateRun:
    """A candidate with these rounds."""
    candidate = Candidate(placement=PLACE, shapes={}, is_baseline=baseline)
    return CandidateRun(candidate=candidate, alone=alone, rounds=[*scores], startup_s=startup_s)


@pytest.mark.parametrize(
    ("before", "rounds", "is_chosen"),
    [
        pytest.param([100, 101, 99], [150, 150, 150], True, id="better in every round"),
        pytest.param([100, 50, 200], [110, 55, 220], True, id="better in rounds of other requests"),
        pytest.param([0, 0, 0], [5, 5, 5], True, id="the only one that ever answers"),
        pytest.param([0, 0, 0], [0, 0, 0], False, id="as useless as the file as it is"),
        pytest.param([150, 150, 150], [100, 101, 99], False, id="worse"),
        pytest.param([100] * 5, [150, 150, 150, 150, 99], False, id="one round is lost"),
        pytest.param([100] * 5, [101] * 5, False, id="better by less than 2 %"),
        pytest.param([100, 100], [200, 200], False, id="fewer than three rounds"),
        pytest.param([100, 100, 100], [200, 200], False, id="a round is missing"),
    ],
)
def test_the_file_as_it_is_gives_way_only_to_what_is_better_in_every_round(
    before: list[float], rounds: list[float], is_chosen: bool
) -> None:
    """Rounds are paired, and a lucky median is not believed."""
    mine, other = trial(*before, baseline=True), trial(*rounds)
    assert (other if is_chosen else mine) is choose([mine, other])


def test_the_best_of_several_is_chosen_among_those_that_did_not_fail() -> None:
    """Without the file as it is the best of the others is, and nothing where nothing was measured."""
    mine, other, best = trial(100, 100, 100, baseline=True), trial(200, 200, 200), trial(300, 300, 300)
    assert best is choose([mine, other, best])
    best.problem = "failed"
    assert other is choose([mine, other, best])
    mine.problem = "failed"
    assert other is choose([mine, other, best])
    assert choose([mine, trial()]) is None


def test_of_those_within_2_percent_of_the_best_the_smallest_is_chosen() -> None:
    """Memory decides nothing else: not for what is slower by more, nor against the file as it is."""
    mine, best = trial(100, 100, 100, baseline=True), trial(300, 300, 300)
    near, slower = trial(295, 295, 295), trial(290, 290, 290)
    for each, memory in ((mine, 5), (best, 900), (near, 800), (slower, 100)):
        each.memory_bytes = memory
    assert near is choose([mine, slower, best, near])
    near.memory_bytes = 901
    assert best is choose([mine, slower, best, near])
    equal = trial(101, 101, 101)
    equal.memory_bytes = 1
    assert mine is choose([mine, equal])


@given(left_s=st.floats(-10, 1000), count=st.integers(1, MOST_FINALISTS))
def test_a_plan_fits_the_time_that_is_left(left_s: float, count: int) -> None:
    """Warming up and all rounds; only the least that means anything is done whatever it takes."""
    rounds, round_s = plan_rounds(left_s, count)
    assert round_s >= LEAST_ROUND_S
    assert count * (rounds + 1) * round_s * OVERRUN <= left_s + 1e-6 or round_s == LEAST_ROUND_S


@given(left_s=st.floats(-10, 1000), startups_s=st.lists(st.floats(0, 60), min_size=1, max_size=9))
def test_the_final_takes_no_more_than_there_is_time_for(left_s: float, startups_s: list[float]) -> None:
    """But for the first two, without which nothing could be compared."""
    trials = [trial(alone=100.0 - n, startup_s=s, baseline=n == 0) for n, s in enumerate(startups_s)]
    chosen = finalists(trials, left_s)
    assert trials[: len(chosen)] == chosen
    assert min(2, len(trials)) <= len(chosen) <= MOST_FINALISTS
    if len(chosen) > 2:
        rounds_s = len(chosen) * (ROUNDS[-1] + 1) * LEAST_ROUND_S * OVERRUN
        assert sum(each.startup_s for each in chosen) + rounds_s <= left_s


def test_the_best_of_the_heats_meet_the_file_as_it_is() -> None:
    """It is there however slow it was; what failed, or had no heat, is not."""
    mine, poor, good = trial(alone=1.0, baseline=True), trial(alone=50.0), trial(alone=90.0)
    failed, unknown = trial(alone=99.0), trial()
    failed.problem = "refused"
    assert [mine, good, poor] == finalists([mine, poor, good, failed, unknown], 1000.0)
