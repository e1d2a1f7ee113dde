"""Spans of requests and batches, by OpenTelemetry, once they have ended.

The event loop notes plain facts. A thread makes spans of them and gives these to the SDK, whose own thread sends them.

The one module of the server that imports what the extra `[otel]` brings.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias

import structlog
import trio
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased
from opentelemetry.trace import Link, Span, SpanKind, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from shapestream.serving.sessions import RequestRecord
from shapestream.serving.workers import RunningBatch
from shapestream.telemetry.logging import RateLimit
from shapestream.wire.limits import MAX_INTEGER, MAX_MESSAGE_CHARACTERS
from shapestream.wire.tags import REQUEST_ID, TRACEPARENT
from shapestream_engine.batch import BatchReport

log = structlog.get_logger()

# Seconds between two looks of the thread: a burst of work is then cheaper than a wake-up per batch.
INTERVAL_S = 0.2
# Ends that wait for the thread, at most: two seconds of 10,000 lone requests per second. Later ones get no span.
MAX_WAITING = 20_000
# Seconds between two lines about spans that were lost.
COMPLAINT_S = 60.0
# Seconds at the server's end for what is not sent yet.
FLUSH_S = 2.0
OK = "ok"

Attributes: TypeAlias = dict[str, Any]


@dataclass(slots=True)
class _Event:
    """A point in a request's life."""

    name: str
    at: float
    attributes: Attributes


@dataclass(slots=True)
class _Part:
    """A span to be: of a request, or of a batch. Times are the server's."""

    name: str
    begun: float
    attributes: Attributes
    code: str = OK
    message: str = ""
    tags: Mapping[str, str] | None = None
    events: Sequence[_Event] = ()


@dataclass(slots=True)
class _End:
    """Requests that ended together, with the batch that ran them, if one did."""

    ended: float
    epoch_s: float
    """What makes a point in Unix time of a time of the server, by addition."""
    requests: list[_Part]
    batch: _Part | None


class RequestTracer:
    """Notes what happens to requests that belong to a trace, and makes spans of it in a thread of its own."""

    def __init__(self, exporter: SpanExporter) -> None:
        """Environment variables `OTEL_*` say the rest: the sampler, the queue's bounds, the service's name.

        Raises ValueError for one that cannot be used.
        """
        asked = "OTEL_TRACES_SAMPLER" in os.environ
        self._roots = asked
        """Whether requests without a trace may begin one."""
        self._provider = TracerProvider(
            sampler=None if asked else ParentBased(ALWAYS_OFF),
            resource=Resource.create(
                {"service.name": "shapestream", **OTELResourceDetector().detect().attributes}
            ),
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("shapestream")
        self._parents = TraceContextTextMapPropagator()
        self._events: dict[int, list[_Event]] = {}
        """Of requests that have not ended, by number."""
        self._ends: deque[_End] = deque()
        self._lost = 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="shapestream-tracing", daemon=True)
        self._thread.start()

    # ---------------------------------------------------------------- the event loop

    def started(self, running: RunningBatch) -> None:
        """Note that requests go to a slot."""
        self._note(running, "attempt")

    def failed(self, running: RunningBatch, report: BatchReport) -> None:
        """Note that they come back without a result."""
        self._note(running, "attempt failed", str(report.code))

    def delivered(self, running: RunningBatch, records: Sequence[RequestRecord]) -> None:
        """Note requests that have their results."""
        traced = [record for record in records if self._is_wanted(record)]
        if traced:
            requests = [self._part_of(record, running) for record in traced]
            self._end(requests, _part_of_batch(running))

    def ended(self, record: RequestRecord, code: str, message: str) -> None:
        """Note a request that ends without a result."""
        if self._is_wanted(record):
            part = self._part_of(record)
            part.code, part.message = code, message
            self._end([part], None)

    def _is_wanted(self, record: RequestRecord) -> bool:
        return self._roots or (record.tags is not None and TRACEPARENT in record.tags)

    def _note(self, running: RunningBatch, name: str, code: str = OK) -> None:
        traced = [record.id for record in running.records if self._is_wanted(record)]
        if not traced:
            return
        event = _Event(name, trio.current_time(), _where(running))
        if code != OK:
            event.attributes["shapestream.code"] = code
        for request in traced:
            self._events.setdefault(request, []).append(event)

    def _part_of(self, record: RequestRecord, running: RunningBatch | None = None) -> _Part:
        tags, session = record.tags or {}, record.session
        attributes: Attributes = {
            "shapestream.model": record.model,
            "shapestream.request_id": tags.get(REQUEST_ID) or f"{session.client[0].hex()}-{record.sequence}",
            "shapestream.sizes": record.shape.sizes,
            "shapestream.rows": record.shape.rows,
        }
        if running is not None:
            sizes = running.action.sizes
            call = (record.shape.rows, *sizes[1:]) if record.served.profile.has_batch else sizes
            attributes |= _where(running)
            attributes["shapestream.padding"] = _padding(prod(call), record.shape.elements)
        events = self._events.pop(record.id, ())
        return _Part(f"infer {record.model}", record.arrived, attributes, tags=tags, events=events)

    def _end(self, requests: list[_Part], batch: _Part | None) -> None:
        if len(self._ends) >= MAX_WAITING:
            self._lost += 1
            return
        now = trio.current_time()
        self._ends.append(_End(now, time.time() - now, requests, batch))

    # ---------------------------------------------------------------- the thread

    def _run(self) -> None:
        complaints = _Complaints()
        while not self._stopped.wait(INTERVAL_S) or self._ends:
            try:
                while self._ends:
                    self._make(self._ends.popleft())
                    time.sleep(0)  # the event loop may be waiting for the interpreter
            except Exception as error:  # noqa: BLE001 - of the SDK, which must not end what is traced
                complaints.write(f"a span could not be made: {error!r}")
            if self._lost:
                lost, self._lost = self._lost, 0
                complaints.write(f"{lost} ends of requests came too fast")
        self._provider.shutdown()
        complaints.close()

    def _make(self, end: _End) -> None:
        def at(moment: float) -> int:
            return round((end.epoch_s + moment) * 1e9)

        spans: list[tuple[Span, _Part]] = []
        for part in end.requests:
            parent = self._parents.extract(part.tags or {}, Context())
            span = self._tracer.start_span(
                part.name,
                parent,
                SpanKind.SERVER,
                {**part.attributes, "shapestream.code": part.code},
                start_time=at(part.begun),
            )
            if span.is_recording():
                spans.append((span, part))
        batch = end.batch
        if batch is not None and spans:
            # A child of one of its requests, so that a trace shows what ran; links lead to and from the others.
            made = self._tracer.start_span(
                batch.name,
                set_span_in_context(spans[0][0], Context()),
                SpanKind.INTERNAL,
                batch.attributes,
                [Link(span.get_span_context()) for span, _ in spans],
                start_time=at(batch.begun),
            )
            made.end(at(end.ended))
            for span, _ in spans:
                span.add_link(made.get_span_context())
        for span, part in spans:
            for event in part.events:
                span.add_event(event.name, event.attributes, at(event.at))
            if part.code != OK:
                span.set_attribute("error.type", part.code)
                # An engine's words may be no UTF-8, and would keep a whole export back.
                message = part.message[:MAX_MESSAGE_CHARACTERS].encode(errors="replace").decode()
                span.set_status(StatusCode.ERROR, message)
            span.end(at(end.ended))

    # ---------------------------------------------------------------- its end

    def stop(self) -> None:
        """Send what is not sent yet, and end, in the thread."""
        self._stopped.set()

    def join(self) -> None:
        """Wait for that."""
        self._thread.join()

    async def aclose(self) -> None:
        """Stop, and wait for that, but no longer than `FLUSH_S`."""
        self.stop()
        with trio.move_on_after(FLUSH_S):
            await trio.to_thread.run_sync(self.join, abandon_on_cancel=True)


