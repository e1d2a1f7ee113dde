"""Versions of a name at a server: who gets which, whose ports are where, and what follows when one leaves.

The models answer by hand. Version 4 has inputs and outputs of one type and shape in the other order, and adds 100.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.entries import (
    Execute,
    Failure,
    Goodbye,
    ModelOpened,
    ModelRefused,
    OpenModel,
    ResultEntry,
    request_of,
)
from tests.pipeline.serving.clocks import virtual_time
from tests.pipeline.serving.harness import Owner, Running, memory_serving
from tests.pipeline.serving.raw_peer import RawPeer, hello_of, verdict
from tests.pipeline.serving.scripted_slots import ScriptedSlots
from trio.testing import wait_all_tasks_blocked

from shapestream.chains.spec import ChainSpec, StageSpec
from shapestream.settings import ModelSettings
from shapestream.slices import at_once
from shapestream.versions import Versions
from shapestream_engine.batch import BatchInputs
from shapestream_engine.layout import Tensors
from shapestream_engine.output_rules import Rows
from shapestream_engine.ports import InputPort, OutputPort
from shapestream_engine.shapes import NamedShape
from shapestream_engine.signature import ModelSignature

SHAPE = NamedShape.parse("batch:1..64")
IN = {name: InputPort(name, "f32", SHAPE) for name in "ab"}
OUT = {name: OutputPort(name, "f32", SHAPE, Rows()) for name in "yz"}
THREE = ModelSignature("m@3", (IN["a"], IN["b"]), (OUT["y"], OUT["z"]))
FOUR = ModelSignature("m@4", (IN["b"], IN["a"]), (OUT["z"], OUT["y"]))
OTHER = ModelSignature("m@5", (IN["a"],), (OUT["y"],))
SIGNATURES = {model.name: model for model in (THREE, FOUR, OTHER)}
SETTINGS = {name: ModelSettings(name="m") for name in SIGNATURES}
CLIENT = b"c" * 16


def shares(four: int = 250_000, **more: Any) -> dict[str, Versions]:
    """Version 3 with the rest."""
    return {"m": Versions.of("m", [("3", None), ("4", four)], **more)}


def tensors_of(*values: float) -> Tensors:
    """One row each."""
    layout = tuple((number, "f32", (1,)) for number in range(len(values)))
    return Tensors(layout=layout, buffers=[np.float32(value).tobytes() for value in values])


def numbers_of(tensors: Tensors) -> dict[int, float]:
    """By port."""
    buffers = [float(np.frombuffer(bytes(memoryview(buffer)), np.float32)[0]) for buffer in tensors.buffers]
    return {row[0]: value for row, value in zip(tensors.layout, buffers, strict=True)}


def answers(batch: BatchInputs) -> list[Tensors]:
    """`y = a`, `z = b`, and 100 more of version 4, in each model's own order."""
    more = 100.0 if batch.model == "m@4" else 0.0
    return [tensors_of(*(more + value for value in numbers_of(member).values())) for member in batch.members]


def slots_of(*names: str) -> ScriptedSlots:
    """A slot that serves these versions."""
    slots = ScriptedSlots(THREE)
    slots.models = {name: SIGNATURES[name] for name in names}
    return slots


async def play(slots: ScriptedSlots, requests: int) -> Counter[str]:
    """Answers so many requests; returns how many each model had."""
    seen: Counter[str] = Counter()
    while sum(seen.values()) < requests:
        batch = await slots.next_batch()
        seen[batch.model] += len(batch.members)
        slots.finish(batch, answers(batch))
    return seen


async def opened(peer: RawPeer, name: str = "m") -> int:
    """The number of a name."""
    peer.say(OpenModel(name=name))
    return (await peer.hear(ModelOpened)).number


async def client_of(running: Running, name: bytes = CLIENT) -> tuple[RawPeer, int]:
    """A client that has opened `m`."""
    peer = await running.greeted(name, None)
    return peer, await opened(peer)


