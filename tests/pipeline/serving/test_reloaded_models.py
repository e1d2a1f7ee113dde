"""A reload changes a model while its requests wait: by whom they are run, and what its workers are told."""

from __future__ import annotations

from tests.pipeline.serving.clocks import virtual_time
from tests.pipeline.serving.echo_model import request
from tests.pipeline.serving.harness import memory_serving

from shapestream.settings import ModelSettings

ECHO = ModelSettings(name="echo")


@virtual_time
async def test_requests_that_waited_for_an_old_worker_are_run_by_the_new_one() -> None:
    """With the same signature: of its process nothing is left, whether it died or had only one slot to drain."""
    async with memory_serving(models={"echo": ECHO}) as running:
        client, old, _ = await running.busy_worker()
        client.say(*[request(number) for number in range(2, 6)])
        running.server.model_expected("echo", ECHO.model_copy(update={"calibration_s": 0.0}), may_change=True)
        new = await running.joined("new")
        client.say(request(6))
        await client.statistics()
        old.close()
        for _ in range(3):  # what waited, what came later, and what the old one had begun
            await new.run_next()
        assert [1, 2, 3, 4, 5, 6] == sorted(await client.sequences(6))
