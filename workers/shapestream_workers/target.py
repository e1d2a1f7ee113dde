"""The server that a command asks: by its address, or by the YAML that it serves."""

from __future__ import annotations

from pathlib import Path

from shapestream.addresses import reached_from_here
from shapestream.errors import ConfigurationError
from shapestream.settings import load_settings


def address_of(target: str | Path) -> str:
    """The address itself, or where the server of this YAML listens; raises `ConfigurationError`."""
    if "://" in str(target):
        return str(target)
    loaded = load_settings(target, files_must_exist=False)
    for address in loaded.settings.server.listen:
        if not address.endswith((":*", ":0")):
            return reached_from_here(address)
    message = "every port is chosen when the server starts (name the address that it logged)"
    raise ConfigurationError([loaded.problem(("server", "listen"), message)])
