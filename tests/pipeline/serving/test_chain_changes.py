"""A chain's request while the model of a later stage changes, or a canary that its rows wait for is given up.

The first stage answers by hand, so that a reload happens between two stages. The second is a worker of `q` that answers as
its signature says: `y` is the larger of its inputs less the smaller, so ports that are mixed up show.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
from tests.entries import Execute, Failure, Goodbye, ModelOpened, OpenModel, ResultEntry, request_of
from tests.pipeline.serving.clocks import virtual_time
from tests.pipeline.serving.harness import Running, memory_serving
from tests.pipeline.serving.raw_peer import RawPeer, done
from tests.pipeline.serving.scripted_slots import ScriptedSlots
from trio.testing import wait_all_tasks_blocked

from shapestream.chains.spec import ChainSpec, StageSpec
from shapestream.settings import ModelSettings
from shapestream.versions import Versions
from shapestream_engine.layout import Tensors
from shapestream_engine.output_rules import Rows
from shapestream_engine.ports import InputPort, OutputPort
from shapestream_engine.shapes import NamedShape
from shapestream_engine.signature import ModelSignature


def model(name: str, inputs: str, outputs: str, most: int = 64) -> ModelSignature:
    """With these ports, a letter each, of one type and shape."""
    shape = NamedShape.parse(f"batch:1..{most}")
    takes = tuple(InputPort(port, "f32", shape) for port in inputs)
    return ModelSignature(name, takes, tuple(OutputPort(port, "f32", shape, Rows()) for port in outputs))


FIRST = model("p", "ab", "yz")
SECOND = model("q", "ab", "yz")
TURNED = model("q", "ba", "zy", most=128)
"""The same ports in another order, and other bounds."""
CLOSED = model("q", "abc", "yz")
"""It takes no request of the others."""
CHAIN = ChainSpec(
    name="chain",
    inputs={"a": "first.a", "b": "first.b"},
    stages=[
        StageSpec(name="first", model="p", inputs={"a": "a", "b": "b"}),
        StageSpec(name="second", model="q", inputs={"a": "first.y", "b": "first.z"}),
    ],
    outputs={"y": "second.y", "z": "second.z"},
)
SETTINGS = {name: ModelSettings(name=name) for name in ("p", "q")}


def tensors_of(*values: float) -> Tensors:
    """One row each."""
    layout = tuple((number, "f32", (1,)) for number in range(len(values)))
    return Tensors(layout=layout, buffers=[np.float32(value).tobytes() for value in values])


def numbers_of(tensors: Tensors) -> list[float]:
    """By port."""
    rows = sorted(
        zip((row[0] for row in tensors.layout), tensors.buffers, strict=True), key=lambda row: row[0]
    )
    return [float(np.frombuffer(bytes(memoryview(buffer)), np.float32)[0]) for _, buffer in rows]


async def answer(worker: RawPeer, signature: ModelSignature) -> None:
    """`y = a - b` and `z = a + b`, by the names of the worker's ports."""
    execute = await worker.hear(Execute)
    outputs = []
    for member in execute.members:
        got = {port.name: value for port, value in zip(signature.inputs, numbers_of(member), strict=True)}
        made = {"y": got["a"] - got["b"], "z": got["a"] + got["b"]}
        outputs.append(tensors_of(*(made[port.name] for port in signature.outputs)))
    worker.say(done(execute, outputs=tuple(outputs)))


@asynccontextmanager
async def between_the_stages(**options: Any) -> AsyncIterator[tuple[Running, RawPeer, ScriptedSlots]]:
    """A server with both models, and a client whose request is in the first stage: (7, 3)."""
    slots = ScriptedSlots(FIRST)
    async with memory_serving(slots, models=SETTINGS, chains=[CHAIN], **options) as running:
        yield running, await running.greeted(b"c" * 16, None), slots


async def asked(client: RawPeer) -> None:
    """The chain is asked for."""
    client.say(OpenModel(name="chain"))
    number = (await client.hear(ModelOpened)).number
    client.say(request_of(1, tensors_of(7, 3), model=number))


async def first_stage(slots: ScriptedSlots) -> None:
    """It gives what it got."""
    batch = await slots.next_batch()
    slots.finish(batch, [Tensors(layout=one.layout, buffers=list(one.buffers)) for one in batch.members])


