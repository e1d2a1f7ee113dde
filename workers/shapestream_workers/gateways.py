"""The gateway processes of a server: they speak HTTP to the clients of others, and are clients of the server.

The server's process opens the socket that listens, and never accepts; all gateways accept from it. So an address in use is
an error at the start, port 0 is possible, and connections that wait when a gateway ends are taken by another one. With
SO_REUSEPORT each process would have a queue of its own, whose connections end with it, and a second server could take half
of the connections without an error.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec

from shapestream.errors import ConfigurationError
from shapestream.settings import HttpSettings, LoadedSettings
from shapestream.transport.http_listener import listen_at, place_of
from shapestream_workers.supervisor.core import RestartPolicy
from shapestream_workers.supervisor.processes import SupervisedProcesses

BACKLOG = 1024
"""Connections that wait for a gateway, at most."""


def missing_library() -> str | None:
    """Return the problem, with its remedy, if a library of the gateways is not installed."""
    missing = [name for name in ("httptools", "orjson") if find_spec(name) is None]
    return f"{' and '.join(missing)} missing (pip install 'shapestream[http]')" if missing else None


class GatewayPort:
    """The port of the gateways, which listens from its construction on."""

    def __init__(self, loaded: LoadedSettings, settings: HttpSettings) -> None:
        """Listen. Raises `ConfigurationError` where that is not possible."""
        self._settings = settings
        try:
            self._listener = listen_at(settings.address, backlog=BACKLOG)
        except ConfigurationError as error:
            problems = [loaded.problem(("server", "http"), text) for text in error.problems]
            raise ConfigurationError(problems) from error
        self.address = place_of(self._listener)
        """HOST:PORT where it listens, with the port that was chosen for 0."""

    def processes(self, server_address: str, *, grace_s: float) -> SupervisedProcesses:
        """Return the gateways, to be run. They end within `grace_s` seconds of the request to.

        They are never given up, since each holds nothing but its connections.
        """
        program = [sys.executable, "-P", "-m", "shapestream_workers", "gateway", server_address]
        settings, descriptor = self._settings, self._listener.fileno()
        options = ["--supervised", "--listener", str(descriptor), "--max-body", str(settings.max_body)]
        options += ["--default-priority-level", str(settings.default_priority_level)]
        if settings.token_file is not None:
            options += ["--token-file", settings.token_file]
        if settings.tls is not None:
            options += ["--certificate", settings.tls.certificate, "--certificate-key", settings.tls.key]
        return SupervisedProcesses(
            {f"g{number}": [*program, *options] for number in range(settings.processes)},
            RestartPolicy(max_crashes=sys.maxsize, drain_s=grace_s),
            kind="gateway",
            descriptors=[descriptor],
        )

    def close(self) -> None:
        """Stop listening. Connections that no gateway has accepted are refused."""
        self._listener.close()
