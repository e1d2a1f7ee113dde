"""At a protected server everything hangs on the key: client ids, kept replies, workers' names. Over real sockets."""

from __future__ import annotations

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from tests.pipeline.serving.clocks import real_time
from tests.pipeline.serving.harness import SIGNATURE, Owner, ScriptedSlots, echo_tensors, request
from tests.pipeline.serving.protected_server import ADMIN, ALICE, BOB, BOX, OTHER_BOX, Place, serving

from shapestream.errors import ConfigurationError
from shapestream.serving import ownership
from shapestream.serving.options import ServerOptions
from shapestream.serving.ownership import ClientOwners
from shapestream.serving.server import serve
from shapestream.wire.codec import Role
from shapestream.wire.messages import Execute, Failure, Goodbye, Hello, Result, WorkerHello

ID = b"alice's own id.."


def bad(place: Place, port: str) -> int:
    """Messages that were refused at this port."""
    found: dict[str, int] = place.server.statistics()["bad_messages"]
    return found.get(port, 0)


@real_time
async def test_a_client_id_belongs_to_the_key_that_used_it_first() -> None:
    """Bob presents the id of Alice's session: his connection ends, hers goes on, and one counter has moved."""
    slots = ScriptedSlots()
    async with serving(slots) as place:
        alice, bob = await place.client(ALICE, ID), await place.peer(BOB)
        alice.say(request(1))
        batch = await slots.next_batch()
        bob.say(Hello(client=ID, software="bob"), request(1))
        await bob.hear(Goodbye)
        assert 1 == bad(place, "clients")
        slots.finish(batch)
        assert 1 == (await alice.hear(Result)).sequence
        assert 1 == place.server.statistics()["clients"]


@real_time
async def test_a_kept_reply_goes_to_nobody_else() -> None:
    """Alice's connection is gone, her reply is kept; Bob asks for it under her id and number, and gets nothing."""
    slots = ScriptedSlots()
    async with serving(slots) as place:
        alice, bob = await place.client(ALICE, ID), await place.peer(BOB)
        alice.say(request(1))
        slots.finish(await slots.next_batch())
        first = await alice.hear(Result)
        place.sockets[0].close()
        bob.say(Hello(client=ID, software="bob"), request(1))
        await bob.hear(Goodbye)
        assert not bob.has_heard(Result)
        again = await place.client(ALICE, ID)
        again.say(request(1))
        assert first.tensors.layout == (await again.hear(Result)).tensors.layout
        assert [] == slots.started


@real_time
async def test_a_client_comes_back_on_another_connection_with_its_key() -> None:
    """It is the same client: its running request is answered there, and runs once."""
    slots = ScriptedSlots()
    async with serving(slots) as place:
        before = await place.client(ALICE, ID)
        before.say(request(1))
        batch = await slots.next_batch()
        after = await place.client(ALICE, ID)
        after.say(request(1))
        slots.finish(batch)
        assert 1 == (await after.hear(Result)).sequence
        assert [] == slots.started


@real_time
async def test_counters_are_for_admins() -> None:
    """A client's key gets the models' names, and why it gets no more."""
    async with serving(ScriptedSlots()) as place:
        seen = []
        for pair in (ALICE, ADMIN):
            peer = await place.peer(pair)
            await peer.open_session(pair.public.encode()[:16])
            seen.append(await peer.statistics())
        client, admin = seen
        assert {"models", "unavailable", "digests", "forbidden"} == set(client)
        assert client["models"] == admin["models"]
        assert {"clients": {}} == admin["peers_refused"]


@real_time
async def test_a_workers_name_belongs_to_its_key() -> None:
    """Another listed worker's key cannot push the first out by taking its name; the first is still given work."""
    async with serving() as place:
        box, other = await place.peer(BOX, Role.WORKER), await place.peer(OTHER_BOX, Role.WORKER)
        await box.join_as_worker("box")
        other.say(WorkerHello(worker="box", pid=2, slots=1, models={SIGNATURE.name: SIGNATURE.to_dict()}))
        await other.hear(Goodbye)
        assert 1 == bad(place, "workers")
        alice = await place.client(ALICE, ID)
        alice.say(request(1, echo_tensors()))
        assert 1 == len((await box.hear(Execute)).members)


@real_time
async def test_a_dialled_in_worker_cannot_pass_for_one_of_the_servers_own() -> None:
    """What it did would be laid at that process's door: it could have it killed."""
    async with serving() as place:
        owner = Owner("w0-7")
        place.server.own_processes(owner)
        box = await place.peer(BOX, Role.WORKER)
        box.say(WorkerHello(worker="w0-7", pid=7, slots=1, models={SIGNATURE.name: SIGNATURE.to_dict()}))
        await box.hear(Goodbye)
        assert (1, []) == (bad(place, "workers"), owner.killed)


@real_time
async def test_a_client_cannot_speak_as_a_worker() -> None:
    """What belongs to the other port is refused at this one, whatever the key may do elsewhere."""
    async with serving(ScriptedSlots()) as place:
        alice = await place.client(ALICE, ID)
        alice.say(WorkerHello(worker="w", pid=1, slots=1, models={}))
        alice.say(request(1, echo_tensors(), model=7))
        assert "invalid" == (await alice.hear(Failure)).code
        assert [] == [
            label for label in place.server.statistics()["slots"] if not label.startswith("scripted")
        ]


@pytest.mark.parametrize(
    "address", ["tcp://0.0.0.0:5555", "tcp://*:5555", "tcp://eth0:5555", "tcp://[::]:5555"]
)
def test_no_address_beyond_loopback_without_keys(address: str) -> None:
    """Also where no YAML was read: the error comes before anything listens."""
    with pytest.raises(ConfigurationError, match="security is needed"):
        trio.run(serve, ServerOptions(listen=(address,)))


# ---------------------------------------------------------------- the table of owners


@given(
    st.lists(
        st.tuples(st.sampled_from([b"a" * 16, b"b" * 16]), st.sampled_from([None, "k1", "k2"])), max_size=20
    )
)
def test_an_id_has_one_owner(claims: list[tuple[bytes, str | None]]) -> None:
    """Whatever the order: who came first keeps it, others never get it, and no two keys share what it is kept under."""
    owners = ClientOwners()
    first: dict[bytes, str | None] = {}
    kept: dict[tuple[bytes, str | None], object] = {}
    for client, key in claims:
        owner = first.setdefault(client, key)
        under = owners.claim(client, key)
        assert (under is not None) == (owner == key)
        if under is not None:
            assert under == kept.setdefault((client, key), under)
    assert len(set(kept.values())) == len(kept)


def test_a_forgotten_id_is_still_not_the_same_to_another_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table is bounded; what is kept for a client is kept under its key, too."""
    monkeypatch.setattr(ownership, "MAX_OWNED", 2)
    owners = ClientOwners()
    mine = owners.claim(b"a" * 16, "alice")
    for number in range(3):
        owners.claim(bytes([number]) * 16, "alice")
    theirs = owners.claim(b"a" * 16, "bob")
    assert None not in (mine, theirs)
    assert mine != theirs
