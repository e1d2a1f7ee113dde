"""What a configuration says of access: the keys of `server.security`, and the admin port.

`serve` and `check` read the keys before a port is open.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog
from pydantic import ValidationError

from shapestream.errors import ConfigurationError
from shapestream.settings import AdminSettings, LoadedSettings

if TYPE_CHECKING:
    from shapestream.serving.admin import AdminPort


from collections.abc import Sequence
from pathlib import Path

from shapestream.transport.curve import KeyRing, ServerSecurity
from shapestream.transport.curve_keys import CallerKeys, public_key, read_key_folder, read_key_pair

log = structlog.get_logger()


def worker_admin(loaded: LoadedSettings, address: str) -> AdminSettings:
    """Return settings of a worker's port at `address`, HOST:PORT; the token is that of the server's port.

    Raises `ConfigurationError` as the YAML's loader does.
    """
    server = loaded.settings.server
    token_file = None if server.admin is None else server.admin.token_file
    try:
        settings = AdminSettings(address=address, token_file=token_file)
    except ValidationError as error:
        raise ConfigurationError([f"--admin: {detail['msg']}" for detail in error.errors()]) from error
    if (words := settings.is_open(network_is_safe=server.network_is_safe)) is not None:
        raise ConfigurationError([f"--admin: {words}"])
    return settings


def open_admin_port(loaded: LoadedSettings, settings: AdminSettings | None) -> AdminPort | None:
    """Return the port, which listens; None where none is asked for, and where its libraries are missing.

    Raises `ConfigurationError` where it cannot listen.
    """
    if settings is None:
        return None
    try:
        from shapestream.serving.admin import AdminPort
    except ModuleNotFoundError as error:
        log.warning("no admin port", why=str(error), advice="pip install 'shapestream[admin]'")
        return None
    try:
        return AdminPort(settings)
    except ConfigurationError as error:
        problems = [loaded.problem(("server", "admin"), text) for text in error.problems]
        raise ConfigurationError(problems) from error


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
