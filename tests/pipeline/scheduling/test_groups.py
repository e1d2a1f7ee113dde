"""Requests that have inputs in common share batches by groups: the scheduler sees a digest of these inputs."""

from __future__ import annotations

from collections.abc import Callable

from tests.pipeline.scheduling.stage import Stage

from shapestream.scheduling.events import CutReason
from shapestream.scheduling.queueing import MOST_GROUPS

ROW = (1, 4)


def _occupied(make_stage: Callable[..., Stage]) -> Stage:
    """A stage whose only slot runs a request, so that what arrives is queued."""
    stage = make_stage()
    stage.model(padded=True)
    stage.slots(1)
    stage.arrive(ROW, group=0)
    return stage


def _batches(stage: Stage) -> list[tuple[tuple[int, ...], CutReason]]:
    """Runs all that is queued; the requests of each further batch, and why it holds no more."""
    done = 1
    stage.finish(stage.started[0])
    while len(stage.started) > done:
        stage.finish(stage.started[done])
        done += 1
    return [(start.requests, start.facts.reason) for start in stage.started[1:]]


def test_only_requests_of_a_group_share_a_batch(make_stage: Callable[..., Stage]) -> None:
    """Whatever their sizes are, and in the order of their turns."""
    stage = _occupied(make_stage)
    sevens = [*stage.arrive(ROW, group=7), *stage.arrive((1, 6), group=7)]
    eights = stage.arrive(ROW, ROW, group=8)
    sevens += stage.arrive(ROW, group=7)
    assert [set(sevens), set(eights)] == [set(requests) for requests, _ in _batches(stage)]


def test_requests_beyond_the_largest_number_of_groups_run_alone(make_stage: Callable[..., Stage]) -> None:
    """They say why; when a group has left the queue, there is room for another one."""
    stage = _occupied(make_stage)
    for group in range(MOST_GROUPS):
        stage.arrive(ROW, ROW, group=group)
    crowded = stage.arrive(ROW, ROW, group=MOST_GROUPS)
    batches = _batches(stage)
    assert [(one,) for one in crowded] == [requests for requests, _ in batches[MOST_GROUPS:]]
    assert CutReason.CROWDED is batches[MOST_GROUPS][1]
    assert {2} == {len(requests) for requests, _ in batches[:MOST_GROUPS]}
    stage.arrive(ROW, group=1)
    later = stage.arrive(ROW, ROW, group=MOST_GROUPS)
    stage.finish(stage.started[-1])
    assert tuple(later) == stage.started[-1].requests
