"""The context of a call over gRPC: its caller, metadata and deadline, and how it is refused."""

from __future__ import annotations

from urllib.parse import unquote

import grpc

from shapestream.client.tickets import checked_deadline
from shapestream.errors import RequestError
from shapestream.gateway.grpc_status import MOST_WORDS, pushback_of, status_of


def refuse(context: grpc.ServicerContext, error: RequestError) -> None:
    """End a call by the status of an error. Raises gRPC's own exception."""
    context.set_trailing_metadata((pushback_of(error),))
    context.abort(status_of(error), error.message[:MOST_WORDS])


def metadata_of(context: grpc.ServicerContext) -> dict[str, str]:
    """Return the metadata of a call that are text; names are lower-case."""
    return {name: value for name, value in context.invocation_metadata() if isinstance(value, str)}


def peer_of(peer: str) -> str:
    """Return the address of a peer without its port: gRPC says `ipv4:127.0.0.1:5`, and `ipv6:%5B::1%5D:5`."""
    kind, _, place = unquote(peer).partition(":")
    return place.rpartition(":")[0].strip("[]") if kind in ("ipv4", "ipv6") else kind


def deadline_of(context: grpc.ServicerContext, wish: float | None) -> float | None:
    """Return the seconds that a request has: the smaller of its own wish and what its call has left; None for no end."""
    # gRPC says some centuries where a call has no deadline.
    left = checked_deadline(context.time_remaining())
    return min((seconds for seconds in (wish, left) if seconds is not None), default=None)
