"""The section `server` of the YAML: addresses, keys, limits and times of the server, and its gateways.

The server uses `ServerSettings` as they are: each default is written here only.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BeforeValidator, Field, ValidationInfo, WithJsonSchema

from shapestream.addresses import is_beyond_loopback, is_protectable
from shapestream.quarantine import KEEP_S, MOST_REQUESTS
from shapestream.settings.values import (
    TEXT,
    Bytes,
    FilePath,
    Finding,
    Section,
    TokenPort,
    absolute_path,
    address_meant,
    below,
    constant,
    describe,
    is_there,
    keys_must_exist,
    read_list,
    read_path,
    wrong,
)
from shapestream.settings.yaml_source import Location

MIN_HANG_S = 10.0
"""Seconds in which no batch counts as hanging: a machine that is short of CPUs or memory stands still for as long."""

LAME_DUCK_S = 10.0
"""Default of the lame duck: balancers look for readiness each few seconds, and want two or three refusals."""

_HOW_TO_BE_SAFE = (
    "add security: {key: ..., clients: ...} as docs/security.md shows, or security: network where the network itself "
    "keeps strangers away, or listen on tcp://127.0.0.1:PORT or ipc://PATH"
)


class TlsSettings(Section):
    """Files in PEM for TLS."""

    certificate: FilePath
    """The certificate, and those that it was signed with."""
    key: FilePath
    """The certificate's secret key."""


class GatewaySettings(TokenPort):
    """Settings that gateways of both kinds have; their `token_file` has a line `NAME TOKEN` for each caller."""

    count: int = Field(default=1, ge=1, le=64)
    """Number of processes."""
    tls: TlsSettings | None = None
    """Files for TLS. Default: none is spoken."""
    max_body: Bytes = 64 << 20
    """Bytes of one request's body or message, at most, after it is decompressed."""
    max_connection_s: float = Field(default=300.0, gt=0, le=86400, allow_inf_nan=False)
    """Age in seconds, a tenth more or less, from which a connection ends with its next answer."""


def read_texts(value: Any) -> Any:
    """Read a list of names, or one name. `true` has been replaced by the names of the folders, where there are any."""
    if value is True:
        raise wrong("no path of a model is a folder of texts (write the names of the models or chains)")
    return () if value is False else read_list(value)


class HttpSettings(GatewaySettings):
    """HTTP for clients of the Open Inference Protocol (docs/http.md). HOST:PORT is short for {address}."""

    texts: Annotated[
        tuple[str, ...], BeforeValidator(read_texts, json_schema_input_type=bool | str | list[str])
    ] = Field(default=(), strict=False)
    """Models and chains that embed texts or rank them, for clients of OpenAI, Cohere and TEI; `true`: all folders of texts.
    TEI's clients, who name no model, get the first."""

    def services(self) -> Iterator[tuple[Location, str]]:
        """Yield the models and chains that endpoints for texts name, each with its place."""
        for index, name in enumerate(self.texts):
            yield ("texts", index), name


class GrpcSettings(GatewaySettings):
    """gRPC for clients of the Open Inference Protocol (docs/grpc.md). HOST:PORT is short for {address}."""


def read_model_root(value: Any, info: ValidationInfo) -> str:
    """Read a folder that exists, as an absolute path without symbolic links."""
    return str(Path(read_path(value, info, expected="a folder", kind="folder")).resolve())


MAX_IPC_PATH_BYTES = 103
"""Linux allows 108 bytes with the closing zero (sun_path of sockaddr_un); the transport first binds `PATH.new`."""
_Z85_KEY = re.compile(r"[0-9a-zA-Z.:+=^!/*?&<>()\[\]{}@%$#-]{40}")
"""A CURVE key in Z85 (ZeroMQ's RFC 32)."""


