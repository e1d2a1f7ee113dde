"""The gateway processes of a server: they speak HTTP or gRPC to the clients of others, and are clients of the server.

HTTP: the server's process opens the socket that listens, and never accepts; all gateways accept from it. So an address in
use is an error at the start, port 0 is possible, and connections that wait when a gateway ends are taken by another one.
With SO_REUSEPORT each process would have a queue of its own, whose connections end with it, and a second server could take
half of the connections without an error.

gRPC: its library listens itself, so SO_REUSEPORT it is. The server's process binds the address before, alone, and keeps it:
an address in use is an error here too, and port 0 is possible.

A process speaks one of the two. Threads of gRPC's would take the interpreter from HTTP's event loop; each kind has a number
of processes and an extra of its own; and a crash in gRPC's C++ costs no connection of HTTP.
"""

from __future__ import annotations

import hashlib
import socket
import ssl
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, TypeAlias

from shapestream.errors import ConfigurationError
from shapestream.secret_files import read_secret
from shapestream.settings import (
    AdminSettings,
    GatewaySettings,
    GrpcSettings,
    HttpSettings,
    LoadedSettings,
    ServerSettings,
)
from shapestream.transport.http_listener import listen_at, place_of, reserve_at
from shapestream.web.tokens import read_tokens
from shapestream_engine.files import read_regular
from shapestream_workers.chains import service_options
from shapestream_workers.supervisor.processes import SupervisedProcesses
from shapestream_workers.supervisor.replacements import RestartPolicy

_Socket: TypeAlias = socket.socket

BACKLOG = 1024
"""Connections that wait for a gateway, at most."""
STOP_GRACE_S = 5.0
"""Seconds for a process to end after its requests have: last answers leave, and nothing else is left to do."""
MAX_TLS_BYTES = 1 << 20
"""Largest file of a TLS key, or of certificates. A key has some 3 KiB, and a chain of certificates seldom more than 10."""

Kind: TypeAlias = Literal["http", "grpc"]
LIBRARIES: Mapping[str, Sequence[str]] = {
    "http": ("httptools", "orjson"),
    "grpc": ("grpc", "google.protobuf"),
    "admin": ("httptools", "prometheus_client"),
    "otel": ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http", "requests"),
}
"""Extra -> the modules that it brings, of gateways (each kind has an extra of its name) and of what the server itself tells
over HTTP."""


def missing_library(extra: str) -> str | None:
    """Return the problem, with its remedy, if a library of an extra is not installed."""
    missing = [name for name in LIBRARIES[extra] if not _is_installed(name)]
    return f"{' and '.join(missing)} missing (pip install 'shapestream[{extra}]')" if missing else None


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # not even the package that it is in
        return False


def read_tls(certificate: Path, key: Path) -> tuple[ssl.SSLContext, bytes, bytes]:
    """Return a context for TLS, the secret key and the certificate, both in PEM.

    Raises `ConfigurationError` for files that cannot be read, or do not belong together, and for a key that others may
    read.
    """
    secret = read_secret(key, MAX_TLS_BYTES, holds="a secret key")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(certificate, key)
        return context, secret, read_regular(certificate, MAX_TLS_BYTES)
    except (OSError, ssl.SSLError) as error:
        raise ConfigurationError([f"{certificate}, {key}: {error}"]) from error


def _read_files(port: AdminSettings | GatewaySettings) -> None:
    if port.token_file is not None:
        read_tokens(Path(port.token_file), only="admin" if isinstance(port, AdminSettings) else None)
    if isinstance(port, GatewaySettings) and port.tls is not None:
        read_tls(Path(port.tls.certificate), Path(port.tls.key))


def port_file_problems(loaded: LoadedSettings) -> list[str]:
    """Return what is wrong with the files of tokens and of TLS of all ports, each with its line in the YAML."""
    server = loaded.settings.server
    problems: list[str] = []
    for section, port in (("admin", server.admin), ("http", server.http), ("grpc", server.grpc)):
        try:
            if port is not None:
                _read_files(port)
        except ConfigurationError as error:
            problems += [loaded.problem(("server", section), text) for text in error.problems]
    return problems


