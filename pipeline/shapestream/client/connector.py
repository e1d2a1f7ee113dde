"""Connections to the addresses that the caller names, one after another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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


class Connector:
    """The way to servers of the same models: each connection is to the next address, and after the last to the first."""

    def __init__(self, dials: Sequence[tuple[str, Callable[[], Connection]]]) -> None:
        """Make the connector of these addresses, each with the function that makes a connection."""
        self.name = " or ".join([address for address, _ in dials])
        """The addresses, for messages."""
        self.others = len(dials) - 1
        """Servers besides the one of the last connection; the next connection is to one of these."""
        self.place = 0
        """The place of the last connection's address among them."""
        self._turns = cycle(enumerate(dials))
        self._address = ""
        self._latest: Connection | None = None

    def open(self) -> Connection:
        """Make the next connection."""
        self.place, (self._address, dial) = next(self._turns)
        self._latest = None
        self._latest = dial()
        return self._latest

    def refusal(self) -> str | None:
        """Return the reason why the last connection was not let in; None if it was, or no server is there."""
        return (None if self._latest is None else self._latest.refusal) or missing_socket(self._address)

    def broke(self) -> bool:
        """Tell whether the last connection has ended since it was made. A transport may heal it by itself."""
        return self._latest is not None and self._latest.broke


def connector_for(
    address: Addresses, *, key: str | Path | None = None, server_key: str | Path | None = None
) -> Connector:
    """Return the connector for `address`; raises `TransportError` for an address that no client can connect to.

    `key` is the file of our secret key, `server_key` the server's public key or its file: for a server that asks for
    keys, both. Raises `ConfigurationError` for files that cannot be used, and for one without the other, and ValueError
    where there is no address.
    """
    addresses = [address] if isinstance(address, str) or not isinstance(address, Sequence) else address
    if not addresses:
        raise ValueError("no address: write at least one, such as tcp://HOST:PORT")
    return Connector(
        [
            (each if isinstance(each, str) else "memory", _dial_for(each, key, server_key))
            for each in addresses
        ]
    )


def _dial_for(
    address: Address, key: str | Path | None, server_key: str | Path | None
) -> Callable[[], Connection]:
    if (key is None) != (server_key is None):
        missing = "key" if key is None else "server_key"
        raise ConfigurationError(
            [f"{missing} is missing (a server that asks for keys needs key and server_key, others neither)"]
        )
    if key is not None and not (isinstance(address, str) and is_protectable(address)):
        raise ConfigurationError([f"{address}: keys are for tcp (over ipc, leave key and server_key out)"])
    if not isinstance(address, str):
        if not callable(address):
            raise TypeError(f"an address is a str, such as tcp://HOST:PORT or ipc://PATH, not {address!r}")
        return address
    check_destination(address)
    # Only here: a client over memory endpoints loads no libzmq.
    from shapestream.transport.curve_keys import CallerKeys, public_key, read_key_pair
    from shapestream.transport.zeromq import DealerSocket

    keys: CallerKeys | None = None
    if key is not None:
        keys = CallerKeys(key=read_key_pair(Path(key)), server_key=public_key(str(server_key)))

    def dial() -> Connection:
        socket = DealerSocket(keys=keys)
        try:
            socket.connect(address)
        except Exception:
            socket.close()
            raise
        return socket

    return dial
