"""A cap on call shapes, through the whole scheduler: whatever arrives and fails, devices never meet more."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.pipeline.scheduling.stage import Stage

from shapestream.scheduling.events import StartBatch

BOUNDS = (8, 256)


@pytest.mark.parametrize("max_batch", [1, 8])
def test_rows_are_not_rounded_unless_the_profile_says_so(max_batch: int) -> None:
    """Every call has the rows of its requests, also when the cap is used up; lengths are rounded all the same."""
    stage, chance = Stage(), random.Random(5)
    stage.model(padded=True, max_shapes=4, bounds=BOUNDS, max_batch=max_batch)
    stage.slots(1, 2)
    met: dict[int, set[int]] = {}
    for _ in range(300):
        burst = [(chance.choice((1, 2, 3, 5)), chance.randint(1, 256)) for _ in range(chance.randint(1, 3))]
        sizes = dict(zip(stage.arrive(*burst), burst, strict=True))
        while stage.started:
            start = stage.started.pop(0)
            rows, seq = start.sizes
            assert sum(sizes[number][0] for number in start.requests) == rows
            met.setdefault(rows, set()).add(seq)
            stage.finish(start, 0.01)
    assert all(len(lengths) <= 4 for lengths in met.values())


def finish_all(stage: Stage, sizes: dict[int, tuple[int, int]], chance: random.Random) -> None:
    """Ends every batch that runs, some of them badly; every call holds its members, within the bounds."""
    while stage.started:
        start = stage.started.pop(0)
        rows, seq = start.sizes
        members = [sizes[number] for number in start.requests]
        assert rows >= sum(own for own, _ in members)
        assert seq >= max(own for _, own in members)
        assert rows <= BOUNDS[0]
        assert seq <= BOUNDS[1]
        if chance.random() < 0.1:
            stage.fail(start)
        else:
            stage.finish(start, 0.01 + rows * seq * 1e-4)


def play(stage: Stage, cap: int, seed: int, *, drifts: int, turns: int) -> set[tuple[int, ...]]:
    """Requests in bursts around sizes that drift; all call sizes that were started."""
    chance = random.Random(seed)
    sizes: dict[int, tuple[int, int]] = {}
    met: set[tuple[int, ...]] = set()
    handle = stage.play

    def noting(event: object, **options: object) -> list[object]:
        actions = handle(event, **options)  # type: ignore[arg-type]  # whatever the stage plays
        met.update(action.sizes for action in actions if isinstance(action, StartBatch))
        return list(actions)

    stage.play = noting  # type: ignore[method-assign,assignment]  # everything that is started passes here
    stage.model(padded=True, max_shapes=cap, fills_rows=True, bounds=BOUNDS)
    stage.slots(1, 2)
    for _ in range(drifts):
        centre = chance.uniform(2.0, 5.0)
        for _ in range(turns):
            burst = [
                (chance.choice((1, 1, 1, 2, 3)), min(256, max(1, round(chance.lognormvariate(centre, 0.8)))))
                for _ in range(chance.randrange(1, 24))
            ]
            ids = stage.arrive(*burst)
            sizes.update(zip(ids, burst, strict=True))
            finish_all(stage, sizes, chance)
            stage.now += 0.1
    assert len(stage.ends) == len(sizes)
    return met


@settings(max_examples=15, deadline=None)
@given(cap=st.integers(1, 40), seed=st.integers(0, 10**6))
def test_devices_never_meet_more_shapes_than_the_cap(cap: int, seed: int) -> None:
    """Reruns in halves included."""
    assert len(play(Stage(), cap, seed, drifts=3, turns=6)) <= cap


@pytest.mark.parametrize("seed", [1, 2])
def test_a_cap_holds_through_several_learnings(stage: Stage, seed: int) -> None:
    """Thousands of requests, whose sizes drift twice; it is used, too."""
    met = play(stage, 48, seed, drifts=3, turns=60)
    assert 24 < len(met) <= 48