def check_address(value: Any, info: ValidationInfo) -> str:
    """Check `tcp://HOST:PORT`, or make `ipc://PATH` absolute. `security` checks addresses beyond loopback."""
    if not isinstance(value, str):
        raise wrong(f"expected an address, got {describe(value)} (write ipc://PATH or tcp://127.0.0.1:PORT)")
    scheme, separator, rest = value.partition("://")
    if separator and scheme == "ipc":
        return _ipc_address(rest, info)
    if separator and scheme == "tcp":
        return _tcp_address(value, rest)
    meant = address_meant(value) or "ipc://PATH or tcp://127.0.0.1:PORT"
    raise wrong(f"{describe(value)} is not an address (write {meant})")


def _ipc_address(path: str, info: ValidationInfo) -> str:
    if not path or path.startswith("@"):
        raise wrong("an ipc address needs a path (write ipc://run/shapestream.sock)")
    absolute = str(absolute_path(path, info))
    if len(absolute.encode()) > MAX_IPC_PATH_BYTES:
        advice = f"at most {MAX_IPC_PATH_BYTES} bytes; use a shorter, absolute path such as ipc:///run/shapestream.sock"
        raise wrong(f"the socket's path {absolute} is too long ({advice})")
    return f"ipc://{absolute}"


def _tcp_address(value: str, rest: str) -> str:
    host, _, port = rest.rpartition(":")
    if port != "*" and not (port.isascii() and port.isdigit() and int(port) <= 65535):
        raise wrong(f"{describe(value)} has no port between 0 and 65535 (write tcp://127.0.0.1:5555)")
    if not host:
        raise wrong(f"{describe(value)} has no host (write tcp://127.0.0.1:5555)")
    return value


def is_public_key(text: str) -> bool:
    """Tell whether a text has the form of a key. A path of that form is written ./PATH."""
    return _Z85_KEY.fullmatch(text) is not None


def read_security(value: Any) -> Any:
    """Read a mapping, or the word `network`."""
    if not isinstance(value, str):
        return value
    if value != "network":
        raise wrong(
            f"expected keys, or the word network, got {describe(value)} (write {{key: FILE, clients: FOLDER}})"
        )
    return {"mode": value}


def read_secret_path(value: Any, info: ValidationInfo) -> str:
    """Read the path of a secret key's file, as an absolute path. The error for a key itself does not repeat that key."""
    if not isinstance(value, str) or not value:
        raise wrong("expected the path of a secret key's file (make one with: shapestream keys new NAME)")
    if is_public_key(value) and not absolute_path(value, info).exists():
        raise wrong(
            "a key itself does not belong into this file (make a new key, and write the path of its file)"
        )
    path = absolute_path(value, info)
    if keys_must_exist(info) and not is_there(Path.is_file, path):
        raise wrong(f"no such file: {path} (make it with: shapestream keys new NAME --folder {path.parent})")
    return str(path)


def read_key_list(value: Any, info: ValidationInfo) -> str | tuple[str, ...]:
    """Read a folder of public keys, as an absolute path, or a list: each key in Z85, or the path of a .pub file."""
    if isinstance(value, str) and value and not is_public_key(value):
        folder = absolute_path(value, info)
        if keys_must_exist(info) and not is_there(Path.is_dir, folder):
            raise wrong(f"no such folder: {folder} (make it, with a .pub file for each key to let in)")
        return str(folder)
    if not isinstance(value, list) or not all(isinstance(key, str) and key for key in value):
        raise wrong(f"expected a folder of .pub files, or a list of public keys, got {describe(value)}")
    return tuple(_listed_key(key, info) for key in value)


def _listed_key(key: str, info: ValidationInfo) -> str:
    if is_public_key(key):
        return key
    path = absolute_path(key, info)
    if keys_must_exist(info) and not is_there(Path.is_file, path):
        raise wrong(f"{describe(key)} is neither a public key of 40 characters nor a file (correct it)")
    return str(path)


Address: TypeAlias = Annotated[str, BeforeValidator(check_address), WithJsonSchema(TEXT)]
KeyList: TypeAlias = Annotated[
    Any,
    BeforeValidator(read_key_list),
    WithJsonSchema({"anyOf": [TEXT, {"type": "array", "items": TEXT}]}),
]


