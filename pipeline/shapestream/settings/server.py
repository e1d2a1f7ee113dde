"""The section `server` of the YAML: addresses, keys, bounds and times of the server.

The server takes `ServerSettings` as they are: each default stands here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BeforeValidator, Field, WithJsonSchema

from shapestream.addresses import is_beyond_loopback, is_protectable
from shapestream.settings.places import (
    check_address,
    read_key_list,
    read_model_root,
    read_output_path,
    read_secret_path,
    read_security_mode,
)
from shapestream.settings.values import TEXT, Bytes, Finding, Section
from shapestream.settings.yaml_source import Location

__all__ = ["SecuritySettings", "ServerSettings"]

MIN_HANG_S = 10.0
"""Default of the shortest time, in seconds, after which a batch counts as hanging."""

_HOW_TO_BE_SAFE = (
    "add security: {key: ..., clients: ...} as docs/security.md shows, or security: network where the network itself "
    "keeps strangers away, or listen on tcp://127.0.0.1:PORT or ipc://PATH"
)

Address: TypeAlias = Annotated[str, BeforeValidator(check_address), WithJsonSchema(TEXT)]
KeyList: TypeAlias = Annotated[
    Any,
    BeforeValidator(read_key_list),
    WithJsonSchema({"anyOf": [TEXT, {"type": "array", "items": TEXT}]}),
]


class SecuritySettings(Section):
    """The keys that tcp addresses ask for (docs/security.md). `security: network` is short for {mode: network}."""

    mode: Literal["keys", "network"] = "keys"
    """`keys`: callers prove a listed key. `network`: every caller is let in; the network keeps strangers away."""
    key: Annotated[str, BeforeValidator(read_secret_path)] | None = None
    """The server's secret key: a file with mode 0600, from `shapestream keys new`."""
    clients: KeyList = ()
    """Keys that may send requests: a folder of .pub files, or a list of public keys."""
    admins: KeyList = ()
    """Keys that may also see the server's counters."""
    workers: KeyList = ()
    """Keys that may serve models at `worker_listen`."""

    def problems(self, listen: tuple[str, ...], worker_listen: str | None) -> Iterator[Finding]:
        """Yield missing keys, which make an address useless, and needless ones."""
        if self.mode == "network":
            for role in ("key", "clients", "admins", "workers"):
                if getattr(self, role):
                    yield (role,), 'the mode "network" asks nobody for a key (remove one of them)'
            return
        if self.key is None:
            yield (), 'missing "key" (the server\'s secret key: shapestream keys new server)'
        protected = [address for address in listen if is_protectable(address)]
        if protected and not self.clients and not self.admins:
            yield (), f'nobody could use "{protected[0]}" (list public keys in clients, or in admins)'
        if worker_listen is not None and is_protectable(worker_listen) and not self.workers:
            yield (), f'no worker could use "{worker_listen}" (list public keys in workers)'


def _read_security(value: Any) -> Any:
    return read_security_mode(value) if isinstance(value, str) else value


