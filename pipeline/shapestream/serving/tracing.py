"""Spans of requests and batches, made by OpenTelemetry after they have ended.

The event loop notes the ends of requests that belong to a trace. A thread makes spans of them for OpenTelemetry's SDK,
whose own thread sends them. The span of a chain's request begins with the first end of a request of its stages, since theirs
are its children. Only this module of the server imports packages of the extra `[otel]`.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

import requests
import trio
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased
from opentelemetry.trace import Link, Span, SpanKind, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from shapestream.serving.chain_desk import part_of
from shapestream.serving.ends import (
    BatchEnded,
    ChainEnded,
    End,
    RequestEnded,
    StageFailed,
    member_of,
)
from shapestream.serving.sessions import Parent, RequestRecord
from shapestream.serving.stories import Past, Stories
from shapestream.telemetry.logging import RateLimit, get_logger
from shapestream.telemetry.runs import Run
from shapestream.wire.limits import MAX_MESSAGE_CHARACTERS
from shapestream.wire.tags import TRACEPARENT

log = get_logger()

INTERVAL_S = 0.2
"""Seconds between two rounds of the thread: one burst of work is cheaper than a wake-up per batch."""
MAX_WAITING = 20_000
"""Most ends that wait for the thread: two seconds of 10,000 lone requests per second. Beyond it requests get no span."""
MOST_CHAINS = 20_000
"""Most requests of chains whose span has begun. Beyond it the oldest gets none: its end was one of those too many."""
COMPLAINT_S = 60.0
"""Seconds between two log lines about lost spans."""
FLUSH_S = 2.0
"""Seconds at the server's end to send the remaining spans."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _End:
    """Requests that ended together: by the results of their last run, or without one."""

    epoch_s: float
    """Unix time minus the server's time, in seconds."""
    pasts: Sequence[Past]
    tags: Sequence[Mapping[str, str]]
    """Parallel to `pasts`."""
    parents: Sequence[Parent | None]
    """Likewise; of requests of chains' stages, those of the chains."""
    run: Run | None