class SecuritySettings(Section):
    """The keys that tcp addresses ask for (docs/security.md): callers prove a listed key. Or the word `network`."""

    mode: Literal["keys", "network"] = constant("keys", is_shown=True)
    """`network`: every caller is let in; the network keeps strangers away."""
    key: Annotated[str, BeforeValidator(read_secret_path)] | None = None
    """The server's secret key: a file with mode 0600, from `shapestream keys new`."""
    clients: KeyList = ()
    """Keys that may send requests: a folder of .pub files, or a list of public keys."""
    admins: KeyList = ()
    """Keys that may also see the server's counters."""
    gateways: KeyList = ()
    """Keys that may also name the caller of each request, who then has the fair share."""
    workers: KeyList = ()
    """Keys that may serve models at `worker_listen`."""

    def problems(self, listen: tuple[str, ...], worker_listen: str | None) -> Iterator[Finding]:
        """Yield missing keys, without which an address is useless."""
        if self.mode == "network":
            return
        if self.key is None:
            yield (), 'missing "key" (the server\'s secret key: shapestream keys new server)'
        protected = [address for address in listen if is_protectable(address)]
        if protected and not (self.clients or self.admins or self.gateways):
            yield (), f'no client could use "{protected[0]}" (list public keys in clients, or in admins)'
        if worker_listen is not None and is_protectable(worker_listen) and not self.workers:
            yield (), f'no worker could use "{worker_listen}" (list public keys in workers)'


class AdminSettings(TokenPort):
    """The admin port: health, metrics and statistics over HTTP (docs/metrics.md). HOST:PORT is short for {address}."""


_COLLECTOR = re.compile(r"https?://(\[[0-9a-fA-F:.]+\]|[^\s/?#@:\[\]]+)(:[0-9]{1,5})?(/[^\s?#]*)?")


def check_collector(value: Any) -> str:
    """Check the address of a collector of traces."""
    if isinstance(value, str) and _COLLECTOR.fullmatch(value):
        return value
    raise wrong(f"expected http://HOST:PORT, got {describe(value)} (write http://127.0.0.1:4318)")


