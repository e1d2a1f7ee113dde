"""At a protected server shares and caps go by key, however many connections it has. Over real sockets, or pure."""

from __future__ import annotations

import numpy as np
import pytest
from tests.entries import Failure, Goodbye, Heartbeat, Hello, ResultEntry, Unknown
from tests.pipeline.serving.batches import record_of
from tests.pipeline.serving.clocks import real_time
from tests.pipeline.serving.echo_model import SIGNATURE, echo_tensors, model_settings, request
from tests.pipeline.serving.protected_server import ALICE, BOB, Place, serving
from tests.pipeline.serving.raw_peer import RawPeer
from tests.pipeline.serving.scripted_slots import ScriptedSlots

from shapestream.serving.grants import room_of
from shapestream.serving.kept_replies import KeptReplies
from shapestream.serving.served_models import ServedModel
from shapestream.serving.sessions import ClientSession, RequestRecord, Sessions
from shapestream.settings import ServerSettings
from shapestream.transport.curve_keys import KeyPair
from shapestream_engine.cost_table import CostPoint, CostTable

ECHO = ServedModel(0, SIGNATURE.name, SIGNATURE, model_settings())
ONE_BY_ONE = {SIGNATURE.name: model_settings(max_batch=1)}
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
async def test_more_connections_are_not_more_credit() -> None:
    """Three sessions that heed nothing have two windows together; another key has its own; what ends makes room."""
    slots = ScriptedSlots()
    async with serving(slots, window_requests=4, windows_per_key=2, models=ONE_BY_ONE) as place:
        bob = await sessions(place, BOB, 3)
        assert [0, 0, 4] == [await refused(peer, 4) for peer in bob]
        (alice,) = await sessions(place, ALICE, 1)
        assert 0 == await refused(alice, 4)
        slots.finish(await slots.next_batch())
        await bob[0].hear(ResultEntry)
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
    async with serving(ScriptedSlots(), max_clients=9) as place:
        bob = await sessions(place, BOB, 8)
        late = await place.peer(BOB)
        late.say(Hello(client=client_id(BOB, 8), software="test"))
        await late.hear(Goodbye)
        await sessions(place, ALICE, 1)
        bob[0].say(Goodbye())
        bob[0].say(Heartbeat())
        await bob[0].hear(Unknown)
        await bob[0].open_session(client_id(BOB, 9))


# ---------------------------------------------------------------- the table of sessions


def table(**options: int) -> Sessions:
    """Of a server with these options."""
    kept = KeptReplies(max_bytes=1, max_age_s=1.0, max_replies=1, now=0.0)
    settings = ServerSettings(**options)
    room = room_of(1 << 40, settings.max_queued_bytes, settings.window_bytes)
    return Sessions(settings, kept, room)


def opened(sessions: Sessions, name: str, key: str | None, heard_at: float = 0.0) -> ClientSession:
    """A new session, for which there is room."""
    session = sessions.open((16 * name.encode(), key), name.encode(), heard_at)
    assert session is not None
    return session


def begin(session: ClientSession, sequence: int) -> RequestRecord:
    """A request of 20 bytes is admitted."""
    tensors = echo_tensors()
    shape = SIGNATURE.resolve(tensors.layout)
    assert 20 == shape.total_nbytes
    record = record_of(session, sequence, ECHO, shape, tensors)
    session.begin(record)
    return record


def test_the_caps_of_a_key_are_on_requests_and_on_bytes_of_all_its_sessions() -> None:
    """One session alone cannot reach them. What ends makes room, and another key has caps of its own."""
    sessions = table(window_requests=4, window_bytes=100, windows_per_key=2)
    first, second, third = [opened(sessions, name, "bob") for name in "abc"]
    other = opened(sessions, "d", "alice")
    records = [begin(session, number) for session in (first, second) for number in range(4)]
    session_excess = sessions.excess(first, None, 1)
    assert session_excess is not None
    assert "session's credit: 4 requests, 100 bytes" in session_excess
    key_excess = sessions.excess(third, None, 1)
    assert key_excess is not None
    assert "key's credit: 8 requests, 200 bytes" in key_excess
    assert sessions.excess(other, None, 100) is None
    records[0].session.end(records[0])
    assert sessions.excess(third, None, 60) is None
    assert sessions.excess(third, None, 61) is not None


def test_a_session_without_a_connection_gives_up_its_place() -> None:
    """At a key's cap the session is one of that key, where all places are taken one of any: the one last heard first."""
    sessions = table(max_clients=9)
    bob = [opened(sessions, name, "bob", heard_at=float(ord(name))) for name in "abcdefgh"]
    alice = opened(sessions, "i", "alice")
    assert sessions.session_to_end("bob") is None
    for session in (alice, bob[5], bob[3]):
        sessions.detach(session)
    assert bob[3] is sessions.session_to_end("bob")
    assert alice is sessions.session_to_end("carol")
    sessions.close(alice)
    assert bob[3] is sessions.session_to_end("bob")
    assert sessions.session_to_end("carol") is None


def test_a_key_keeps_its_number_when_all_of_its_sessions_have_gone() -> None:
    """So its debts: each return would be a new client's, which goes first. Without a key no client is known again."""
    sessions = table()

    def numbers(key: str | None) -> list[int]:
        found = []
        for name in "ab":
            session = opened(sessions, name, key)
            found.append(session.number)
            sessions.close(session)
        return found

    assert 1 == len({*numbers("key"), *numbers("key")})
    assert 6 == len({*numbers("key"), *numbers("other"), *numbers(None), *numbers(None)})
