"""The tags that a client gives its requests: the caller's own id, the place in a trace, and a gateway's caller.

The one module of the client that imports OpenTelemetry, and only in a process that has imported it before.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

from shapestream.wire.tags import CALLER, REQUEST_ID, TRACEPARENT, TRACESTATE, can_be_sent, rule_of, trace_id


def tags_of(
    request_id: str | None, trace: Mapping[str, str] | None, caller: str | None
) -> dict[str, str] | None:
    """Return the tags of one request, None for none. Without a `trace` they tell the current span.

    Raises TypeError and ValueError for an id or a caller that cannot be sent. A `trace` that cannot be understood is
    ignored.
    """
    tags = current_trace() if trace is None else _given(trace)
    if request_id is None and caller is None:
        return tags
    tags = {} if tags is None else tags
    if request_id is not None:
        tags[REQUEST_ID] = _checked(REQUEST_ID, "a request's id", request_id)
    if caller is not None:
        tags[CALLER] = _checked(CALLER, "the name of a caller", caller)
    return tags


def checked_caller(caller: str | None) -> str | None:
    """Return the name of a caller, or None; raises TypeError and ValueError for one that cannot be sent."""
    return None if caller is None else _checked(CALLER, "the name of a caller", caller)


def _checked(tag: str, what: str, text: str) -> str:
    if not isinstance(text, str):
        raise TypeError(f"{what} is a string, not {text!r}")
    if not can_be_sent(tag, text):
        raise ValueError(f"{what} has {rule_of(tag)}, unlike {text[:200]!r}")
    return text


def current_trace() -> dict[str, str] | None:
    """Return the tags that tell the current OpenTelemetry span; None where there is none."""
    if "opentelemetry.trace" not in sys.modules:
        return None
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
