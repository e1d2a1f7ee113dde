"""A real server with a worker for each of two models: what is asked of one is nothing to the clients of the other."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import trio

import shapestream

pytestmark = pytest.mark.e2e

ROOM = 64
FLOOD = 3 * ROOM
ASKING = 20
"""Requests at a time, less than half of the room."""
ANSWERS = 200
MODEL = """\
      - name: {name}
        function: gated:{function}
        inputs: {{x: {{shape: "batch:1..8, 4", element_type: f32}}}}
        outputs: {{y: {{shape: "batch, 4", element_type: f32, rule: rows}}}}
        trust: true
        calibration_s: 0
"""
SERVED = (
    f"    server: {{listen: [ipc://s.sock], max_queued_requests: {ROOM}}}\n    models:\n"
    + MODEL.format(name="slow", function="double_when_open")
    + MODEL.format(name="fast", function="double")
    + "    workers: [{models: [slow]}, {models: [fast]}]\n"
)
ONES = np.ones((1, 4), np.float32)


async def ask(client: shapestream.Client, model: str) -> str:
    """How one request ends."""
    try:
        await client.infer(model, {"x": ONES})
    except shapestream.RequestError as error:
        return error.code
    return "answered"


async def flood_and_ask(served: Any, same_client: bool) -> Counter[str]:
    """Flood the slow model until it refuses, and then ask the fast one: how that ends."""
    refused = trio.Event()
    fast: Counter[str] = Counter()

    async def ask_slow(client: shapestream.Client) -> None:
        if await ask(client, "slow") == "overloaded":
            refused.set()

    async def ask_fast(client: shapestream.Client) -> None:
        for _ in range(ANSWERS // ASKING):
            fast[await ask(client, "fast")] += 1

    async with (
        shapestream.connect(served.address) as flooding,
        shapestream.connect(served.address) as other,
        trio.open_nursery() as flooded,
    ):
        for _ in range(FLOOD):
            flooded.start_soon(ask_slow, flooding)
        with trio.fail_after(60.0):
            await refused.wait()
            async with trio.open_nursery() as asking:
                for _ in range(ASKING):
                    asking.start_soon(ask_fast, flooding if same_client else other)
        flooded.cancel_scope.cancel()
    return fast


@pytest.mark.parametrize("same_client", [False, True], ids=["another client", "same client"])
def test_a_flood_of_one_model_refuses_nothing_of_a_model_on_other_slots(
    workplace: Any, same_client: bool
) -> None:
    """The worker of the flooded model answers nothing meanwhile, and has all of its room taken."""
    served = workplace.serve(SERVED)
    served.wait_for("workers ready")
    fast = trio.run(flood_and_ask, served, same_client)
    workplace.open_gate()
    assert Counter(answered=ANSWERS) == fast
