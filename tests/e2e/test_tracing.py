"""A client in a trace, a server that makes spans, and a collector that receives them: each real, over OTLP and HTTP."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest
from tests.e2e.conftest import until

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="the extra [otel] is not installed")

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from opentelemetry.sdk.trace import TracerProvider

pytestmark = pytest.mark.e2e

CONFIG = """\
    server: {listen: [ipc://s.sock], tracing: "http://127.0.0.1:PORT"}
    models:
      - name: gated
        function: gated:double_when_open
        inputs: {x: {shape: "batch:1..8, n:1..64", element_type: f32}}
        outputs: {y: {shape: "batch, n", element_type: f32, rule: rows}}
        trust: true
        calibration_s: 0
    in_process: true
"""
X = {"x": np.ones((1, 2), np.float32)}


class Collector(ThreadingHTTPServer):
    """A collector on loopback that keeps what it gets."""

    daemon_threads = True

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.services: set[str] = set()
        self.headers: list[dict[str, str]] = []
        super().__init__(("127.0.0.1", 0), _Receiver)

    def take(self, body: bytes, headers: dict[str, str]) -> None:
        """Read one export."""
        self.headers.append(headers)
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            for attribute in resource.resource.attributes:
                if attribute.key == "service.name":
                    self.services.add(attribute.value.string_value)
            for scope in resource.scope_spans:
                self.spans += scope.spans


class _Receiver(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        """One export."""
        assert "/v1/traces" == self.path
        self.server.take(self.rfile.read(int(self.headers["Content-Length"])), dict(self.headers))
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the library's name
        """Say nothing."""


@contextmanager
def collecting() -> Iterator[Collector]:
    """A collector for the time of the block."""
    with Collector() as collector:
        thread = threading.Thread(target=collector.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield collector
        finally:
            collector.shutdown()
            thread.join()


def stop(served: Any) -> None:
    """As systemd does; it ends well."""
    served.send(signal.SIGTERM)
    assert 0 == served.wait()


def attributes(span: Span) -> dict[str, Any]:
    """Plain values, without our prefix."""
    return {
        attribute.key.removeprefix("shapestream."): getattr(
            attribute.value, attribute.value.WhichOneof("value")
        )
        for attribute in span.attributes
    }


def test_the_spans_of_a_request_reach_a_collector_in_the_trace_of_its_client(
    workplace: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`infer` and a stream within a span; a request outside of it has none. Variables of the environment are honoured."""
    monkeypatch.setenv("OTEL_SERVICE_NAME", "embedder")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20me")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
    tracer = TracerProvider().get_tracer("test")
    with collecting() as collector:
        served = workplace.serve(CONFIG.replace("PORT", str(collector.server_port)))
        workplace.open_gate()
        with served.client() as client:
            client.infer("gated", X)
            with tracer.start_as_current_span("mine") as mine:
                client.infer("gated", X, request_id="the-first")
                with client.stream("gated", [X, X]) as results:
                    assert 2 == len(list(results))
            context = mine.get_span_context()

            def enough() -> list[Span]:
                found = [span for span in list(collector.spans) if span.name == "infer gated"]
                return found if len(found) >= 3 else []

            requests: list[Span] = until("three spans", enough)
            client.infer("gated", X, trace={"traceparent": f"00-{1:032x}-{2:016x}-01"})
            until("a fourth", lambda: (1).to_bytes(16) in {span.trace_id for span in list(collector.spans)})
        stop(served)
    assert {context.trace_id.to_bytes(16)} == {span.trace_id for span in requests}
    assert {context.span_id.to_bytes(8)} == {span.parent_span_id for span in requests}
    assert Span.SPAN_KIND_SERVER == requests[0].kind
    assert "the-first" == attributes(requests[0])["request_id"]
    batches = {attributes(span)["batch"]: span for span in collector.spans if span.name == "batch gated"}
    for span in requests:
        batch = batches[attributes(span)["batch"]]
        assert span.span_id in {link.span_id for link in batch.links}
        assert [batch.span_id] == [link.span_id for link in span.links]
        assert span.start_time_unix_nano <= batch.start_time_unix_nano
        assert batch.end_time_unix_nano <= span.end_time_unix_nano
    assert {"embedder"} == collector.services
    assert {"Bearer me"} == {headers["authorization"] for headers in collector.headers}


def test_a_collector_whose_answers_never_end_costs_no_memory_and_no_spans(
    workplace: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each export gets a body without end, of which the server reads nothing; later spans arrive all the same."""
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    cut: list[int] = []

    def endless(self: _Receiver) -> None:
        self.server.take(self.rfile.read(int(self.headers["Content-Length"])), {})
        self.send_response(200)
        self.end_headers()
        sent = 0
        with suppress(OSError):
            while True:
                self.wfile.write(bytes(1 << 16))
                sent += 1 << 16
        cut.append(sent)

    monkeypatch.setattr(_Receiver, "do_POST", endless)
    traced = {"traceparent": f"00-{1:032x}-{2:016x}-01"}
    with collecting() as collector:
        served = workplace.serve(CONFIG.replace("PORT", str(collector.server_port)))
        workplace.open_gate()
        with served.client() as client:
            for exports in range(1, 4):
                client.infer("gated", X, trace=traced)
                until("another answer that the server has cut off", lambda: len(cut) >= exports)  # noqa: B023
        stop(served)
    assert 3 <= sum(span.name == "infer gated" for span in collector.spans)
    # What the kernels of both ends hold.
    assert max(cut) < 64 << 20


def test_a_collector_that_is_gone_costs_spans_and_one_line(
    workplace: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests are answered, the log has one line, and the server ends in time."""
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.2")
    with collecting() as collector:
        served = workplace.serve(CONFIG.replace("PORT", str(collector.server_port)))
    workplace.open_gate()
    with served.client() as client:
        for number in range(1, 100):
            client.infer("gated", X, trace={"traceparent": f"00-{number:032x}-{1:016x}-01"})
        (line,) = served.wait_for("traces are incomplete")
        assert 2.0 == client.infer("gated", X)["y"][0, 0]
    assert "warning" == line["level"]
    assert line["why"]
    stop(served)
    assert 1 == len(served.events("traces are incomplete"))
    assert [line for line in served.log.read_text().splitlines() if not line.startswith("{")] == []
