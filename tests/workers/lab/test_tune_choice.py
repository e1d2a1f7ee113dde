"""Choosing: by measurements where they differ by more than the noise, else by memory and simplicity."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shapestream_workers.lab.tune_candidates import Candidate, Placement, ShapeChoice
from shapestream_workers.lab.tune_choice import LEAST_NOISE, UNKNOWN_NOISE, Scored, choose, noise_of
from shapestream_workers.lab.tune_second_stage import (
    LEAST_ROUND_S,
    MOST_FINALISTS,
    OVERRUN,
    has_room,
    plan_rounds,
)
from shapestream_workers.lab.tune_trials import Trial, varied

MIB = 1 << 20


def scored(
    number: int, *values: float, memory: int = 100, settings: int = 0, baseline: bool = False
) -> Scored:
    """One candidate; memory in MiB."""
    return Scored(
        number=number, values=values, memory_bytes=memory * MIB, settings=settings, is_baseline=baseline
    )


def test_a_clear_difference_decides() -> None:
    """Whatever it costs in memory and settings; higher throughput, lower latency."""
    entries = [scored(0, 100, 101, 99, baseline=True), scored(1, 150, 149, 151, memory=900, settings=9)]
    assert 1 == choose(entries, "throughput").number
    assert 0 == choose(entries, "latency").number


def test_within_the_noise_less_memory_wins() -> None:
    """Then the user's own file, then the fewest settings."""
    much, little = scored(0, 101, 100, 102, memory=500), scored(1, 100, 101, 101, memory=100, settings=3)
    assert 1 == choose([much, little], "throughput").number
    mine = scored(2, 100, 100, 101, memory=105, baseline=True)
    assert 2 == choose([much, little, mine], "throughput").number
    simple = scored(3, 100, 100, 101, memory=105, settings=1)
    assert 3 == choose([much, little, simple], "throughput").number


def test_what_is_common_to_a_round_is_no_noise() -> None:
    """Rounds of other requests, or at a slower minute, say nothing against anybody."""
    entries = [scored(0, 100, 50, 200), scored(1, 110, 55, 220)]
    assert LEAST_NOISE == noise_of(entries)
    assert 1 == choose(entries, "throughput").number


def test_rounds_that_contradict_each_other_are_noise() -> None:
    """Then a small difference of medians decides nothing."""
    entries = [scored(0, 100, 140, 70, baseline=True), scored(1, 104, 75, 140, settings=1)]
    assert noise_of(entries) > 0.05
    assert 0 == choose(entries, "throughput").number


def test_single_rounds_show_no_noise_so_it_is_assumed() -> None:
    """A lucky round of one candidate is not believed."""
    assert UNKNOWN_NOISE == noise_of([scored(0, 100), scored(1, 110)])
    assert 0 == choose([scored(0, 100, baseline=True), scored(1, 110, settings=1)], "throughput").number


def test_a_candidate_that_never_answers_in_time_is_not_chosen() -> None:
    """An infinite p99 is worse than any."""
    entries = [scored(0, inf, inf, inf, baseline=True), scored(1, 0.2, 0.2, 0.2)]
    assert 1 == choose(entries, "latency").number


def test_nothing_measured_is_nothing_to_choose_from() -> None:
    """The caller says so, instead of guessing."""
    with pytest.raises(ValueError, match="nothing"):
        choose([], "throughput")


@given(
    entries=st.lists(
        st.tuples(
            st.lists(st.floats(1, 1e6), min_size=3, max_size=3), st.integers(1, 9999), st.integers(0, 9)
        ),
        min_size=1,
        max_size=6,
    )
)
def test_the_chosen_is_never_worse_than_the_best_by_more_than_the_noise(
    entries: list[tuple[list[float], int, int]],
) -> None:
    """However frugal it is."""
    candidates = [
        scored(number, *values, memory=memory, settings=settings)
        for number, (values, memory, settings) in enumerate(entries)
    ]
    noise = noise_of(candidates)
    best = max(each.middle for each in candidates)
    assert choose(candidates, "throughput").middle >= best * (1 - noise)
    least = min(each.middle for each in candidates)
    assert choose(candidates, "latency").middle <= least * (1 + noise)


@given(left_s=st.floats(-10, 1000), finalists=st.integers(1, MOST_FINALISTS))
def test_a_plan_fits_the_time_that_is_left(left_s: float, finalists: int) -> None:
    """Warming up and all rounds; only the least that means anything is done whatever it takes."""
    plan = plan_rounds(left_s, finalists)
    rounds_s = finalists * (plan.rounds + 1) * plan.round_s * OVERRUN
    assert plan.round_s >= LEAST_ROUND_S
    assert rounds_s <= left_s + 1e-6 or plan.round_s == LEAST_ROUND_S


@given(left_s=st.floats(-10, 1000), startups_s=st.lists(st.floats(0, 60), max_size=MOST_FINALISTS))
def test_no_server_is_started_that_no_time_is_left_for(left_s: float, startups_s: list[float]) -> None:
    """But for the first two, without which nothing could be compared."""
    if not has_room(left_s, startups_s):
        return
    assert left_s > 0
    assert len(startups_s) < MOST_FINALISTS
    if len(startups_s) >= 2:
        after_s = left_s - max(startups_s)
        assert plan_rounds(after_s, len(startups_s) + 1).round_s * 0.999 <= after_s


def trial(predicted: float, *, slots: int = 1, max_prepared: int | None = None, seq: int = 0) -> Trial:
    """A candidate of which that was predicted."""
    place = Placement(processes=None, slots=slots, threads=slots)
    static = ((1, seq),) if seq else ()
    shapes = ShapeChoice(max_prepared=max_prepared, static=static)
    return Trial(candidate=Candidate(placement=place, shapes=shapes), prediction=predicted)


def test_another_idea_runs_before_more_of_the_same() -> None:
    """Caps are predicted alike and make the same calls: one of them waits for what is nearly as promising."""
    first, again, other, poor = trial(100), trial(100, max_prepared=16), trial(95, seq=8), trial(50, slots=2)
    able, unlike = [first, again, other, poor], trial(1, slots=9)
    assert [first, other, again, poor] == varied(able, "throughput", beside=unlike)
    assert [first, other, poor, again] == varied(able, "throughput", beside=unlike, within=inf)
    assert [other, poor, first, again] == varied(able, "throughput", beside=trial(1), within=inf)
    assert [] == varied([], "latency", beside=unlike)


def test_predictions_are_corrected_by_what_ran() -> None:
    """In rank as in the table."""
    fast, slow = trial(100), trial(90, slots=2)
    assert fast.rank("throughput") < slow.rank("throughput")
    fast.correction = 0.5
    assert fast.rank("throughput") > slow.rank("throughput")
    assert 50 == fast.predicted
