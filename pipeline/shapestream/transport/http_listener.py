"""Sockets that listen for HTTP: of the admin port, and of gateways."""

from __future__ import annotations

import socket

from shapestream.errors import ConfigurationError

UNREAD_MS = 10_000
"""Milliseconds after which the kernel closes a connection whose reader takes nothing of an answer."""


def listen_at(host_and_port: str) -> socket.socket:
    """Return a socket that listens at HOST:PORT. Raises `ConfigurationError` for an address that cannot be used."""
    host, _, port = host_and_port.rpartition(":")
    try:
        family, _, _, _, place = socket.getaddrinfo(
            host.strip("[]"), int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.create_server(place[:2], family=family)
    except OSError as error:
        raise ConfigurationError([f'"{host_and_port}": {error.strerror or error}']) from error
    # Accepted connections inherit it.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNREAD_MS)
    return listener


def place_of(listener: socket.socket) -> str:
    """Return the HOST:PORT of a listening socket, with the port that was chosen for 0."""
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
