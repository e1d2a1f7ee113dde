"""The keys that `server.security` of a YAML names. `serve` and `check` read them before a port is open."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from shapestream.errors import ConfigurationError
from shapestream.settings import LoadedSettings
from shapestream.transport.curve import CallerKeys, KeyRing, ServerSecurity
from shapestream.transport.curve_keys import public_key, read_key_folder, read_key_pair


def server_security(loaded: LoadedSettings) -> ServerSecurity | None:
    """Return the server's key and the keys that it lets in; None where no key is asked for.

    Raises `ConfigurationError` with every file that cannot be used.
    """
    settings = loaded.settings.server.security
    if settings is None or settings.mode == "network" or settings.key is None:
        return None
    problems: list[str] = []

    def listed(role: str, given: str | Sequence[str]) -> dict[str, str]:
        try:
            if isinstance(given, str):
                return read_key_folder(Path(given))
            return {public_key(key): key for key in given}
        except ConfigurationError as error:
            problems.extend(loaded.problem(("server", "security", role), text) for text in error.problems)
            return {}

    ring = KeyRing(
        clients=listed("clients", settings.clients),
        admins=listed("admins", settings.admins),
        gateways=listed("gateways", settings.gateways),
        workers=listed("workers", settings.workers),
    )
    try:
        pair = read_key_pair(Path(settings.key))
    except ConfigurationError as error:
        problems.extend(loaded.problem(("server", "security", "key"), text) for text in error.problems)
    if problems:
        raise ConfigurationError(problems)
    return ServerSecurity(key=pair, ring=ring)


def caller_keys(key: Path | None, server_key: str | None) -> CallerKeys | None:
    """Return the keys that `--key` and `--server-key` name; None without both. Raises `ConfigurationError` for only one."""
    if key is None and server_key is None:
        return None
    if key is None or server_key is None:
        missing, given = ("--key", "--server-key") if key is None else ("--server-key", "--key")
        raise ConfigurationError(
            [f"{given} without {missing} (a server with keys needs both, others need neither)"]
        )
    return CallerKeys(key=read_key_pair(key), server_key=public_key(server_key))
