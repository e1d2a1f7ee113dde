"""Our client and a real server, over connections of which one loses what the server says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import trio
from tests.pipeline.serving.echo_model import SIGNATURE, model_settings
from tests.pipeline.serving.harness import Running, memory_serving
from tests.pipeline.serving.scripted_slots import ScriptedSlots
from trio.testing import MockClock, wait_all_tasks_blocked

import shapestream
from shapestream.testing import MemoryConnection

INPUTS = {"x": np.full((1, 4), 3, np.float32), "scale": np.ones((1,), np.float32)}
ONCE = {"echo": model_settings(idempotent=False)}


class Line:
    """The connections of one client, one after the other."""

    def __init__(self, running: Running) -> None:
        self._running = running
        self.connections: list[MemoryConnection] = []

    def __call__(self) -> MemoryConnection:
        """The next connection; it hears."""
        self.connections.append(self._running.clients.connect())
        return self.connections[-1]

    def deafen(self) -> None:
        """From now on the latest connection loses the messages of the server; those of the client arrive."""
        latest = self.connections[-1]
        receive_nowait = latest.receive_nowait

        def lose() -> list[Any]:
            receive_nowait()
            return []

        latest.receive_nowait = lose  # type: ignore[method-assign]


def lose_one_reply(
    then: Callable[[ScriptedSlots], Any] | None = None, **options: Any
) -> tuple[shapestream.Result | shapestream.RequestError, dict[str, Any]]:
    """One request whose reply is lost on its way: what its caller gets in the end, and the server's counters."""
    ended: list[shapestream.Result | shapestream.RequestError] = []
    counters: dict[str, Any] = {}

    async def ask(client: shapestream.Client) -> None:
        try:
            ended.append(await client.infer("echo", INPUTS))
        except shapestream.RequestError as error:
            ended.append(error)

    async def main() -> None:
        slots = ScriptedSlots()
        async with memory_serving(slots, **options) as running:
            line = Line(running)
            async with shapestream.connect(line) as client, trio.open_nursery() as nursery:
                nursery.start_soon(ask, client)
                batch = await slots.next_batch()
                line.deafen()
                slots.finish(batch)
                await wait_all_tasks_blocked()
                assert [] == ended
                if then is not None:
                    slots.finish(await then(slots))
            assert 2 == len(line.connections)
            counters.update(running.server.statistics())

    async def in_time() -> None:
        with trio.fail_after(600):  # of the jumping clock
            await main()

    trio.run(in_time, clock=MockClock(autojump_threshold=0))
    return ended[0], counters


def test_a_reply_that_was_lost_is_given_again_and_the_model_ran_once() -> None:
    """The silence of the connection is noticed; on the next one the kept reply comes."""
    outcome, counters = lose_one_reply()
    assert isinstance(outcome, shapestream.Result)
    np.testing.assert_array_equal(INPUTS["x"], outcome["y"])
    assert (1, 1, 1) == (counters["batches"], counters["repeated"], counters["requests"])


def test_a_lost_reply_that_is_not_kept_is_made_again() -> None:
    """It is too large for what may be kept: the request runs once more, under a new number."""
    outcome, counters = lose_one_reply(then=ScriptedSlots.next_batch, kept_bytes=100)
    assert isinstance(outcome, shapestream.Result)
    assert (2, 0, {"answered": 1}) == (counters["batches"], counters["repeated"], counters["failures"])


@pytest.mark.parametrize(
    ("kept_bytes", "expected"), [(1 << 20, shapestream.Result), (100, shapestream.AlreadyAnswered)]
)
def test_a_lost_reply_of_what_may_not_run_twice_is_given_again_or_not_at_all(
    kept_bytes: int, expected: type
) -> None:
    """Kept, it comes; if not, the caller learns that it is gone."""
    outcome, counters = lose_one_reply(models=ONCE, kept_bytes=kept_bytes)
    assert isinstance(outcome, expected)
    assert 1 == counters["batches"]


def test_a_request_that_others_passed_is_not_taken_for_one_that_was_answered() -> None:
    """Its model comes later to the next server than another one, whose replies are not kept there. It runs, once."""
    servers: list[Running] = []
    ended: list[str] = []

    async def ask(client: shapestream.Client, model: str) -> None:
        await client.infer(model, INPUTS)
        ended.append(model)

    async def main() -> None:
        other = replace(SIGNATURE, name="other")
        async with trio.open_nursery() as nursery:
            async with memory_serving(ScriptedSlots(other), models=ONCE) as first:
                servers.append(first)
                await first.joined()
                client = await nursery.start(keep_open)
                for model in ("echo", "other"):
                    await client.signature(model)
                first.server.drain()
                await wait_all_tasks_blocked()
            slots = ScriptedSlots(other)
            async with memory_serving(slots, models=ONCE, kept_bytes=100) as second:
                servers.append(second)
                nursery.start_soon(ask, client, "echo")
                await wait_all_tasks_blocked()
                nursery.start_soon(ask, client, "other")
                slots.finish(await slots.next_batch())
                await wait_all_tasks_blocked()
                assert ["other"] == ended
                worker = await second.joined()
                await worker.run_next()
                await wait_all_tasks_blocked()
                assert ["other", "echo"] == ended
                nursery.cancel_scope.cancel()

    async def keep_open(*, task_status: trio.TaskStatus[shapestream.Client]) -> None:
        async with shapestream.connect(lambda: servers[-1].clients.connect()) as client:
            task_status.started(client)
            await trio.sleep_forever()

    async def in_time() -> None:
        with trio.fail_after(600):  # of the jumping clock
            await main()

    trio.run(in_time, clock=MockClock(autojump_threshold=0))
