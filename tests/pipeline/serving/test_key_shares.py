"""At a protected server shares and credit go by key, however many connections it has. Over real sockets."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import trio
from tests.pipeline.serving.clocks import real_time
from tests.pipeline.serving.harness import SIGNATURE, RawPeer, ScriptedSlots, echo_tensors, request
from tests.pipeline.serving.protected_server import ALICE, BOB, SERVER, Place, serving

import shapestream
from shapestream.serving.models import ModelOptions
from shapestream.transport.curve_keys import KeyPair, write_key_pair
from shapestream.wire.messages import Credit, Failure, Goodbye, Heartbeat, Hello, Result, Unknown
from shapestream_engine.cost_table import CostPoint, CostTable

ONE_BY_ONE = {SIGNATURE.name: ModelOptions(max_batch=1)}
SECONDS = {4: 0.1, 16: 0.3}
"""What a request with so many numbers takes."""


class CostlySlots(ScriptedSlots):
    """One slot that has measured what requests take."""

    def __init__(self) -> None:
        super().__init__()
        points = tuple(CostPoint(sizes=(1, n), seconds=seconds) for n, seconds in SECONDS.items())
        self.costs = {SIGNATURE.name: CostTable(key="slot", dimensions=("batch", "n"), points=points)}


async def sessions(place: Place, pair: KeyPair, count: int) -> list[RawPeer]:
    """So many sessions with this key, each on its own connection."""
    peers = [await place.peer(pair) for _ in range(count)]
    for number, peer in enumerate(peers):
        await peer.open_session(client_id(pair, number))
    return peers


def client_id(pair: KeyPair, number: int) -> bytes:
    """Of one of these sessions."""
    return pair.public[:15].encode() + bytes([number])


async def flood(peers: list[RawPeer], requests: int, *, value: float, n: int) -> None:
    """Each asks for so many at once; all have arrived afterwards."""
    for peer in peers:
        peer.say(*[request(sequence, echo_tensors(n=n, value=value)) for sequence in range(requests)])
        await peer.statistics()


async def refused(peer: RawPeer, requests: int, first: int = 0) -> int:
    """Asks for so many at once, whatever credit there is; how many are refused for it."""
    peer.say(*[request(sequence) for sequence in range(first, first + requests)])
    await peer.statistics()
    failures = [entry for entry in peer.heard if isinstance(entry, Failure)]
    peer.heard.clear()
    assert all("overloaded" == failure.code and "key's credit" in failure.message for failure in failures)
    return len(failures)


async def parts(peers: list[RawPeer], window: int) -> list[int]:
    """How many requests each may have unanswered, as it was told by now; `window` is what the welcome said."""
    told = [window] * len(peers)
    for number, peer in enumerate(peers):
        await peer.statistics()
        while peer.has_heard(Credit):
            told[number] = (await peer.hear(Credit)).window_requests
    return told


@pytest.mark.parametrize("n", [4, 16])
@real_time
async def test_two_keys_get_half_each_whatever_their_connections(n: int) -> None:
    """Bob floods from eight connections, then Alice from one, perhaps with dearer requests: both get the same seconds."""
    slots = CostlySlots()
    async with serving(slots, models=ONE_BY_ONE) as place:
        await flood(await sessions(place, BOB, 8), 20, value=1.0, n=4)
        await flood(await sessions(place, ALICE, 1), 40, value=2.0, n=n)
        spent_s = {1.0: 0.0, 2.0: 0.0}
        for _ in range(40):
            batch = await slots.next_batch()
            (x, _) = batch.members[0].buffers
            values = np.frombuffer(x, np.float32)
            spent_s[float(values[0])] += SECONDS[len(values)]
            slots.finish(batch, busy_s=SECONDS[len(values)])
    assert abs(spent_s[1.0] - spent_s[2.0]) <= 2 * max(SECONDS.values())


@real_time
async def test_one_session_of_a_key_is_told_nothing_new() -> None:
    """Its window is that of the welcome, as where no key is asked for."""
    async with serving(ScriptedSlots(), window_requests=16) as place:
        (alice,) = await sessions(place, ALICE, 1)
        await alice.statistics()
        assert not alice.has_heard(Credit)


@real_time
async def test_sessions_of_a_key_are_told_their_parts() -> None:
    """As they come, and the others have repeated theirs; and again when one has gone. Another key's are told nothing."""
    async with serving(ScriptedSlots(), window_requests=16, heartbeat_s=0.1) as place:
        alice = await sessions(place, ALICE, 1)
        bob = await sessions(place, BOB, 3)
        assert [8, 8, 0] == await parts(bob, 16)
        for peer in bob[:2]:
            peer.say(Credit(window_requests=8, window_bytes=256 << 20))
        assert 8 == (await bob[2].hear(Credit)).window_requests
        bob.pop().say(Goodbye())
        assert [16, 16] == [(await peer.hear(Credit)).window_requests for peer in bob]
        assert [16] == await parts(alice, 16)


