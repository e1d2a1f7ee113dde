"""Spans of requests and batches, by OpenTelemetry, once they have ended.

The event loop notes the stories of requests in a trace. A thread makes spans of them and gives these to the SDK, whose own
thread sends them.

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
from typing import Any

import requests
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
from opentelemetry.util.types import AttributeValue

from shapestream.serving.ends import BatchEnded, End, Member, RequestEnded, Run, row_of
from shapestream.serving.sessions import RequestRecord
from shapestream.serving.stories import Past, Stories
from shapestream.telemetry.logging import RateLimit
from shapestream.wire.limits import MAX_MESSAGE_CHARACTERS
from shapestream.wire.tags import TRACEPARENT

log = structlog.get_logger()

# Seconds between two looks of the thread: a burst of work is then cheaper than a wake-up per batch.
INTERVAL_S = 0.2
# Ends that wait for the thread, at most: two seconds of 10,000 lone requests per second. Later ones get no span.
MAX_WAITING = 20_000
# Seconds between two lines about spans that were lost.
COMPLAINT_S = 60.0
# Seconds at the server's end for what is not sent yet.
FLUSH_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _End:
    """Requests that ended together: by the results of their last run, or without one."""

    epoch_s: float
    """What makes a point in Unix time of a time of the server, by addition."""
    pasts: Sequence[Past]
    tags: Sequence[Mapping[str, str]]
    """Parallel to `pasts`."""
    run: Run | None


class RequestTracer:
    """Notes what happens to requests that belong to a trace, and makes spans of it in a thread of its own."""

    def __init__(self, exporter: SpanExporter) -> None:
        """Environment variables `OTEL_*` say the rest: the sampler, the queue's bounds, the service's name.

        Raises ValueError for one that cannot be used.
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
        self._lost = 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="shapestream-tracing", daemon=True)
        self._thread.start()

    def follow(self, stories: Stories) -> None:
        """Take the failed attempts of requests from these stories, which are told of each end before."""
        self._stories = stories

    def ended(self, end: End) -> None:
        """Note requests that end with the results of a batch, or without any."""
        if isinstance(end, BatchEnded):
            if end.answered and (traced := self._traced(end.answered)):
                self._note(traced, end.at, end.run, None, "")
        elif isinstance(end, RequestEnded) and (traced := self._traced([end.record])):
            self._note(traced, end.at, None, end.code, end.message)

    def _traced(self, records: Sequence[RequestRecord]) -> list[RequestRecord]:
        return [record for record in records if self._roots or TRACEPARENT in (record.tags or ())]

    def _note(
        self,
        traced: Sequence[RequestRecord],
        now: float,
        run: Run | None,
        code: str | None,
        message: str,
    ) -> None:
        if len(self._ends) >= MAX_WAITING:
            self._lost += 1
            return
        last = () if run is None else (run,)
        failed_runs = self._stories.failed_runs
        pasts = [
            Past(
                Member(*row_of(record)), record.model, now, code, message, None, (*failed_runs(record), *last)
            )
            for record in traced
        ]
        tags = [record.tags or {} for record in traced]
        self._ends.append(_End(epoch_s=time.time() - now, pasts=pasts, tags=tags, run=run))

    # ---------------------------------------------------------------- the thread

    def _run(self) -> None:
        complaints = _SpanLossLog()
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

        spans: list[tuple[Span, Past]] = []
        for past, tags in zip(end.pasts, end.tags, strict=True):
            span = self._tracer.start_span(
                f"infer {past.model}",
                self._parents.extract(tags, Context()),
                SpanKind.SERVER,
                _attributes(past, end.run),
                start_time=at(past.member.arrived),
            )
            if span.is_recording():
                spans.append((span, past))
        if end.run is not None and spans:
            # A child of one of its requests, so that a trace shows what ran; links lead to and from the others.
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
            for run in past.runs:
                span.add_event("attempt", _where(run), at(run.began))
                if run.code is not None:
                    span.add_event(
                        "attempt failed", {**_where(run), "shapestream.code": run.code}, at(run.ended)
                    )
            if past.code is not None:
                span.set_attribute("error.type", past.code)
                # An engine's words may be no UTF-8, and would keep a whole export back.
                words = past.message[:MAX_MESSAGE_CHARACTERS].encode(errors="replace").decode()
                span.set_status(StatusCode.ERROR, words)
            span.end(at(past.ended))

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


def _attributes(past: Past, run: Run | None) -> dict[str, AttributeValue]:
    """Return the facts of a request."""
    facts: dict[str, AttributeValue] = {
        "shapestream.request_id": past.member.id,
        "shapestream.model": past.model,
        "shapestream.sizes": past.member.sizes,
        "shapestream.code": past.code or "ok",
    }
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
    """A session that reads the head of an answer, and no body, which a collector may make endless.

    Status and reason are all that the exporter uses. A connection with an unread body carries no other request.
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
    """The lines about lost spans, one in `COMPLAINT_S`; also for what OpenTelemetry logs, as of a collector that is gone."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._limit = RateLimit(COMPLAINT_S)
        self._logger = logging.getLogger("opentelemetry")
        self._logger.addHandler(self)
        self._logger.propagate = False

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line of OpenTelemetry's as one of ours, unless it is about what a client sent."""
        if not record.name.startswith("opentelemetry.trace"):
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
