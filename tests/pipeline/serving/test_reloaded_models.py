"""A reload changes a model while its requests wait: by whom they are run, and what its workers are told."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import trio
from tests.entries import (
    Execute,
    Failure,
    Goodbye,
    ResultEntry,
    SlotHello,
    Unknown,
    WorkerRefused,
    WorkerWelcome,
    request_of,
)
from tests.pipeline.serving.clocks import virtual_time
from tests.pipeline.serving.echo_model import SIGNATURE, done, echo_tensors, request
from tests.pipeline.serving.harness import Running, memory_serving
from tests.pipeline.serving.raw_peer import RawPeer, hello_of
from trio.testing import wait_all_tasks_blocked

from shapestream.settings import ModelSettings
from shapestream.wire.codec import encode
from shapestream_engine.output_rules import Rows
from shapestream_engine.ports import OutputPort
from shapestream_engine.shapes import NamedShape

ECHO = ModelSettings(name="echo")
RELOADED = ECHO.model_copy(update={"calibration_s": 0.0})
OTHER = replace(SIGNATURE, outputs=(OutputPort("z", "f32", NamedShape.parse("batch, n"), Rows()),))
"""What a reload makes of the echo: its output has another name."""
OLD, NEW = "0" * 64, "1" * 64
SECOND = replace(SIGNATURE, name="second")


@virtual_time
async def test_requests_that_waited_for_an_old_worker_are_run_by_the_new_one() -> None:
    """With the same signature: of its process nothing is left, whether it died or had only one slot to drain."""
    async with memory_serving(models={"echo": ECHO}) as running:
        client, old, _ = await running.busy_worker()
        client.say(*[request(number) for number in range(2, 6)])
        running.server.model_expected("echo", RELOADED, may_change=True)
        new = await running.joined("new")
        client.say(request(6))
        await client.statistics()
        old.close()
        for _ in range(3):  # what waited, what came later, and what the old one had begun
            await new.run_next()
        assert [1, 2, 3, 4, 5, 6] == sorted(await client.sequences(6))


@virtual_time
async def test_requests_of_old_signatures_fail_with_the_last_worker_that_takes_them() -> None:
    """Also those of a generation that had the signature of the one before."""
    async with memory_serving(models={"echo": ECHO}) as running:
        client, old, _ = await running.busy_worker()
        client.say(request(2))
        await client.statistics()
        running.server.model_expected("echo", RELOADED, may_change=True)
        alike = await running.joined("alike")
        client.say(*[request(number) for number in range(3, 7)])
        await alike.hear(Execute)
        running.server.model_expected("echo", ECHO, may_change=True)
        await running.joined("another", signature=OTHER)
        old.close()
        await trio.sleep(1.5)
        assert ["alike/0", "another/0"] == list((await client.statistics())["slots"])
        assert not client.has_heard(Failure)
        alike.close()
        failed = {entry.sequence: entry.code for entry in await client.hear_each(Failure, 6)}
        assert dict.fromkeys(range(1, 7), "unavailable") == failed


@virtual_time
async def test_requests_of_an_equal_signature_wait_for_the_next_worker() -> None:
    """While there is none at all, as after a crash."""
    async with memory_serving(models={"echo": ECHO}) as running:
        client, old, _ = await running.busy_worker()
        client.say(*[request(number) for number in range(2, 5)])
        await client.statistics()
        running.server.model_expected("echo", RELOADED, may_change=True)
        alike = await running.joined("alike")
        await alike.hear(Execute)
        old.close()
        alike.close()
        await trio.sleep(1.5)
        assert [] == list((await client.statistics())["slots"])
        assert not client.has_heard(Failure)
        new = await running.joined("new")
        for _ in range(4):  # each alone: a worker died of them, or beside them
            await new.run_next()
        assert [1, 2, 3, 4] == sorted(await client.sequences(4))


@virtual_time
async def test_requests_of_an_equal_signature_fail_where_no_worker_will_come() -> None:
    """They do not wait for ever for one that was given up."""
    async with memory_serving(models={"echo": ECHO}) as running:
        client, old, _ = await running.busy_worker()
        client.say(*[request(number) for number in range(2, 5)])
        await client.statistics()
        running.server.model_expected("echo", RELOADED, may_change=True)
        alike = await running.joined("alike")
        await alike.hear(Execute)
        old.close()
        alike.close()
        await trio.sleep(1.5)
        running.server.model_given_up("echo", "it never came up")
        failed = {entry.sequence: entry.code for entry in await client.hear_each(Failure, 4)}
        assert dict.fromkeys(range(1, 5), "unavailable") == failed


@virtual_time
async def test_an_old_worker_is_finished_as_soon_as_the_last_request_for_it_has_ended() -> None:
    """At that very time, and not before what waited for it."""
    async with memory_serving(models={"echo": ECHO}) as running:
        client, old, execute = await running.busy_worker()
        client.say(request(2))
        running.server.model_expected("echo", RELOADED, may_change=True)
        await running.joined("new", signature=OTHER)
        finished = trio.Event()

        async def wait() -> None:
            await running.server.worker_finished("w")
            finished.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait)
            old.say(done(execute))
            assert [1] == await client.sequences(1)
            execute = await old.hear(Execute)
            await wait_all_tasks_blocked()
            assert not finished.is_set()
            ended_at = trio.current_time()
            old.say(done(execute))
            await finished.wait()
            assert trio.current_time() == ended_at
            assert [2] == await client.sequences(1)


async def refusal(peer: RawPeer, **said: Any) -> WorkerRefused:
    """What a worker is told that has to greet anew, once it has."""
    await peer.hear(Unknown)
    peer.say(hello_of(**said))
    return await peer.hear(WorkerRefused)


@virtual_time
async def test_a_dialled_in_worker_of_old_files_serves_until_another_has_the_new_ones() -> None:
    """It may even lose its connection. Then it finishes what it has, gets nothing more, and is told why."""
    async with memory_serving(models={"echo": ECHO}, digests={"echo": OLD}) as running:
        lost = await running.joined("old", digests={"echo": OLD})
        running.server.serve_files({"echo": NEW})
        lost.close()
        old = await running.joined("old", digests={"echo": OLD})
        client = await running.greeted()
        client.say(request(1))
        execute = await old.hear(Execute)
        new = await running.joined("new", digests={"echo": NEW})
        await trio.sleep(1.5)
        client.say(request(2))
        await new.run_next()
        assert not old.has_heard(Unknown)
        old.say(done(execute))
        answered = {entry.sequence: entry.timings.digest for entry in await client.hear_each(ResultEntry, 2)}
        assert {1: OLD, 2: NEW} == answered
        refused = await refusal(old, worker="old", digests={"echo": OLD})
        assert "echo" == refused.model
        assert "it has read other bytes of the model's files" in refused.message
        await old.hear(Goodbye)
        assert ["new/0"] == list((await client.statistics())["slots"])


@virtual_time
async def test_a_dialled_in_worker_of_an_old_signature_is_told_when_nothing_waits_for_it() -> None:
    """Not before, and it cannot turn the model back."""
    async with memory_serving(models={"echo": ECHO}) as running:
        client, old, execute = await running.busy_worker()
        second = await running.joined("second")
        running.server.model_expected("echo", RELOADED, may_change=True)
        new = await running.joined("new", signature=OTHER)
        await trio.sleep(1.5)
        for worker in (old, second):
            worker.take_arrived()
            assert not worker.has_heard(Unknown)
        old.say(done(execute))
        assert [1] == await client.sequences(1)
        for name, worker in (("w", old), ("second", second)):
            refused = await refusal(worker, worker=name)
            assert "its model has another signature" in refused.message
            await worker.hear(Goodbye)
        assert ["new/0"] == list((await client.statistics())["slots"])
        assert not new.has_heard(Goodbye)


@virtual_time
async def test_a_dialled_in_worker_goes_on_with_its_other_models() -> None:
    """It is told which one is refused, and gets requests for what is left."""
    models = {"echo": ECHO, "second": ModelSettings(name="second")}
    both = {"models": {"echo": SIGNATURE.to_dict(), "second": SECOND.to_dict()}, "digests": {"echo": OLD}}
    async with memory_serving(models=models, digests={"echo": OLD}) as running:
        old = await running.joined("old", **both)
        running.server.serve_files({"echo": NEW})
        new = await running.joined("new", digests={"echo": NEW})
        assert "echo" == (await refusal(old, worker="old", **both)).model
        old = await welcomed(running, old)
        client = await running.greeted(model="second")
        client.say(request(1), request_of(2, echo_tensors(), model=1))
        assert ("echo", "second") == ((await new.run_next()).model, (await old.run_next()).model)
        assert [1, 2] == sorted(await client.sequences(2))


async def welcomed(running: Running, worker: RawPeer) -> RawPeer:
    """The worker, whose slot has greeted after its welcome."""
    token = (await worker.hear(WorkerWelcome)).token
    worker.slots = [running.workers.connect()]
    worker.slots[0].send_nowait(encode([SlotHello(token=token, slot=0)], limits=worker.limits))
    await wait_all_tasks_blocked()
    return worker


@virtual_time
async def test_files_that_a_failed_reload_kept_are_served_while_a_worker_has_them() -> None:
    """They are gone from the disk, so a worker that comes back has others."""
    async with memory_serving(models={"echo": ECHO}, digests={"echo": OLD}) as running:
        old = await running.joined("old", digests={"echo": OLD})
        running.server.serve_files({"echo": NEW})
        running.server.keep_files({"echo": OLD})
        early = running.worker()
        early.say(hello_of(worker="early", digests={"echo": NEW}))
        assert f"and {OLD} is served" in (await early.hear(WorkerRefused)).message
        old.close()
        await trio.sleep(1.5)  # the server notices when it sends a heartbeat
        await running.joined("new", digests={"echo": NEW})
        client = await running.greeted()
        assert {"echo": NEW} == (await client.statistics())["digests"]