class RequestTracer:
    """The observer that makes spans of requests that belong to a trace, in a thread of its own."""

    def __init__(self, exporter: SpanExporter) -> None:
        """Environment variables `OTEL_*` set the sampler, the queue's bounds and the service's name.

        Raises ValueError for an unusable one.
        """
        self._roots = "OTEL_TRACES_SAMPLER" in os.environ
        """Whether requests without a trace may begin one."""
        self._provider = TracerProvider(
            sampler=None if self._roots else ParentBased(ALWAYS_OFF),
            resource=Resource.create(
                {"service.name": "shapestream", **OTELResourceDetector().detect().attributes}
            ),
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("shapestream")
        self._parents = TraceContextTextMapPropagator()
        self._stories: Stories
        self._ends: deque[_End] = deque()
        self._chains: OrderedDict[int, Span] = OrderedDict()
        """Spans of chains' requests that have begun and not ended, by their ids. The thread's own."""
        self._lost = 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="shapestream-tracing", daemon=True)
        self._thread.start()

    def follow(self, stories: Stories) -> None:
        """Take the failed attempts of requests from these stories. They must be told of each end before the tracer."""
        self._stories = stories

    def ended(self, end: End) -> None:
        """Note requests that end with the results of a batch, of a chain's stages, or without any."""
        if isinstance(end, BatchEnded):
            if end.answered and (traced := self._traced(end.answered)):
                self._note(traced, [self._answered(record, end.at, end.run) for record in traced], end.run)
        elif isinstance(end, ChainEnded):
            # A failed one has been told of as `RequestEnded`.
            if end.request.run.failure is None and (traced := self._traced([end.request.record])):
                self._note(traced, [self._answered(traced[0], end.at, None)], None)
        elif isinstance(end, RequestEnded | StageFailed) and (traced := self._traced([end.record])):
            self._note(traced, [self._stories.failed(end)], None)

    def _traced(self, records: Sequence[RequestRecord]) -> list[RequestRecord]:
        return [record for record in records if self._roots or TRACEPARENT in (record.tags or ())]

    def _answered(self, record: RequestRecord, at: float, run: Run | None) -> Past:
        """Return the known facts of a request that ends with a result."""
        part = None if record.stage is None else part_of(record.stage, record.id)
        runs = tuple(self._stories.attempts(record.id, record.arrived, run))
        return Past(member_of(record), record.served.name, at, None, "", None, runs, part=part)

    def _note(self, traced: Sequence[RequestRecord], pasts: Sequence[Past], run: Run | None) -> None:
        if len(self._ends) >= MAX_WAITING:
            self._lost += 1
            return
        tags, parents = [record.tags or {} for record in traced], [record.parent for record in traced]
        epoch_s = time.time() - pasts[0].ended
        self._ends.append(_End(epoch_s=epoch_s, pasts=pasts, tags=tags, parents=parents, run=run))

    # ---------------------------------------------------------------- the thread

    def _run(self) -> None:
        complaints = _SpanLossLog()
        while not self._stopped.wait(INTERVAL_S) or self._ends:
            try:
                while self._ends:
                    self._make(self._ends.popleft())
                    time.sleep(0)  # the event loop may be waiting for the interpreter
            except Exception as error:  # noqa: BLE001 - an error of the SDK must not end the tracing
                complaints.write(f"a span could not be made: {error!r}")
            if self._lost:
                lost, self._lost = self._lost, 0
                complaints.write(f"{lost} ends of requests came too fast")
        self._provider.shutdown()
        complaints.close()

    def _make(self, end: _End) -> None:
        def at(moment: float) -> int:
            return round((end.epoch_s + moment) * 1e9)

        spans: list[tuple[Span, Past]] = []
        for past, tags, parent in zip(end.pasts, end.tags, end.parents, strict=True):
            facts, begins = _attributes(past, end.run), at(past.member.arrived)
            if past.part is not None and parent is not None:
                above = self._chain_span(parent, tags, at(parent.arrived))
                context, name = set_span_in_context(above, Context()), f"stage {past.part.stage}"
                span = self._tracer.start_span(name, context, attributes=facts, start_time=begins)
            elif (begun := self._chains.pop(past.member.number, None)) is not None:
                span = begun
                span.set_attributes(facts)
            else:
                span = self._start(past.model, tags, facts, begins)
            if span.is_recording():
                spans.append((span, past))
        if end.run is not None and spans:
            # The batch is a child of one of its requests, so that a trace shows it. Links lead to and from the others.
            batch = self._tracer.start_span(
                f"batch {end.run.model}",
                set_span_in_context(spans[0][0], Context()),
                attributes=_attributes_of_batch(end.run),
                links=[Link(span.get_span_context()) for span, _ in spans],
                start_time=at(end.run.began),
            )
            batch.end(at(end.run.ended))
            for span, _ in spans:
                span.add_link(batch.get_span_context())
        for span, past in spans:
            for run in [run for run in past.runs if run.began < inf]:
                span.add_event("attempt", _where(run), at(run.began))
                if run.code is not None:
                    span.add_event(
                        "attempt failed", {**_where(run), "shapestream.code": run.code}, at(run.ended)
                    )
            if past.code is not None:
                span.set_attribute("error.type", past.code)
                # An engine's message that is not UTF-8 would make a whole export fail.
                words = past.message[:MAX_MESSAGE_CHARACTERS].encode(errors="replace").decode()
                span.set_status(StatusCode.ERROR, words)
            span.end(at(past.ended))

    def _start(
        self, model: str, tags: Mapping[str, str], facts: Mapping[str, AttributeValue], begins: int
    ) -> Span:
        """Start the span of a client's request, below the client's own."""
        context = self._parents.extract(tags, Context())
        return self._tracer.start_span(f"infer {model}", context, SpanKind.SERVER, facts, start_time=begins)

    def _chain_span(self, parent: Parent, tags: Mapping[str, str], begins: int) -> Span:
        """Return the span of a chain's request; start it if this is the first end of a request of its stages."""
        span = self._chains.get(parent.id)
        if span is None:
            span = self._chains[parent.id] = self._start(parent.model, tags, {}, begins)
            if len(self._chains) > MOST_CHAINS:
                self._chains.popitem(last=False)
        return span

    # ---------------------------------------------------------------- its end

    def stop(self) -> None:
        """Tell the thread to send the remaining spans and end."""
        self._stopped.set()

    def join(self) -> None:
        """Wait until the thread has ended."""
        self._thread.join()

    async def aclose(self) -> None:
        """Stop the thread, and wait for its end, but no longer than `FLUSH_S` seconds."""
        self.stop()
        with trio.move_on_after(FLUSH_S):
            await trio.to_thread.run_sync(self.join, abandon_on_cancel=True)


