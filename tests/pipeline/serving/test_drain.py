"""The end of a server: it refuses what is new, finishes what it has, and hands back what it cannot finish."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest
import trio
from tests.entries import Execute, Failure, Goodbye, Heartbeat
from tests.pipeline.serving.clocks import virtual_time
from tests.pipeline.serving.echo_model import model_settings, request
from tests.pipeline.serving.harness import memory_serving, serve_with
from tests.pipeline.serving.raw_peer import RawPeer, verdict
from tests.pipeline.serving.scripted_slots import ScriptedSlots
from trio.testing import wait_all_tasks_blocked

from shapestream.serving.server import FAREWELL_S, Server
from shapestream.transport.memory import memory_server


@asynccontextmanager
async def ends_by_itself(**options: Any) -> AsyncIterator[tuple[Server, RawPeer, ScriptedSlots]]:
    """A server that at the end of the block has nothing left to wait for, and its one client."""
    slots, endpoint = ScriptedSlots(), memory_server()
    async with trio.open_nursery() as nursery:
        server = await nursery.start(partial(serve_with(**options), local=slots, clients=endpoint))
        client = RawPeer(endpoint.connect())
        await client.open_session()
        yield server, client, slots
        began = trio.current_time()
    assert slots.closed
    assert trio.current_time() - began < 0.1


@virtual_time
async def test_an_idle_server_ends_at_once_and_says_goodbye() -> None:
    """Nothing to wait for."""
    async with ends_by_itself() as (server, client, _):
        server.drain()
        await client.hear(Goodbye)


@virtual_time
async def test_who_is_told_goodbye_has_a_moment_to_read_it() -> None:
    """What was not read when a connection ends may be lost with it."""
    async with ends_by_itself() as (server, client, _):
        server.drain()
        await client.hear(Goodbye)
        told_at = trio.current_time()
    assert FAREWELL_S == pytest.approx(trio.current_time() - told_at)


@virtual_time
async def test_a_server_that_leaves_is_not_ready_and_takes_requests() -> None:
    """Clients hear nothing of it before its drain."""
    async with ends_by_itself() as (server, client, slots):
        assert [] == server.readings.not_ready()
        server.leave()
        assert ["the server leaves"] == server.readings.not_ready()
        assert {"echo": ["the server leaves"]} == server.readings.readiness()["models_not_ready"]
        client.say(request(1))
        slots.finish(await slots.next_batch())
        assert [1] == await client.sequences(1)
        server.drain()
        await client.hear(Goodbye)


@virtual_time
async def test_a_draining_server_finishes_what_it_has_and_refuses_what_is_new() -> None:
    """The queued request still runs; the new one is told to go elsewhere."""
    async with ends_by_itself() as (server, client, slots):
        client.say(request(1))
        first = await slots.next_batch()
        client.say(request(2))
        await wait_all_tasks_blocked()
        server.drain()
        await wait_all_tasks_blocked()
        client.say(request(3))
        assert (3, "draining", True) == verdict(await client.hear(Failure))
        slots.finish(first)
        slots.finish(await slots.next_batch())
        assert [1, 2] == await client.sequences(2)
        await client.hear(Goodbye)


@virtual_time
async def test_what_is_not_finished_within_the_grace_is_handed_back() -> None:
    """Retryable, and before the goodbye."""
    async with ends_by_itself(grace_s=5.0) as (server, client, slots):
        client.say(request(1))
        await slots.next_batch()
        client.say(request(2))
        await wait_all_tasks_blocked()
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


@virtual_time
async def test_a_worker_that_is_gone_when_the_grace_is_over_ends_nothing_twice() -> None:
    """That it cannot be told goodbye is found out when its requests have been handed back, and their clients told."""
    async with memory_serving(models={"echo": model_settings(idempotent=False)}, grace_s=0.5) as running:
        client, worker = await running.client_and_worker()
        client.say(request(1), request(2))
        await worker.hear(Execute)
        running.server.drain()
        await trio.sleep(0.4)
        worker.close()
        verdicts = [verdict(failure) for failure in await client.hear_each(Failure, 2)]
        assert [(1, "worker_lost", True), (2, "draining", True)] == verdicts
        await client.hear(Goodbye)
