"""Spans of requests and batches, read from OpenTelemetry's exporter in memory."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import trio
from structlog.testing import capture_logs
from tests.entries import Cancel, Execute, Failure, Goodbye, ResultEntry
from tests.pipeline.serving.batches import record_of
from tests.pipeline.serving.chain_server import (
    CHAIN,
    SKIPS,
    Client,
    chain_served,
    cut,
    play_rows,
    played,
    run_next,
)
from tests.pipeline.serving.clocks import virtual_time
from tests.pipeline.serving.echo_model import SIGNATURE, echo_tensors, model_settings, request
from tests.pipeline.serving.harness import memory_serving
from tests.pipeline.serving.raw_peer import RawPeer
from tests.pipeline.serving.scripted_slots import ScriptedSlots
from trio.testing import wait_all_tasks_blocked

from shapestream.chains.spec import ChainSpec
from shapestream.scheduling.actions import FailRequest
from shapestream.serving.ends import RequestEnded
from shapestream.serving.kept_replies import ClientReplies
from shapestream.serving.served_models import ServedModel
from shapestream.serving.sessions import ClientSession
from shapestream.serving.stories import Stories

pytest.importorskip("opentelemetry.sdk", reason="the extra [otel] is not installed")

from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from shapestream.serving import tracing
from shapestream.serving.tracing import RequestTracer

Scenario = Callable[[RawPeer, ScriptedSlots], Awaitable[None]]


def parent(number: int, flags: str = "01") -> dict[str, str]:
    """The tags of a request of this trace, from a span with the same number."""
    return {"traceparent": f"00-{number:032x}-{number:016x}-{flags}"}


def spans_of(scenario: Scenario, exporter: SpanExporter | None = None) -> list[ReadableSpan]:
    """The spans that a server with one scripted slot makes, in order of their ends."""
    memory = InMemorySpanExporter()
    tracer = RequestTracer(exporter or memory)

    @virtual_time
    async def serve() -> None:
        slots = ScriptedSlots()
        async with memory_serving(slots, tracer=tracer) as running:
            await scenario(await running.greeted(b"c" * 16), slots)

    serve()
    tracer.stop()
    tracer.join()
    return list(memory.get_finished_spans())


def facts(span: ReadableSpan | Event) -> dict[str, Any]:
    """Its attributes, without our prefix."""
    return {key.removeprefix("shapestream."): value for key, value in (span.attributes or {}).items()}


def test_a_request_has_a_span_in_its_clients_trace_and_its_batch_one_that_is_linked() -> None:
    """Parent, kind, times and attributes; the batch's span is a child of its first request's."""

    async def scenario(client: RawPeer, slots: ScriptedSlots) -> None:
        client.say(
            request(7, echo_tensors(2), tags={**parent(1), "request_id": "mine"}),
            request(8, tags=parent(2)),
            request(9),
        )
        batch = await slots.next_batch()
        await trio.sleep(0.25)
        slots.finish(batch)
        await client.hear_each(ResultEntry, 3)

    batch, one, other = spans_of(scenario)
    assert ["batch echo", "infer echo", "infer echo"] == [span.name for span in (batch, one, other)]
    assert one.parent is not None
    assert other.parent is not None
    assert [(1, 1), (2, 2)] == [(span.parent.trace_id, span.parent.span_id) for span in (one, other)]
    assert [1, 2] == [span.context.trace_id for span in (one, other)]
    assert SpanKind.SERVER is one.kind
    assert one.start_time is not None
    assert one.end_time is not None
    assert 250_000_000 == pytest.approx(one.end_time - one.start_time, abs=1e6)
    assert {
        "model": "echo",
        "request_id": "mine",
        "sizes": (2, 4),
        "batch": facts(batch)["batch"],
        "slot": "local/0",
        "padding_ratio": 0.0,
        "code": "ok",
    } == facts(one)
    assert f"{(b'c' * 16).hex()}-8" == facts(other)["request_id"]
    assert batch.parent == one.context
    assert [one.context, other.context] == [link.context for link in batch.links]
    assert [batch.context] == [link.context for link in one.links] == [link.context for link in other.links]
    assert {
        "model": "echo",
        "batch": facts(one)["batch"],
        "slot": "local/0",
        "sizes": (4, 4),
        "requests": 3,
        "padding_ratio": 0.0,
        "new_shapes": 0,
    } == facts(batch)
    assert ["attempt"] == [event.name for event in one.events]


def chain_spans(
    chain: ChainSpec, scenario: Callable[[Client, ScriptedSlots], Awaitable[None]]
) -> list[ReadableSpan]:
    """The spans of a server with this chain, in order of their ends."""
    memory = InMemorySpanExporter()
    tracer = RequestTracer(memory)

    @virtual_time
    async def serve() -> None:
        async with chain_served(chain, tracer=tracer) as (_, client, slots):
            await scenario(client, slots)

    serve()
    tracer.stop()
    tracer.join()
    return list(memory.get_finished_spans())


def of_trace(spans: list[ReadableSpan], number: int) -> tuple[ReadableSpan, list[ReadableSpan]]:
    """The span of the chain's request of this trace, and those of its stages' requests, by stage and row."""
    own = [span for span in spans if number == span.context.trace_id and not span.name.startswith("batch ")]
    (chain,) = [span for span in own if span.name == "infer chain"]
    stages = [span for span in own if span is not chain]
    return chain, sorted(stages, key=lambda span: (span.name, facts(span).get("row", 0)))


def test_spans_of_stages_are_children_of_their_chains() -> None:
    """Of two chains whose rows share batches, each in its client's trace; all lie within the chain's time."""

    async def scenario(client: Client, slots: ScriptedSlots) -> None:
        client.ask(1, 3, 2, tags=parent(1))
        client.ask(2, 4, tags=parent(2))
        client.ask(3, 4, tags=parent(3, "00"))
        await trio.sleep(0.25)
        async with played(slots):
            await client.peer.hear_each(ResultEntry, 3)

    spans = chain_spans(CHAIN, scenario)
    for number, rows in ((1, 2), (2, 1)):
        chain, stages = of_trace(spans, number)
        assert ["stage cut", *["stage read"] * rows] == [span.name for span in stages]
        assert chain.parent is not None
        assert (number, SpanKind.SERVER) == (chain.parent.span_id, chain.kind)
        assert {
            "model": "chain",
            "request_id": f"{(b'c' * 16).hex()}-{number}",
            "sizes": (3 - number,),
            "code": "ok",
        } == facts(chain)
        assert chain.start_time is not None
        assert chain.end_time is not None
        for span in stages:
            assert chain.context == span.parent
            assert span.start_time is not None
            assert span.end_time is not None
            assert chain.start_time <= span.start_time <= span.end_time <= chain.end_time
        assert [("cut", "cut", None), *[("read", "read", row) for row in range(rows)]] == [
            (facts(span)["stage"], facts(span)["model"], facts(span).get("row")) for span in stages
        ]
        assert {"local/0"} == {facts(span)["slot"] for span in stages}
    assert {1, 2} == {span.context.trace_id for span in spans}


def test_a_row_that_fails_has_a_failed_span_below_its_chains() -> None:
    """Where it fails the chain, and where it is skipped."""

    async def failing(client: Client, slots: ScriptedSlots) -> None:
        client.ask(1, 3, 5, 2, tags=parent(1))
        await run_next(slots)
        await play_rows(slots, bad=5.0)

    for chain, code in ((CHAIN, "model_error"), (SKIPS, "ok")):
        whole, stages = of_trace(chain_spans(chain, failing), 1)
        (failed,) = [span for span in stages if facts(span)["code"] != "ok"]
        assert code == facts(whole)["code"]
        assert (StatusCode.ERROR, "cannot be read") == (failed.status.status_code, failed.status.description)
        assert ("stage read", 1, whole.context) == (failed.name, facts(failed)["row"], failed.parent)
        assert ["attempt", "attempt failed"] == [event.name for event in failed.events]


def test_a_chain_whose_deadline_passes_in_a_call_has_spans() -> None:
    """The call's attempt has a beginning only. A chain whose client left in its first stage has a span without children."""

    async def late(client: Client, slots: ScriptedSlots) -> None:
        client.ask(1, 3, remaining_ms=500, tags=parent(1))
        client.ask(2, 3, tags=parent(2))
        batch = await slots.next_batch()
        await client.peer.hear(Failure)
        client.peer.say(Goodbye())
        await wait_all_tasks_blocked()
        slots.finish(batch, cut(batch))
        await wait_all_tasks_blocked()

    spans = chain_spans(CHAIN, late)
    whole, (stage,) = of_trace(spans, 1)
    assert ("deadline_exceeded", whole.context) == (facts(stage)["code"], stage.parent)
    assert ["attempt"] == [event.name for event in stage.events]
    assert "deadline_exceeded" == facts(whole)["code"]
    gone, none = of_trace(spans, 2)
    assert ("cancelled", []) == (facts(gone)["code"], none)