def _where(running: RunningBatch) -> Attributes:
    return {"shapestream.batch": running.action.batch, "shapestream.slot": running.slot.label}


def _part_of_batch(running: RunningBatch) -> _Part:
    """The span to be of a batch that has run."""
    action, records = running.action, running.records
    computed = sum([count * prod(sizes) for count, sizes in running.calls])
    attributes: Attributes = {
        "shapestream.model": action.model,
        **_where(running),
        "shapestream.sizes": action.sizes,
        "shapestream.requests": len(records),
        "shapestream.rows": sum([record.shape.rows for record in records]),
        "shapestream.calls": sum([count for count, _ in running.calls]),
        "shapestream.padding": _padding(computed, sum([record.shape.elements for record in records])),
    }
    return _Part(f"batch {action.model}", running.started, attributes)


def _padding(computed: int, useful: int) -> int:
    """Elements computed only as padding, as OTLP can carry it: sizes of empty tensors are as large as a caller claims."""
    return min(max(0, computed - useful), MAX_INTEGER)


def otlp_exporter(endpoint: str) -> SpanExporter:
    """An exporter to the collector at this address, `http://HOST:PORT`, by OTLP over HTTP."""
    return OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces")


class _Complaints(logging.Handler):
    """The lines about lost spans, one in `COMPLAINT_S`; also for what OpenTelemetry logs, as of a collector that is gone."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._limit = RateLimit(COMPLAINT_S)
        self._logger = logging.getLogger("opentelemetry")
        self._logger.addHandler(self)
        self._logger.propagate = False

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line of OpenTelemetry's as one of ours."""
        self.write(record.getMessage())

    def write(self, why: str) -> None:
        """Write a line, unless there was one lately."""
        left_out = self._limit.admit("", time.monotonic())
        if left_out is not None:
            log.warning("traces are incomplete", why=why, like_it_before=left_out)

    def close(self) -> None:
        """Leave OpenTelemetry's log as it was."""
        self._logger.removeHandler(self)
        self._logger.propagate = True
        super().close()
