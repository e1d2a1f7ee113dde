"""What the scheduler cannot work out: a coded failure of one request, one line of the log, and a server that goes on."""

from __future__ import annotations

from typing import Any

import pytest
import trio
from structlog.testing import capture_logs
from tests.pipeline.serving.clocks import virtual_time
from tests.pipeline.serving.echo_model import echo_tensors, request
from tests.pipeline.serving.harness import memory_serving
from tests.pipeline.serving.scripted_slots import ScriptedSlots

import shapestream.serving.server
from shapestream.scheduling import Scheduler, events
from shapestream.scheduling.actions import Action, FailRequest, ReportFault
from shapestream.scheduling.model_queue import ModelQueue
from shapestream.slices import at_once
from shapestream.telemetry.metrics import read_metrics
from shapestream.wire.messages import Failure, ResultEntry

UNLUCKY = (1, 13)


class Faulty(Scheduler):
    """Works out nothing about requests of one shape."""

    def handle(self, event: events.Event, now: float) -> list[Action]:
        """As ever, but for these."""
        if not isinstance(event, events.RequestsArrived):
            return super().handle(event, now)
        unlucky = [arrival for arrival in event.requests if arrival.sizes == UNLUCKY]
        others = tuple([arrival for arrival in event.requests if arrival.sizes != UNLUCKY])
        actions = super().handle(events.RequestsArrived(requests=others), now)
        for arrival in unlucky:
            error = OverflowError("int too large to convert to float")
            actions.append(ReportFault(error=error, about="terms of a request", requests=(arrival.id,)))
            actions.append(FailRequest(request=arrival, code="internal", message="see the server's log"))
        return actions


@virtual_time
async def test_a_fault_is_one_line_and_one_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its neighbours of the same turn are answered, the counter moves, and the line carries the traceback."""

    def made(**options: Any) -> Scheduler:
        return Faulty(**options)

    monkeypatch.setattr(shapestream.serving.server, "Scheduler", made)
    with capture_logs() as lines:
        async with memory_serving() as running:
            client, worker = await running.client_and_worker()
            client.say(request(1), request(2, echo_tensors(1, 13)), request(3))
            failure = await client.hear(Failure)
            assert (2, "internal") == (failure.sequence, failure.code)
            await worker.run_next()
            assert [1, 3] == [result.sequence for result in await client.hear_each(ResultEntry, 2)]
            client.say(request(4))
            await worker.run_next()
            assert 4 == (await client.hear(ResultEntry)).sequence
            assert 1 == (await client.statistics())["faults"]
    (line,) = [line for line in lines if line["event"] == "scheduler fault"]
    assert ("error", "terms of a request", OverflowError) == (
        line["log_level"],
        line["about"],
        type(line["exc_info"]),
    )


@virtual_time
async def test_books_that_disagree_after_a_fault_end_requests_and_not_the_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The request that was being started is answered `internal`, the log has both errors, and the next one is answered."""
    take = ModelQueue.take

    def broken(queue: ModelQueue, anchor: Any, members: Any, share_s: float | None) -> None:
        monkeypatch.setattr(ModelQueue, "take", take)
        members[0].start()
        raise OverflowError("in the midst of a start")

    with capture_logs() as lines:
        async with memory_serving() as running:
            client, worker = await running.client_and_worker()
            monkeypatch.setattr(ModelQueue, "take", broken)
            client.say(request(1))
            failure = await client.hear(Failure)
            assert (1, "internal") == (failure.sequence, failure.code)
            client.say(request(2))
            await worker.run_next()
            assert 2 == (await client.hear(ResultEntry)).sequence
            assert 2 == (await client.statistics())["faults"]
    errors = [type(line["exc_info"]) for line in lines if line["event"] == "scheduler fault"]
    assert [OverflowError, AssertionError] == errors


@virtual_time
async def test_failed_batches_count_the_time_that_they_held_their_slot() -> None:
    """A batch that fails after two seconds shows in the metric and in the last minute, by model."""
    slots = ScriptedSlots()
    async with memory_serving(slots) as running:
        client = await running.greeted()
        client.say(request(1))
        batch = await slots.next_batch()
        await trio.sleep(2.0)
        slots.fail(batch)
        await client.hear(Failure)
        samples = {
            metric.name: found for metric, found in at_once(read_metrics(running.server.readings.snapshot()))
        }
        assert [(("echo",), 2.0)] == samples["shapestream_batches_failed_seconds_total"]
        told = await client.statistics()
        assert 2_000_000 == told["last_minute"]["models"]["echo"]["failed_us"]
