"""At a protected server everything hangs on the key: client ids, kept replies, workers' names. Over real sockets."""

from __future__ import annotations

import pytest
import trio
from tests.entries import (
    AcknowledgeAudit,
    Cancel,
    Execute,
    Failure,
    Goodbye,
    ResultEntry,
    Role,
)
from tests.pipeline.serving.clocks import real_time
from tests.pipeline.serving.echo_model import echo_tensors, request
from tests.pipeline.serving.harness import Owner
from tests.pipeline.serving.protected_server import ADMIN, ALICE, BOB, BOX, OTHER_BOX, Place, serving
from tests.pipeline.serving.raw_peer import ending, hello_of
from tests.pipeline.serving.scripted_slots import ScriptedSlots

from shapestream.errors import ConfigurationError
from shapestream.serving.auditor import Auditor
from shapestream.serving.server import serve
from shapestream.settings import ServerSettings

ID = b"alice's own id.."


def bad(place: Place, port: str) -> int:
    """Messages that were refused at this port."""
    found: dict[str, int] = place.server.statistics()["bad_messages"]
    return found.get(port, 0)


@real_time
async def test_a_client_id_is_another_clients_with_another_key() -> None:
    """Bob presents the id and number of Alice's running request: both run, and each hears the end of its own."""
    slots = ScriptedSlots()
    async with serving(slots) as place:
        alice, bob = await place.client(ALICE, ID), await place.client(BOB, ID)
        alice.say(request(1))
        batch = await slots.next_batch()
        bob.say(request(1, echo_tensors(value=2.0)), Cancel(sequence=1))
        assert (1, "cancelled") == ending(await bob.hear(Failure))
        slots.finish(batch)
        assert 1 == (await alice.hear(ResultEntry)).sequence
        assert 2 == place.server.statistics()["clients"]


@real_time
async def test_a_kept_reply_goes_to_no_other_key() -> None:
    """Alice's connection is gone, her reply is kept; Bob asks under her id and number, and what he asked for runs."""
    slots = ScriptedSlots()
    async with serving(slots) as place:
        alice = await place.client(ALICE, ID)
        alice.say(request(1))
        slots.finish(await slots.next_batch())
        first = await alice.hear(ResultEntry)
        place.sockets[0].close()
        bob = await place.client(BOB, ID)
        bob.say(request(1))
        slots.finish(await slots.next_batch())
        await bob.hear(ResultEntry)
        again = await place.client(ALICE, ID)
        again.say(request(1))
        assert first == await again.hear(ResultEntry)
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
        assert 1 == (await after.hear(ResultEntry)).sequence
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
        assert {
            "models",
            "chains",
            "unavailable",
            "digests",
            "versions",
            "not_ready",
            "models_not_ready",
            "forbidden",
        } == set(client)
        assert client["models"] == admin["models"]
        assert {"clients": {}} == admin["peers_refused"]


@real_time
async def test_only_admins_acknowledge_audits(monkeypatch: pytest.MonkeyPatch) -> None:
    """What another key says has no effect."""
    acknowledged: list[str] = []
    monkeypatch.setattr(Auditor, "acknowledge", lambda auditor, model: acknowledged.append(model))
    async with serving(ScriptedSlots()) as place:
        for pair in (ALICE, ADMIN):
            peer = await place.peer(pair)
            await peer.open_session(pair.public.encode()[:16])
            peer.say(AcknowledgeAudit(model=pair.public))
            await peer.statistics()
    assert [ADMIN.public] == acknowledged


@real_time
async def test_a_workers_name_belongs_to_its_key() -> None:
    """Another listed worker's key cannot push the first out by taking its name; the first is still given work."""
    async with serving() as place:
        box, other = await place.peer(BOX, Role.WORKER), await place.peer(OTHER_BOX, Role.WORKER)
        await box.join_as_worker("box")
        other.say(hello_of(worker="box", pid=2))
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
        box.say(hello_of(worker="w0-7", pid=7))
        await box.hear(Goodbye)
        assert (1, []) == (bad(place, "workers"), owner.killed)


@real_time
async def test_a_client_cannot_speak_as_a_worker() -> None:
    """What belongs to the other port is refused at this one, whatever the key may do elsewhere."""
    async with serving(ScriptedSlots()) as place:
        alice = await place.client(ALICE, ID)
        alice.say(hello_of())
        alice.say(request(1, echo_tensors(), model=7))
        assert "invalid" == (await alice.hear(Failure)).code
        assert [] == [label for label in place.server.statistics()["slots"] if not label.startswith("local")]


@pytest.mark.parametrize(
    "address", ["tcp://0.0.0.0:5555", "tcp://*:5555", "tcp://eth0:5555", "tcp://[::]:5555"]
)
def test_no_address_beyond_loopback_without_keys(address: str) -> None:
    """Also where no YAML was read: the error comes before anything listens."""
    with pytest.raises(ConfigurationError, match="security is needed"):
        trio.run(serve, ServerSettings(listen=(address,)))
