"""The tags that a client sends with its requests: the caller's own id, and the place in a trace."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from shapestream.testing import ScriptedServer

X = {"x": [[1, 2]]}
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


async def test_a_request_carries_the_callers_id_and_trace(face: Any, server: ScriptedServer) -> None:
    """Of an HTTP request's headers only those of the trace; a request without either carries nothing."""
    headers = {"host": "example", "traceparent": PARENT, "tracestate": "vendor=1"}
    async with face.connect() as client:
        await client.infer("double", X)
        await client.infer("double", X, request_id="order 7/b")
        await client.infer("double", X, trace=headers)
        await client.infer("double", X, request_id="~", trace={"traceparent": PARENT})
    assert [
        None,
        {"request_id": "order 7/b"},
        {"traceparent": PARENT, "tracestate": "vendor=1"},
        {"request_id": "~", "traceparent": PARENT},
    ] == [request.tags for request in server.requests]


async def test_a_request_carries_how_many_were_submitted_with_it(face: Any, server: ScriptedServer) -> None:
    """One alone carries nothing, and no number is refused by the server."""
    async with face.connect() as client:
        await client.infer("double", X, together=64)
        await client.infer("double", X, together=1)
        for bad in (0, -1, 100_000, 2.0, "3"):
            with pytest.raises(ValueError, match="together is an integer from 1 to 99999"):
                await client.infer("double", X, together=bad)
    assert [{"together": "64"}, None] == [request.tags for request in server.requests]


@pytest.mark.parametrize(
    "bad", ["", "i" * 129, "two\nlines", "caf\u00e9", "\ud800", 7, b"id"], ids=lambda bad: repr(bad)[:12]
)
async def test_an_id_that_cannot_be_sent_is_refused_at_once(
    bad: Any, face: Any, server: ScriptedServer
) -> None:
    """TypeError for another type, ValueError for another length or other characters."""
    async with face.connect() as client:
        with pytest.raises(TypeError if not isinstance(bad, str) else ValueError, match="request's id"):
            await client.infer("double", X, request_id=bad)
        await client.infer("double", X, request_id="i" * 128)
    assert 1 == len(server.requests)


@pytest.mark.parametrize(
    "traceparent",
    [
        None,
        7,
        "",
        "00",
        PARENT.upper(),
        PARENT[:-1],
        PARENT + "-00",
        PARENT + "\n",
        "ff" + PARENT[2:],
        "00-" + "0" * 32 + PARENT[35:],
        PARENT[:36] + "0" * 16 + "-01",
        "01" + PARENT[2:] + "-" + "x" * 457,
        "01" + PARENT[2:] + "-\ud800",
    ],
    ids=lambda text: repr(text)[-12:],
)
async def test_a_trace_that_cannot_be_understood_is_ignored(
    traceparent: Any, face: Any, server: ScriptedServer
) -> None:
    """The request runs, without a trace."""
    async with face.connect() as client:
        await client.infer("double", X, trace={"traceparent": traceparent, "tracestate": "vendor=1"})
    assert [None] == [request.tags for request in server.requests]


async def test_a_later_version_of_the_trace_is_passed_on(face: Any, server: ScriptedServer) -> None:
    """With the fields that it adds; a tracestate that is too long, or no text, is left out."""
    later = "01" + PARENT[2:] + "-" + "x" * 456
    async with face.connect() as client:
        for tracestate in ("s" * 513, "a=1\nb=2", "", 7):
            await client.infer("double", X, trace={"traceparent": later, "tracestate": tracestate})
    assert [{"traceparent": later}] * 4 == [request.tags for request in server.requests]


async def test_the_current_span_is_the_parent_and_an_explicit_trace_is_first(
    face: Any, server: ScriptedServer
) -> None:
    """Of a call, and of each item of a stream as it is pulled; without a span nothing is sent."""
    trace = pytest.importorskip("opentelemetry.sdk.trace", reason="the extra [otel] is not installed")
    spans: list[Any] = []
    tracer = trace.TracerProvider().get_tracer("test")

    def items() -> Iterator[Any]:
        yield X
        with tracer.start_as_current_span("item") as span:
            spans.append(span.get_span_context())
            yield X

    async with face.connect() as client:
        await client.infer("double", X)
        with tracer.start_as_current_span("call") as span:
            spans.append(span.get_span_context())
            await client.infer("double", X, request_id="mine")
            await client.infer("double", X, trace={"traceparent": PARENT})
            async with client.stream("double", items()) as results:
                assert [0, 1] == [result.key async for result in results]
        await client.infer("double", X, trace={})
    call, item = [f"00-{span.trace_id:032x}-{span.span_id:016x}-{span.trace_flags:02x}" for span in spans]
    assert [
        None,
        {"request_id": "mine", "traceparent": call},
        {"traceparent": PARENT},
        {"traceparent": call},
        {"traceparent": item},
        None,
    ] == [request.tags for request in server.requests]


def test_importing_the_client_imports_no_opentelemetry() -> None:
    """Nor does asking for the tags of a request."""
    script = (
        "import sys, shapestream; from shapestream.client.tickets import tags_of; "
        "print(tags_of(None, None, None), [name for name in sys.modules if 'telemetry' in name and 'open' in name])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    assert "None []" == done.stdout.strip()