def serving(slots: ScriptedSlots | None, versions: dict[str, Versions] | None = None, **options: Any) -> Any:
    """A server with both versions."""
    versions = shares() if versions is None else versions
    return memory_serving(slots, models=SETTINGS, versions=versions, **options)


@virtual_time
async def test_each_request_gets_the_version_that_is_drawn_and_its_answer_in_the_order_that_was_opened() -> (
    None
):
    """Counted exactly, by the client's bytes; the ports of version 4 are found by name."""
    slots = slots_of("m@3", "m@4")
    async with serving(slots) as running:
        peer, number = await client_of(running)
        peer.say(*(request_of(at, tensors_of(at, -at), model=number) for at in range(200)))
        seen = await play(slots, 200)
        drawn = {at: shares()["m"].draw(CLIENT, at) for at in range(200)}
        assert Counter(f"m@{version}" for version in drawn.values()) == seen
        for result in await peer.hear_each(ResultEntry, 200):
            at, version = result.sequence, result.timings.version
            more = 100.0 if version == "4" else 0.0
            assert (drawn[at], {0: more + at, 1: more - at}) == (version, numbers_of(result.tensors))
            assert [0, 1] == [row[0] for row in result.tensors.layout]


@virtual_time
async def test_a_version_that_is_named_has_its_own_ports_and_all_requests_under_its_number() -> None:
    """And a version that is not there is refused with those that are."""
    slots = slots_of("m@3", "m@4")
    async with serving(slots) as running:
        peer, _ = await client_of(running)
        four = await opened(peer, "m@4")
        peer.say(*(request_of(at, tensors_of(7, 8), model=four) for at in range(20)))
        assert {"m@4": 20} == await play(slots, 20)
        assert all(
            {0: 107.0, 1: 108.0} == numbers_of(one.tensors) for one in await peer.hear_each(ResultEntry, 20)
        )
        peer.say(OpenModel(name="m@6"))
        refused = await peer.hear(ModelRefused)
        assert ("invalid", "'m' has no version '6'; it has: 3, 4") == (refused.code, refused.message)


@virtual_time
async def test_a_request_that_comes_again_shares_the_reply_also_of_a_version_with_another_order() -> None:
    """While it runs, and after its answer; another layout under its number is a conflict."""
    slots = slots_of("m@3", "m@4")
    async with serving(slots, shares(1_000_000)) as running:
        peer, number = await client_of(running)
        again = request_of(1, tensors_of(7, 8), model=number)
        peer.say(again, again)
        assert {"m@4": 1} == await play(slots, 1)
        first = await peer.hear(ResultEntry)
        running.server.change_versions(shares(0))
        peer.say(again)
        second = await peer.hear(ResultEntry)
        assert ("4", {0: 107.0, 1: 108.0}) == (second.timings.version, numbers_of(second.tensors))
        assert first.timings == second.timings
        wide = Tensors(layout=((0, "f32", (2,)), (1, "f32", (2,))), buffers=[bytes(8), bytes(8)])
        peer.say(request_of(1, wide, model=number))
        assert "conflict" == (await peer.hear(Failure)).code
        await wait_all_tasks_blocked()
        assert [] == slots.started


@virtual_time
async def test_changed_shares_hold_for_requests_that_come_then() -> None:
    """Those that wait keep their versions."""
    slots = slots_of("m@3", "m@4")
    async with serving(slots, shares(1_000_000)) as running:
        peer, number = await client_of(running)
        peer.say(*(request_of(at, tensors_of(1, 2), model=number) for at in range(10)))
        await wait_all_tasks_blocked()
        running.server.change_versions(shares(0))
        peer.say(*(request_of(at, tensors_of(1, 2), model=number) for at in range(10, 20)))
        assert {"m@4": 10, "m@3": 10} == await play(slots, 20)


