"""The end of a server: it refuses what is new, finishes what it has, and hands back what it cannot finish."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import trio
from tests.pipeline.serving.clocks import virtual_time
from tests.pipeline.serving.harness import RawPeer, ScriptedSlots, memory_serving, request, verdict
from trio.testing import MockClock

from shapestream.serving.models import ModelOptions
from shapestream.serving.options import ServerOptions
from shapestream.serving.server import Server, serve
from shapestream.transport.memory import MemoryServer, memory_server
from shapestream.wire.messages import Execute, Failure, Goodbye, Heartbeat, Result

Body = Callable[[Server, RawPeer, ScriptedSlots], Awaitable[None]]


def run_to_the_end(body: Body, **options: Any) -> float:
    """Runs `body` beside a server; returns how long the server lived on after it, on the jumping clock."""

    async def main() -> float:
        slots, endpoint = ScriptedSlots(), memory_server()
        with trio.fail_after(600):
            async with trio.open_nursery() as nursery:
                server = await nursery.start(_serve, ServerOptions(**options), slots, endpoint)
                client = RawPeer(endpoint.connect())
                await client.open_session()
                await body(server, client, slots)
                began = trio.current_time()
        assert slots.closed
        return trio.current_time() - began

    return trio.run(main, clock=MockClock(autojump_threshold=0))


async def _serve(
    options: ServerOptions, slots: ScriptedSlots, clients: MemoryServer, task_status: trio.TaskStatus[Server]
) -> None:
    await serve(options, local=slots, clients=clients, task_status=task_status)


def test_an_idle_server_ends_at_once_and_says_goodbye() -> None:
    """Nothing to wait for."""

    async def body(server: Server, client: RawPeer, slots: ScriptedSlots) -> None:
        server.drain()
        await client.hear(Goodbye)

    assert run_to_the_end(body) < 0.1


def test_a_draining_server_finishes_what_it_has_and_refuses_what_is_new() -> None:
    """The queued request still runs; the new one is told to go elsewhere."""

    async def body(server: Server, client: RawPeer, slots: ScriptedSlots) -> None:
        client.say(request(1))
        first = await slots.next_batch()
        client.say(request(2))
        await trio.testing.wait_all_tasks_blocked()
        server.drain()
        await trio.testing.wait_all_tasks_blocked()
        client.say(request(3))
        failure = await client.hear(Failure)
        assert (3, "draining", True) == verdict(failure)
        slots.finish(first)
        slots.finish(await slots.next_batch())
        assert [1, 2] == [(await client.hear(Result)).sequence for _ in range(2)]
        await client.hear(Goodbye)

    assert run_to_the_end(body) < 0.1


def test_what_is_not_finished_within_the_grace_is_handed_back() -> None:
    """Retryable, and before the goodbye."""

    async def body(server: Server, client: RawPeer, slots: ScriptedSlots) -> None:
        client.say(request(1))
        await slots.next_batch()
        client.say(request(2))
        await trio.testing.wait_all_tasks_blocked()
        server.drain()
        began = trio.current_time()
        endings: list[Failure] = []
        while len(endings) < 2:
            with trio.move_on_after(1):
                endings.append(await client.hear(Failure))
            client.say(Heartbeat())
        assert 5 <= trio.current_time() - began < 7
        assert {(1, "draining", True), (2, "draining", True)} == {verdict(failure) for failure in endings}
        await client.hear(Goodbye)

    run_to_the_end(body, grace_s=5.0)


@virtual_time
async def test_a_worker_that_is_gone_when_the_grace_is_over_ends_nothing_twice() -> None:
    """That it cannot be told goodbye is found out when its requests have been handed back, and their clients told."""
    async with memory_serving(models={"echo": ModelOptions(idempotent=False)}, grace_s=0.5) as running:
        client, worker = await running.client_and_worker()
        client.say(request(1), request(2))
        await worker.hear(Execute)
        running.server.drain()
        await trio.sleep(0.4)
        worker.connection.close()
        verdicts = [verdict(failure) for failure in await client.hear_each(Failure, 2)]
        assert [(1, "worker_lost", True), (2, "draining", True)] == verdicts
        await client.hear(Goodbye)
