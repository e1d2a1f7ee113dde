"""The moment when new workers get the traffic of old ones, as the owner of the processes decides it."""

from __future__ import annotations

from dataclasses import replace

import trio
from tests.entries import Execute, ResultEntry
from tests.pipeline.serving.clocks import virtual_time
from tests.pipeline.serving.echo_model import SIGNATURE, done, request
from tests.pipeline.serving.harness import Owner, Running, memory_serving
from tests.pipeline.serving.raw_peer import RawPeer
from trio.testing import wait_all_tasks_blocked

from shapestream.settings import ModelSettings
from shapestream_engine.shapes import NamedShape

WIDER = replace(
    SIGNATURE,
    inputs=(
        replace(SIGNATURE.inputs[0], shape=NamedShape.parse("batch:1..64, n:1..2000000")),
        SIGNATURE.inputs[1],
    ),
)


def owned(running: Running, *held: str, leaving: tuple[str, ...] = ()) -> Owner:
    """The owner of workers of which some are held, and some were asked to finish."""
    owner = Owner(*held, *leaving)
    owner.held, owner.leaving = set(held), set(leaving)
    running.server.own_processes(owner)
    return owner


def changes(running: Running) -> None:
    """The next worker may bring another signature."""
    running.server.model_expected("echo", ModelSettings(name="echo"), may_change=True)


async def answers(client: RawPeer, *sequences: int) -> None:
    """These requests are answered, in any order."""
    assert {*sequences} == {(await client.hear(ResultEntry)).sequence for _ in sequences}


@virtual_time
async def test_held_workers_get_nothing_before_all_of_them_are_let_in() -> None:
    """They bring another signature. The owner is told that their slots are there; then the traffic moves in one turn.

    One that dials in meanwhile with that signature waits, too.
    """
    async with memory_serving() as running:
        old = await running.joined("old")
        client = await running.greeted()
        owner = owned(running, "new", "other")
        changes(running)
        new = await running.joined("new", signature=WIDER)
        other = await running.joined("other", signature=WIDER)
        guest = await running.joined("guest", signature=WIDER)
        assert ["new", "other"] == owner.ready[:2]
        for sequence in (1, 2):
            client.say(request(sequence))
            await old.run_next()
            await answers(client, sequence)
        assert ["old/0"] == list(running.server.statistics()["slots"])
        owner.held.clear()
        running.server.move_traffic()
        for sequence, worker in ((3, new), (4, other), (5, guest)):
            client.say(request(sequence))
            assert isinstance(await worker.hear(Execute), Execute)


@virtual_time
async def test_workers_that_end_together_serve_what_only_they_have() -> None:
    """Neither is needed if one looks at the other; both are, and their requests are answered."""
    async with memory_serving() as running:
        olds = [await running.joined(name) for name in ("a", "b")]
        client = await running.greeted()
        for sequence in (1, 2):
            client.say(request(sequence))
            await wait_all_tasks_blocked()
        executes = [await old.hear(Execute) for old in olds]
        client.say(request(3), request(4))
        await wait_all_tasks_blocked()
        owned(running, leaving=("a", "b"))
        changes(running)
        await running.joined("new", signature=WIDER)
        finished: list[str] = []

        async def finish(name: str) -> None:
            await running.server.worker_finished(name)
            finished.append(name)

        async def run_all(old: RawPeer) -> None:
            while True:
                await old.run_next()

        async with trio.open_nursery() as nursery:
            for name in ("a", "b"):
                nursery.start_soon(finish, name)
            await trio.sleep(1.0)
            assert [] == finished
            for old, execute in zip(olds, executes, strict=True):
                old.say(done(execute))
                nursery.start_soon(run_all, old)
            await answers(client, 1, 2, 3, 4)
            await trio.sleep(1.0)
            assert ["a", "b"] == sorted(finished)
            nursery.cancel_scope.cancel()


@virtual_time
async def test_a_worker_that_is_about_to_end_gets_nothing_more() -> None:
    """From the moment when its process may be asked to, whenever that hears of it."""
    async with memory_serving() as running:
        await running.joined("old")
        client = await running.greeted()
        new = await running.joined("new")
        owned(running, leaving=("old",))
        await running.server.worker_finished("old")
        for sequence in (1, 2):
            client.say(request(sequence))
            await new.run_next()
            await answers(client, sequence)