@virtual_time
async def test_a_caller_keeps_its_version_whatever_gateway_asks_for_it() -> None:
    """With `traffic_by: caller`, by the name that the gateways give."""
    versions = shares(500_000, by="caller")
    slots = slots_of("m@3", "m@4")
    async with serving(slots, versions) as running:
        peers = [await client_of(running, name) for name in (b"g" * 16, b"h" * 16)]
        for at, caller in enumerate(("ann", "bob", "cid", "dan", "eve", "fay")):
            for peer, number in peers:
                tags = {"caller": caller}
                peer.say(request_of(at, tensors_of(1, 2), model=number, tags=tags))
                await play(slots, 1)
                assert (
                    versions["m"].draw(caller.encode(), 0) == (await peer.hear(ResultEntry)).timings.version
                )


@virtual_time
async def test_a_canary_that_has_not_come_leaves_its_share_to_the_rest() -> None:
    """The name is announced with the version that has the rest, and the server is ready with it."""
    slots = slots_of("m@3")
    models = {name: SETTINGS[name] for name in ("m@3", "m@4")}
    async with memory_serving(slots, models=models, versions=shares(1_000_000)) as running:
        peer, number = await client_of(running)
        assert [] == running.server.readings.not_ready()
        assert [] != running.server.readings.not_ready("m@4")
        peer.say(request_of(1, tensors_of(1, 2), model=number))
        assert {"m@3": 1} == await play(slots, 1)
        worker = await running.joined("w", signature=FOUR)
        peer.say(request_of(2, tensors_of(1, 2), model=number))
        execute = await worker.hear(Execute)
        assert "m@4" == execute.model


@virtual_time
async def test_a_canary_that_is_held_back_leaves_its_share_to_the_rest_until_the_traffic_moves() -> None:
    """It has brought its model, and gets no batches yet: others come with it."""
    slots = slots_of("m@3")
    models = {name: SETTINGS[name] for name in ("m@3", "m@4")}
    async with memory_serving(slots, models=models, versions=shares(1_000_000)) as running:
        peer, number = await client_of(running)
        owner = Owner("w")
        owner.held.add("w")
        running.server.own_processes(owner)
        worker = await running.joined("w", signature=FOUR)
        peer.say(request_of(1, tensors_of(1, 2), model=number))
        assert {"m@3": 1} == await play(slots, 1)
        owner.held.clear()
        running.server.move_traffic()
        peer.say(request_of(2, tensors_of(1, 2), model=number))
        assert "m@4" == (await worker.hear(Execute)).model


@virtual_time
async def test_what_waits_for_a_canary_that_is_given_up_goes_to_the_rest() -> None:
    """Nobody who named no version hears of it; who named it is told `unavailable`."""
    slots = slots_of("m@3")
    async with serving(slots, shares(1_000_000)) as running:
        worker = await running.joined("w", signature=FOUR)
        peer, number = await client_of(running)
        four = await opened(peer, "m@4")
        peer.say(request_of(1, tensors_of(1, 2), model=number))
        await worker.hear(Execute)
        peer.say(request_of(2, tensors_of(5, 6), model=number), request_of(3, tensors_of(5, 6), model=four))
        await wait_all_tasks_blocked()
        worker.say(Goodbye())
        running.server.model_given_up("m@4", "it crashes")
        failure = await peer.hear(Failure)
        assert (3, "unavailable", True) == verdict(failure)
        assert {"m@3": 2} == await play(slots, 2)
        found = {one.sequence: one for one in await peer.hear_each(ResultEntry, 2)}
        assert ("3", {0: 5.0, 1: 6.0}) == (found[2].timings.version, numbers_of(found[2].tensors))
        assert 0 == (await peer.statistics())["scheduler"]["queued"]
        running.server.readings.scheduler.check_invariants()


