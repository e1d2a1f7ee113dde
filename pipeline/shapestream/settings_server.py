"""The section `server` of the YAML: the process that producers talk to, and who may."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BeforeValidator, Field, WithJsonSchema

from shapestream.settings_addresses import (
    check_address,
    read_key_list,
    read_secret_path,
    read_security_mode,
)
from shapestream.settings_file_values import read_model_root, read_output_path
from shapestream.settings_section import TEXT, Bytes, Section

__all__ = ["SecuritySettings", "ServerSettings"]

Address: TypeAlias = Annotated[str, BeforeValidator(check_address), WithJsonSchema(TEXT)]
KeyList: TypeAlias = Annotated[
    Any,
    BeforeValidator(read_key_list),
    WithJsonSchema({"anyOf": [TEXT, {"type": "array", "items": TEXT}]}),
]


class SecuritySettings(Section):
    """Who may connect over tcp; docs/security.md. `security: network` is short for {mode: network}."""

    mode: Literal["keys", "network"] = "keys"
    """`keys`: callers prove a listed key. `network`: anybody who gets there is let in; the network keeps others away."""
    key: Annotated[str, BeforeValidator(read_secret_path)] | None = None
    """The server's secret key: a file with mode 0600, from `shapestream keys new`."""
    clients: KeyList = ()
    """Who may send requests: a folder of .pub files, or a list of public keys."""
    admins: KeyList = ()
    """Who may also see the server's counters."""
    workers: KeyList = ()
    """Who may serve models at `worker_listen`."""


def _read_security(value: Any) -> Any:
    return read_security_mode(value) if isinstance(value, str) else value


class ServerSettings(Section):
    """The process that producers talk to."""

    listen: tuple[Address, ...] = Field(
        default=("ipc://run/shapestream.sock",), strict=False, min_length=1, validate_default=True
    )
    """Where clients connect: ipc://PATH (relative to this file) or tcp://HOST:PORT; beyond loopback with `security`."""
    worker_listen: Address | None = None
    """Where workers that were started elsewhere dial in. The server's own workers need no setting."""
    security: Annotated[SecuritySettings | None, BeforeValidator(_read_security)] = None
    """Needed for addresses that other machines reach: the keys that are let in, or `network`."""
    max_queued_requests: int = Field(default=8192, ge=1)
    """Requests that may wait, of all clients together; more are answered `overloaded`."""
    max_queued_bytes: Bytes = 2 << 30
    """Bytes of tensors that may wait; more are answered `overloaded`."""
    max_queued_s: float | None = Field(default=None, gt=0.0, allow_inf_nan=False)
    """Seconds that the slots are predicted to need for what waits; more is answered `overloaded`. Null: not limited."""
    window_requests: int = Field(default=1024, ge=1, le=65536)
    """A client's credit: requests without an answer at any time."""
    window_bytes: Bytes = 512 << 20
    """A client's credit in bytes of tensors; a single request above it is answered `too_large`."""
    windows_per_key: int = Field(default=2, ge=1, le=65536)
    """Where clients prove keys: how many clients' credits all clients with one key have together."""
    max_outbox_bytes: Bytes = 512 << 20
    """Bytes that wait for all clients and workers that read too slowly; beyond it the one with most is cut off."""
    prefetch: bool = True
    """While all slots are busy, the next batch is sent to one a moment before it becomes free."""
    kept_bytes: Bytes = 64 << 20
    """Replies that were given are kept up to so many bytes, for clients that ask again after a broken connection."""
    kept_s: float = Field(default=60.0, ge=0, le=86400, allow_inf_nan=False)
    """How long such a reply is kept, at most."""
    max_clients: int = Field(default=1024, ge=1, le=65536)
    """Clients at a time."""
    heartbeat_s: float = Field(default=1.0, gt=0, le=3600, allow_inf_nan=False)
    """How often the server, its clients and its workers show that they live."""
    client_silence_s: float = Field(default=10.0, gt=0, le=86400, allow_inf_nan=False)
    """A client that was silent for so long is gone; its queued requests are dropped."""
    worker_silence_s: float = Field(default=3.0, gt=0, le=86400, allow_inf_nan=False)
    """A worker that was silent for so long is lost; what it ran is run elsewhere."""
    model_root: Annotated[str, BeforeValidator(read_model_root)] | None = None
    """Model files must lie in this folder, symbolic links followed. Default: anywhere."""
    hang_min_s: float | None = Field(default=None, gt=0, le=86400, allow_inf_nan=False)
    """No batch is taken to hang before it has run so long. Default: 10, and `worker_silence_s` twice if that is more."""
    hang_grace_s: float = Field(default=5.0, gt=0, le=3600, allow_inf_nan=False)
    """A batch that hangs is cancelled; if it has not ended after so long, its worker is killed."""
    quarantine_requests: int = Field(default=1024, ge=0, le=65536)
    """Requests that killed workers, whose digests are kept; what equals one is answered `poisoned`. 0: none."""
    quarantine_s: float = Field(default=600.0, gt=0, le=86400, allow_inf_nan=False)
    """How long such a digest is kept."""
    record_trace: Annotated[str, BeforeValidator(read_output_path)] | None = None
    """Record when requests come and how large they are, never what is in them, for `simulate` and `tune`."""
    grace_s: float = Field(default=25.0, ge=0, le=86400, allow_inf_nan=False)
    """How long SIGTERM waits for accepted requests before it gives up on them."""
