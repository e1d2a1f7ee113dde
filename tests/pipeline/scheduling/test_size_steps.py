"""Requests of endless sizes are rounded up where that costs less than the first calls that it saves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod

import numpy as np
import pytest
from tests.pipeline.scheduling.stage import Stage
from tests.workers.lab.worlds import CheckedScheduler

from shapestream.scheduling.costs import CostModel
from shapestream.scheduling.events import InputBytes, ModelAdded, ModelProfile
from shapestream.scheduling.size_steps import SizeSteps
from shapestream.telemetry.trace import TraceRequest
from shapestream_workers.lab.simulator import Scenario, Simulated, simulate
from shapestream_workers.lab.true_cost import FormulaCost

PICTURES = ModelProfile(
    name="m",
    dimensions=("batch", "height", "width"),
    has_batch=True,
    paddable=(False, True, True),
    max_batch=16,
    bounds=(16, 96, 96),
    free_sizes=True,
)
DETECTOR = {"fixed_s": 0.35e-3, "per_element_s": 0.05e-6, "prepare_s": 2.6e-3}
"""A small detector, as measured: see benchmarks/endless.py."""


def steps_of(profile: ModelProfile = PICTURES, **costs: float) -> SizeSteps:
    """The steps of a model with a worker that has measured its costs."""
    model = CostModel()
    model.add_model(profile)
    cost = FormulaCost(**{**DETECTOR, **costs}, largest=(16, 96, 96))
    table = cost.calibration("k", profile.dimensions, profile.max_batch)
    model.join(0, "w", {"m": table}, ["m"])
    steps = model["m"].steps
    assert steps is not None
    return steps


def ask(steps: SizeSteps, pictures: list[tuple[int, int]]) -> list[tuple[int, ...]]:
    """What each picture is padded to; every four are a batch that runs."""
    given = []
    for number, picture in enumerate(pictures):
        given.append(steps.rounded((1, *picture)))
        if number % 4 == 3:
            steps.ran((4, *map(max, zip(*given[number - 3 : number + 1], strict=True))))
    return given


def endless(count: int, seed: int = 0) -> list[tuple[int, int]]:
    """Pictures of which hardly two are alike."""
    drawn = np.random.default_rng(seed).integers(32, 97, (count, 2)).tolist()
    return [(height, width) for height, width in drawn]


def detector_stage(stage: Stage, profile: ModelProfile = PICTURES) -> Stage:
    """A stage with one slot that has measured its costs."""
    stage.play(ModelAdded(model=profile))
    cost = FormulaCost(**DETECTOR, largest=(16, 96, 96))
    stage.slots(0, models=("m",), costs={"m": cost.calibration("k", profile.dimensions, profile.max_batch)})
    return stage


def simulated(profile: ModelProfile, pictures: list[tuple[int, int]], **costs: float) -> Simulated:
    """64 in flight on two slots."""
    cost = FormulaCost(**{**DETECTOR, **costs}, largest=(16, 96, 96))
    return simulate(
        CheckedScheduler(10_000),
        Scenario(
            profiles=[profile],
            costs={"m": cost},
            believed={"m": cost},
            traffic=[TraceRequest(0.0, 0, 0, (1, *picture)) for picture in pictures],
            slots=2,
            slots_per_worker=2,
            in_flight=64,
            way_s=0.0003,
        ),
    )


def test_endless_pictures_are_rounded_up_within_the_bounds() -> None:
    """At first as they come; then to multiples of a step, so that few shapes are left. None is cut."""
    steps = steps_of()
    pictures = endless(600)
    given = ask(steps, pictures)
    assert [tuple(picture) for picture in pictures[:31]] == given[:31]
    assert steps.step >= 16
    late = given[300:]
    assert all(
        size % 8 == 0 or size == 96 for picture in late for size in picture
    )  # whatever the step was then
    assert len(set(late)) * 8 < len(set(pictures[300:]))
    assert all(
        own <= size <= 96
        for picture, larger in zip(pictures, given, strict=True)
        for own, size in zip(picture, larger, strict=True)
    )


@pytest.mark.parametrize(
    ("costs", "pictures"),
    [
        ({}, [(37, 50), (61, 90), (90, 61)] * 200),
        ({"prepare_s": 0.0}, endless(600)),
        ({"per_element_s": 5e-5}, endless(600)),
    ],
    ids=["few sizes", "first calls are free", "padding is dear"],
)
def test_nothing_is_rounded_where_that_does_not_pay(
    costs: dict[str, float], pictures: list[tuple[int, int]]
) -> None:
    """Shapes that come again by themselves, that cost nothing when they are new, or that cost more when they are larger."""
    assert pictures == ask(steps_of(**costs), pictures)


@pytest.mark.parametrize(
    "change",
    [
        {"free_sizes": False},
        {"paddable": (False, False, False)},
        {"max_padding_ratio": 0.5},
        {"static_shapes": ((1, 64, 64),)},
        {"max_shapes": 64},
    ],
)
def test_only_free_sizes_that_may_be_padded_are_rounded(change: dict[str, object]) -> None:
    """A strategy names its own sizes; a cap rounds calls; a limit on padding or a static shape is the user's word."""
    profile = replace(PICTURES, **change)
    model = CostModel()
    model.add_model(profile)
    assert model["m"].steps is None


