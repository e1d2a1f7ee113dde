"""Addresses: their reach, and checks of those that a client connects to."""

from __future__ import annotations

import ipaddress
import stat
from pathlib import Path

from shapestream.errors import TransportError


def is_protectable(address: str) -> bool:
    """Tell whether an address can ask for keys. Over ipc the folder's mode decides about access instead."""
    return address.startswith("tcp://")


def is_beyond_loopback(address: str) -> bool:
    """Tell whether other machines may reach `tcp://HOST:PORT`. A name other than localhost may mean any interface."""
    if not is_protectable(address):
        return False
    host = _host(address)
    if host == "localhost":
        return False
    try:
        return not ipaddress.ip_address(host).is_loopback
    except ValueError:
        return True


def reached_from_here(address: str) -> str:
    """Return the address by which a process of this machine reaches a server that listens at `address`."""
    if is_protectable(address):
        host, port = _host(address), address.rpartition(":")[2]
        if host in ("*", "0.0.0.0"):
            return f"tcp://127.0.0.1:{port}"
        if host == "::":
            return f"tcp://[::1]:{port}"
    return address


def check_destination(address: str) -> None:
    """Raise `TransportError` for an address that no client can connect to, with the one that was probably meant."""
    scheme, separator, rest = address.partition("://")
    if not separator or scheme not in ("tcp", "ipc"):
        raise TransportError(f"{address!r} is no address; {_meant(address)}")
    if scheme == "tcp":
        _check_tcp(address)
    elif not rest:
        raise TransportError(f"{address!r} names no socket; write ipc://PATH")
    else:
        _check_ipc(address, Path(rest))


def missing_socket(address: str) -> str | None:
    """Return the reason, in words, why no server listens at an `ipc://` address; None where one may."""
    path = Path(address.removeprefix("ipc://"))
    if not address.startswith("ipc://") or str(path).startswith("@"):  # Linux's abstract sockets are no files
        return None
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return f"there is no socket {path.absolute()}: is the server running, and with this path?"
    except OSError as error:
        return f"{path.absolute()}: {error.strerror}"
    return None


def is_ipv6(address: str) -> bool:
    """Tell whether an address has an IPv6 host, in brackets. libzmq takes one only where `ZMQ_IPV6` is set before, and then
    resolves `localhost` to `::1`; so it is set for these alone, and names mean IPv4 addresses."""
    return address.startswith("tcp://[")


def _check_tcp(address: str) -> None:
    host, port = _host(address), address.rpartition(":")[2]
    if not host or not (port.isascii() and port.isdigit() and 0 < int(port) < 2**16):
        raise TransportError(f"{address!r} needs a host and a port; write tcp://HOST:PORT")
    if host == "*":
        raise TransportError(
            f"{address!r} is where a server listens; did you mean {reached_from_here(address)}?"
        )


def _check_ipc(address: str, path: Path) -> None:
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError):  # perhaps it will be there once the server is
        return
    if stat.S_ISDIR(mode):
        raise TransportError(f"{address!r} is a folder; name the socket in it")
    if not stat.S_ISSOCK(mode):
        raise TransportError(f"{address!r} is a file, and no socket; name the one of the server")


def _meant(address: str) -> str:
    """Return the advice for a text that is no address."""
    before, colon, port = address.rpartition(":")
    host = before.rpartition("/")[2] or before.strip("/:")
    if colon and host and port.strip("/").isdigit():
        return f"did you mean tcp://{host.removeprefix('tcp:')}:{port.strip('/')}?"
    if address.startswith(("/", "./", "ipc:")) or address.endswith(".sock"):
        return f"did you mean ipc://{address.removeprefix('ipc:')}?"
    return "write tcp://HOST:PORT or ipc://PATH"


def _host(address: str) -> str:
    return address.removeprefix("tcp://").rpartition(":")[0].strip("[]")
