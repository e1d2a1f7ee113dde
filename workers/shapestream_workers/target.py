"""The server that a command asks, named by its address or by its YAML file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shapestream.addresses import is_protectable, reached_from_here
from shapestream.errors import ConfigurationError
from shapestream.settings import load_settings

if TYPE_CHECKING:
    from shapestream import blocking

Key = Annotated[
    Path | None,
    typer.Option(metavar="FILE", envvar="SHAPESTREAM_KEY", help="Your secret key, for a server with keys."),
]
ServerKey = Annotated[
    str | None,
    typer.Option(
        metavar="KEY|FILE", envvar="SHAPESTREAM_SERVER_KEY", help="The server's public key, or its file."
    ),
]
Timeout = Annotated[float, typer.Option(min=0.0, metavar="SECONDS", help="Time to find the server.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerAccess:
    """The address of a server, and the options of a connection to it."""

    address: str
    timeout_s: float
    """Seconds that the server may take to answer for the first time."""
    key: Path | None
    """File of our secret key; None for a transport that takes no keys."""
    server_key: str | None

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments of `connect`, in each of its three forms."""
        return {"connect_timeout": self.timeout_s, "key": self.key, "server_key": self.server_key}

    def connect(self) -> blocking.Client:
        """Connect without async code. Raises the errors of `blocking.connect`."""
        from shapestream import blocking  # takes long to import

        return blocking.connect(self.address, **self.options)


def server_access(
    target: str | Path, timeout_s: float, key: Path | None, server_key: str | None
) -> ServerAccess:
    """Return the server that a command line names, with the keys to show there: none where the transport takes none.

    Raises `ConfigurationError` for a YAML that names no address.
    """
    address = address_of(target)
    if not is_protectable(address):
        key = server_key = None
    return ServerAccess(address=address, timeout_s=timeout_s, key=key, server_key=server_key)


def address_of(target: str | Path) -> str:
    """Return the address itself, or where the server of this YAML listens. Raises `ConfigurationError`."""
    if "://" in str(target):
        return str(target)
    loaded = load_settings(target, files_must_exist=False)
    for address in loaded.settings.server.listen:
        if not address.endswith((":*", ":0")):
            return reached_from_here(address)
    message = "the server chooses every port when it starts (name the address in its log)"
    raise ConfigurationError([loaded.problem(("server", "listen"), message)])
