"""Chains at a server whose slots the test plays: what is run, what is not run any more, and that nothing is left."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import trio
from tests.pipeline.serving.clocks import virtual_time
from tests.pipeline.serving.echo_model import model_settings
from tests.pipeline.serving.harness import Running, memory_serving
from tests.pipeline.serving.raw_peer import RawPeer, ending
from tests.pipeline.serving.scripted_slots import ScriptedSlots
from trio.testing import wait_all_tasks_blocked

from shapestream.chains.spec import ChainSpec, StageSpec
from shapestream.wire.messages import Failure, ModelOpened, OpenModel, RequestEntry, ResultEntry
from shapestream_engine.batch import BatchInputs
from shapestream_engine.element_types import element_type_of
from shapestream_engine.layout import Tensors
from shapestream_engine.ports import InputPort, OutputPort, Whole, list_ports
from shapestream_engine.shapes import NamedShape
from shapestream_engine.signature import ModelSignature

CUT = ModelSignature(
    "cut",
    (InputPort("x", "f32", NamedShape.parse("n:1..64")),),
    list_ports("parts", "f32", NamedShape.parse("k")),
)
"""Of each number, a list has an array of so many ones."""
READ = ModelSignature(
    "read",
    (InputPort("v", "f32", NamedShape.parse("k:1..9")),),
    (OutputPort("o", "f32", NamedShape.parse("1"), Whole()),),
)
"""The sum. It takes no empty array."""
CHAIN = ChainSpec(
    name="chain",
    inputs={"x": "cut.x"},
    stages=[
        StageSpec(name="cut", model="cut", inputs={"x": "x"}),
        StageSpec(
            name="read", model="read", inputs={"v": "cut.parts"}, each=["item of cut.parts"], at_most=8
        ),
    ],
    outputs={"o": "read.o"},
)
SKIPS = replace(CHAIN, skips=True, outputs={"o": "read.o", "ok": "read.ok"})


def tensors_of(*arrays: np.ndarray[Any, Any]) -> Tensors:
    """In the order of the ports."""
    layout = tuple((port, element_type_of(array.dtype), array.shape) for port, array in enumerate(arrays))
    return Tensors(layout=layout, buffers=[array.tobytes() for array in arrays])


def cut(batch: BatchInputs) -> list[Tensors]:
    """What the first stage answers."""
    found = []
    for member in batch.members:
        sizes = np.frombuffer(bytes(memoryview(member.buffers[0])), np.float32).astype(np.int64)
        found.append(tensors_of(np.ones(int(sizes.sum()), np.float32), sizes.reshape(-1, 1)))
    return found


def read(batch: BatchInputs) -> list[Tensors]:
    """What the second stage answers."""
    return [
        tensors_of(np.frombuffer(bytes(memoryview(member.buffers[0])), np.float32).sum(keepdims=True))
        for member in batch.members
    ]


async def run_next(slots: ScriptedSlots) -> str:
    """Answers the next batch as its model does; returns which model that is."""
    batch = await slots.next_batch()
    first = batch.model == "cut"
    slots.finish(batch, cut(batch) if first else read(batch))
    return batch.model


@asynccontextmanager
async def played(slots: ScriptedSlots) -> AsyncIterator[None]:
    """Every batch is answered as it comes."""

    async def play() -> None:
        while True:
            await run_next(slots)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(play)
        yield
        nursery.cancel_scope.cancel()


class Client:
    """A client that has opened the chain."""

    def __init__(self, peer: RawPeer, number: int) -> None:
        self.peer = peer
        self.number = number

    def ask(self, sequence: int, *sizes: int, remaining_ms: int | None = None) -> None:
        """One request."""
        self.peer.say(
            RequestEntry(
                sequence=sequence,
                model=self.number,
                remaining_ms=remaining_ms,
                priority=0,
                tensors=tensors_of(np.array(sizes, np.float32)),
            )
        )


async def open_chain(running: Running, name: bytes = b"c" * 16) -> Client:
    """A new client."""
    peer = await running.greeted(name, None)
    peer.say(OpenModel(name="chain"))
    return Client(peer, (await peer.hear(ModelOpened)).number)


@asynccontextmanager
async def chain_served(
    chain: ChainSpec = CHAIN, **options: Any
) -> AsyncIterator[tuple[Running, Client, ScriptedSlots]]:
    """A server with the chain and one scripted slot, and its first client."""
    slots = ScriptedSlots(CUT)
    slots.models = {"cut": CUT, "read": READ}
    async with memory_serving(slots, chains=[chain], **options) as running:
        yield running, await open_chain(running), slots


def outputs_of(result: ResultEntry) -> list[list[float]]:
    """Its numbers."""
    return [
        np.frombuffer(
            bytes(memoryview(buffer)), np.bool_ if element_type == "boolean" else np.float32
        ).tolist()
        for (_, element_type, _), buffer in zip(result.tensors.layout, result.tensors.buffers, strict=True)
    ]


@virtual_time
async def test_a_row_that_its_model_does_not_take_fails_the_request_and_none_of_its_rows_runs() -> None:
    """Also those that were made before it: nothing of it is left for a slot to do."""
    async with chain_served() as (_, client, slots):
        client.ask(1, 3, 2, 0, 4)
        assert "cut" == await run_next(slots)
        failure = await client.peer.hear(Failure)
        assert (1, "invalid") == ending(failure)
        assert failure.message.startswith("stage 'read', row 2: model 'read'")
        await wait_all_tasks_blocked()
        assert [] == slots.started
        client.ask(2, 5)
        assert ["cut", "read"] == [await run_next(slots), await run_next(slots)]
        assert [[5.0]] == outputs_of(await client.peer.hear(ResultEntry))


@virtual_time
async def test_a_row_that_its_model_does_not_take_is_skipped_where_rows_are() -> None:
    """The others run, and it is marked."""
    async with chain_served(SKIPS) as (_, client, slots):
        client.ask(1, 3, 0, 4)
        async with played(slots):
            assert [[3.0, 0.0, 4.0], [True, False, True]] == outputs_of(await client.peer.hear(ResultEntry))


@pytest.mark.parametrize(
    ("stage", "words"),
    [
        ({"at_most": 2}, "stage 'read' has 3 rows to run; its at_most is 2"),
        ({"at_most_bytes": 23}, "stage 'read' has 24 bytes to run; its at_most_bytes is 23"),
    ],
)
@virtual_time
async def test_more_than_a_stage_may_hold_is_too_large(stage: dict[str, int], words: str) -> None:
    """Rows, or bytes; none of them runs."""
    limited = replace(CHAIN, stages=[CHAIN.stages[0], replace(CHAIN.stages[1], **stage)])
    async with chain_served(limited) as (_, client, slots):
        client.ask(1, 3, 2, 1)
        await run_next(slots)
        failure = await client.peer.hear(Failure)
        assert ((1, "too_large"), words) == (ending(failure), failure.message)
        await wait_all_tasks_blocked()
        assert [] == slots.started


@virtual_time
async def test_chains_that_do_not_fit_together_wait_and_all_are_answered() -> None:
    """Room for two of them at a time, 60 requests of three clients; at the end nothing is left."""
    async with chain_served(max_queued_requests=32) as (running, first, slots):
        clients = [first, await open_chain(running, b"d" * 16), await open_chain(running, b"e" * 16)]
        for sequence in range(1, 21):
            for client in clients:
                client.ask(sequence, *[1 + sequence % 9] * (sequence % 8 + 1))
        async with played(slots):
            for client in clients:
                results = await client.peer.hear_each(ResultEntry, 20)
                expected = {number: [1.0 + number % 9] * (number % 8 + 1) for number in range(1, 21)}
                assert expected == {result.sequence: outputs_of(result)[0] for result in results}
            numbers = await first.peer.statistics()
        assert (60, 60, {}, 0) == (
            numbers["requests"],
            numbers["results"],
            numbers["failures"],
            numbers["faults"],
        )


@virtual_time
async def test_rows_of_a_chain_that_has_begun_go_before_the_first_stage_of_a_younger_one() -> None:
    """The slot that ends the older one's first stage gets its rows next, though the younger one was queued before them."""
    async with chain_served() as (_, client, slots):
        client.ask(1, 3, 2)
        first = await slots.next_batch()
        await trio.sleep(1.0)
        client.ask(2, 4)
        await wait_all_tasks_blocked()
        slots.finish(first, cut(first))
        assert ["read", "read", "cut", "read"] == [await run_next(slots) for _ in range(4)]
        results = await client.peer.hear_each(ResultEntry, 2)
        assert [(1, [[3.0, 2.0]]), (2, [[4.0]])] == [
            (result.sequence, outputs_of(result)) for result in results
        ]


