"""From what the caller names to connections, one after another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from shapestream.transport.interface import Connection

__all__ = ["Address", "Connector", "connector_for"]

Address: TypeAlias = str | Callable[[], Connection]
"""`ipc://…` or `tcp://…`; or what makes a connection, such as a memory endpoint's `connect`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Connector:
    """How to reach the server: a name for messages to humans, and how to make the (next) connection."""

    name: str
    open: Callable[[], Connection]


def connector_for(address: Address) -> Connector:
    """How to reach `address`. Whether it can be reached, or is an address at all, shows when it is opened."""
    if not isinstance(address, str):
        return Connector(name="memory", open=address)
    # Only here: a client over memory endpoints loads no libzmq.
    from shapestream.transport.zeromq import DealerSocket

    def open_socket() -> Connection:
        socket = DealerSocket()
        try:
            socket.connect(address)
        except Exception:
            socket.close()
            raise
        return socket

    return Connector(name=address, open=open_socket)
