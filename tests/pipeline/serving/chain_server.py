"""A server with a chain of two stages, whose slots the test plays, and its clients."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import trio
from tests.entries import ModelOpened, OpenModel, ResultEntry, request_of
from tests.pipeline.serving.harness import Running, memory_serving
from tests.pipeline.serving.raw_peer import RawPeer
from tests.pipeline.serving.scripted_slots import ScriptedSlots
from trio.testing import wait_all_tasks_blocked

from shapestream.chains.spec import ChainSpec, StageSpec
from shapestream_engine.batch import BatchInputs
from shapestream_engine.element_types import element_type_of
from shapestream_engine.layout import Tensors
from shapestream_engine.output_rules import Whole
from shapestream_engine.ports import InputPort, OutputPort, list_ports
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


async def run_next(slots: ScriptedSlots, *, bad: float | None = None) -> str:
    """Answers the next batch as its model does; returns which model that is. One with a row of `bad` ones fails."""
    batch = await slots.next_batch()
    if batch.model == "cut":
        slots.finish(batch, cut(batch))
    elif bad in [member.layout[0][2][0] for member in batch.members]:
        slots.fail(batch, message="cannot be read")
    else:
        slots.finish(batch, read(batch))
    return batch.model


@asynccontextmanager
async def played(slots: ScriptedSlots, *, bad: float | None = None) -> AsyncIterator[None]:
    """Every batch is answered as it comes."""

    async def play() -> None:
        while True:
            await run_next(slots, bad=bad)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(play)
        yield
        nursery.cancel_scope.cancel()


async def play_rows(slots: ScriptedSlots, *, bad: float) -> None:
    """Answers batches until none is left, as `run_next` does."""
    await wait_all_tasks_blocked()
    while slots.started:
        await run_next(slots, bad=bad)
        await wait_all_tasks_blocked()


class Client:
    """A client that has opened the chain."""

    def __init__(self, peer: RawPeer, number: int) -> None:
        self.peer = peer
        self.number = number

    def ask(
        self,
        sequence: int,
        *sizes: int,
        remaining_ms: int | None = None,
        tags: dict[str, str] | None = None,
    ) -> None:
        """One request."""
        self.peer.say(
            request_of(
                sequence,
                tensors_of(np.array(sizes, np.float32)),
                model=self.number,
                remaining_ms=remaining_ms,
                tags=tags,
            )
        )


async def open_chain(running: Running, name: bytes = b"c" * 16) -> Client:
    """A new client."""
    peer = await running.greeted(name, None)
    peer.say(OpenModel(name="chain"))
    return Client(peer, (await peer.hear(ModelOpened)).number)


@asynccontextmanager
async def chain_served(
    chain: ChainSpec = CHAIN, *, signature: ModelSignature = CUT, **options: Any
) -> AsyncIterator[tuple[Running, Client, ScriptedSlots]]:
    """A server with the chain and one scripted slot, and its first client. `signature`: of the first stage."""
    slots = ScriptedSlots(signature)
    slots.models = {"cut": signature, "read": READ}
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