def test_what_is_not_in_a_sampled_trace_has_no_span() -> None:
    """Neither a request without tags, nor one whose client does not sample, nor one whose parent cannot be understood."""

    async def scenario(client: RawPeer, slots: ScriptedSlots) -> None:
        client.say(
            request(1),
            request(2, tags=parent(1, "00")),
            request(3, tags={"traceparent": "00-zz"}),
            request(4, tags={"tracestate": "a=1", "request_id": "x"}),
            request(5, tags={"traceparent": parent(1)["traceparent"], "tracestate": "=,=,nonsense"}),
        )
        slots.finish(await slots.next_batch())
        await client.hear_each(ResultEntry, 5)

    with capture_logs() as lines:
        made = spans_of(scenario)
    assert ["batch echo", "infer echo"] == [span.name for span in made]
    assert facts(made[1])["request_id"].endswith("-5")
    assert "traces are incomplete" not in [line["event"] for line in lines]


def test_a_sampler_of_the_environment_may_ask_for_spans_of_all_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`OTEL_TRACES_SAMPLER`; then each request without a trace begins one. The service has a name of the environment's."""
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_on")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "embedder")

    async def scenario(client: RawPeer, slots: ScriptedSlots) -> None:
        client.say(request(1), request(2, tags=parent(1, "00")))
        slots.finish(await slots.next_batch())
        await client.hear_each(ResultEntry, 2)

    batch, one = spans_of(scenario)
    assert one.parent is None
    assert batch.parent == one.context
    assert "embedder" == one.resource.attributes["service.name"]


