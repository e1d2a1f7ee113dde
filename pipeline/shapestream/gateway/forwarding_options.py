"""Options that gateways of both kinds have: how they reach their server, and what they ask of their callers."""

from __future__ import annotations

from dataclasses import dataclass

from shapestream.gateway.infer_options import DEFAULT_PRIORITY_LEVEL
from shapestream.gateway.tokens import Tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardingOptions:
    """How a gateway reaches its server, and what it asks of its callers."""

    server: str
    """The server's address, `tcp://…` or `ipc://…`."""
    key: str | None = None
    server_key: str | None = None
    tokens: Tokens | None = None
    default_priority_level: int = DEFAULT_PRIORITY_LEVEL
    connect_timeout_s: float = 60.0
    """Seconds that the server may take to answer at first."""
    unavailable_after_s: float = 10.0
    """Seconds without a server, or with one that takes nothing new, after which requests are refused as unavailable."""
    grace_s: float = 30.0
    """Seconds from SIGTERM, after which requests without an answer are refused as unavailable."""
