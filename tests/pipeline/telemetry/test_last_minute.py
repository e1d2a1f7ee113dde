"""The window of a minute, against a recount of everything that happened within it."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.held import held
from tests.pipeline.telemetry.runs import ran

from shapestream.slices import at_once
from shapestream.telemetry.counters import (
    MAX_BYTES,
    SNAPSHOT_S,
    WINDOW_S,
    Histogram,
    LastMinute,
    ModelCounters,
    ServerStatistics,
)

START = 1000.0


@dataclass
class World:
    """Counters with their last minute, and a list of all that was counted: time, model, what, number."""

    now: float = START
    counters: ServerStatistics = field(default_factory=ServerStatistics)
    happened: list[tuple[float, str, str, int]] = field(default_factory=list)
    widest_beat: float = 0.0

    def __post_init__(self) -> None:
        self.minute = LastMinute(self.counters, self.now)

    def beat(self, seconds: float) -> None:
        """Let time pass, then take a snapshot as the server's heartbeat does."""
        self.now += seconds
        self.widest_beat = max(self.widest_beat, seconds)
        at_once(self.minute.take(self.now))

    def answer(self, model: str, us: int) -> None:
        """A request that arrives, runs alone for `us`, and is answered."""
        self.counters.models[model].arrived += 1
        times = {
            "gather_us": us // 4,
            "run_us": us,
            "busy_us": 2 * us,
            "began": us * 1e-6,
            "ended": 2e-6 * us,
        }
        self.counters.count_batch(
            ran(model, (us,), arrived=(0.0,), rows=2, useful=us // 2, preparations=1, **times)
        )
        self.happened.append((self.now, model, "ran", us))

    def fail(self, model: str, code: str) -> None:
        """A request that arrives and fails."""
        self.counters.models[model].arrived += 1
        self.counters.models[model].failures[code] += 1
        self.counters.failures[code] += 1
        self.happened.append((self.now, model, code, 0))

    def refuse(self, code: str) -> None:
        """A request that no model gets."""
        self.counters.failures[code] += 1
        self.happened.append((self.now, "", code, 0))


STEPS = st.one_of(
    st.tuples(st.just("beat"), st.sampled_from([0.25, 1.0, 7.0, 61.0, 500.0])),
    st.tuples(st.just("answer"), st.sampled_from("abc"), st.integers(0, 2**36)),
    st.tuples(st.just("fail"), st.sampled_from("abc"), st.sampled_from(["model_error", "cancelled"])),
    st.tuples(st.just("refuse"), st.sampled_from(["invalid", "cancelled"])),
)


@given(st.lists(st.lists(STEPS, max_size=12), max_size=12), st.sampled_from([0.0, 0.5, 70.0]))
def test_the_window_counts_what_a_recount_finds(minutes: list[list[tuple]], unseen: float) -> None:  # type: ignore[type-arg]
    """Whatever happens between beats of any width, with models that appear and rest; read at a beat or after it."""
    world = World()
    for steps in minutes:
        for name, *arguments in steps:
            getattr(world, name)(*arguments)
        now = world.now + unseen
        told = at_once(world.minute.to_dict(now, ["served"]))
        seconds, begin = told["seconds"], now - told["seconds"]
        if now - START < WINDOW_S:
            assert now - START == seconds
        else:
            assert WINDOW_S <= seconds < WINDOW_S + SNAPSHOT_S + world.widest_beat + unseen + 1e-9
        # What happened at the time of a snapshot came after it.
        within = [entry for entry in world.happened if entry[0] >= begin]
        assert {"served", *(model for _, model, _, _ in within if model)} == set(told["models"])
        assert count(within, "") == told["refused"]
        for model, row in told["models"].items():
            own = [entry for entry in within if entry[1] == model]
            took = [us for _, _, what, us in own if what == "ran"]
            assert (len(own), len(took), len(took), 2 * len(took), len(took), len(took)) == tuple(
                row[name] for name in ("arrived", "results", "batches", "rows", "calls", "new_shapes")
            )
            assert (sum(took), sum(us - us // 2 for us in took)) == (
                row["elements_computed"],
                row["elements_padding"],
            )
            assert count(own, model) == row["failures"]
            check_histogram(row["queue_us"], took)
            check_histogram(row["gather_us"], [us // 4 for us in took])
            check_histogram(row["run_us"], took)
            check_histogram(row["split_us"], [us - us // 4 for us in took])
            check_histogram(row["total_us"], [2 * us for us in took])
            check_histogram(row["batch_requests"], [1] * len(took))


def count(entries: list[tuple[float, str, str, int]], model: str) -> dict[str, int]:
    """Failures by code."""
    codes = [what for _, name, what, _ in entries if name == model and what != "ran"]
    return {code: codes.count(code) for code in codes}


def check_histogram(told: dict[str, object], numbers: list[int]) -> None:
    """Count and mean are exact; each bound counts the numbers up to it; quantiles are within 6 %."""
    assert len(numbers) == told["count"]
    assert told["mean"] == pytest.approx(sum(numbers) / len(numbers) if numbers else 0.0, abs=0.0501)
    below = 0
    for bound, times in told["buckets"]:  # type: ignore[attr-defined]
        assert times > 0
        below += times
        assert sum(number <= bound for number in numbers) == below
    assert len(numbers) == below
    for percent in (50, 90, 95, 99):
        rank = max(1, -(-percent * len(numbers) // 100))
        exact = sorted(numbers)[rank - 1] if numbers else 0
        assert told[f"p{percent}"] == pytest.approx(exact, rel=1 / 16)


def test_no_traffic_is_no_rows_but_those_of_served_models() -> None:
    """At the first moment, too: nothing is divided by the time that has passed."""
    world = World()
    told = at_once(world.minute.to_dict(START, ["m"]))
    assert (0.0, 0, {}) == (told["seconds"], told["models_left_out"], told["refused"])
    assert {"count": 0, "mean": 0.0, "p50": 0, "p90": 0, "p95": 0, "p99": 0, "buckets": []} == told["models"][
        "m"
    ]["total_us"]


def test_what_rests_for_a_minute_leaves() -> None:
    """A model that is served no more, with all that it did; one that rests keeps no snapshots of its own."""
    world = World()
    world.answer("gone", 5)
    for _ in range(int(WINDOW_S + 2 * SNAPSHOT_S)):
        world.beat(1.0)
    assert {} == at_once(world.minute.to_dict(world.now, []))["models"]
    kept = held(world.minute)
    assert 2 == len([thing for thing in kept if isinstance(thing, ModelCounters)]), (
        "what counts, and one copy"
    )
    for _ in range(int(2 * WINDOW_S)):
        world.beat(1.0)
    assert len(kept) == len(held(world.minute)), "snapshots pile up"


def test_very_many_models_keep_to_their_room() -> None:
    """The quietest are left out, and how many is told."""
    world = World()
    for number in range(1024):
        for repeat in range(number // 64):
            world.answer(f"{number}-{'x' * 100}", 3**repeat)
    told = at_once(world.minute.to_dict(START, []))
    assert MAX_BYTES / 2 < len(msgpack.packb(told["models"])) < MAX_BYTES
    assert 1024 - 64 == len(told["models"]) + told["models_left_out"]
    assert {15} == {row["arrived"] for name, row in list(told["models"].items())[:64]}


def test_a_difference_of_histograms_is_the_histogram_of_the_difference() -> None:
    """Also where nothing came in between."""
    whole, later = Histogram(), Histogram()
    whole.record(7, times=3)
    assert later.to_dict() == (whole - whole).to_dict()
