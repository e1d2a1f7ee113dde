"""Ports that speak HTTP or gRPC, the admin port and gateways: how they listen, and whom they refuse."""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

from shapestream.errors import ConfigurationError


def listen_at(host_and_port: str, *, backlog: int | None = None) -> socket.socket:
    """Return a socket that listens at HOST:PORT. Raises `ConfigurationError` for an address that cannot be used.

    Port 0 lets the system choose one. `backlog`: connections that the system accepts before this process does; Linux cuts it
    at net.core.somaxconn.
    """
    family, place = _resolved(host_and_port)
    try:
        return socket.create_server(place, family=family, backlog=backlog)
    except OSError as error:
        raise _unusable(host_and_port, error) from error


def reserve_at(host_and_port: str) -> socket.socket:
    """Return a socket that holds HOST:PORT for processes that listen there themselves, with SO_REUSEPORT, and gets nothing.

    It is bound as the only one, so an address in use is an error, and shares the address afterwards. Raises as `listen_at`
    does.
    """
    family, place = _resolved(host_and_port)
    holder = socket.socket(family, socket.SOCK_STREAM)
    try:
        # Connections of a server that has just ended do not matter; one that listens does.
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(place)
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    except OSError as error:
        holder.close()
        raise _unusable(host_and_port, error) from error
    return holder


def _resolved(host_and_port: str) -> tuple[socket.AddressFamily, tuple[str, int]]:
    host, _, port = host_and_port.rpartition(":")
    if not host or not (port.isascii() and port.isdigit() and int(port) <= 65535):
        raise ConfigurationError([f'"{host_and_port}" is no HOST:PORT'])
    try:
        family, _, _, _, place = socket.getaddrinfo(
            host.strip("[]"), int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as error:
        raise _unusable(host_and_port, error) from error
    return family, (str(place[0]), int(place[1]))


def _unusable(host_and_port: str, error: OSError | UnicodeError) -> ConfigurationError:
    return ConfigurationError([f'"{host_and_port}": {getattr(error, "strerror", None) or error}'])


def place_of(listener: socket.socket) -> str:
    """Return the HOST:PORT of a listening socket, with the port that was chosen for 0."""
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


_HELD_STATES = frozenset({"01", "08"})
"""The states of TCP, as Linux writes them, in which a peer may still ask or wait: ESTABLISHED and CLOSE_WAIT."""


def connections_at(host_and_port: str) -> int | None:
    """Count the connections of peers to a port of this machine; None where the system does not tell (Linux does)."""
    port = f"{int(host_and_port.rpartition(':')[2]):04X}"
    found = 0
    for table in ("tcp", "tcp6"):
        try:
            lines = Path(f"/proc/self/net/{table}").read_text(encoding="ascii").splitlines()[1:]
        except OSError:
            if table == "tcp":
                return None
            continue  # a system without IPv6
        rows = (line.split() for line in lines)
        found += sum(row[1].endswith(f":{port}") and row[3] in _HELD_STATES for row in rows)
    return found


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
    return not _is_address(headers.get("host", "localhost"))


@lru_cache(maxsize=64)
def _is_address(host_and_port: str) -> bool:
    """Tell whether a header `Host` names localhost or an IP address. Peers send few different ones."""
    host = _HOST.fullmatch(host_and_port)
    if host is None:
        return False
    name = host["name"].strip("[]").lower()
    if name == "localhost":
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
