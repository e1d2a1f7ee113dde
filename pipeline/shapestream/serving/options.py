"""How a server is set up, in plain values; the settings loader makes this from the YAML."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from shapestream.serving.models import ModelOptions
from shapestream.transport.curve import ServerSecurity
from shapestream_engine.calibration_cache import CostCache

__all__ = ["ServerOptions"]

_MIB = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """Addresses, bounds and times of one server. Every bound has an answer for what exceeds it."""

    listen: tuple[str, ...] = ()
    """Addresses for clients."""
    worker_listen: str | None = None
    """Address for workers; None if there are only slots in this process."""
    dial_in_listen: str | None = None
    """A second address for workers, where it is not for those that this server has started."""
    security: ServerSecurity | None = None
    """Keys that are asked for at all tcp addresses; None: at none, and then none may lie beyond loopback."""
    network_is_safe: bool = False
    """The operator's word that no key is needed, wherever the addresses lie."""
    cost_cache: CostCache | None = None
    """Where what traffic teaches about costs is kept for the next server; None: nowhere."""
    record_trace: Path | None = None
    """Where the sizes of all requests are recorded; see docs/capacity.md."""
    models: Mapping[str, ModelOptions] = field(default_factory=dict)
    """The models that clients may ask for, even before a worker has brought them."""
    digests: Mapping[str, str] = field(default_factory=dict)
    """The sha256 of the files that these are served from. Of one left out, the first worker that joins says it."""
    max_queued_requests: int = 8192
    """Beyond it: `overloaded`."""
    max_queued_bytes: int = 2048 * _MIB
    max_queued_s: float | None = None
    """Predicted seconds of the slots for what waits; None: not limited."""
    window_requests: int = 1024
    """Credit of each client; what exceeds it is `overloaded`."""
    window_bytes: int = 512 * _MIB
    """The same in bytes of tensors; a single request that exceeds it is `too_large`."""
    windows_per_key: int = 2
    """Credits that all clients with one proven key have together; what exceeds them is `overloaded`."""
    max_outbox_bytes: int = 512 * _MIB
    """Of messages that peers at both ports have not read; beyond it the peer with the largest outbox is cut off."""
    kept_bytes: int = 64 * _MIB
    """Of replies that were given and are kept, in case they must be given again; the oldest are dropped."""
    kept_s: float = 60.0
    """How long they are kept, at most."""
    max_sessions: int = 1024
    """Clients at a time; the next is answered `Goodbye`."""
    heartbeat_s: float = 1.0
    client_silence_s: float = 10.0
    """A client that says nothing for so long is gone, and what it had queued is dropped."""
    prefetch: bool = True
    """While all slots are busy, may the next batch be sent to one a moment before it becomes free?"""
    worker_silence_s: float = 3.0
    """A worker that says nothing for so long is gone, and what it ran is run again elsewhere."""
    hang_min_s: float = 10.0
    """No batch is taken to hang before it has run so long; above it counts what its model's batches usually take."""
    hang_grace_s: float = 5.0
    """Between stopping a batch that hangs and ending its process."""
    quarantine_requests: int = 1024
    """Requests that killed workers, of which digests are kept; what equals one of them is `poisoned`."""
    quarantine_s: float = 600.0
    """How long they are kept."""
    grace_s: float = 25.0
    """How long `Server.drain` lets admitted requests finish; the rest is handed back as `draining`."""
