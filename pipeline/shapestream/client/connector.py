"""Connections to the addresses that the caller names, one after another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import TypeAlias

from shapestream.addresses import check_destination, is_protectable, missing_socket
from shapestream.errors import ConfigurationError
from shapestream.transport.interface import Connection

Address: TypeAlias = str | Callable[[], Connection]
"""`ipc://…` or `tcp://…`; or a function that makes a connection, such as a memory endpoint's `connect`."""
Addresses: TypeAlias = Address | Sequence[Address]
"""One, or those of several servers that serve the same models, in the order in which they are tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Connector:
    """The way to a server: a name for messages, and a function that makes the next connection."""

    name: str
    open: Callable[[], Connection]
    refusal: Callable[[], str | None] = lambda: None
    """The reason why the last connection was not let in; None if it was, or no server is there."""
    broke: Callable[[], bool] = lambda: False
    """Tells whether the last connection has ended since it was made. A transport may heal it by itself."""
    others: int = 0
    """Servers besides the one of the last connection; the next connection is to one of these."""


def connector_for(
    address: Addresses, *, key: str | Path | None = None, server_key: str | Path | None = None
) -> Connector:
    """Return the connector for `address`; raises `TransportError` for an address that no client can connect to.

    `key` is the file of our secret key, `server_key` the server's public key or its file: for a server that asks for
    keys, both. Raises `ConfigurationError` for files that cannot be used, and for one without the other, and ValueError
    where there is no address.
    """
    if isinstance(address, str) or not isinstance(address, Sequence):
        return _connector_for(address, key, server_key)
    if not address:
        raise ValueError("no address: write at least one, such as tcp://HOST:PORT")
    connectors = [_connector_for(each, key, server_key) for each in address]
    turns = _InTurns(connectors)
    return Connector(
        name=" or ".join([connector.name for connector in connectors]),
        open=turns.open,
        refusal=turns.refusal,
        broke=turns.broke,
        others=len(connectors) - 1,
    )


class _InTurns:
    """Connectors of which each makes one connection; after the last comes the first."""

    def __init__(self, connectors: Sequence[Connector]) -> None:
        self._turns = cycle(connectors)
        self._latest = connectors[0]

    def open(self) -> Connection:
        self._latest = next(self._turns)
        return self._latest.open()

    def refusal(self) -> str | None:
        return self._latest.refusal()

    def broke(self) -> bool:
        return self._latest.broke()


def _connector_for(address: Address, key: str | Path | None, server_key: str | Path | None) -> Connector:
    if (key is None) != (server_key is None):
        raise ConfigurationError(
            ["key and server_key go together (a protected server needs both, others neither)"]
        )
    if key is not None and not (isinstance(address, str) and is_protectable(address)):
        raise ConfigurationError([f"{address}: keys are for tcp (over ipc, leave key and server_key out)"])
    if not isinstance(address, str):
        if not callable(address):
            raise TypeError(f"an address is a str, such as tcp://HOST:PORT or ipc://PATH, not {address!r}")
        return Connector(name="memory", open=address)
    check_destination(address)
    # Only here: a client over memory endpoints loads no libzmq.
    from shapestream.transport.curve import CallerKeys, ProtectedDealer
    from shapestream.transport.curve_keys import public_key, read_key_pair
    from shapestream.transport.dealer import DealerSocket

    keys: CallerKeys | None = None
    if key is not None:
        keys = CallerKeys(key=read_key_pair(Path(key)), server_key=public_key(str(server_key)))
    latest: DealerSocket | None = None

    def open_socket() -> Connection:
        nonlocal latest
        socket = latest = DealerSocket() if keys is None else ProtectedDealer(keys)
        try:
            socket.connect(address)
        except Exception:
            socket.close()
            raise
        return socket

    def refusal() -> str | None:
        return (None if latest is None else latest.refusal) or missing_socket(address)

    def broke() -> bool:
        return latest is not None and latest.broke

    return Connector(name=address, open=open_socket, refusal=refusal, broke=broke)