@real_time
async def test_a_session_that_greets_again_is_told_its_part_again() -> None:
    """A welcome says the whole window, so its part must come behind."""
    async with serving(ScriptedSlots(), window_requests=16) as place:
        bob = await sessions(place, BOB, 3)
        bob[0].heard.clear()
        await bob[0].open_session(client_id(BOB, 0))
        assert [8] == await parts(bob[:1], 16)


@real_time
async def test_more_connections_are_not_more_credit() -> None:
    """Three sessions that heed nothing have two windows together; another key has its own; what ends makes room."""
    slots = ScriptedSlots()
    async with serving(slots, window_requests=4, models=ONE_BY_ONE) as place:
        bob = await sessions(place, BOB, 3)
        assert [0, 0, 4] == [await refused(peer, 4) for peer in bob]
        (alice,) = await sessions(place, ALICE, 1)
        assert 0 == await refused(alice, 4)
        slots.finish(await slots.next_batch())
        await bob[0].hear(Result)
        assert 3 == await refused(bob[2], 4)


@real_time
async def test_what_a_session_that_left_had_is_credit_again() -> None:
    """What it had waiting is dropped; the key's other sessions may use all of it, once."""
    async with serving(ScriptedSlots(), window_requests=4, windows_per_key=1) as place:
        first, second, third = await sessions(place, BOB, 3)
        assert [0, 1] == [await refused(first, 3), await refused(second, 2)]
        first.say(Goodbye())
        first.say(Heartbeat())
        await first.hear(Unknown)
        assert [0, 2] == [await refused(second, 1, first=5), await refused(third, 4)]


@real_time
async def test_one_key_cannot_take_every_place() -> None:
    """It has eight in nine; the ninth is another key's. Where somebody leaves it may come again."""
    async with serving(ScriptedSlots(), max_sessions=9) as place:
        bob = await sessions(place, BOB, 8)
        late = await place.peer(BOB)
        late.say(Hello(client=client_id(BOB, 8), software="test"))
        await late.hear(Goodbye)
        await sessions(place, ALICE, 1)
        bob[0].say(Goodbye())
        bob[0].say(Heartbeat())
        await bob[0].hear(Unknown)
        await bob[0].open_session(client_id(BOB, 9))


@real_time
async def test_clients_that_heed_their_credit_are_never_refused(tmp_path: Path) -> None:
    """Six of our own clients with one key send 40 each, of a credit of two windows of eight: all get all their results."""
    secret, _ = write_key_pair(tmp_path, "bob", BOB)
    slots = ScriptedSlots()
    async with serving(slots, window_requests=8, heartbeat_s=0.1) as place, trio.open_nursery() as nursery:
        done: list[int] = []

        async def ask() -> None:
            keys = {"key": secret, "server_key": SERVER.public}
            async with shapestream.connect(place.server.addresses[0], **keys) as client:
                inputs = {"x": np.ones((1, 4), np.float32), "scale": np.ones(1, np.float32)}
                async with client.stream("echo", [inputs] * 40) as results:
                    done.append(len([result async for result in results]))
            if len(done) == 6:
                nursery.cancel_scope.cancel()

        for _ in range(6):
            nursery.start_soon(ask)
        while True:
            slots.finish(await slots.next_batch())
    assert [40] * 6 == done
