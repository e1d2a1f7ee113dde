"""Slots greet on connections of their own: by the token of their worker's session, with its key, each number once."""

from __future__ import annotations

import pytest
from tests.entries import (
    BatchDone,
    BatchFailedEntry,
    Entry,
    Execute,
    Goodbye,
    Heartbeat,
    ResultEntry,
    Role,
    SlotEnded,
    SlotHello,
    Unknown,
    WorkerRefused,
    WorkerWelcome,
    batch_failed,
)
from tests.pipeline.serving.clocks import real_time, virtual_time
from tests.pipeline.serving.eager import EagerScheduler
from tests.pipeline.serving.echo_model import done, request
from tests.pipeline.serving.harness import Running, memory_serving
from tests.pipeline.serving.protected_server import BOX, OTHER_BOX, serving
from tests.pipeline.serving.raw_peer import RawPeer, hello_of
from trio.testing import wait_all_tasks_blocked

from shapestream.wire.codec import encode
from shapestream.wire.limits import WORKER_LIMITS

HELLO = hello_of(slots=2)


async def welcomed(running: Running) -> tuple[RawPeer, WorkerWelcome]:
    """The control of a worker with two slots, which have not greeted yet."""
    control = running.worker()
    control.say(HELLO)
    return control, await control.hear(WorkerWelcome)


def labels(running: Running) -> list[str]:
    """The slots that are here."""
    return list(running.server.statistics()["slots"])


@virtual_time
async def test_a_worker_joins_with_the_last_of_its_slots() -> None:
    """Not before: what it is given must have a way to it."""
    async with memory_serving() as running:
        _, welcome = await welcomed(running)
        for slot, expected in ((1, []), (0, ["w/0", "w/1"])):
            running.worker().say(SlotHello(token=welcome.token, slot=slot))
            await wait_all_tasks_blocked()
            assert expected == labels(running)


@virtual_time
async def test_a_token_that_is_not_known_opens_nothing() -> None:
    """A guess, or the token of a session that is over: such a peer is a stranger."""
    async with memory_serving() as running:
        control, old = await welcomed(running)
        control.say(HELLO)
        new = await control.hear(WorkerWelcome)
        assert (old.token != new.token, old.session < new.session) == (True, True)
        for token in (bytes(16), old.token):
            stranger = running.worker()
            stranger.say(SlotHello(token=token, slot=0))
            await stranger.hear(Unknown)
        assert {"workers": 2} == running.server.statistics()["strangers"]


@pytest.mark.parametrize("slot", [0, 2, 2**62])
@virtual_time
async def test_a_number_that_is_taken_or_none_is_turned_away(slot: int) -> None:
    """That connection alone: the worker is not to blame for it, and serves on."""
    async with memory_serving() as running:
        worker = running.worker()
        welcome = await worker.greet_as_worker(HELLO)
        intruder = running.worker()
        intruder.say(SlotHello(token=welcome.token, slot=slot))
        await intruder.hear(Goodbye)
        client = await running.greeted()
        client.say(request(1))
        await worker.run_next()
        assert 1 == (await client.hear(ResultEntry)).sequence
        assert not intruder.has_heard(Execute)


@real_time
async def test_a_slot_with_another_key_is_turned_away() -> None:
    """Also with the right token, which its owner alone has been told."""
    async with serving() as place:
        box = await place.peer(BOX, Role.WORKER)
        box.say(HELLO)
        welcome = await box.hear(WorkerWelcome)
        other = await place.peer(OTHER_BOX, Role.WORKER)
        other.say(SlotHello(token=welcome.token, slot=0))
        await other.hear(Goodbye)
        assert {"workers": 1} == place.server.statistics()["bad_messages"]


@pytest.mark.parametrize("kind", ["done", "failed"])
@virtual_time
async def test_a_slot_that_reports_anothers_batch_ends_its_worker(kind: str) -> None:
    """What was never sent to it is a lie, whichever of its worker's slots has the batch; the work is done again."""
    async with memory_serving() as running:
        worker, client = await running.joined(slots=2), await running.greeted()
        client.say(request(1))
        execute = await worker.hear(Execute)
        lie: BatchDone | BatchFailedEntry = done(execute)
        if kind == "failed":
            lie = batch_failed(execute, "internal")
        worker.slots[1 - execute.slot].send_nowait(encode([lie], limits=WORKER_LIMITS))
        await worker.hear(Goodbye)
        await running.assert_redone(client)


