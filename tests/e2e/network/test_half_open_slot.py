"""The connection of one slot that leads nowhere while its worker's control works: what it carried runs elsewhere."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import numpy as np
import pytest
import trio
from tests.e2e.network.proxy import DOWN, UP, Direction, Proxy

import shapestream

pytestmark = pytest.mark.e2e

CONFIG = """\
    server:
      listen: [ipc://s.sock]
      worker_listen: "tcp://127.0.0.1:*"
      heartbeat_s: 0.2
    models:
      - name: gated
        function: gated:noted_when_open
        inputs: {x: {shape: "batch:1..8, n:1..64", element_type: f32}}
        outputs: {y: {shape: "batch, n", element_type: f32, rule: rows}}
        batching: {max_batch: 1, hang_after_s: off}   # only the connection shows that a batch is lost
        trust: true
        calibration_s: 0
    workers: []
"""
PATIENCE_S = 120.0


@pytest.mark.parametrize(
    "directions",
    [pytest.param((DOWN,), marks=pytest.mark.thorough), (UP, DOWN)],
    ids=["its batches vanish", "so do its reports"],
)
@pytest.mark.parametrize("began", [False, True], ids=["before the batch", "in the middle of it"])
def test_a_batch_on_a_half_open_slot_runs_again_elsewhere(
    workplace: Any, directions: tuple[Direction, ...], began: bool
) -> None:
    """The slot hears nothing, and its worker begins a new session; each request is answered once, and rightly."""
    config = workplace.write(CONFIG)
    served = workplace.serve(config)
    (ready,) = served.events("server ready")
    port = int(ready["workers"][0].rpartition(":")[2])
    answers: dict[int, shapestream.Result] = {}

    async def ask(client: shapestream.Client, value: int) -> None:
        answers[value] = await client.infer("gated", {"x": np.full((1, 3), value, np.float32)})

    async def main() -> None:
        proxy = Proxy(port)
        async with trio.open_nursery() as nursery:
            await nursery.start(proxy.run)
            with trio.fail_after(PATIENCE_S):
                workplace.start("worker", str(config), "--connect", proxy.address, "--name", "left")
                await trio.to_thread.run_sync(served.wait_for, "worker joined")
                async with shapestream.connect(served.address) as client:
                    workplace.open_gate()
                    await ask(client, 0)
                (workplace.folder / "open").unlink()
                for path in [*workplace.folder.glob("entered-*"), workplace.folder / "begun"]:
                    path.unlink()
                _control, slot = proxy.passages  # the worker dials for its slots when it is welcome
                workplace.start(
                    "worker", str(config), "--connect", f"tcp://127.0.0.1:{port}", "--name", "right"
                )
                await trio.to_thread.run_sync(served.wait_for, "worker joined", 2)
                async with shapestream.connect(served.address) as client, trio.open_nursery() as asking:
                    if not began:
                        slot.swallow(*directions)
                    for value in (1, 2):
                        asking.start_soon(ask, client, value)
                    # One on each: with one that was lost on its way, only the other begins.
                    await trio.to_thread.run_sync(partial(workplace.wait_entered, 2 if began else 1))
                    if began:
                        slot.swallow(*directions)
                    workplace.open_gate()
            nursery.cancel_scope.cancel()

    trio.run(main)
    assert {0: 0.0, 1: 2.0, 2: 4.0} == {value: float(result["y"][0, 0]) for value, result in answers.items()}
    reported = began and UP not in directions
    lost_by = [event["worker"].partition("-")[0] for event in served.events("worker left")]
    assert [] == lost_by if reported else ["left"] == lost_by
    begun = Counter((workplace.folder / "begun").read_text().split())
    assert (3 if began and not reported else 2) == begun.total()
