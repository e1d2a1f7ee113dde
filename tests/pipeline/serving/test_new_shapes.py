"""A server that is short of memory refuses requests of new shapes, where each one costs memory for good."""

from __future__ import annotations

from dataclasses import replace

import pytest
import trio
from tests.pipeline.serving.clocks import virtual_time
from tests.pipeline.serving.harness import (
    SIGNATURE,
    RawPeer,
    ScriptedSlots,
    echo_tensors,
    memory_serving,
    request,
)

from shapestream.wire.messages import Failure, Result
from shapestream_engine.strategy import Strategy


async def answer(slots: ScriptedSlots, client: RawPeer, sequence: int, n: int) -> str:
    """How a request of this shape ends."""
    client.say(request(sequence, echo_tensors(n=n)))
    with trio.move_on_after(1):
        slots.finish(await slots.next_batch())
        return f"result {(await client.hear(Result)).sequence}"
    failure = await client.hear(Failure)
    return f"{failure.code}: {failure.message}"


@pytest.mark.parametrize("strategy", [Strategy(), Strategy(max_prepared=4), Strategy({"batch": (1, 2)})])
@virtual_time
async def test_only_shapes_that_were_met_are_served_while_new_ones_are_refused(strategy: Strategy) -> None:
    """A strategy that leaves one dimension at any size does not help; the refusal ends when it is taken back."""
    slots = ScriptedSlots(replace(SIGNATURE, strategy=strategy))
    async with memory_serving(slots) as running:
        client = await running.greeted()
        assert "result 1" == await answer(slots, client, 1, 4)
        running.server.refuse_new_shapes("no room")
        assert "unavailable: no room" == await answer(slots, client, 2, 5)
        assert "result 3" == await answer(slots, client, 3, 4)
        running.server.refuse_new_shapes(None)
        assert "result 4" == await answer(slots, client, 4, 5)


@virtual_time
async def test_a_model_that_runs_a_few_shapes_only_takes_all_requests() -> None:
    """A new request shape is no new shape for the engine there."""
    sizes = {"batch": (1, 64), "n": (8, 1_000_000)}
    inputs = tuple(replace(port, pad={"n": 0} if port.name == "x" else {}) for port in SIGNATURE.inputs)
    slots = ScriptedSlots(replace(SIGNATURE, inputs=inputs, strategy=Strategy(sizes)))
    async with memory_serving(slots) as running:
        client = await running.greeted()
        running.server.refuse_new_shapes("no room")
        assert "result 1" == await answer(slots, client, 1, 5)
