"""A reload changes a model while its requests wait: by whom they are run, and what its workers are told."""

from __future__ import annotations

from dataclasses import replace

import trio
from tests.entries import Execute
from tests.pipeline.serving.clocks import virtual_time
from tests.pipeline.serving.echo_model import SIGNATURE, done, request
from tests.pipeline.serving.harness import memory_serving
from trio.testing import wait_all_tasks_blocked

from shapestream.settings import ModelSettings
from shapestream_engine.output_rules import Rows
from shapestream_engine.ports import OutputPort
from shapestream_engine.shapes import NamedShape

ECHO = ModelSettings(name="echo")
RELOADED = ECHO.model_copy(update={"calibration_s": 0.0})
OTHER = replace(SIGNATURE, outputs=(OutputPort("z", "f32", NamedShape.parse("batch, n"), Rows()),))
"""What a reload makes of the echo: its output has another name."""


@virtual_time
async def test_requests_that_waited_for_an_old_worker_are_run_by_the_new_one() -> None:
    """With the same signature: of its process nothing is left, whether it died or had only one slot to drain."""
    async with memory_serving(models={"echo": ECHO}) as running:
        client, old, _ = await running.busy_worker()
        client.say(*[request(number) for number in range(2, 6)])
        running.server.model_expected("echo", RELOADED, may_change=True)
        new = await running.joined("new")
        client.say(request(6))
        await client.statistics()
        old.close()
        for _ in range(3):  # what waited, what came later, and what the old one had begun
            await new.run_next()
        assert [1, 2, 3, 4, 5, 6] == sorted(await client.sequences(6))


@virtual_time
async def test_an_old_worker_is_finished_as_soon_as_the_last_request_for_it_has_ended() -> None:
    """At that very time, and not before what waited for it."""
    async with memory_serving(models={"echo": ECHO}) as running:
        client, old, execute = await running.busy_worker()
        client.say(request(2))
        running.server.model_expected("echo", RELOADED, may_change=True)
        await running.joined("new", signature=OTHER)
        finished = trio.Event()

        async def wait() -> None:
            await running.server.worker_finished("w")
            finished.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait)
            old.say(done(execute))
            assert [1] == await client.sequences(1)
            execute = await old.hear(Execute)
            await wait_all_tasks_blocked()
            assert not finished.is_set()
            ended_at = trio.current_time()
            old.say(done(execute))
            await finished.wait()
            assert trio.current_time() == ended_at
            assert [2] == await client.sequences(1)