class ServerSettings(Section):
    """Settings of the server."""

    listen: tuple[Address, ...] = Field(
        default=("ipc://run/shapestream.sock",), strict=False, min_length=1, validate_default=True
    )
    """Addresses for clients: ipc://PATH (relative to this file) or tcp://HOST:PORT; beyond loopback with `security`."""
    worker_listen: Address | None = None
    """Address for workers that are started elsewhere. The server's own workers need no setting."""
    security: Annotated[
        SecuritySettings | None,
        BeforeValidator(read_security, json_schema_input_type=Literal["network"] | SecuritySettings | None),
    ] = None
    """Keys that are let in, or `network`, which lets every caller in; required where other machines reach an address."""
    max_queued_requests: int = Field(default=8192, ge=1)
    """Requests in the queue, of all clients together, at most; more are answered `overloaded`."""
    max_queued_bytes: Bytes = 2 << 30
    """Bytes of tensors in the queue, at most; more are answered `overloaded`."""
    window_requests: int = Field(default=1024, ge=1, le=65536)
    """A client's credit: requests without an answer at any time."""
    window_bytes: Bytes = 512 << 20
    """A client's credit in bytes of tensors; a single request above it is answered `too_large`."""
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
    grace_s: float = Field(default=25.0, ge=0, le=86400, allow_inf_nan=False)
    """Seconds that the first SIGTERM leaves accepted requests to end."""
    reload_s: float | None = Field(default=None, gt=0, le=86400, allow_inf_nan=False)
    """Seconds for a process that a reload starts to be ready, or it is killed and the old one stays. Default: it goes on
    starting, and the reload ends without it after four start-up times of the old one, at least 120 s."""
    surge: Literal["rolling", "all"] = "rolling"
    """Processes that a reload starts beside the old ones: one after the other, or all at once, with one move of traffic."""
    lame_duck_s: float | None = Field(default=None, ge=0, le=86400, allow_inf_nan=False)
    """Seconds from SIGTERM for which gateways take requests, and the server is not ready. Default: 10 if open, else 0."""
    admin: AdminSettings | None = None
    """Address of the admin port, HOST:PORT, with the extra `[admin]`. Default: none."""
    http: HttpSettings | None = None
    """HTTP for clients of the Open Inference Protocol: HOST:PORT, with the extra `[http]`. Default: none."""
    grpc: GrpcSettings | None = None
    """gRPC for clients of the Open Inference Protocol: HOST:PORT, with the extra `[grpc]`. Default: none."""
    tracing: Annotated[str, BeforeValidator(check_collector), WithJsonSchema(TEXT)] | None = None
    """Address of a collector that gets spans by OTLP over HTTP, with the extra `[otel]`. Default: none."""

    # Constants: no file sets them.
    record_trace: str | None = constant(None)
    """File for a trace of the times and shapes of requests, never of their data: `serve --record-trace`."""
    windows_per_key: int = constant(8)
    """Credits that all clients with one key have together: by default as many requests as the queue holds."""
    max_outbox_bytes: int = constant(512 << 20)
    """Unsent bytes for all peers, at most: a client's credit. Beyond it the peer with most is cut off."""
    prefetch: bool = constant(True)
    """Queue the next batch behind the running one of a busy slot: goodput is 1.4 to 23 % lower without."""
    kept_bytes: int = constant(64 << 20)
    """Bytes of kept replies, at most, for clients that ask again after a broken connection."""
    kept_s: float = constant(60.0)
    """Seconds that a reply is kept, at most: as long as our client looks for a server (`unavailable_after`)."""
    hang_min_s: float | None = constant(None)
    """Shortest time, in seconds, after which a batch counts as hanging. None: `MIN_HANG_S`, or twice `worker_silence_s`,
    so that a silent worker counts as lost first."""
    hang_grace_s: float = constant(5.0)
    """Seconds between the cancellation of a batch that hangs and the end of its worker, in which a long call may end."""
    quarantine_requests: int = constant(MOST_REQUESTS)
    """Digests of requests that killed workers, at most. A new one replaces the oldest."""
    quarantine_s: float = constant(KEEP_S)
    """Seconds that such a digest is kept. An equal request that comes later ends two more workers at most."""

    @property
    def network_is_safe(self) -> bool:
        """True if the operator vouches for the network, so that no address needs a key."""
        return self.security is not None and self.security.mode == "network"

    @property
    def effective_hang_min_s(self) -> float:
        """`hang_min_s`, or its default."""
        return self.hang_min_s or max(MIN_HANG_S, 2 * self.worker_silence_s)

    @property
    def effective_lame_duck_s(self) -> float:
        """`lame_duck_s`, or its default: only peers on other machines have balancers that must notice first."""
        if self.lame_duck_s is not None:
            return self.lame_duck_s
        gateways = [port for port in (self.http, self.grpc) if port is not None]
        return LAME_DUCK_S if any(is_beyond_loopback(f"tcp://{port.address}") for port in gateways) else 0.0

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
        for key, port in ("admin", self.admin), ("http", self.http), ("grpc", self.grpc):
            words = None if port is None else port.is_open(network_is_safe=self.network_is_safe)
            if words is not None:
                yield (key,), words
        if self.security is not None:
            yield from below(("security",), self.security.problems(self.listen, self.worker_listen))
            return
        addresses: list[tuple[Location, str | None]] = [(("worker_listen",), self.worker_listen)]
        addresses += [(("listen", index), address) for index, address in enumerate(self.listen)]
        for where, address in addresses:
            if address is not None and is_beyond_loopback(address):
                yield where, f'"{address}" is open to other machines ({_HOW_TO_BE_SAFE})'

    def too_short_for_hangs(self, limit_s: float | None) -> str | None:
        """Return the problem of a limit for hanging batches, in seconds, or None for one that is long enough.

        If workers dial in, a silent worker must count as lost before its batch counts as hanging.
        """
        least_s = self.worker_silence_s + self.heartbeat_s
        if self.worker_listen is None or limit_s is None or limit_s >= least_s:
            return None
        return (
            f"{limit_s:g} s must be at least worker_silence_s + heartbeat_s ({least_s:g}) where workers dial in: else a "
            "broken connection counts as a request that hangs (raise it)"
        )