def kind_of(settings: HttpSettings | GrpcSettings) -> Kind:
    """Return the protocol of these settings."""
    return "http" if isinstance(settings, HttpSettings) else "grpc"


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayPort:
    """The port of the gateways of one kind, which is taken."""

    kind: Kind
    settings: GatewaySettings
    socket: _Socket
    """HTTP's listens, and its gateways inherit it; gRPC's is held for them."""
    options: Sequence[str]
    """Options of a gateway of this kind alone."""

    @classmethod
    def open(cls, settings: HttpSettings | GrpcSettings, loaded: LoadedSettings) -> GatewayPort:
        """Take the port.

        Raises `ConfigurationError` where the address or a file cannot be used, or a library is missing.
        """
        kind = kind_of(settings)
        if (missing := missing_library(kind)) is not None:
            raise ConfigurationError([missing])
        # Each gateway reads them again when it starts: so a reload does, and one that cannot use them replaces none.
        _read_files(settings)
        if isinstance(settings, HttpSettings):
            taken = listen_at(settings.address, backlog=BACKLOG)
        else:
            taken = reserve_at(settings.address)
        return cls._at(taken, settings, loaded)

    @classmethod
    def _at(
        cls, taken: _Socket, settings: HttpSettings | GrpcSettings, loaded: LoadedSettings
    ) -> GatewayPort:
        if isinstance(settings, HttpSettings):
            options = ["--listener", str(taken.fileno())]
            labels = {folder.name: folder.labels for folder in loaded.folders}
            options += service_options(settings, loaded.settings, labels)
        else:
            options = ["--grpc", place_of(taken)]
        return cls(kind=kind_of(settings), settings=settings, socket=taken, options=options)

    def by(self, loaded: LoadedSettings) -> GatewayPort:
        """Return this port with the settings of a YAML; as it is, where that has no such port, or at another address."""
        server = loaded.settings.server
        settings = server.http if self.kind == "http" else server.grpc
        if settings is None or settings.address != self.settings.address:
            return self
        return self._at(self.socket, settings, loaded)

    def read_by_processes(self) -> tuple[tuple[bytes, int], ...] | None:
        """Return the digests of the files that each process reads, and their modes; None where one cannot be read."""
        settings = self.settings
        tls = () if settings.tls is None else (settings.tls.certificate, settings.tls.key)
        try:
            files = [file for file in (settings.token_file, *tls) if file is not None]
            return tuple(
                (hashlib.sha256(read_regular(Path(file), MAX_TLS_BYTES)).digest(), Path(file).stat().st_mode)
                for file in files
            )
        except (OSError, ConfigurationError):
            return None

    def commands(self, server_address: str, *, grace_s: float, lame_duck_s: float) -> dict[str, list[str]]:
        """Return the command line of each process, by name. Its requests have `grace_s` seconds at its end."""
        program = [sys.executable, "-P", "-m", "shapestream_workers", "gateway", server_address]
        settings = self.settings
        options = ["--supervised", "--grace", str(grace_s), "--lame-duck", str(lame_duck_s)]
        options += ["--max-body", str(settings.max_body), "--max-connection", str(settings.max_connection_s)]
        if settings.token_file is not None:
            options += ["--token-file", settings.token_file]
        if settings.tls is not None:
            options += ["--certificate", settings.tls.certificate, "--certificate-key", settings.tls.key]
        prefix = "g" if self.kind == "http" else "r"
        return {f"{prefix}{number}": [*program, *options, *self.options] for number in range(settings.count)}


class GatewayPorts:
    """The ports of all gateways of a server."""

    def __init__(self, ports: Sequence[GatewayPort]) -> None:
        self._ports = ports
        self._made_of: dict[str, object] = {}
        """By process: its command line, and digests of the files that it reads."""
        self._start: Callable[[GatewayPort], dict[str, list[str]]]

    @property
    def addresses(self) -> dict[Kind, str]:
        """HOST:PORT where each kind listens, with the port that was chosen for 0."""
        return {port.kind: place_of(port.socket) for port in self._ports}

    def processes(
        self, server_address: str, settings: ServerSettings, *, all_ready: Callable[[], None]
    ) -> SupervisedProcesses:
        """Return the gateways, to be run. The requests of one that is replaced have the server's grace.

        `all_ready` is called whenever each of them is ready. They are never given up, since each holds nothing but its
        connections.
        """
        self._start = partial(
            GatewayPort.commands,
            server_address=server_address,
            grace_s=settings.grace_s,
            lame_duck_s=settings.effective_lame_duck_s,
        )
        commands, self._made_of = self._wanted(self._ports)
        return SupervisedProcesses(
            commands,
            RestartPolicy(max_crashes=sys.maxsize, drain_s=settings.grace_s + STOP_GRACE_S),
            kind="gateway",
            all_ready=all_ready,
            descriptors=[port.socket.fileno() for port in self._ports if port.kind == "http"],
        )

    def follow(self, loaded: LoadedSettings) -> tuple[dict[str, list[str]], frozenset[str]]:
        """Return the command line of each process by a YAML that was read again, and those that it changes.

        The other settings of the server, and its addresses, stay as they were.
        """
        commands, made_of = self._wanted([port.by(loaded) for port in self._ports])
        before, self._made_of = self._made_of, made_of
        return commands, frozenset(
            name for name, made in made_of.items() if made is None or before.get(name) != made
        )

    def doubt(self, names: Iterable[str]) -> None:
        """Know no more what these processes are made of, since they stay as they were."""
        for name in names:
            self._made_of[name] = None

    def _wanted(self, ports: Sequence[GatewayPort]) -> tuple[dict[str, list[str]], dict[str, object]]:
        commands: dict[str, list[str]] = {}
        made_of: dict[str, object] = {}
        for port in ports:
            files = port.read_by_processes()
            for name, command in self._start(port).items():
                commands[name] = command
                made_of[name] = None if files is None else (command, files)
        return commands, made_of

    def close(self) -> None:
        """Give the ports up. Connections that no gateway has accepted are refused."""
        for port in self._ports:
            port.socket.close()


def open_ports(loaded: LoadedSettings) -> GatewayPorts | None:
    """Return the ports of the gateways, which are taken; None if none is configured. Raises `ConfigurationError`."""
    server = loaded.settings.server
    ports: list[GatewayPort] = []
    for kind, settings in (("http", server.http), ("grpc", server.grpc)):
        if settings is not None:
            try:
                ports.append(GatewayPort.open(settings, loaded))
            except ConfigurationError as error:
                GatewayPorts(ports).close()
                problems = [loaded.problem(("server", kind), text) for text in error.problems]
                raise ConfigurationError(problems) from error
    return GatewayPorts(ports) if ports else None
