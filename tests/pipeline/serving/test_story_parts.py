"""The parts of a request's time, as a server tells them: they name model, slot and batches, and add up to the whole."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from tests.entries import (
    Cancel,
    Explain,
    Explanation,
    Failure,
    ModelOpened,
    OpenModel,
    ResultEntry,
)
from tests.pipeline.serving.clocks import virtual_time
from tests.pipeline.serving.echo_model import SIGNATURE, echo_tensors, request
from tests.pipeline.serving.harness import Running, memory_serving, scripted_client
from tests.pipeline.serving.raw_peer import RawPeer
from tests.pipeline.serving.scripted_slots import ScriptedSlots
from trio.testing import wait_all_tasks_blocked

OWN, OTHER = b"c" * 16, b"d" * 16


async def story_of(peer: RawPeer, sequence: int, client: bytes = OWN) -> dict[str, Any]:
    """The one story of a request."""
    peer.say(Explain(question=7, request=f"{client.hex()}-{sequence}", slowest=10))
    answer = await peer.hear(Explanation)
    (story,) = json.loads(json.dumps(answer.values))["stories"]
    assert_adds_up(story)
    return dict(story)


def assert_adds_up(story: dict[str, Any]) -> None:
    """The parts of a story sum to the whole, and so do those of what it waited behind."""
    assert story["total_ms"] == pytest.approx(sum(part["ms"] for part in story["phases"]), abs=1e-6)
    assert all(part["ms"] >= 0 for part in story["phases"])
    behind = story["waited_behind"]
    assert behind["own_ms"] + behind["others_ms"] == pytest.approx(
        sum(model["own_ms"] + model["others_ms"] for model in behind["models"].values()), abs=0.01
    )


def parts(story: dict[str, Any]) -> list[tuple[str, float, str | None]]:
    """The phases of a story, their milliseconds and slots."""
    return [(part["phase"], part["ms"], part["slot"]) for part in story["phases"]]


@asynccontextmanager
async def two_models(**options: Any) -> AsyncIterator[tuple[Running, ScriptedSlots]]:
    """A server with one scripted slot that serves the models `echo` and `slow`."""
    slots = ScriptedSlots()
    slots.models = {"echo": SIGNATURE, "slow": dataclasses.replace(SIGNATURE, name="slow")}
    async with memory_serving(slots, prefetch=False, **options) as running:
        yield running, slots


async def opened(peer: RawPeer, model: str) -> int:
    """The number of a model that this client opens."""
    peer.say(OpenModel(name=model))
    return (await peer.hear(ModelOpened)).number


@virtual_time
async def test_a_request_withdrawn_while_it_runs_is_told_with_its_slot_and_its_call() -> None:
    """It ran 400 ms until its client withdrew it; its call ran on for 100 ms, and is told as running until then."""
    async with scripted_client() as (client, slots):
        client.say(request(1))
        batch = await slots.next_batch()
        await trio.sleep(0.4)
        client.say(Cancel(sequence=1))
        await client.hear(Failure)
        await trio.sleep(0.05)
        running = await story_of(client, 1)
        assert ("cancelled", "echo", "local/0", 1, 400.0) == tuple(
            running[name] for name in ("code", "model", "slot", "attempts", "total_ms")
        )
        assert [("running", 400.0, "local/0")] == parts(running)
        assert "it ran 400 ms in batch 1 on local/0" in running["why"]
        assert "Its call runs on without it." in running["why"]
        await trio.sleep(0.05)
        slots.finish(batch)
        await wait_all_tasks_blocked()
        over = await story_of(client, 1)
        assert parts(running) == parts(over)
        assert "Its call ran on without it for 100 ms." in over["why"]
        assert [500.0, "batch 1 ended without it"] == over["events"][-1]
        slowest = (await slowest_of(client))[0]
        assert over["why"] == slowest["why"]


async def slowest_of(peer: RawPeer) -> list[dict[str, Any]]:
    """The slowest requests."""
    peer.say(Explain(question=7, request="", slowest=10))
    return list(json.loads(json.dumps((await peer.hear(Explanation)).values))["stories"])


@virtual_time
async def test_a_request_whose_deadline_passes_while_it_runs_is_told_with_its_slot_and_its_call() -> None:
    """One that shares its batch with another: that one is answered, and the story knows when."""
    async with scripted_client() as (client, slots):
        client.say(request(1, remaining_ms=300), request(2))
        batch = await slots.next_batch()
        await client.hear(Failure)
        await trio.sleep(0.2)
        slots.finish(batch)
        await client.hear(ResultEntry)
        late, answered = [await story_of(client, sequence) for sequence in (1, 2)]
        assert ("deadline_exceeded", "local/0", 1) == (late["code"], late["slot"], late["attempts"])
        assert [("running", 300.0, "local/0")] == parts(late)
        assert "Its call ran on without it for 200 ms." in late["why"]
        assert 500.0 == answered["total_ms"]


@pytest.mark.parametrize(
    ("withdrawn", "code", "phase", "said"),
    [
        (
            False,
            "model_error",
            "failed",
            "it spent 400 ms in a failed attempt (batch 1 on local/0: model_error)",
        ),
        (True, "cancelled", "running", "Its call ran on without it for 2 ms."),
    ],
    ids=["failed", "withdrawn and interrupted"],
)
@virtual_time
async def test_a_call_without_results_is_told_with_its_slot_not_as_the_way_there(
    withdrawn: bool, code: str, phase: str, said: str
) -> None:
    """It fails after 400 ms; or its request is withdrawn then, and the engine is interrupted a moment later."""
    async with scripted_client() as (client, slots):
        client.say(request(1))
        batch = await slots.next_batch()
        await trio.sleep(0.4)
        if withdrawn:
            client.say(Cancel(sequence=1))
            await client.hear(Failure)
            await trio.sleep(0.002)
        slots.fail(batch, code)
        await wait_all_tasks_blocked()
        story = await story_of(client, 1)
        assert (code, "local/0", 1) == (story["code"], story["slot"], story["attempts"])
        assert [(phase, 400.0, "local/0")] == parts(story)
        assert said in story["why"]
        assert "on the way" not in story["why"]


@virtual_time
async def test_a_failed_request_keeps_its_attempt_however_many_others_fail_after_it() -> None:
    """The ring of failed batches is shorter than that of failed requests."""
    async with scripted_client() as (client, slots):
        for sequence in range(1, 302):
            client.say(request(sequence))
            batch = await slots.next_batch()
            await trio.sleep(0.01)
            slots.fail(batch)
            await client.hear(Failure)
        story = await story_of(client, 1)
        assert ([("failed", 10.0, "local/0")], 1) == (parts(story), story["attempts"])


@virtual_time
async def test_what_a_request_waited_behind_is_divided_by_client_and_model() -> None:
    """300 ms of another client's model, then 100 ms of its own client's earlier request, on the only slot."""
    async with two_models() as (running, slots):
        client, other = await running.greeted(), await running.greeted(OTHER, "slow")
        slow = await opened(other, "slow")
        other.say(request(1, model=slow))
        await wait_all_tasks_blocked()
        first = await slots.next_batch()
        client.say(request(1, echo_tensors(n=8)))
        await wait_all_tasks_blocked()
        client.say(request(2))
        await trio.sleep(0.3)
        slots.finish(first)
        for _ in range(2):
            batch = await slots.next_batch()
            await trio.sleep(0.1)
            slots.finish(batch, run_s=0.04, busy_s=0.06)
        await client.hear_each(ResultEntry, 2)
        story = await story_of(client, 2)
        assert [
            ("queued", 400.0, None),
            ("calls", 40.0, "local/0"),
            ("copies", 20.0, "local/0"),
            ("way", 40.0, "local/0"),
        ] == parts(story)
        assert {
            "slots": ["local/0"],
            "batches": 2,
            "own_ms": 100.0,
            "others_ms": 300.0,
            "models": {
                "slow": {"batches": 1, "own_ms": 0.0, "others_ms": 300.0},
                "echo": {"batches": 1, "own_ms": 100.0, "others_ms": 0.0},
            },
            "complete": True,
        } == story["waited_behind"]
        assert (
            "Meanwhile local/0 ran 2 batches: 300 ms for other clients, 100 ms for its own client; "
            "300 ms for slow, 100 ms for echo." in story["why"]
        )


@virtual_time
async def test_a_batch_of_several_clients_is_divided_among_them() -> None:
    """One of three members is of its own client."""
    async with two_models() as (running, slots):
        client, other = await running.greeted(), await running.greeted(OTHER)
        slow = await opened(other, "slow")
        other.say(request(1, model=slow))
        first = await slots.next_batch()
        other.say(request(2), request(3))
        client.say(request(1))
        await wait_all_tasks_blocked()
        slots.finish(first)
        shared = await slots.next_batch()
        assert 3 == len(shared.members)
        client.say(request(2, echo_tensors(n=8)))
        await trio.sleep(0.3)
        slots.finish(shared)
        batch = await slots.next_batch()
        slots.finish(batch)
        await client.hear_each(ResultEntry, 2)
        behind = (await story_of(client, 2))["waited_behind"]
        assert (1, 100.0, 200.0) == (behind["batches"], behind["own_ms"], behind["others_ms"])


@virtual_time
async def test_a_batch_that_runs_again_in_halves_is_told_attempt_by_attempt() -> None:
    """The innocent one has two attempts, and so has the culprit; each names its slot and its milliseconds."""
    async with scripted_client(prefetch=False) as (client, slots):
        client.say(request(1), request(2))
        both = await slots.next_batch()
        await trio.sleep(0.1)
        slots.fail(both)
        one = await slots.next_batch()
        await trio.sleep(0.2)
        slots.finish(one, run_s=0.2, busy_s=0.2)
        await client.hear(ResultEntry)
        other = await slots.next_batch()
        await trio.sleep(0.3)
        slots.fail(other)
        await client.hear(Failure)
        innocent, culprit = [await story_of(client, sequence) for sequence in (1, 2)]
        assert [("failed", 100.0, "local/0"), ("calls", 200.0, "local/0")] == parts(innocent)
        assert [
            ("failed", 100.0, "local/0"),
            ("queued", 200.0, None),
            ("failed", 300.0, "local/0"),
        ] == parts(culprit)
        assert [2, 2] == [innocent["attempts"], culprit["attempts"]]
        assert "it waited 200 ms to run again" in culprit["why"]
        assert "it spent 400 ms in 2 failed attempts" in culprit["why"]
        assert (1, 200.0, 0.0) == tuple(
            culprit["waited_behind"][name] for name in ("batches", "own_ms", "others_ms")
        )


@virtual_time
async def test_a_lost_worker_is_told_with_its_slot_and_its_milliseconds() -> None:
    """The first worker is silent, another one comes later."""
    async with memory_serving() as running:
        client, worker, _ = await running.busy_worker()
        worker.close()
        await trio.sleep(5.0)
        await running.assert_redone(client)
        story = await story_of(client, 1)
        (lost_ms,) = [at for at, text in story["events"] if text == "batch 1 failed: worker_lost"]
        first, waited, *ran = parts(story)
        assert ("failed", lost_ms, "w/0") == first
        assert ("queued", None) == (waited[0], waited[2])
        assert {"other/0"} == {slot for _, _, slot in ran}
        assert (2, "other/0") == (story["attempts"], story["slot"])
        assert f"it spent {lost_ms:g} ms in a failed attempt (batch 1 on w/0: worker_lost)" in story["why"]


@virtual_time
async def test_a_request_that_ends_queued_is_told_with_what_runs_on_its_slots() -> None:
    """Behind a call of another client that has not ended yet, and after it has."""
    async with two_models() as (running, slots):
        client, other = await running.greeted(), await running.greeted(OTHER, "slow")
        slow = await opened(other, "slow")
        other.say(request(1, model=slow))
        long = await slots.next_batch()
        client.say(request(1, remaining_ms=400), request(2))
        await wait_all_tasks_blocked()
        await trio.sleep(0.3)
        client.say(Cancel(sequence=2))
        await client.hear_each(Failure, 2)
        during = [await story_of(client, sequence) for sequence in (1, 2)]
        slots.finish(long)
        await other.hear(ResultEntry)
        after = [await story_of(client, sequence) for sequence in (1, 2)]
        for late, withdrawn in (during, after):
            assert [("queued", 400.0, None)] == parts(late)
            assert [("queued", 300.0, None)] == parts(withdrawn)
            assert [0, 0] == [late["attempts"], withdrawn["attempts"]]
            assert {
                "slots": ["local/0"],
                "batches": 1,
                "own_ms": 0.0,
                "others_ms": 300.0,
                "models": {"slow": {"batches": 1, "own_ms": 0.0, "others_ms": 300.0}},
                "complete": True,
            } == withdrawn["waited_behind"]
            assert "Meanwhile local/0 ran 1 batch: 400 ms for other clients; all for slow." in late["why"]
