"""Shadows on real slots: a version that answers nobody is compared with the one that does, alone with alone."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from math import inf
from typing import Any

import numpy as np
import pytest
import trio
from tests.entries import Execute, Heartbeat, ModelOpened, OpenModel, ResultEntry, request_of
from tests.pipeline.serving.clocks import real_time, virtual_time
from tests.pipeline.serving.echo_model import done
from tests.pipeline.serving.harness import Running, memory_serving
from tests.pipeline.serving.raw_peer import RawPeer

from shapestream.serving import shadows
from shapestream.serving.shadows import OutputCounts, differences
from shapestream.serving.slot_threads import SlotThreads
from shapestream.settings import ModelSettings
from shapestream.settings.model_settings import BatchingSettings
from shapestream.versions import WHOLE, Versions
from shapestream_engine import string_arrays
from shapestream_engine.layout import Tensors
from shapestream_engine.model import InputSpec, ModelSpec, OutputSpec, compile_model
from shapestream_engine.output_rules import Rows
from shapestream_engine.ports import InputPort, OutputPort
from shapestream_engine.probing.tolerances import TOLERANCES, OutputTolerance
from shapestream_engine.shapes import NamedShape
from shapestream_engine.signature import ModelSignature

Array = np.ndarray[Any, Any]
Function = Callable[[Array], Array]
WIDTH = 8
WEIGHTS = np.random.default_rng(1).normal(size=(WIDTH, 300)).astype(np.float32)
TOLERANCE = OutputTolerance(TOLERANCES["f32"], overall=1.0).to_dict()


def answers(x: Array) -> Array:
    """Rows by themselves, as far as BLAS goes."""
    return np.asarray(np.tanh(x @ WEIGHTS) @ WEIGHTS.T, np.float32)


def is_off(x: Array) -> Array:
    """The same with an error of a hundredth of its spread."""
    y = answers(x)
    return np.asarray(y + np.float32(0.01) * y.std() * np.sign(y), np.float32)


def flips(x: Array) -> Array:
    """The largest value has another place."""
    return np.asarray(answers(x)[:, ::-1], np.float32)


def refuses(x: Array) -> Array:
    """It fails on everything."""
    raise ValueError("no")


class Varies:
    """Another answer to each call."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, x: Array) -> Array:
        """A call."""
        self.calls += 1
        return np.asarray(x + self.calls, np.float32)


class Compared:
    """A server with two versions, of which one is a shadow, and a client of the name."""

    def __init__(self, running: Running, client: RawPeer, number: int) -> None:
        self.server = running.server
        self.client = client
        self.number = number
        self.asked = 0
        self.random = np.random.default_rng(5)

    async def ask(self, requests: int = 4) -> None:
        """So many requests in one message; each is answered by the version with the rest."""
        entries = []
        for _ in range(requests):
            x = self.random.normal(size=(1, WIDTH)).astype(np.float32)
            tensors = Tensors(layout=((0, "f32", x.shape),), buffers=(x.tobytes(),))
            entries.append(request_of(self.asked, tensors, model=self.number))
            self.asked += 1
        self.client.say(*entries)
        assert {"3"} == {one.timings.version for one in await self.client.hear_each(ResultEntry, requests)}

    async def state(self) -> dict[str, Any]:
        """What was found, once nothing waits to be compared."""
        while True:
            found: dict[str, Any] = (await self.client.statistics())["shadows"]["m@5"]
            if found["sampled"] == sum(found[key] for key in ("compared", "unjudged", "failed", "dropped")):
                return found


@asynccontextmanager
async def compared(
    known: Function, new: Function, *, share: int = WHOLE, tolerance: dict[str, Any] | None = TOLERANCE
) -> AsyncIterator[Compared]:
    """A server of these two functions."""
    models = {}
    for name, function in (("m@3", known), ("m@5", new)):
        spec = ModelSpec(
            name=name,
            model=function,
            inputs={"x": InputSpec(shape=f"batch:1..64, {WIDTH}", element_type="f32")},
            outputs={"y": OutputSpec(shape=f"batch, {WIDTH}", element_type="f32")},
        )
        models[name] = compile_model(spec, slots=1)
        if tolerance is not None:
            models[name].tolerances = {"y": tolerance}
    settings = {name: ModelSettings(name="m", audit=0.0) for name in models}
    versions = {"m": Versions.of("m", [("3", None), ("5", 0)], shadows={"5": share})}
    local = SlotThreads(models=models, slots=1)
    async with memory_serving(local, models=settings, versions=versions) as running:
        peer = await running.greeted(b"c" * 16, None)
        peer.say(OpenModel(name="m"))
        yield Compared(running, peer, (await peer.hear(ModelOpened)).number)


