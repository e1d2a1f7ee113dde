"""Slots that end while their worker goes on: what was on the way then harms no other slot, and no other worker."""

from __future__ import annotations

from functools import partial

import pytest
import trio
from tests.entries import (
    Execute,
    Failure,
    Goodbye,
    Heartbeat,
    ResultEntry,
    SlotEnded,
    SlotHello,
    WorkerDraining,
    WorkerWelcome,
)
from tests.pipeline.serving.clocks import virtual_time
from tests.pipeline.serving.echo_model import done, request
from tests.pipeline.serving.harness import Running, memory_serving, serve_with
from tests.pipeline.serving.raw_peer import RawPeer, hello_of
from tests.pipeline.serving.scripted_slots import ScriptedSlots
from trio.testing import wait_all_tasks_blocked

from shapestream.serving.slot_threads import SessionBroken, ThreadEnded
from shapestream.transport.memory import memory_server
from shapestream.wire.codec import encode
from shapestream.wire.limits import WORKER_LIMITS


async def joined(running: Running, name: str, slots: int) -> tuple[RawPeer, WorkerWelcome]:
    """A worker, and the welcome that it was given."""
    worker = running.worker()
    return worker, await worker.greet_as_worker(hello_of(worker=name, slots=slots))


@virtual_time
async def test_a_slot_that_ends_cannot_be_blamed_for_anothers_batch() -> None:
    """A worker that names the batch of another one harms itself only: the other's report is believed."""
    async with memory_serving() as running:
        honest, _ = await joined(running, "honest", 1)
        client = await running.greeted()
        client.say(request(1))
        execute = await honest.hear(Execute)
        liar, welcome = await joined(running, "liar", 1)
        liar.say(SlotEnded(slot=0, session=welcome.session, batch=execute.batch))
        await wait_all_tasks_blocked()
        honest.say(done(execute))
        assert "honest/0" == (await client.hear(ResultEntry)).timings.worker
        assert {} == running.server.statistics()["peers_lost"]


@virtual_time
async def test_a_worker_that_drains_leaves_with_the_slot_that_ended_last() -> None:
    """It has nothing more to answer for, and waits for the goodbye."""
    async with memory_serving() as running:
        worker, welcome = await joined(running, "w", 1)
        client = await running.greeted()
        client.say(request(1))
        await worker.hear(Execute)
        worker.say(WorkerDraining())
        await wait_all_tasks_blocked()
        worker.say(SlotEnded(slot=0, session=welcome.session, batch=None))
        await worker.hear(Goodbye)
        await running.assert_redone(client)


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
@virtual_time
async def test_a_worker_goes_on_with_its_other_slot(busy: bool) -> None:
    """The ended slot is not missed, its batch runs on the other, and its late report does not end the worker."""
    async with memory_serving() as running:
        worker, welcome = await joined(running, "w", 2)
        client = await running.greeted()
        client.say(request(1))
        first = last = await worker.hear(Execute)
        ended = first.slot if busy else 1 - first.slot
        worker.say(SlotEnded(slot=ended, session=welcome.session, batch=None))
        if busy:
            last = await worker.hear(Execute)
            worker.say(done(first))
        await wait_all_tasks_blocked()
        worker.slots[ended].close()
        for _ in range(5):
            await trio.sleep(1.0)
            worker.say(Heartbeat())
        worker.say(done(last))
        assert f"w/{1 - ended}" == (await client.hear(ResultEntry)).timings.worker
        assert {} == running.server.statistics()["peers_lost"]


@virtual_time
async def test_a_slot_that_ended_does_not_greet_again() -> None:
    """Its worker would join twice."""
    async with memory_serving() as running:
        worker, welcome = await joined(running, "w", 2)
        worker.say(SlotEnded(slot=0, session=welcome.session, batch=None))
        await wait_all_tasks_blocked()
        other = running.worker()
        other.connection.send_nowait(encode([SlotHello(token=welcome.token, slot=0)], limits=WORKER_LIMITS))
        await other.hear(Goodbye)
        assert ["w/1"] == list(running.server.statistics()["slots"])


@pytest.mark.parametrize("ended", [0, 1])
@virtual_time
async def test_a_batch_that_finds_a_thread_of_this_process_gone_goes_to_another(ended: int) -> None:
    """The connection is closed a moment before the news of it: the other slots are none the worse."""
    slots = ScriptedSlots(slots=2)
    async with memory_serving(slots) as running:
        client = await running.greeted()
        slots.hang_up(ended)
        client.say(request(1))
        await wait_all_tasks_blocked()
        slots.tell(ThreadEnded(session=1, slot=ended, batch=None))
        batch = await slots.next_batch()
        assert 1 - ended == batch.slot
        slots.finish(batch)
        assert f"local/{batch.slot}" == (await client.hear(ResultEntry)).timings.worker


@virtual_time
async def test_a_report_behind_the_news_that_a_thread_ended_is_late_here_too() -> None:
    """It was on its way in the socket; the other slot runs the batch again, and is believed."""
    slots = ScriptedSlots(slots=2)
    async with memory_serving(slots) as running:
        client = await running.greeted()
        client.say(request(1))
        first = await slots.next_batch()
        slots.tell(ThreadEnded(session=1, slot=first.slot, batch=None))
        slots.finish(first)
        again = await slots.next_batch()
        await wait_all_tasks_blocked()
        slots.finish(again)
        assert f"local/{1 - first.slot}" == (await client.hear(ResultEntry)).timings.worker


@virtual_time
async def test_no_request_waits_for_slots_of_this_process_that_are_all_gone() -> None:
    """A server without another port for workers has nothing to wait for."""
    slots, clients = ScriptedSlots(), memory_server()
    async with trio.open_nursery() as nursery:
        await nursery.start(partial(serve_with(), local=slots, clients=clients))
        client = RawPeer(clients.connect())
        await client.open_session()
        client.say(request(1))
        await slots.next_batch()
        slots.tell(SessionBroken(session=1, why="no more sockets"))
        assert "unavailable" == (await client.hear(Failure)).code
        nursery.cancel_scope.cancel()