class ServerSettings(Section):
    """Settings of the server."""

    listen: tuple[Address, ...] = Field(
        default=("ipc://run/shapestream.sock",), strict=False, min_length=1, validate_default=True
    )
    """Addresses for clients: ipc://PATH (relative to this file) or tcp://HOST:PORT; beyond loopback with `security`."""
    worker_listen: Address | None = None
    """Address for workers that are started elsewhere. The server's own workers need no setting."""
    security: Annotated[SecuritySettings | None, BeforeValidator(_read_security)] = None
    """Keys that are let in, or `network`; required for addresses that other machines reach."""
    max_queued_requests: int = Field(default=8192, ge=1)
    """Requests in the queue, of all clients together, at most; more are answered `overloaded`."""
    max_queued_bytes: Bytes = 2 << 30
    """Bytes of tensors in the queue, at most; more are answered `overloaded`."""
    max_queued_s: float | None = Field(default=None, gt=0.0, allow_inf_nan=False)
    """Predicted seconds of the slots for the queue, at most; more is answered `overloaded`. Null: no limit."""
    window_requests: int = Field(default=1024, ge=1, le=65536)
    """A client's credit: requests without an answer at any time."""
    window_bytes: Bytes = 512 << 20
    """A client's credit in bytes of tensors; a single request above it is answered `too_large`."""
    windows_per_key: int = Field(default=8, ge=1, le=65536)
    """Credits that all clients with one key have together, where clients prove keys."""
    max_outbox_bytes: Bytes = 512 << 20
    """Unsent bytes for all clients and workers, at most; beyond it the one with most is cut off."""
    prefetch: bool = True
    """Queue the next batch behind the running one of a busy slot, just before that slot is free."""
    kept_bytes: Bytes = 64 << 20
    """Bytes of kept replies, at most, for clients that ask again after a broken connection."""
    kept_s: float = Field(default=60.0, ge=0, le=86400, allow_inf_nan=False)
    """Seconds that a reply is kept, at most."""
    max_clients: int = Field(default=1024, ge=1, le=65536)
    """Clients at a time, at most."""
    heartbeat_s: float = Field(default=1.0, gt=0, le=3600, allow_inf_nan=False)
    """Seconds between heartbeats of the server, its clients and its workers."""
    client_silence_s: float = Field(default=10.0, gt=0, le=86400, allow_inf_nan=False)
    """Seconds of silence after which a client counts as gone; its queued requests are dropped."""
    worker_silence_s: float = Field(default=3.0, gt=0, le=86400, allow_inf_nan=False)
    """Seconds of silence after which a worker counts as lost; its batches run elsewhere."""
    model_root: Annotated[str, BeforeValidator(read_model_root)] | None = None
    """Folder that must hold all model files, symbolic links followed. Default: any folder."""
    hang_min_s: float | None = Field(default=None, gt=0, le=86400, allow_inf_nan=False)
    """Shortest time, in seconds, after which a batch counts as hanging. Default: 10, or twice `worker_silence_s`."""
    hang_grace_s: float = Field(default=5.0, gt=0, le=3600, allow_inf_nan=False)
    """Seconds between the cancellation of a batch that hangs and the end of its worker."""
    quarantine_requests: int = Field(default=1024, ge=0, le=65536)
    """Digests of requests that killed workers, at most; an equal request is answered `poisoned`. 0: none are kept."""
    quarantine_s: float = Field(default=600.0, gt=0, le=86400, allow_inf_nan=False)
    """Seconds that such a digest is kept."""
    record_trace: Annotated[str, BeforeValidator(read_output_path)] | None = None
    """File for a trace of the times and shapes of requests, never of their data, for `simulate` and `tune`."""
    grace_s: float = Field(default=25.0, ge=0, le=86400, allow_inf_nan=False)
    """Seconds that the first SIGTERM leaves accepted requests to end."""

    @property
    def network_is_safe(self) -> bool:
        """True where the operator vouches for the network, so that no address needs a key."""
        return self.security is not None and self.security.mode == "network"

    @property
    def effective_hang_min_s(self) -> float:
        """`hang_min_s`, or its default."""
        return self.hang_min_s or max(MIN_HANG_S, 2 * self.worker_silence_s)

    def problems(self) -> Iterator[Finding]:
        """Yield the contradictions between the settings of the server."""
        for key in ("client_silence_s", "worker_silence_s"):
            silence = getattr(self, key)
            if silence < 2 * self.heartbeat_s:
                to_change = key if key in self.model_fields_set else "heartbeat_s"
                yield (
                    (to_change,),
                    f"{key} ({silence:g}) must be at least twice heartbeat_s ({self.heartbeat_s:g})",
                )
        if (words := self.too_short_for_hangs(self.hang_min_s)) is not None:
            yield ("hang_min_s",), words
        if self.security is not None:
            for where, words in self.security.problems(self.listen, self.worker_listen):
                yield ("security", *where), words
            return
        addresses: list[tuple[Location, str | None]] = [(("worker_listen",), self.worker_listen)]
        addresses += [(("listen", index), address) for index, address in enumerate(self.listen)]
        for where, address in addresses:
            if address is not None and is_beyond_loopback(address):
                yield where, f'"{address}" is open to other machines ({_HOW_TO_BE_SAFE})'

    def too_short_for_hangs(self, limit_s: float | None) -> str | None:
        """The problem of a limit for hangs, in seconds; None for a limit that is long enough.

        Where a network may break, a silent worker must count as lost before its batch counts as hanging.
        """
        least_s = self.worker_silence_s + self.heartbeat_s
        if self.worker_listen is None or limit_s is None or limit_s >= least_s:
            return None
        return (
            f"a batch hangs after {limit_s:g} s, which must not be less than worker_silence_s + heartbeat_s "
            f"({least_s:g}) where workers dial in: else a broken connection passes for a request that hangs"
        )