def test_a_dimension_that_may_not_be_padded_stays() -> None:
    """Only the others are rounded."""
    steps = steps_of(replace(PICTURES, paddable=(False, True, False)))
    pictures = endless(600)
    given = ask(steps, pictures)
    assert [width for _, width in pictures] == [width for _, width in given]
    assert given != pictures


def test_a_request_is_not_rounded_beyond_what_a_call_may_hold() -> None:
    """A larger request runs alone, in a call of its own sizes; rounding makes none larger than that."""
    inputs = (InputBytes(nbytes=1, axes=(0, 1, 2)),)
    steps = steps_of(replace(PICTURES, inputs=inputs, max_batch_bytes=70 * 70))
    pictures = endless(600)
    given = ask(steps, pictures)
    assert given != pictures
    assert all(
        larger == own or larger[0] * larger[1] <= 4900 for own, larger in zip(pictures, given, strict=True)
    )


def test_a_request_without_elements_stays_as_it_is() -> None:
    """There is nothing to pad, and it says nothing about others."""
    steps = steps_of()
    ask(steps, endless(600))
    assert steps.step > 1
    assert (0, 50) == steps.rounded((1, 0, 50))
    assert (33, 50) == steps.rounded((0, 33, 50))


def test_rounding_saves_first_calls_and_time() -> None:
    """Against pictures that are batched in their own sizes, in simulation: a third of the first calls, a quarter more
    goodput."""
    pictures = endless(2000, seed=1)
    rounded, plain = (simulated(replace(PICTURES, free_sizes=free), pictures) for free in (True, False))
    assert 3 * rounded.preparations < plain.preparations
    assert 1.25 * rounded.ended_s < plain.ended_s


def test_padding_is_counted_from_a_requests_own_size(stage: Stage) -> None:
    """What rounding adds is padding as any other."""
    detector_stage(stage)
    for picture in endless(300):
        stage.arrive((1, *picture), model="m")
        stage.finish(stage.started[-1], 0.001)
    stage.arrive((1, 60, 61), model="m")
    padding = prod(stage.started[-1].sizes) - 60 * 61
    assert padding
    assert padding == stage.started[-1].facts.padding


@pytest.mark.parametrize(
    "takes",
    [lambda height, width: max(height, width) <= 80, lambda height, width: height * width <= 5000],
    ids=["a table of 80 positions", "room for 5,000 elements"],
)
def test_no_request_fails_because_it_was_rounded_up(stage: Stage, takes: Callable[[int, int], bool]) -> None:
    """A model may take less than its inputs' shapes say: nothing larger ran, so nothing is rounded to it."""
    detector_stage(stage, replace(PICTURES, bounds=()))
    rounded = 0
    for picture in endless(900):
        (here,) = stage.arrive((1, *picture), model="m")
        start = stage.started[-1]
        rounded += start.sizes != (1, *picture)
        if takes(*start.sizes[1:]):
            stage.finish(start, 0.001)
        else:
            stage.fail(start)
        assert stage.ends[here] == ("delivered" if takes(*picture) else "model_error")
    assert rounded > 100


def test_a_short_request_after_long_ones_is_padded_to_twice_its_size_at_most() -> None:
    """The step pays for the sizes that came lately: sentences of 385 to 512 tokens, and then one of 7, as in the README."""
    profile = replace(
        PICTURES, dimensions=("batch", "seq"), paddable=(False, True), max_batch=64, bounds=(64, 512)
    )
    model = CostModel()
    model.add_model(profile)
    cost = FormulaCost(fixed_s=5e-3, per_element_s=1e-3, prepare_s=4.0, largest=(64, 512))
    model.join(0, "w", {"m": cost.calibration("k", profile.dimensions, profile.max_batch)}, ["m"])
    steps = model["m"].steps
    assert steps is not None
    for seq in range(1, 513):
        steps.rounded((1, seq))
        steps.ran((1, seq))
    assert steps.step == 256
    assert [(8,), (32,), (256,), (512,)] == [steps.rounded((1, seq)) for seq in (7, 17, 200, 260)]
