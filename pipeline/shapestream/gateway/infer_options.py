"""The parameters of an inference request: its deadline and priority, and what is not served."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shapestream.errors import InvalidRequest
from shapestream.gateway.errors import Unsupported
from shapestream.wire.limits import MAX_INTEGER, MAX_PRIORITY
from shapestream.wire.tags import REQUEST_ID, can_be_sent
from shapestream_engine.layout import value

DEFAULT_PRIORITY_LEVEL = 1
"""Triton's priority level of requests that state none: as high as the highest, level 1."""
_IGNORED = "triton_enable_empty_final_response"
"""Asks for an empty last response of a stream. A request has one response here, which is the last."""


@value
class InferOptions:
    """The wishes of a request's parameters."""

    deadline_s: float | None = None
    """Seconds from the request's arrival."""
    priority: int = 0
    """The priority for `Client.infer`: a higher number goes first."""
    binary_outputs: bool = False
    """Outputs that do not say themselves how they are sent come as binary data."""


def read_options(parameters: Mapping[str, Any], default_priority_level: int) -> InferOptions:
    """Return the options of a request; raises `InvalidRequest` for wrong values. Unknown parameters are ignored.

    A `timeout` is in microseconds; 0 is none. Triton's highest priority is 1, and 0 stands for `default_priority_level`.
    """
    for name in parameters:
        if name.startswith(("triton_", "sequence_")) and name != _IGNORED:
            raise Unsupported(f"the parameter {name!r} is not supported")
    timeout_us = _number(parameters, "timeout")
    level = _number(parameters, "priority")
    return InferOptions(
        deadline_s=timeout_us / 1e6 if timeout_us else None,
        priority=max(default_priority_level - level, -MAX_PRIORITY) if level else 0,
        binary_outputs=flag(parameters, "binary_data_output") is True,
    )


def read_parameters(holder: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the `parameters` of a request, an input or an output; raises `InvalidRequest` where they are no object."""
    parameters = holder.get("parameters")
    if parameters is None:
        return {}
    if not isinstance(parameters, dict):
        raise InvalidRequest('"parameters" is an object')
    return parameters


def flag(parameters: Mapping[str, Any], name: str) -> bool | None:
    """Return a parameter that is true or false, None where it is absent; raises `InvalidRequest` for other values."""
    value = parameters.get(name)
    if value is not None and not isinstance(value, bool):
        raise InvalidRequest(f"the parameter {name!r} is true or false")
    return value


def _number(parameters: Mapping[str, Any], name: str) -> int:
    value = parameters.get(name, 0)
    if type(value) is not int or not 0 <= value <= MAX_INTEGER:
        raise InvalidRequest(f"the parameter {name!r} is an integer from 0 to {MAX_INTEGER}")
    return value


def own_id(*wishes: str | None) -> str | None:
    """Return the first of a caller's ids for its request that the server takes, or None."""
    for wish in wishes:
        if wish is not None and can_be_sent(REQUEST_ID, wish):
            return wish
    return None
