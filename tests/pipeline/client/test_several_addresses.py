"""A client that knows several servers of the same models: the next is asked where one is absent, gone, or leaving."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
import trio
import trio.testing
from tests.entries import Goodbye
from tests.pipeline.client.virtual_time import ROW, serving, until

import shapestream
from shapestream.errors import Draining
from shapestream.testing import MemoryEndpoint, ScriptedModel, ScriptedServer, identity_signature


class Leaving:
    """The answers of a model whose server takes nothing new from some time on."""

    def __init__(self) -> None:
        self.leaves = False

    def __call__(self, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        """The input as it came; of those that come while it leaves (rows of zeros), none is taken."""
        if self.leaves and not inputs["x"].any():
            raise Draining("this server is leaving")
        return {"y": inputs["x"]}


@asynccontextmanager
async def two_servers(
    *models: ScriptedModel,
) -> AsyncIterator[tuple[ScriptedServer, ScriptedServer, list[Any]]]:
    """Two servers of the same models, and their addresses."""
    async with serving(*models) as (first, one), serving(*models) as (second, other):
        yield first, second, [one.connect, other.connect]


async def test_the_next_is_asked_where_the_first_is_absent() -> None:
    """Nobody listens at the first address: after the time of a greeting the second one has the client."""
    async with serving() as (server, endpoint):
        start = trio.current_time()
        async with shapestream.connect([MemoryEndpoint().connect, endpoint.connect]) as client:
            await client.infer("identity", ROW)
        assert 1 == pytest.approx(trio.current_time() - start, abs=0.1)
        assert 1 == len(server.requests)


async def test_a_goodbye_sends_the_client_to_the_next_at_once() -> None:
    """There is no rest before another server is asked, and one before the first is asked again in vain."""
    async with two_servers() as (first, second, addresses), shapestream.connect(addresses) as client:
        await client.infer("identity", ROW)
        start = trio.current_time()
        first.say(Goodbye())
        await trio.testing.wait_all_tasks_blocked()
        await client.infer("identity", ROW)
        assert (1, 1, start) == (len(first.requests), len(second.requests), trio.current_time())


async def test_two_servers_that_turn_a_client_away_are_not_asked_without_pause() -> None:
    """Both say goodbye to each greeting: after each has been asked once there is a rest."""
    async with two_servers() as (first, second, addresses), shapestream.connect(addresses) as client:
        await client.signature("identity")
        for _ in range(10):
            first.say(Goodbye())
            second.say(Goodbye())
            await trio.testing.wait_all_tasks_blocked()
        assert 2 >= first.hellos
        assert 1 == second.hellos
        await client.infer("identity", ROW)


async def test_what_a_leaving_server_does_not_take_goes_to_the_next() -> None:
    """It answers what it has; then the next server gets the rest, in order, while the first one still leaves."""
    leaving = Leaving()
    slow = ScriptedModel(identity_signature(), leaving, duration_s=lambda inputs: float(inputs["x"][0, 0]))
    async with serving(slow) as (first, one), serving() as (second, other):
        async with (
            shapestream.connect([one.connect, other.connect]) as client,
            trio.open_nursery() as nursery,
        ):
            await client.signature("identity")
            nursery.start_soon(client.infer, "identity", {"x": np.full((1, 16), 5.0, np.float32)})
            await until(lambda: first.requests)
            await trio.sleep(1)
            leaving.leaves = True
            start = trio.current_time()
            await client.infer("identity", ROW)
            # It waits until the running one is answered.
            assert 4 == pytest.approx(trio.current_time() - start, abs=0.1)
        await trio.testing.wait_all_tasks_blocked()
        assert (2, 1, 1) == (len(first.requests), len(second.requests), first.goodbyes)


async def test_a_silent_server_is_left_for_the_next() -> None:
    """After the silence, what it had not answered is answered by the next server."""
    async with two_servers() as (first, second, addresses):
        async with shapestream.connect(addresses, silence=5) as client:
            await client.signature("identity")
            first.go_silent()
            start = trio.current_time()
            await client.infer("identity", ROW)
            assert 5 == pytest.approx(trio.current_time() - start, abs=0.1)
        assert 1 == len(second.requests)


async def test_a_server_that_is_met_again_answers_everything() -> None:
    """To and fro between two servers, each of which remembers the numbers that it was sent: no request is taken for old."""
    async with two_servers() as (first, second, addresses), shapestream.connect(addresses) as client:
        for turn in range(6):
            present = (first, second)[turn % 2]
            for _ in range(5):
                await client.infer("identity", ROW)
            present.say(Goodbye())
            await trio.testing.wait_all_tasks_blocked()
        for server in (first, second):
            numbers = [request.sequence for request in server.requests]
            assert sorted(set(numbers)) == numbers
        assert 30 == len(first.requests) + len(second.requests)


async def test_an_empty_list_is_no_address() -> None:
    """The error says what to write."""
    with pytest.raises(ValueError, match="no address: write at least one"):
        async with shapestream.connect([]):
            pass
