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

import socket
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import Literal, TypeAlias

from shapestream.errors import ConfigurationError
from shapestream.settings import GatewaySettings, GrpcSettings, HttpSettings, LoadedSettings, Settings
from shapestream.transport.http_listener import listen_at, place_of, reserve_at
from shapestream_workers.chains import service_options
from shapestream_workers.supervisor.core import RestartPolicy
from shapestream_workers.supervisor.processes import SupervisedProcesses

BACKLOG = 1024
"""Connections that wait for a gateway, at most."""

Kind: TypeAlias = Literal["http", "grpc"]
LIBRARIES: Mapping[Kind, Sequence[str]] = {
    "http": ("httptools", "orjson"),
    "grpc": ("grpc", "google.protobuf"),
}
"""The modules that a gateway of each kind needs; its extra has the name of the kind."""


def missing_library(kind: Kind) -> str | None:
    """Return the problem, with its remedy, if a library of a gateway is not installed."""
    missing = [name for name in LIBRARIES[kind] if not _is_installed(name)]
    return f"{' and '.join(missing)} missing (pip install 'shapestream[{kind}]')" if missing else None


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # not even the package that it is in
        return False


class GatewayPort(ABC):
    """The port of the gateways of one kind. It is taken from its construction on."""

    kind: Kind
    prefix: str
    """Of the names of its processes."""

    def __init__(self, settings: GatewaySettings, socket_: socket.socket) -> None:
        self._settings = settings
        self._socket = socket_
        self.address = place_of(socket_)
        """HOST:PORT where it listens, with the port that was chosen for 0."""

    def commands(self, server_address: str) -> dict[str, list[str]]:
        """Return the command line of each process, by name."""
        program = [sys.executable, "-P", "-m", "shapestream_workers", "gateway", server_address]
        settings = self._settings
        options = ["--supervised", "--max-body", str(settings.max_body)]
        if settings.token_file is not None:
            options += ["--token-file", settings.token_file]
        if settings.tls is not None:
            options += ["--certificate", settings.tls.certificate, "--certificate-key", settings.tls.key]
        return {
            f"{self.prefix}{number}": [*program, *options, *self._own_options()]
            for number in range(settings.processes)
        }

    @property
    def descriptors(self) -> list[int]:
        """The descriptors that its processes inherit."""
        return []

    def close(self) -> None:
        """Give the port up. Connections that no gateway has accepted are refused."""
        self._socket.close()

    @abstractmethod
    def _own_options(self) -> list[str]:
        """Return the options that gateways of this kind have alone."""


class HttpPort(GatewayPort):
    """The port of the gateways that speak HTTP, which listens."""

    kind = "http"
    prefix = "g"

    def __init__(self, settings: HttpSettings, whole: Settings) -> None:
        """Raise `ConfigurationError` where the address cannot be used."""
        super().__init__(settings, listen_at(settings.address, backlog=BACKLOG))
        self._services = service_options(settings, whole)

    @property
    def descriptors(self) -> list[int]:
        """The listening socket's."""
        return [self._socket.fileno()]

    def _own_options(self) -> list[str]:
        return ["--listener", str(self._socket.fileno()), *self._services]


class GrpcPort(GatewayPort):
    """The port of the gateways that speak gRPC, which is held for them."""

    kind = "grpc"
    prefix = "r"

    def __init__(self, settings: GrpcSettings) -> None:
        """Raise `ConfigurationError` where the address cannot be used."""
        super().__init__(settings, reserve_at(settings.address))

    def _own_options(self) -> list[str]:
        return ["--grpc", self.address]


class GatewayPorts:
    """The ports of all gateways of a server."""

    def __init__(self, ports: Sequence[GatewayPort]) -> None:
        self._ports = ports

    @property
    def addresses(self) -> dict[Kind, str]:
        """HOST:PORT by kind."""
        return {port.kind: port.address for port in self._ports}

    def processes(
        self, server_address: str, *, grace_s: float, all_ready: Callable[[], None]
    ) -> SupervisedProcesses:
        """Return the gateways, to be run. They end within `grace_s` seconds of the request to.

        `all_ready` is called whenever each of them is ready. They are never given up, since each holds nothing but its
        connections.
        """
        commands: dict[str, list[str]] = {}
        for port in self._ports:
            commands |= port.commands(server_address)
        return SupervisedProcesses(
            commands,
            RestartPolicy(max_crashes=sys.maxsize, drain_s=grace_s),
            kind="gateway",
            all_ready=all_ready,
            descriptors=[number for port in self._ports for number in port.descriptors],
        )

    def close(self) -> None:
        """Give the ports up."""
        for port in self._ports:
            port.close()


def open_ports(loaded: LoadedSettings) -> GatewayPorts | None:
    """Return the ports of the gateways, which are taken; None if none is configured. Raises `ConfigurationError`."""
    server = loaded.settings.server
    ports: list[GatewayPort] = []
    for kind, settings in (("http", server.http), ("grpc", server.grpc)):
        if settings is not None:
            try:
                ports.append(_open(settings, loaded.settings))
            except ConfigurationError as error:
                for port in ports:
                    port.close()
                problems = [loaded.problem(("server", kind), text) for text in error.problems]
                raise ConfigurationError(problems) from error
    return GatewayPorts(ports) if ports else None


def _open(settings: HttpSettings | GrpcSettings, whole: Settings) -> GatewayPort:
    kind: Kind = "http" if isinstance(settings, HttpSettings) else "grpc"
    if (missing := missing_library(kind)) is not None:
        raise ConfigurationError([missing])
    return HttpPort(settings, whole) if isinstance(settings, HttpSettings) else GrpcPort(settings)
