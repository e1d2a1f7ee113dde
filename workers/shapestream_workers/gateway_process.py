"""`shapestream gateway`: a process that serves HTTP clients for a server."""

from __future__ import annotations

from functools import partial

import trio

from shapestream.errors import ConfigurationError
from shapestream_workers.process import keep_what_is_loaded
from shapestream_workers.target import ServerAccess


def run_gateway(access: ServerAccess, http: str, *, max_body_bytes: int, default_priority_level: int) -> None:
    """Serve until SIGTERM or SIGINT. Raises `ConfigurationError` where the extra [http] is missing."""
    try:
        from shapestream.gateway.gateway import serve_gateway
        from shapestream.gateway.http_limits import HttpLimits
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            [f"the gateway needs {error.name} (pip install 'shapestream[http]')"]
        ) from error
    keep_what_is_loaded()
    trio.run(
        partial(
            serve_gateway,
            access.address,
            http,
            access=access.options,
            limits=HttpLimits(max_body_bytes=max_body_bytes),
            default_priority_level=default_priority_level,
        )
    )
