"""A gateway names its callers: shares of the slots go by that name, wherever it is said. Scripted slots."""

from __future__ import annotations

from collections import Counter
from itertools import count

import numpy as np
import pytest
import trio
from tests.entries import Explain, Explanation, Failure
from tests.pipeline.serving.clocks import real_time, virtual_time
from tests.pipeline.serving.echo_model import SIGNATURE, echo_tensors, model_settings, request
from tests.pipeline.serving.harness import memory_serving
from tests.pipeline.serving.protected_server import ALICE, GATEWAY, serving
from tests.pipeline.serving.raw_peer import RawPeer, verdict
from tests.pipeline.serving.scripted_slots import ScriptedSlots

from shapestream.serving.sessions import Callers

ONE_BY_ONE = {SIGNATURE.name: model_settings(max_batch=1)}


async def ask(peer: RawPeer, first: int, requests: int, caller: str | None, value: float) -> None:
    """So many requests for this caller; all have arrived afterwards."""
    tags = None if caller is None else {"caller": caller}
    tensors = echo_tensors(value=value)
    peer.say(*[request(first + number, tensors, tags=tags) for number in range(requests)])
    await peer.statistics()


async def turns(slots: ScriptedSlots, batches: int) -> Counter[float]:
    """How many of the next requests had which value."""
    found: Counter[float] = Counter()
    for _ in range(batches):
        batch = await slots.next_batch()
        (x, _) = batch.members[0].buffers
        found[float(np.frombuffer(x, np.float32)[0])] += 1
        slots.finish(batch)
    return found


@virtual_time
async def test_callers_of_one_gateway_share_equally_whoever_asks_first() -> None:
    """One floods, another asks for little; a third asks through another gateway and is the first one again."""
    slots = ScriptedSlots()
    async with memory_serving(slots, models=ONE_BY_ONE) as running:
        gateway, other = await running.greeted(b"g" * 16), await running.greeted(b"o" * 16)
        await ask(gateway, 0, 40, "greedy", 1.0)
        await ask(other, 0, 40, "greedy", 1.0)
        await ask(gateway, 40, 20, "modest", 2.0)
        found = await turns(slots, 30)
    assert abs(found[1.0] - found[2.0]) <= 2, found


@pytest.mark.parametrize(("pair", "shared"), [(GATEWAY, True), (ALICE, False)])
@real_time
async def test_a_protected_server_takes_names_of_gateways_only(pair: object, shared: bool) -> None:
    """With a client's key the names are ignored: all its callers are one, in the order in which they came."""
    slots = ScriptedSlots()
    async with serving(slots, models=ONE_BY_ONE) as place:
        peer = await place.client(pair, b"p" * 16)
        await ask(peer, 0, 30, "greedy", 1.0)
        await ask(peer, 30, 10, "modest", 2.0)
        found = await turns(slots, 20)
    assert shared == (found[2.0] >= 8), found


@virtual_time
async def test_a_single_request_passes_what_its_caller_submitted_together() -> None:
    """Ten that say so wait, and two that come later and say nothing go before those that are left."""
    slots = ScriptedSlots()
    async with memory_serving(slots, models=ONE_BY_ONE) as running:
        peer = await running.greeted(b"p" * 16)
        together = echo_tensors(value=1.0)
        peer.say(*[request(number, together, tags={"together": "10"}) for number in range(10)])
        await peer.statistics()
        await ask(peer, 10, 2, None, 2.0)
        found = await turns(slots, 3)
    assert {1.0: 1, 2.0: 2} == found  # one was running