@virtual_time
async def test_who_waits_for_a_name_whose_rest_never_comes_is_told() -> None:
    """Also who asks later; and by the version that a model without versions has."""
    models = {**SETTINGS, "plain": ModelSettings(name="plain")}
    async with memory_serving(models=models, versions=shares()) as running:
        peer = await running.greeted(CLIENT, None)
        names = ("m", "m@3", "plain", "plain@1")
        peer.say(*(OpenModel(name=name) for name in names))
        await wait_all_tasks_blocked()
        running.server.model_given_up("m@3", "it never came up")
        running.server.model_given_up("plain", "it never came up")
        peer.say(*(OpenModel(name=name) for name in names))
        refused = [await peer.hear(ModelRefused) for _ in range(8)]
        assert 2 * sorted(names) == sorted(one.name for one in refused[:4]) + sorted(
            one.name for one in refused[4:]
        )
        assert {"unavailable"} == {one.code for one in refused}
        assert all("it never came up" in one.message for one in refused)


@virtual_time
async def test_a_version_that_was_removed_is_invalid_for_who_names_it() -> None:
    """Trying again cannot help. Others go to who has the share now."""
    slots = slots_of("m@3")
    async with serving(slots, shares(1_000_000)) as running:
        worker = await running.joined("w", signature=FOUR)
        peer, number = await client_of(running)
        four = await opened(peer, "m@4")
        peer.say(request_of(1, tensors_of(1, 2), model=number))
        await worker.hear(Execute)
        peer.say(request_of(2, tensors_of(5, 6), model=number))
        await wait_all_tasks_blocked()
        running.server.change_versions({"m": Versions.of("m", [("3", None)])})
        running.server.model_withdrawn("m@4", "it was removed")
        worker.say(Goodbye())
        assert {"m@3": 2} == await play(slots, 2)
        peer.say(request_of(3, tensors_of(5, 6), model=four), OpenModel(name="m@4"))
        failure = await peer.hear(Failure)
        assert (3, "invalid", False) == verdict(failure)
        assert "'m' has no version '4'; it has: 3" == failure.message
        assert "invalid" == (await peer.hear(ModelRefused)).code


@virtual_time
async def test_the_old_version_serves_on_until_the_new_rest_has_come() -> None:
    """As a reload puts version 4 in the place of version 3, and then version 5, which never comes."""
    slots = slots_of("m@3")
    async with serving(slots, {"m": Versions.of("m", [("3", None)])}) as running:
        peer, number = await client_of(running)
        running.server.change_versions({"m": Versions.of("m", [("4", None)])})
        running.server.model_withdrawn("m@3", "it was removed")
        peer.say(request_of(1, tensors_of(5, 6), model=number))
        assert {"m@3": 1} == await play(slots, 1)
        worker = await running.joined("w", signature=FOUR)
        running.server.change_versions({"m": Versions.of("m", [("5", None)])})
        peer.say(request_of(2, tensors_of(5, 6), model=number))
        assert "m@4" == (await worker.hear(Execute)).model


@virtual_time
async def test_a_version_that_does_not_take_what_was_announced_gets_no_traffic() -> None:
    """The log, the page and the result of a reload say why; it is served to those who name it."""
    slots = slots_of("m@3", "m@5")
    versions = {"m": Versions.of("m", [("3", None), ("5", 1_000_000)])}
    async with serving(slots, versions) as running:
        peer, number = await client_of(running)
        peer.say(request_of(1, tensors_of(1, 2), model=number))
        assert {"m@3": 1} == await play(slots, 1)
        (told,) = running.server.versions_without_traffic()
        assert told.startswith("version m@5 gets no traffic: ")
        running.server.reload_ended("incomplete", 1.0, ok=False, why=[told])
        assert 1 == at_once(running.server.readings.live(0))["notices"].count(told)
        five = await opened(peer, "m@5")
        peer.say(request_of(2, tensors_of(1), model=five))
        assert {"m@5": 1} == await play(slots, 1)