def test_attempts_are_events_and_a_failed_request_has_a_failed_span() -> None:
    """A batch fails, its halves run: one of them fails again. Each attempt is an event of its requests."""

    async def scenario(client: RawPeer, slots: ScriptedSlots) -> None:
        client.say(request(1, tags=parent(1)), request(2, tags=parent(2)))
        for _ in range(3):
            slots.fail(await slots.next_batch(), message="bad \ud800 data")
        await client.hear_each(Failure, 2)

    made = spans_of(scenario)
    assert ["infer echo"] * 2 == [span.name for span in made]
    for span in made:
        assert ["attempt", "attempt failed"] * 2 == [event.name for event in span.events]
        assert "model_error" == facts(span)["code"] == (span.attributes or {})["error.type"]
        assert (StatusCode.ERROR, "bad ? data") == (span.status.status_code, span.status.description)
        batches = [(event.attributes or {})["shapestream.batch"] for event in span.events]
        assert batches[0] == batches[1] != batches[2] == batches[3]
        assert "model_error" == (span.events[1].attributes or {})["shapestream.code"]


def test_an_attempt_that_goes_on_when_its_request_ends_has_a_beginning_only() -> None:
    """The request was withdrawn, and has its span; the others of its batch run again."""

    async def scenario(client: RawPeer, slots: ScriptedSlots) -> None:
        client.say(request(1, tags=parent(1)), request(2, tags=parent(2)))
        batch = await slots.next_batch()
        client.say(Cancel(sequence=1))
        await client.hear(Failure)
        slots.fail(batch, "internal")
        slots.finish(await slots.next_batch())
        await client.hear(ResultEntry)

    withdrawn, ran = [span for span in spans_of(scenario) if span.name == "infer echo"]
    assert ["attempt"] == [event.name for event in withdrawn.events]
    assert ["attempt", "attempt failed", "attempt"] == [event.name for event in ran.events]