def _attributes(past: Past, run: Run | None) -> dict[str, AttributeValue]:
    """Return the facts of a request."""
    facts: dict[str, AttributeValue] = {
        "shapestream.request_id": past.member.id,
        "shapestream.model": past.model,
        "shapestream.sizes": past.member.sizes,
        "shapestream.code": past.code or "ok",
    }
    if past.part is not None:
        facts["shapestream.stage"] = past.part.stage
        if past.part.row is not None:
            facts["shapestream.row"] = past.part.row
    return facts if run is None else {**facts, **_where(run), "shapestream.padding_ratio": run.padding_ratio}


def _attributes_of_batch(run: Run) -> dict[str, AttributeValue]:
    """Return the facts of a batch; requests of other clients are counted, not named."""
    return {
        **_where(run),
        "shapestream.model": run.model,
        "shapestream.sizes": run.sizes,
        "shapestream.requests": len(run.requests),
        "shapestream.padding_ratio": run.padding_ratio,
        "shapestream.new_shapes": run.preparations,
    }


def _where(run: Run) -> dict[str, AttributeValue]:
    return {"shapestream.batch": run.batch, "shapestream.slot": run.slot}


def otlp_exporter(endpoint: str) -> SpanExporter:
    """Return an exporter to the collector at this address, `http://HOST:PORT`, by OTLP over HTTP."""
    return OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces", session=_HeadsOnly())


class _HeadsOnly(requests.Session):
    """A session that reads only the head of an answer: a collector may send an endless body.

    The exporter uses only status and reason. A connection with an unread body carries no other request.
    """

    def __init__(self) -> None:
        super().__init__()
        self.headers["Connection"] = "close"

    def send(self, request: requests.PreparedRequest, **options: Any) -> requests.Response:
        """Send a request; the answer's body is empty."""
        answer = super().send(request, **{**options, "stream": True})
        answer.close()
        answer.raw = None
        return answer


class _SpanLossLog(logging.Handler):
    """The log lines about lost spans, one in `COMPLAINT_S` seconds. OpenTelemetry's own warnings are among them."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._limit = RateLimit(COMPLAINT_S)
        self._logger = logging.getLogger("opentelemetry")
        self._logger.addHandler(self)
        self._logger.propagate = False

    def emit(self, record: logging.LogRecord) -> None:
        """Write a warning of OpenTelemetry to our log, unless it is about the tags of a client."""
        if not record.name.startswith("opentelemetry.trace"):
            self.write(record.getMessage())

    def write(self, why: str) -> None:
        """Write a line, unless one was written within the last `COMPLAINT_S` seconds."""
        left_out = self._limit.admit("", time.monotonic())
        if left_out is not None:
            log.warning("traces are incomplete", why=why, like_it_before=left_out)

    def close(self) -> None:
        """Leave OpenTelemetry's log as it was."""
        self._logger.removeHandler(self)
        self._logger.propagate = True
        super().close()