@virtual_time
async def test_what_is_queued_beside_a_chain_begins_when_nothing_of_it_follows() -> None:
    """The end of its last stage, of a row that others follow, and of a request without rows."""
    async with chain_served() as (_, client, slots):
        client.ask(1, 3, 2)
        assert ["cut", "read"] == [await run_next(slots) for _ in range(2)]
        await trio.sleep(1.0)
        client.ask(2, 4)
        async with played(slots):
            results = await client.peer.hear_each(ResultEntry, 2)
        assert [1, 2] == [result.sequence for result in results]


@virtual_time
async def test_no_stage_begins_after_the_deadline() -> None:
    """The first stage ends too late; its answer is of no use."""
    async with chain_served() as (_, client, slots):
        client.ask(1, 3, 2, remaining_ms=1000)
        batch = await slots.next_batch()
        await trio.sleep(2.0)
        slots.finish(batch, cut(batch))
        assert (1, "deadline_exceeded") == ending(await client.peer.hear(Failure))
        await wait_all_tasks_blocked()
        assert [] == slots.started


@virtual_time
async def test_a_request_sent_again_under_its_number_has_the_same_reply_and_runs_once() -> None:
    """As any request's: the reply is kept."""
    async with chain_served() as (_, client, slots):
        async with played(slots):
            client.ask(1, 3, 2)
            first = await client.peer.hear(ResultEntry)
        assert [[3.0, 2.0]] == outputs_of(first)
        client.ask(1, 3, 2)
        assert first == await client.peer.hear(ResultEntry)
        await wait_all_tasks_blocked()
        assert [] == slots.started


@pytest.mark.parametrize(
    ("once", "code"), [(None, "draining"), ("cut", "worker_lost"), ("read", "worker_lost")]
)
@virtual_time
async def test_chains_that_are_not_finished_within_the_grace_are_handed_back(
    once: str | None, code: str
) -> None:
    """Those in mid-chain and those that wait for room alike. Only what may run twice is a refusal once it has begun."""
    models = {} if once is None else {once: model_settings(idempotent=False)}
    async with chain_served(max_queued_requests=16, grace_s=1.0, models=models) as (running, client, slots):
        for sequence in range(1, 5):
            client.ask(sequence, 3, 2)
        await run_next(slots)
        await slots.next_batch()
        running.server.drain()
        failures = await client.peer.hear_each(Failure, 4)
        assert [(1, code), (2, "draining"), (3, "draining"), (4, "draining")] == sorted(map(ending, failures))