@virtual_time
async def test_a_report_of_another_session_is_dropped() -> None:
    """The worker is not ended for it: the batch's own report answers."""
    async with memory_serving() as running:
        client, worker, execute = await running.busy_worker()
        worker.say(done(execute, session=execute.session + 1), done(execute))
        assert 1 == (await client.hear(ResultEntry)).sequence
        assert 1 == running.server.statistics()["late_reports"]


@pytest.mark.parametrize("entry", [HELLO, SlotEnded(slot=0, session=1, batch=None)], ids=["hello", "ended"])
@virtual_time
async def test_a_slot_says_nothing_but_reports(entry: Entry) -> None:
    """What belongs to the control is refused on a slot's connection."""
    async with memory_serving() as running:
        worker = await running.joined()
        worker.slots[0].send_nowait(encode([entry], limits=WORKER_LIMITS))
        await worker.hear(Goodbye)
        assert [] == labels(running)


@virtual_time
async def test_a_slot_that_cannot_be_reached_ends_its_workers_session() -> None:
    """Its connection broke: the batch runs elsewhere, and the control hears that it is not known any more."""
    async with memory_serving() as running:
        client, worker, _ = await running.busy_worker()
        worker.slots[0].close()
        other = await running.joined("other")
        worker.say(Heartbeat())
        await other.run_next()
        assert 1 == (await client.hear(ResultEntry)).sequence
        assert ["other/0"] == labels(running)


@virtual_time
async def test_what_a_slot_had_behind_the_batch_that_ended_it_runs_again() -> None:
    """The one that it had begun is blamed as a defect of the program; the slot gets nothing more, the others do."""
    async with memory_serving() as running:
        worker, client = await running.joined(slots=2), await running.greeted()
        client.say(request(1))
        execute = await worker.hear(Execute)
        worker.say(SlotEnded(slot=execute.slot, session=execute.session, batch=None))
        again = await worker.hear(Execute)
        assert again.slot != execute.slot
        worker.say(SlotEnded(slot=again.slot, session=again.session + 1, batch=None))  # of another session
        worker.say(done(again))
        assert 1 == (await client.hear(ResultEntry)).sequence
        assert [f"w/{again.slot}"] == labels(running)


@virtual_time
async def test_reports_that_come_after_the_goodbye_count() -> None:
    """They travel on another connection: a server waits for them, and what is missing then runs elsewhere."""
    async with memory_serving() as running:
        client, worker, execute = await running.busy_worker()
        worker.say(Goodbye())
        await wait_all_tasks_blocked()
        worker.say(done(execute))
        assert 1 == (await client.hear(ResultEntry)).sequence
        await wait_all_tasks_blocked()
        assert {"worker: goodbye": 1} == running.server.statistics()["peers_lost"]


@pytest.mark.parametrize("protocol", [1, 2, 3, 4, 6])
@virtual_time
async def test_a_worker_of_another_version_is_told_so(protocol: int) -> None:
    """One clear error on each side; nothing of it is served."""
    async with memory_serving() as running:
        old = running.worker()
        old.say(hello_of(worker="old", protocol=protocol))
        refused = await old.hear(WorkerRefused)
        assert f"it speaks version {protocol} of the workers' protocol" in refused.message
        assert "install the same release" in refused.message
        await old.hear(Goodbye)
        assert [] == running.server.statistics()["models"]


@virtual_time
async def test_a_report_before_that_of_an_earlier_batch_is_a_lie(sends_ahead: EagerScheduler) -> None:
    """A slot runs one batch at a time, in order. Only what it gives back may come before an earlier report."""
    async with memory_serving() as running:
        client, worker = await running.client_and_worker()
        client.say(request(1), request(2))
        _, second = await worker.hear_each(Execute, 2)
        worker.say(done(second))
        await worker.hear(Goodbye)
        assert 1 == running.server.statistics()["peers_lost"]["worker: sent what cannot be accepted"]
        other = await running.joined("other")
        again = await other.hear_each(Execute, 2)
        other.say(*[done(execute) for execute in again])
        assert {1, 2} == set(await client.sequences(2))