@pytest.mark.parametrize("tolerance", [TOLERANCE, None])
@real_time
async def test_the_same_model_twice_is_equal(tolerance: dict[str, Any] | None) -> None:
    """Whatever company the answers had; without a proof bits are compared."""
    async with compared(answers, answers, tolerance=tolerance) as served:
        while (found := await served.state())["compared"] < 40:
            await served.ask()
        assert found["compared"] == found["equal"]
        assert (0, 0) == (found["failed"], found["unjudged"])
        assert {"differing": 0, "largest": 0.0} == {
            key: found["outputs"]["y"][key] for key in ("differing", "largest")
        }
        assert found["lone_us"] is not None


@real_time
async def test_an_error_of_a_hundredth_of_the_spread_is_found() -> None:
    """Within fifty compared requests, and how far it goes is told."""
    async with compared(answers, is_off) as served:
        while (found := await served.state())["compared"] < 20:
            await served.ask()
        output = found["outputs"]["y"]
        assert found["equal"] < found["compared"] <= 50
        assert output["differing"] == found["compared"] - found["equal"]
        assert sum(output["decades"].values()) == found["compared"]
        assert (0, 0) == (output["top_changed"], output["shape_changed"])


@real_time
async def test_classes_that_move_are_told() -> None:
    """The place of the largest value along the last axis."""
    async with compared(answers, flips) as served:
        while (found := await served.state())["compared"] < 10:
            await served.ask()
        assert found["outputs"]["y"]["top_changed"] == found["compared"]


@real_time
async def test_a_shadow_that_fails_costs_no_request_and_no_suspect() -> None:
    """It is counted, with the reason."""
    async with compared(answers, refuses) as served:
        for _ in range(5):
            await served.ask()
        found = await served.state()
        assert (0, found["sampled"]) == (found["compared"], found["failed"] + found["dropped"])
        assert found["failed"] > 0
        assert "it failed" in found["why"]
        told = await served.client.statistics()
        assert (0, 0) == (told["suspects"], told["quarantined"])


@real_time
async def test_what_varies_by_itself_cannot_be_judged() -> None:
    """The old version alone gives two answers to one request."""
    async with compared(Varies(), answers) as served:
        for _ in range(5):
            await served.ask()
        found = await served.state()
        assert (0, found["sampled"]) == (found["compared"], found["unjudged"] + found["dropped"])


