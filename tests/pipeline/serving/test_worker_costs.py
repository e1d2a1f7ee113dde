"""What workers have measured, on its way to the scheduler."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from tests.entries import Goodbye, ResultEntry
from tests.pipeline.serving.clocks import virtual_time
from tests.pipeline.serving.echo_model import SIGNATURE, request
from tests.pipeline.serving.harness import memory_serving
from tests.pipeline.serving.raw_peer import hello_of
from tests.pipeline.serving.scripted_slots import ScriptedSlots
from trio.testing import wait_all_tasks_blocked

from shapestream.scheduling import events
from shapestream.scheduling.actions import Action
from shapestream.scheduling.scheduler import Scheduler
from shapestream_engine.cost_table import CostPoint, CostTable

TABLE = CostTable(
    key="k",
    dimensions=SIGNATURE.dimensions,
    points=(CostPoint(sizes=tuple(4 for _ in SIGNATURE.dimensions), seconds=0.25, first_seconds=0.5),),
)


def joining(monkeypatch: pytest.MonkeyPatch) -> list[events.SlotJoined]:
    """The slots that the scheduler hears of."""
    joined: list[events.SlotJoined] = []
    handle = Scheduler.handle

    def watched(self: Scheduler, event: events.Event, now: float) -> list[Action]:
        if isinstance(event, events.SlotJoined | events.SlotsJoined):
            joined.extend(event.slots if isinstance(event, events.SlotsJoined) else [event])
        return handle(self, event, now)

    monkeypatch.setattr(Scheduler, "handle", watched)
    return joined


@virtual_time
async def test_measured_costs_reach_the_scheduler_with_each_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker's table, and whose slot it is."""
    joined = joining(monkeypatch)
    async with memory_serving() as running:
        worker = running.worker()
        await worker.greet_as_worker(hello_of(slots=2, costs={SIGNATURE.name: TABLE.to_dict()}))
        await wait_all_tasks_blocked()
    assert [("w", {SIGNATURE.name: TABLE})] * 2 == [(event.worker, event.costs) for event in joined]


@virtual_time
async def test_the_server_knows_what_traffic_made_of_the_costs() -> None:
    """For the processes that a reload starts; of models that a worker has measured."""
    points = (CostPoint(sizes=(1, 4), seconds=0.25),)
    slots = ScriptedSlots()
    slots.costs = {SIGNATURE.name: replace(TABLE, points=points)}
    async with memory_serving(slots) as running:
        peer = await running.greeted()
        (before,) = running.server.known_costs()
        for at in range(20):
            peer.say(request(at))
            slots.finish(await slots.next_batch(), busy_s=1.0)
            await peer.hear(ResultEntry)
        (after,) = running.server.known_costs()
    assert (SIGNATURE.name, 0.25) == (before.model, before.table.points[0].seconds)
    assert 0.5 < after.table.points[0].seconds


@pytest.mark.parametrize(
    "costs",
    [
        {SIGNATURE.name: {}},
        {SIGNATURE.name: {**TABLE.to_dict(), "points": [[[4, 4], "much", None]]}},
        {SIGNATURE.name: {**TABLE.to_dict(), "dimensions": ["other"]}},
        {SIGNATURE.name: {**TABLE.to_dict(), "points": [[[4, 4], -1.0, None]]}},
        {SIGNATURE.name: {**TABLE.to_dict(), "points": [[[4, 4], 1e160, None]]}},
        {SIGNATURE.name: {**TABLE.to_dict(), "points": [[[4, 4], 0.1, 1e160]]}},
        {SIGNATURE.name: {**TABLE.to_dict(), "points": [[[4, 4], math.inf, None]]}},
        {SIGNATURE.name: {**TABLE.to_dict(), "points": [[[4, 4], math.nan, None]]}},
        {SIGNATURE.name: {**TABLE.to_dict(), "points": [[[2**30, 2**30], 0.1, None]]}},
        {"another": TABLE.to_dict()},
    ],
)
@virtual_time
async def test_a_worker_whose_costs_cannot_be_read_is_cut_off(costs: dict[str, dict[str, Any]]) -> None:
    """As with a signature: what a worker sends is read strictly, or not at all."""
    async with memory_serving() as running:
        worker = running.worker()
        worker.say(hello_of(costs=costs))
        await worker.hear(Goodbye)
        assert {} == running.server.statistics()["slots"]


@virtual_time
async def test_slots_of_the_servers_own_bring_theirs_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the server's process measured of its models is known with its slots."""
    joined = joining(monkeypatch)
    slots = ScriptedSlots(slots=2)
    slots.costs = {SIGNATURE.name: TABLE}
    async with memory_serving(slots):
        pass
    assert [("local", {SIGNATURE.name: TABLE})] * 2 == [(event.worker, event.costs) for event in joined]
