"""Ports that speak HTTP, the admin port and gateways: how they listen, and whom they refuse."""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Mapping

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


_HOST = re.compile(r"(?P<name>\[[^]]*\]|[^:]*)(:[0-9]+)?")
"""The form of the header `Host`."""
REFUSED_SITES = "this port answers to localhost and IP addresses, and to no page from elsewhere"


def is_sent_by_another_site(headers: Mapping[str, str]) -> bool:
    """Tell whether a page of another site makes a browser call a port that only loopback protects.

    The browser's headers say so, or the page uses a host name of its own (DNS rebinding). Such a name is neither localhost
    nor an IP address. `headers` have lower-case names.
    """
    if headers.get("sec-fetch-site") == "cross-site" and headers.get("sec-fetch-mode") != "navigate":
        return True
    host = _HOST.fullmatch(headers.get("host", "localhost"))
    if host is None:
        return True
    name = host["name"].strip("[]").lower()
    if name == "localhost":
        return False
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return True
    return False
