"""Requests through a server whose slots are scripted: no thread, no real time, no real socket."""

from __future__ import annotations

import structlog.testing
import trio
from tests.entries import (
    Cancel,
    Failure,
    Heartbeat,
    ModelOpened,
    ModelRefused,
    OpenModel,
    ResultEntry,
    Role,
    StatisticsEntry,
    StatisticsRequest,
    result_of,
)
from tests.pipeline.serving.clocks import virtual_time
from tests.pipeline.serving.echo_model import SIGNATURE, echo_tensors, echoed, model_settings, request
from tests.pipeline.serving.harness import memory_serving, scripted_client
from tests.pipeline.serving.raw_peer import RawPeer, ending, verdict
from tests.pipeline.serving.scripted_slots import ScriptedSlots

from shapestream.serving.port_traffic import Outgoing, PeerLink
from shapestream.telemetry.counters import ServerStatistics
from shapestream.transport.memory import memory_server
from shapestream.wire.codec import codec_of, decode
from shapestream_engine.layout import Tensors
from shapestream_engine.signature import ModelSignature


@virtual_time
async def test_a_request_is_answered_with_its_own_bytes_and_timings() -> None:
    """The thinnest way through: hello, open, request, batch, result."""
    async with scripted_client() as (client, slots):
        client.say(request(7))
        slots.finish(await slots.next_batch())
        result = await client.hear(ResultEntry)
        assert 7 == result.sequence
        assert ((0, "f32", (1, 4)),) == result.tensors.layout
        assert echo_tensors().buffers[0] == result.tensors.buffers[0]
        assert "local/0" == result.timings.worker
        assert 1000 == result.timings.run_us


@virtual_time
async def test_requests_of_one_message_share_batches_and_a_message_back() -> None:
    """What arrives together runs together, and what is ready together travels together."""
    async with scripted_client() as (client, slots):
        client.say(*[request(number) for number in range(5)])
        batch = await slots.next_batch()
        assert 5 == len(batch.members)
        slots.finish(batch)
        (message,) = await client.connection.receive()
        results = decode(message, role=Role.CLIENT).entries
        assert [0, 1, 2, 3, 4] == [entry.sequence for entry in results if isinstance(entry, ResultEntry)]


@virtual_time
async def test_a_duplicate_of_a_running_request_shares_its_one_reply() -> None:
    """A client that resends after a reconnect gets one answer, and the model runs once."""
    async with scripted_client() as (client, slots):
        client.say(request(1))
        client.say(request(1))
        batch = await slots.next_batch()
        slots.finish(batch)
        assert 1 == (await client.hear(ResultEntry)).sequence
        values = await client.statistics()
        assert 1 == values["duplicates"]
        assert 1 == values["results"]
        assert [] == slots.started


@virtual_time
async def test_an_unknown_model_is_refused_with_the_names_of_the_known() -> None:
    """The message tells the caller what could be asked for."""
    async with memory_serving(ScriptedSlots()) as running:
        client = await running.greeted(model=None)
        client.say(OpenModel(name="ecko"))
        refused = await client.hear(ModelRefused)
        assert ("ecko", "invalid") == (refused.name, refused.code)
        assert "echo" in refused.message


@virtual_time
async def test_a_promised_model_is_opened_when_its_worker_comes() -> None:
    """Clients may connect while workers still compile."""
    async with memory_serving(models={"echo": model_settings()}) as running:
        client = await running.greeted(model=None)
        client.say(OpenModel(name="echo"), StatisticsRequest())
        await client.hear(StatisticsEntry)
        assert [] == [entry for entry in client.heard if isinstance(entry, ModelOpened | ModelRefused)]
        await running.worker().join_as_worker()
        opened = await client.hear(ModelOpened)
        assert ModelSignature.from_dict(opened.signature) == SIGNATURE


@virtual_time
async def test_a_cancelled_request_that_waits_is_answered_at_once() -> None:
    """It never starts."""
    async with scripted_client() as (client, slots):
        client.say(request(1))
        running_batch = await slots.next_batch()
        client.say(request(2))
        client.say(Cancel(sequence=2))
        assert (2, "cancelled") == ending(await client.hear(Failure))
        slots.finish(running_batch)
        await client.hear(ResultEntry)
        assert [] == slots.started


@virtual_time
async def test_a_running_batch_that_nobody_waits_for_is_cancelled() -> None:
    """The executor is told, and a late report harms nobody."""
    async with scripted_client() as (client, slots):
        client.say(request(1))
        batch = await slots.next_batch()
        client.say(Cancel(sequence=1))
        assert "cancelled" == (await client.hear(Failure)).code
        assert [batch.batch] == slots.cancelled
        slots.fail(batch, "cancelled")
        client.say(request(2))
        slots.finish(await slots.next_batch())
        assert 2 == (await client.hear(ResultEntry)).sequence


