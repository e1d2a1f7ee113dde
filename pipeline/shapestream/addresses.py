"""What an address says about who can get there."""

from __future__ import annotations

import ipaddress

__all__ = ["is_beyond_loopback", "is_protectable", "reached_from_here"]


def is_protectable(address: str) -> bool:
    """Whether a key can be asked for there. Over ipc none is: the folder's mode says who gets there."""
    return address.startswith("tcp://")


def is_beyond_loopback(address: str) -> bool:
    """Whether other machines may reach `tcp://HOST:PORT`. A name other than localhost may mean any of our interfaces."""
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
    """Where a process on this machine connects to reach who listens at `address`: all interfaces are no destination."""
    if is_protectable(address):
        host, port = _host(address), address.rpartition(":")[2]
        if host in ("*", "0.0.0.0"):
            return f"tcp://127.0.0.1:{port}"
        if host == "::":
            return f"tcp://[::1]:{port}"
    return address


def _host(address: str) -> str:
    return address.removeprefix("tcp://").rpartition(":")[0].strip("[]")
