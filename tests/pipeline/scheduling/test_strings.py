"""Models that take strings: mean bytes of strings group requests and cost seconds, but are never padding."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import pytest
from tests.pipeline.scheduling.stage import Stage

from shapestream.scheduling.costs import CostModel
from shapestream.scheduling.events import ModelProfile

TEXTS: dict[str, Any] = {"dimensions": ("batch", "text.bytes"), "padded": True, "strings": (1,)}
MIXED: dict[str, Any] = {"dimensions": ("batch", "text.bytes", "n"), "padded": True, "strings": (1,)}


@pytest.mark.parametrize("limit", [None, 0.0])
def test_strings_of_other_lengths_are_no_padding(stage: Stage, limit: float | None) -> None:
    """Not even where none is allowed; the call's size is the largest mean."""
    stage.model(**TEXTS, max_padding_ratio=limit)
    stage.slots(0)
    stage.arrive((8, 1))  # it keeps the slot while the others come
    stage.arrive((1, 900), (2, 1000))
    stage.finish(stage.started[-1])
    assert ((3, 1000), 0) == (stage.started[-1].sizes, stage.started[-1].facts.padding)


@pytest.mark.parametrize("sizes", [[(1, 900, 7), (2, 1000, 8)], [(2, 1000, 8), (1, 900, 7)]])
def test_padding_beside_strings_weighs_as_the_call(stage: Stage, sizes: list[tuple[int, ...]]) -> None:
    """One of 24 numbers is padding, so a 24th of the elements of the call is."""
    stage.model(**MIXED)
    stage.slots(0)
    stage.arrive((8, 1, 1))
    stage.arrive(*sizes)
    stage.finish(stage.started[-1])
    start = stage.started[-1]
    assert (3, 1000, 8) == start.sizes
    assert prod(start.sizes) == 24 * start.facts.padding


@pytest.mark.parametrize(("limit", "together"), [(0.05, True), (0.04, False)])
@pytest.mark.parametrize("measured", [False, True])
def test_the_limit_of_padding_looks_at_numbers_only(
    make_stage: Callable[..., Stage], limit: float, together: bool, measured: bool
) -> None:
    """Whatever the lengths of the strings; also where seconds are known."""
    stage = make_stage()
    stage.model(**MIXED, max_padding_ratio=limit)
    stage.slots(0)
    if measured:
        for rows in (1, 2, 4, 8):
            stage.arrive((rows, 8, 8))
            stage.finish(stage.started[-1], 0.01)
    stage.arrive((8, 1, 1))
    ids = stage.arrive((1, 900, 7), (2, 1000, 8))
    stage.finish(stage.started[-1])
    assert (set(ids) == set(stage.started[-1].requests)) is together


def test_a_call_of_other_lengths_has_no_new_shape(stage: Stage) -> None:
    """The device met the tensors' shapes before."""
    stage.model(**TEXTS)
    stage.slots(0)
    facts = []
    for sizes in ((2, 10), (2, 1000), (3, 1000)):
        stage.arrive(sizes)
        facts.append(stage.started[-1].facts.new_shape)
        stage.finish(stage.started[-1], 0.01)
    assert [True, False, True] == facts


@pytest.mark.parametrize(
    ("dimensions", "strings", "rounds"),
    [
        (("batch", "t.bytes"), (1,), False),
        (("batch", "n", "t.bytes"), (2,), True),
        (("batch", "n"), (), True),
    ],
)
def test_mean_bytes_are_not_rounded_up(
    dimensions: tuple[str, ...], strings: tuple[int, ...], rounds: bool
) -> None:
    """So that shapes come again: they are no part of a shape."""
    model = CostModel()
    profile = ModelProfile(
        name="m",
        dimensions=dimensions,
        has_batch=True,
        paddable=(False, True, True)[: len(dimensions)],
        max_batch=8,
        free_sizes=True,
        strings=strings,
    )
    model.add_model(profile)
    assert (model["m"].steps is not None) is rounds
