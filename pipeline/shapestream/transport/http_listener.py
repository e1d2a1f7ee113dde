"""Sockets that listen for HTTP: of the admin port, and of gateways."""

from __future__ import annotations

import socket

from shapestream.errors import ConfigurationError


def listen_at(host_and_port: str, *, backlog: int | None = None) -> socket.socket:
    """Return a socket that listens at HOST:PORT. Raises `ConfigurationError` for an address that cannot be used.

    Port 0 lets the system choose one. `backlog`: connections that the system accepts before this process does; Linux cuts it
    at net.core.somaxconn.
    """
    host, _, port = host_and_port.rpartition(":")
    if not host or not (port.isascii() and port.isdigit() and int(port) <= 65535):
        raise ConfigurationError([f'"{host_and_port}" is no HOST:PORT'])
    try:
        family, _, _, _, place = socket.getaddrinfo(
            host.strip("[]"), int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        return socket.create_server(place[:2], family=family, backlog=backlog)
    except (OSError, UnicodeError) as error:
        raise ConfigurationError(
            [f'"{host_and_port}": {getattr(error, "strerror", None) or error}']
        ) from error


def place_of(listener: socket.socket) -> str:
    """Return the HOST:PORT of a listening socket, with the port that was chosen for 0."""
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