@pytest.mark.parametrize("stays", [True, False], ids=["the old worker stays", "the old worker has left"])
@virtual_time
async def test_a_stage_whose_model_changes_meanwhile_ends_on_the_old_one_or_by_name(stays: bool) -> None:
    """The order of two ports of one type and shape is another one: the answer is that of the names in both cases."""
    async with between_the_stages() as (running, client, slots):
        old = await running.joined("old", signature=SECOND)
        await asked(client)
        batch = await slots.next_batch()
        running.server.model_expected("q", SETTINGS["q"], may_change=True)
        new = await running.joined("new", signature=TURNED)
        if not stays:
            old.say(Goodbye())
            await wait_all_tasks_blocked()
        slots.finish(batch, [Tensors(layout=one.layout, buffers=list(one.buffers)) for one in batch.members])
        await (answer(old, SECOND) if stays else answer(new, TURNED))
        result = await client.hear(ResultEntry)
        assert [4.0, 10.0] == numbers_of(result.tensors)
        running.server.readings.scheduler.check_invariants()


@virtual_time
async def test_a_stage_that_waits_for_an_old_worker_that_leaves_goes_to_the_new_one() -> None:
    """The old worker's only slot is busy with another request of the chain, which is run again there, too."""
    async with between_the_stages() as (running, client, slots):
        old = await running.joined("old", signature=SECOND)
        await asked(client)
        await first_stage(slots)
        await old.hear(Execute)
        running.server.model_expected("q", SETTINGS["q"], may_change=True)
        new = await running.joined("new", signature=TURNED)
        old.say(Goodbye())
        await answer(new, TURNED)
        assert [4.0, 10.0] == numbers_of((await client.hear(ResultEntry)).tensors)


@virtual_time
async def test_a_stage_that_does_not_fit_the_new_model_fails_with_clear_words() -> None:
    """No worker of the old one is left, and the new one has one more input."""
    async with between_the_stages() as (running, client, slots):
        old = await running.joined("old", signature=SECOND)
        await asked(client)
        batch = await slots.next_batch()
        running.server.model_expected("q", SETTINGS["q"], may_change=True)
        await running.joined("new", signature=CLOSED)
        old.say(Goodbye())
        await wait_all_tasks_blocked()
        slots.finish(batch, [Tensors(layout=one.layout, buffers=list(one.buffers)) for one in batch.members])
        failure = await client.hear(Failure)
        assert ("invalid", "model 'q' has changed: its input 'c' is new; open it again") == (
            failure.code,
            failure.message,
        )


@virtual_time
async def test_rows_that_wait_for_a_canary_that_is_given_up_go_to_the_rest() -> None:
    """The canary's only slot is busy. Its ports stand in another order; the rows are answered by the rest."""
    rest, canary = model("q@1", "ab", "yz"), model("q@2", "ba", "zy")
    models = {name: ModelSettings(name="q") for name in ("q@1", "q@2")} | {"p": SETTINGS["p"]}
    versions = {"q": Versions.of("q", [("1", None), ("2", 1_000_000)])}
    slots = ScriptedSlots(FIRST)
    async with memory_serving(slots, models=models, versions=versions, chains=[CHAIN]) as running:
        client = await running.greeted(b"c" * 16, None)
        stable = await running.joined("stable", signature=rest)
        trial = await running.joined("trial", signature=canary)
        client.say(OpenModel(name="q@2"))
        named = (await client.hear(ModelOpened)).number
        client.say(request_of(9, tensors_of(1, 2), model=named))
        await trial.hear(Execute)
        await asked(client)
        await first_stage(slots)
        await wait_all_tasks_blocked()
        trial.say(Goodbye())
        running.server.model_given_up("q@2", "it crashes")
        assert (9, "unavailable") == ((failure := await client.hear(Failure)).sequence, failure.code)
        await answer(stable, rest)
        result = await client.hear(ResultEntry)
        assert [4.0, 10.0] == numbers_of(result.tensors)
        running.server.readings.scheduler.check_invariants()


@pytest.mark.parametrize("most", [32, 64], ids=["narrower", "as before"])
@virtual_time
async def test_a_version_that_changes_meanwhile_is_asked_by_the_names_that_the_chain_began_with(
    most: int,
) -> None:
    """Its ports stand in another order. With narrower bounds it is announced anew, and what was begun fits all the same."""
    before, now = model("q@1", "ab", "yz"), model("q@1", "ba", "zy", most=most)
    models = {"q@1": ModelSettings(name="q"), "p": SETTINGS["p"]}
    slots = ScriptedSlots(FIRST)
    versions = {"q": Versions.of("q", [("1", None)])}
    async with memory_serving(slots, models=models, versions=versions, chains=[CHAIN]) as running:
        client = await running.greeted(b"c" * 16, None)
        await running.joined("old", signature=before)
        await asked(client)
        batch = await slots.next_batch()
        running.server.model_expected("q@1", models["q@1"], may_change=True)
        new = await running.joined("new", signature=now)
        slots.finish(batch, [Tensors(layout=one.layout, buffers=list(one.buffers)) for one in batch.members])
        await answer(new, now)
        assert [4.0, 10.0] == numbers_of((await client.hear(ResultEntry)).tensors)