@virtual_time
async def test_a_failing_batch_fails_the_culprit_alone() -> None:
    """Halves are run until the member that the model refuses is alone; the others get their results."""
    async with scripted_client() as (client, slots):
        client.say(*[request(n, echo_tensors(value=13.0 if n == 2 else 1.0)) for n in range(4)])
        bad = echo_tensors(value=13.0).buffers[0]
        ended = 0
        while ended < 4:
            batch = await slots.next_batch()
            if bad in [member.buffers[0] for member in batch.members]:
                slots.fail(batch, message="thirteen")
                ended += len(batch.members) == 1
            else:
                slots.finish(batch)
                ended += len(batch.members)
        failure = await client.hear(Failure)
        assert (2, "model_error", "thirteen", False) == (
            failure.sequence,
            failure.code,
            failure.message,
            failure.retryable,
        )
        assert {0, 1, 3} == set(await client.sequences(3))


@virtual_time
async def test_a_request_whose_deadline_passes_in_the_queue_is_answered_then() -> None:
    """Without any other event: the alarm rings. One that has passed when it is sent is answered at once."""
    async with scripted_client() as (client, slots):
        client.say(request(1))
        batch = await slots.next_batch()
        asked = trio.current_time()
        client.say(request(2, remaining_ms=250), request(3, remaining_ms=0))
        assert (3, "deadline_exceeded", False) == verdict(await client.hear(Failure))
        assert asked == trio.current_time()
        assert (2, "deadline_exceeded") == ending(await client.hear(Failure))
        assert 0.25 <= trio.current_time() - asked < 0.3
        slots.finish(batch)


@virtual_time
async def test_a_member_whose_time_passed_before_the_start_is_told_so_and_the_others_get_results() -> None:
    """The slot leaves it out of the call; its None is no result."""
    async with scripted_client() as (client, slots):
        client.say(request(1, remaining_ms=500), request(2))
        batch = await slots.next_batch()
        now = trio.current_time()
        assert batch.start_before is not None
        assert [0.5, None] == [None if at is None else round(at - now, 2) for at in batch.start_before]
        slots.finish(batch, [None, echoed(batch.members[1])])
        assert "deadline_exceeded" == (await client.hear(Failure)).code
        assert 2 == (await client.hear(ResultEntry)).sequence


@virtual_time
async def test_a_full_queue_refuses_with_a_hint_when_to_retry() -> None:
    """Nothing is dropped silently: the refused one gets `overloaded`, the admitted ones their results."""
    async with scripted_client(max_queued_requests=2) as (client, slots):
        client.say(request(0))
        slots.finish(await slots.next_batch())
        client.say(request(1))
        batch = await slots.next_batch()
        client.say(request(2), request(3), request(4))
        failure = await client.hear(Failure)
        assert (4, "overloaded", True) == verdict(failure)
        assert failure.retry_after_ms is not None
        slots.finish(batch)
        slots.finish(await slots.next_batch())
        assert [0, 1, 2, 3] == await client.sequences(4)


@virtual_time
async def test_a_request_of_a_wrong_shape_fails_alone_in_its_message() -> None:
    """Its neighbours in the same message are served."""
    async with scripted_client() as (client, slots):
        client.say(request(1), request(2, echo_tensors(rows=65)), request(3))
        failure = await client.hear(Failure)
        assert (2, "invalid") == ending(failure)
        assert "batch" in failure.message
        slots.finish(await slots.next_batch())
        assert [1, 3] == await client.sequences(2)


@virtual_time
async def test_a_result_that_no_message_can_hold_fails_alone() -> None:
    """A model's output may have more dimensions than the protocol; its neighbours in the turn are delivered."""
    async with scripted_client() as (client, slots):
        client.say(request(1, echo_tensors(value=7.0)), request(2))
        batch = await slots.next_batch()
        monster = Tensors(layout=((0, "f32", (1,) * 33),), buffers=(bytes(4),))
        slots.finish(batch, [monster, echoed(batch.members[1])])
        for _ in batch.members:  # each alone
            half = await slots.next_batch()
            slots.finish(half, [monster] if half.members[0] == batch.members[0] else None)
        failure = await client.hear(Failure)
        assert (1, "model_error") == ending(failure)
        assert "32" in failure.message
        assert 2 == (await client.hear(ResultEntry)).sequence


@virtual_time
async def test_results_that_cannot_be_sent_do_not_fill_the_log() -> None:
    """A line per second, which tells how many were left out; the client hears of each."""
    endpoint = memory_server()
    outgoing = Outgoing(endpoint, "clients", ServerStatistics(), codec_of(Role.SERVER_OF_CLIENTS))
    peer = RawPeer(endpoint.connect())
    peer.say(Heartbeat())
    ((address, _),) = endpoint.receive_nowait()
    link = PeerLink(address, 0.0)
    monster = Tensors(layout=((0, "f32", (1,) * 33),), buffers=(bytes(4),))
    with structlog.testing.capture_logs() as lines:
        for number in range(5):
            outgoing.say(link, result_of(number, monster))
            assert [] == outgoing.flush()
            assert (number, "model_error") == ending(await peer.hear(Failure))
    assert ["an entry cannot be sent"] == [line["event"] for line in lines if line["log_level"] == "error"]


@virtual_time
async def test_words_of_an_engine_that_are_no_unicode_still_arrive() -> None:
    """A file name with a lone surrogate in an error's text must not keep the answer back."""
    async with scripted_client() as (client, slots):
        client.say(request(1))
        slots.fail(await slots.next_batch(), message="cannot read \udcff")
        assert "cannot read ?" == (await client.hear(Failure)).message