@virtual_time
async def test_a_story_names_the_caller() -> None:
    """And counts what ran before for other callers of the same gateway as others' work."""
    slots = ScriptedSlots()
    async with memory_serving(slots, models=ONE_BY_ONE) as running:
        gateway = await running.greeted(b"g" * 16)
        await ask(gateway, 0, 1, "first", 1.0)
        gateway.say(request(1, echo_tensors(), tags={"caller": "second", "request_id": "asked"}))
        await gateway.statistics()
        for _ in range(2):
            batch = await slots.next_batch()
            await trio.sleep(0.5)
            slots.finish(batch)
        await gateway.sequences(2)
        gateway.say(Explain(question=1, request="asked", slowest=1))
        (story,) = (await gateway.hear(Explanation)).values["stories"]
    assert "second" == story["caller"]
    behind = story["waited_behind"]
    assert behind["others_ms"] >= 400 > behind["own_ms"], story


@virtual_time
async def test_stories_are_found_by_the_trace() -> None:
    """Of requests that are answered, failed or queued; not by another trace, nor by a part of it."""
    trace = "0af7651916cd43dd8448eb211c80319c"
    tags = [
        {"traceparent": f"00-{trace}-{number:016x}-00", "request_id": f"own{number}"} for number in (1, 2, 3)
    ]
    slots = ScriptedSlots()
    async with memory_serving(slots, models=ONE_BY_ONE) as running:
        peer = await running.greeted(b"g" * 16)
        peer.say(*[request(number, echo_tensors(), tags=own) for number, own in enumerate(tags)])
        peer.say(request(3, echo_tensors(), tags={"traceparent": f"00-{trace[::-1]}-{1:016x}-00"}))
        slots.finish(await slots.next_batch())
        slots.fail(await slots.next_batch())
        await slots.next_batch()
        await peer.ends(2)
        told = []
        for text in (trace, trace[:31]):
            peer.say(Explain(question=1, request=text, slowest=1))
            told.append((await peer.hear(Explanation)).values["stories"])
    assert [(f"own{n}", trace) for n in (1, 2, 3)] == [(one["request_id"], one["trace"]) for one in told[0]]
    assert ["answered", "model_error", "running"] == [one["state"] for one in told[0]]
    assert [] == [*told[1]]


@virtual_time
async def test_a_caller_has_half_of_a_clients_credit_at_all_gateways_together() -> None:
    """So its gateways have credit for others; what was answered counts no more."""
    slots = ScriptedSlots()
    async with memory_serving(slots, models=ONE_BY_ONE, window_requests=6) as running:
        gateway, other = await running.greeted(b"g" * 16), await running.greeted(b"o" * 16)
        await ask(gateway, 0, 2, "greedy", 1.0)
        await ask(other, 0, 1, "greedy", 1.0)
        await ask(gateway, 2, 1, "greedy", 1.0)
        assert (2, "overloaded", True) == verdict(await gateway.hear(Failure))
        await ask(gateway, 3, 3, "modest", 2.0)
        await ask(gateway, 6, 1, None, 3.0)
        assert not gateway.has_heard(Failure), (
            "a modest caller has a credit of its own, and so has the gateway"
        )
        await turns(slots, 7)
        await ask(gateway, 7, 3, "greedy", 1.0)
        assert not gateway.has_heard(Failure)


@virtual_time
async def test_a_callers_bytes_are_limited_but_not_its_only_request() -> None:
    """Of a window for three requests one caller may have one more than none."""
    size = sum(map(len, echo_tensors().buffers))
    slots = ScriptedSlots()
    async with memory_serving(slots, models=ONE_BY_ONE, window_bytes=3 * size) as running:
        gateway = await running.greeted(b"g" * 16)
        await ask(gateway, 0, 2, "greedy", 1.0)
        assert (1, "overloaded", True) == verdict(await gateway.hear(Failure))
        await ask(gateway, 2, 1, "modest", 1.0)
        assert not gateway.has_heard(Failure)


def test_callers_are_bounded_and_the_one_that_asked_longest_ago_goes() -> None:
    """Who comes back after that is a new caller."""
    callers = Callers(count(5), most=2)
    assert [5, 6, 5, 7, 5, 8] == [callers.of(name).number for name in ("a", "b", "a", "c", "a", "b")]
    assert 2 == len(callers)