@real_time
async def test_a_share_is_sampled_and_the_newest_samples_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond a number of waiting ones the oldest are dropped, and counted."""
    monkeypatch.setattr(shadows, "MOST_SAMPLES", 2)
    async with compared(answers, answers) as served:
        await served.ask(40)
        found = await served.state()
        assert (40, 40) == (found["seen"], found["sampled"])
        assert found["dropped"] >= 30
    async with compared(answers, answers, share=WHOLE // 4) as served:
        for _ in range(40):
            await served.ask(10)
        assert 40 < (await served.state())["sampled"] < 180


@virtual_time
async def test_shadows_come_and_go_with_the_configuration() -> None:
    """Without one nothing is watched; a changed share keeps what was found."""
    async with memory_serving() as running:
        assert {} == running.server.statistics()["shadows"]
        running.server.change_versions({"m": Versions.of("m", [("3", None), ("5", 0)], shadows={"5": 10})})
        assert {"m@5": 1e-5} == {
            name: one["share"] for name, one in running.server.statistics()["shadows"].items()
        }
        running.server.change_versions({})
        assert {} == running.server.statistics()["shadows"]


def tensors(array: Array, element_type: str = "f32") -> Tensors:
    """One output."""
    return Tensors(layout=((0, element_type, array.shape),), buffers=[array.tobytes()])


def string_tensors(words: list[str]) -> Tensors:
    """One output of strings."""
    shape, buffer = string_arrays.pack("str", string_arrays.as_strings("str", words))
    return Tensors(layout=((0, "str", shape),), buffers=[buffer])


def test_differences_of_outputs() -> None:
    """Another shape is infinitely far; integers without a tolerance are equal or not."""
    known = np.array([[1.0, 2.0]], np.float32)
    cases = {
        "the same": (known, known, "f32", (0.0, False, False, False)),
        "other rows": (known, np.concatenate([known, known]), "f32", (inf, True, False, True)),
        "a swap": (known, known[:, ::-1], "f32", (1.0, True, True, False)),
        "integers": (np.array([1, 5]), np.array([1, 7]), "i64", (2.0, True, False, False)),
    }
    for name, (one, two, kind, expected) in cases.items():
        (found,) = differences(["y"], {}, tensors(one, kind), tensors(np.ascontiguousarray(two), kind))
        assert expected == (found.amount, found.beyond, found.top_changed, found.shape_changed), name
    words = [string_tensors(["one", "two"]), string_tensors(["one", "too"])]
    for one, two in ((words[0], words[0]), words):
        (found,) = differences(["y"], {}, one, two)
        assert (0.0 if one is two else inf, one is not two) == (found.amount, found.beyond)
    counts = OutputCounts()
    for amount in (0.005, 0.0099, 3.0, inf, 1e-30):
        shadows.OutputDifference("y", amount, beyond=True, top_changed=False, shape_changed=False).count(
            counts
        )
    assert {"-12": 1, "-3": 2, "0": 1, "12": 1} == counts.to_dict()["decades"]
    assert counts.to_dict()["largest"] is None


@asynccontextmanager
async def with_workers(
    *more: ModelSignature, hang_after_s: float = 30.0
) -> AsyncIterator[tuple[RawPeer, dict[str, RawPeer]]]:
    """A client, and a worker of its own for `m@3`, which is audited, its shadow `m@5`, and each of `more`.

    Only the first answers by itself.
    """
    models = {name: one_number(name) for name in ("m@3", "m@5")} | {one.name: one for one in more}
    settings = {name: ModelSettings(name=name.partition("@")[0], audit=0.0) for name in models}
    settings["m@3"] = ModelSettings(name="m", audit=1.0)
    settings["m@5"] = ModelSettings(name="m", audit=0.0, batching=BatchingSettings(hang_after_s=hang_after_s))
    versions = {"m": Versions.of("m", [("3", None), ("5", 0)], shadows={"5": WHOLE})}
    async with memory_serving(models=settings, versions=versions) as running, trio.open_nursery() as nursery:
        client = await running.greeted(b"c" * 16, None)
        tolerances = {"m@3": {"y": TOLERANCE}}
        workers = {
            name: await running.joined(
                name, signature=models[name], tolerances=tolerances if name == "m@3" else {}
            )
            for name in models
        }

        async def live() -> None:
            while True:
                for peer in (client, *workers.values()):
                    peer.say(Heartbeat())
                await trio.sleep(1.0)

        nursery.start_soon(live)
        nursery.start_soon(work, workers["m@3"])
        yield client, workers
        nursery.cancel_scope.cancel()


async def work(worker: RawPeer) -> None:
    """Each batch takes 10 ms."""
    while True:
        execute = await worker.hear(Execute)
        await trio.sleep(0.01)
        worker.say(done(execute, outputs=tuple(execute.members)))


def one_number(name: str) -> ModelSignature:
    """A row is a number, and so is its answer."""
    shape = NamedShape.parse("batch:1..64")
    return ModelSignature(name, (InputPort("x", "f32", shape),), (OutputPort("y", "f32", shape, Rows()),))


async def opened(client: RawPeer, name: str) -> int:
    """The number of a model."""
    client.say(OpenModel(name=name))
    return (await client.hear(ModelOpened)).number


async def ask_three(client: RawPeer, first: int, number: int) -> None:
    """Three requests, of which two share a call; and time for what follows."""
    client.say(*(request_of(first + at, row(at), model=number) for at in range(3)))
    assert 3 == len(await client.hear_each(ResultEntry, 3))
    await trio.sleep(3.0)


@virtual_time
async def test_a_shadow_that_hangs_holds_up_no_audit_and_only_until_its_limit() -> None:
    """Its worker takes a request and never answers: audits of the version that answers go on, and then it has failed."""
    async with with_workers() as (client, workers):

        async def audited() -> int:
            count: int = (await client.statistics())["audit"]["m@3"]["audited"]
            return count

        number = await opened(client, "m")
        await ask_three(client, 0, number)
        before = await audited()
        await workers["m@5"].hear(Execute)
        await ask_three(client, 10, number)
        assert before < await audited()
        assert 0 == (await client.statistics())["shadows"]["m@5"]["failed"]
        await trio.sleep(60.0)
        found = (await client.statistics())["shadows"]["m@5"]
        assert 1 <= found["failed"]
        assert 0 == found["compared"]


@pytest.mark.parametrize("busy", [False, True])
@virtual_time
async def test_seconds_count_only_where_no_other_slot_worked(busy: bool) -> None:
    """The answers are compared all the same."""
    async with with_workers(one_number("other")) as (client, workers):
        if busy:
            client.say(request_of(100, row(1), model=await opened(client, "other")))
            await workers["other"].hear(Execute)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(work, workers["m@5"])
            await ask_three(client, 0, await opened(client, "m"))
            found = (await client.statistics())["shadows"]["m@5"]
            assert (3, 3) == (found["compared"], found["equal"])
            assert found["lone_us"] == (None if busy else 500)
            nursery.cancel_scope.cancel()


def row(value: float) -> Tensors:
    """One row of one number."""
    return Tensors(layout=((0, "f32", (1,)),), buffers=(np.float32(value).tobytes(),))