def test_an_engines_words_that_are_no_utf_8_keep_no_span_back() -> None:
    """They are replaced: an export with them could not be written."""
    session = ClientSession(0, ClientReplies((b"c" * 16, None)), b"peer", 0.0)
    model, tensors = ServedModel(0, "echo", SIGNATURE, model_settings()), echo_tensors()
    record = record_of(session, 1, model, SIGNATURE.resolve(tensors.layout), tensors)
    record = dataclasses.replace(record, tags=parent(1))
    memory = InMemorySpanExporter()
    tracer = RequestTracer(memory)
    tracer.follow(Stories(lambda request: [], dict, lambda model: [], {}))
    message = "bad \ud800 data"
    action = FailRequest(request=record, code="model_error", message=message)
    tracer.ended(
        RequestEnded(record=record, at=1.0, code=action.code, message=message, run=None, action=action)
    )
    tracer.stop()
    tracer.join()
    (span,) = memory.get_finished_spans()
    assert "bad ? data" == span.status.description


def test_a_worker_that_is_lost_ends_an_attempt() -> None:
    """The next one is on another worker."""
    memory = InMemorySpanExporter()
    tracer = RequestTracer(memory)

    @virtual_time
    async def serve() -> None:
        async with memory_serving(tracer=tracer) as running:
            client, worker = await running.client_and_worker()
            client.say(request(1, tags=parent(1)))
            await worker.hear(Execute)
            await trio.sleep(2.0)
            await running.assert_redone(client)

    serve()
    tracer.stop()
    tracer.join()
    (span,) = [span for span in memory.get_finished_spans() if span.name == "infer echo"]
    assert [
        ("attempt", "w/0", None),
        ("attempt failed", "w/0", "worker_lost"),
        ("attempt", "other/0", None),
    ] == [(event.name, facts(event)["slot"], facts(event).get("code")) for event in span.events]


def test_requests_that_are_withdrawn_or_whose_client_leaves_have_spans() -> None:
    """Both say so by `cancelled`."""

    async def scenario(client: RawPeer, slots: ScriptedSlots) -> None:
        client.say(request(1, tags=parent(1)))
        await slots.next_batch()
        client.say(request(2, tags=parent(2)), Cancel(sequence=2))
        await client.hear(Failure)
        client.say(Goodbye())
        await wait_all_tasks_blocked()

    assert [("cancelled", 2), ("cancelled", 1)] == [
        (facts(span)["code"], span.context.trace_id) for span in spans_of(scenario)
    ]


class Unreachable(SpanExporter):
    """A collector that is gone: the SDK's own exporter writes a line into its log, and gives up."""

    def export(self, spans: Any) -> SpanExportResult:
        """Fail."""
        logging.getLogger("opentelemetry.exporter").warning("nobody listens")
        return SpanExportResult.FAILURE


def test_spans_that_are_lost_make_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often they are lost, and whatever the SDK raises; every request has its result."""
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "1")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "1")

    async def scenario(client: RawPeer, slots: ScriptedSlots) -> None:
        for number in range(1, 10):
            client.say(request(number, tags=parent(number)))
            slots.finish(await slots.next_batch())
            await client.hear(ResultEntry)

    with capture_logs() as lines:
        made = spans_of(scenario, Unreachable())
    assert [] == made
    told = [line for line in lines if line["event"] == "traces are incomplete"]
    assert [("warning", "nobody listens", 0)] == [
        (line["log_level"], line["why"], line["like_it_before"]) for line in told
    ]


def test_ends_that_wait_for_the_thread_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Later ones get no span, and the log says how many."""
    monkeypatch.setattr(tracing, "MAX_WAITING", 2)
    monkeypatch.setattr(tracing, "INTERVAL_S", 3600.0)

    async def scenario(client: RawPeer, slots: ScriptedSlots) -> None:
        for number in range(1, 6):
            client.say(request(number, tags=parent(number)))
            slots.finish(await slots.next_batch())
            await client.hear(ResultEntry)

    with capture_logs() as lines:
        made = spans_of(scenario)
    assert 4 == len(made)
    (line,) = [line for line in lines if line["event"] == "traces are incomplete"]
    assert "3 ends of requests came too fast" == line["why"]
