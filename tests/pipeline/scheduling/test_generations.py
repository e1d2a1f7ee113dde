"""Generations of a model: two queues of one name, slots and costs that go on, and nothing that is kept of the old one."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.pipeline.scheduling.stage import Stage

from shapestream.scheduling.events import (
    ContractError,
    ModelAdded,
    ModelProfile,
    ModelRemoved,
    ModelUnavailable,
)

FIRST = ModelProfile(
    name="text",
    dimensions=("batch", "seq"),
    has_batch=True,
    paddable=(False, False),
    max_batch=8,
    max_delay_s=5.0,
)
SECOND = replace(FIRST, generation=2, max_delay_s=0.0)


def test_a_generation_that_is_like_another_has_its_slots_and_what_it_has_learned() -> None:
    """What waits under the old one stays there, and shares no call with what comes under the new one."""
    stage = Stage()
    stage.play(ModelAdded(model=FIRST))
    stage.measured_slots(0, 1)
    (first,) = stage.arrive((1, 4))
    assert [] == stage.starts(), "it waits for others"
    stage.play(ModelAdded(model=SECOND, like="text"))
    assert "text~2" == SECOND.key
    (second,) = stage.arrive((1, 4), model="text~2")
    assert [(second,)] == stage.starts()
    told = stage.scheduler.statistics()
    assert [("text", 1, 2)] == [(model.name, model.queued, model.slots) for model in told.models]
    stage.finish(stage.started[-1], run_s=0.1, at=1.0)
    assert pytest.approx(0.1) == stage.scheduler.statistics().models[0].predicted_s
    stage.wait(5.0)
    assert [(first,)] == stage.starts()


def test_a_removed_model_leaves_nothing_behind() -> None:
    """No queue, no costs, no account; its slots go on with the others, and another generation may follow."""
    stage = Stage()
    stage.play(ModelAdded(model=replace(FIRST, max_delay_s=0.0)))
    stage.measured_slots(0)
    stage.play(ModelAdded(model=SECOND, like="text"))
    stage.arrive((1, 4))
    with pytest.raises(ContractError, match="has requests"):
        stage.play(ModelRemoved(model="text"))
    stage.finish(stage.started[0], run_s=0.1, at=1.0)
    assert stage.scheduler.is_idle("text")
    stage.play(ModelRemoved(model="text"))
    assert ["text"] == [model.name for model in stage.scheduler.statistics().models]
    (second,) = stage.arrive((1, 4), model="text~2", at=2.0)
    assert [(second,)] == stage.starts()
    (refused,) = stage.arrive((1, 4), at=2.0)
    assert "unavailable" == stage.ends[refused]
    stage.finish(stage.started[-1], run_s=0.1, at=3.0)
    stage.play(ModelRemoved(model="text~2"))
    stage.play(ModelRemoved(model="text~2"))
    assert () == stage.scheduler.statistics().models
    stage.play(ModelAdded(model=replace(FIRST, generation=3)))
    assert 0 == stage.scheduler.statistics().models[0].slots
    stage.slots(1, models=("text~3",))
    assert 1 == stage.scheduler.statistics().models[0].slots


def test_a_generation_without_workers_ends_alone() -> None:
    """Its requests are unavailable; those of the new one go on."""
    stage = Stage()
    stage.play(ModelAdded(model=FIRST))
    stage.play(ModelAdded(model=SECOND))
    old, new = stage.arrive((1, 4)), stage.arrive((1, 4), model="text~2")
    stage.play(ModelUnavailable(model="text", message="gone"))
    assert {old[0]: "unavailable"} == stage.ends
    stage.slots(0, models=("text~2",))
    assert [(new[0],)] == stage.starts()


def test_a_hundred_generations_do_not_grow() -> None:
    """Each is removed after its last request."""
    stage = Stage()
    stage.play(ModelAdded(model=replace(FIRST, max_delay_s=0.0)))
    stage.measured_slots(0)
    keys = ["text"]
    for generation in range(2, 102):
        stage.arrive((1, 4), model=keys[-1], at=float(generation))
        stage.finish(stage.started[-1], run_s=0.1)
        profile = replace(SECOND, generation=generation)
        stage.play(ModelAdded(model=profile, like=keys[-1]))
        stage.play(ModelRemoved(model=keys.pop()))
        keys.append(profile.key)
    assert 1 == len(stage.scheduler.statistics().models)
    assert ("text~101", 1) == (keys[-1], stage.scheduler.statistics().models[0].slots)
