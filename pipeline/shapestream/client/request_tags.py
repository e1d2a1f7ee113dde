"""The tags that a client gives its requests: the caller's own id, and the place in a trace.

The one module of the client that imports OpenTelemetry, and only in a process that has imported it before.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

from shapestream.wire.tags import REQUEST_ID, TRACEPARENT, TRACESTATE, can_be_sent, rule_of, trace_id


def tags_of(request_id: str | None, trace: Mapping[str, str] | None) -> dict[str, str] | None:
    """Return the tags of one request; without a `trace`, those of the current span. None where there are none.

    Raises TypeError and ValueError for an id that cannot be sent. A `trace` that cannot be understood is ignored.
    """
    tags = None
    if trace is not None:
        tags = _given(trace)
    elif opentelemetry_is_loaded():
        tags = current_trace()
    if request_id is None:
        return tags
    if not isinstance(request_id, str):
        raise TypeError(f"a request's id is a string, not {request_id!r}")
    if not can_be_sent(REQUEST_ID, request_id):
        raise ValueError(f"a request's id has {rule_of(REQUEST_ID)}, unlike {request_id[:200]!r}")
    return {REQUEST_ID: request_id, **(tags or {})}


def opentelemetry_is_loaded() -> bool:
    """Tell whether there may be a current span."""
    return "opentelemetry.trace" in sys.modules


def current_trace() -> dict[str, str] | None:
    """Return the tags that tell the current OpenTelemetry span; None where there is none."""
    from opentelemetry.trace import get_current_span

    span = get_current_span().get_span_context()
    if not span.is_valid:
        return None
    traceparent = f"00-{span.trace_id:032x}-{span.span_id:016x}-{span.trace_flags:02x}"
    return _tags(traceparent, span.trace_state.to_header())


def _given(trace: Mapping[str, str]) -> dict[str, str] | None:
    traceparent, tracestate = trace.get(TRACEPARENT), trace.get(TRACESTATE)
    if not isinstance(traceparent, str) or trace_id(traceparent) is None:
        return None
    return _tags(traceparent, tracestate) if can_be_sent(TRACEPARENT, traceparent) else None


def _tags(traceparent: str, tracestate: object) -> dict[str, str]:
    tags = {TRACEPARENT: traceparent}
    if isinstance(tracestate, str) and can_be_sent(TRACESTATE, tracestate):
        tags[TRACESTATE] = tracestate
    return tags
