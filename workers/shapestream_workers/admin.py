"""The admin port of a process, if the configuration or an option asks for one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog
from pydantic import ValidationError

from shapestream.errors import ConfigurationError
from shapestream.settings import AdminSettings, LoadedSettings

if TYPE_CHECKING:
    from shapestream.serving.admin import AdminPort

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