@virtual_time
async def test_a_name_that_gets_versions_keeps_the_number_that_clients_have() -> None:
    """As a reload adds a canary to a model without versions; and back."""
    bare = replace(THREE, name="m")
    slots = ScriptedSlots(bare)
    async with memory_serving(slots, models={"m": ModelSettings(name="m"), **SETTINGS}) as running:
        peer, number = await client_of(running)
        assert number == await opened(peer, "m@1")
        worker = await running.joined("w", models={one.name: one.to_dict() for one in (THREE, FOUR)})
        running.server.change_versions(shares(1_000_000))
        peer.say(request_of(1, tensors_of(1, 2), model=number))
        assert "m@4" == (await worker.hear(Execute)).model
        assert number == await opened(peer)
        running.server.change_versions({})
        assert number == await opened(peer)
        peer.say(request_of(2, tensors_of(1, 2), model=number))
        batch = await slots.next_batch()
        assert "m" == batch.model


@pytest.mark.parametrize("name", ["a b", "m@", "m@..", "@3", "m@3@4 ", "m\n"])
@virtual_time
async def test_a_worker_that_dials_in_with_a_name_that_no_file_could_state_is_refused(name: str) -> None:
    """And the server goes on."""
    async with memory_serving() as running:
        worker = running.worker()
        worker.say(hello_of(replace(THREE, name=name)))
        await worker.hear(Goodbye)
        assert [] == running.server.statistics()["models"]
        await running.joined("x", signature=replace(THREE, name="m@7"))
        assert ["m@7"] == running.server.statistics()["models"]


SUM = ChainSpec(
    name="chain",
    inputs={"a": "first.a", "b": "first.b"},
    stages=[
        StageSpec(name="first", model="m@3", inputs={"a": "a", "b": "b"}),
        StageSpec(
            name="each",
            model="m",
            inputs={"a": "first.y", "b": "first.z"},
            each=["row of first.y", "row of first.z"],
            at_most=8,
        ),
    ],
    outputs={"y": "each.y", "z": "each.z"},
)


@virtual_time
async def test_a_chain_draws_once_for_all_rows_and_a_stage_may_name_a_version() -> None:
    """Ports are found by name there, too."""
    slots = slots_of("m@3", "m@4")
    async with serving(slots, shares(500_000), chains=[SUM]) as running:
        peer = await running.greeted(CLIENT, None)
        number = await opened(peer, "chain")
        rows = np.arange(4, dtype=np.float32)
        layout = ((0, "f32", (4,)), (1, "f32", (4,)))
        for at in range(12):
            peer.say(
                request_of(
                    at, Tensors(layout=layout, buffers=[rows.tobytes(), (-rows).tobytes()]), model=number
                )
            )
            batch = await slots.next_batch()
            assert "m@3" == batch.model
            slots.finish(batch, [Tensors(layout=layout, buffers=list(batch.members[0].buffers))])
            version = shares(500_000)["m"].draw(CLIENT, at)
            assert {f"m@{version}": 4} == await play(slots, 4)
            result = await peer.hear(ResultEntry)
            y, z = (np.frombuffer(bytes(memoryview(one)), np.float32) for one in result.tensors.buffers)
            more = 100.0 if version == "4" else 0.0
            assert ((rows + more).tolist(), (more - rows).tolist()) == (y.tolist(), z.tolist())


@pytest.mark.parametrize(("idempotent", "model"), [(True, "m@4"), (False, "m@3")])
@virtual_time
async def test_versions_of_which_only_one_may_run_twice_do_not_share_a_name(
    idempotent: bool, model: str
) -> None:
    """Clients are told once whether a request may be sent again elsewhere."""
    slots = slots_of("m@3", "m@4")
    models = {**SETTINGS, "m@4": ModelSettings(name="m", idempotent=idempotent)}
    async with memory_serving(slots, models=models, versions=shares(1_000_000)) as running:
        peer, number = await client_of(running)
        peer.say(request_of(1, tensors_of(1, 2), model=number))
        assert {model: 1} == await play(slots, 1)
