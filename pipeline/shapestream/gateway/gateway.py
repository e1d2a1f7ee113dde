"""The gateway: one client of a server, and the HTTP server in front of it, in one event loop."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any

import structlog
import trio

import shapestream
from shapestream.client.connector import Addresses
from shapestream.gateway.http_limits import HttpLimits
from shapestream.gateway.http_server import HttpListener, HttpServer, open_listeners
from shapestream.gateway.infer_options import DEFAULT_PRIORITY_LEVEL
from shapestream.gateway.routes import Routes

log = structlog.get_logger()


async def serve_gateway(
    server: Addresses,
    http: str,
    *,
    access: Mapping[str, Any] | None = None,
    limits: HttpLimits | None = None,
    default_priority_level: int = DEFAULT_PRIORITY_LEVEL,
    task_status: trio.TaskStatus[tuple[str, ...]] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve the Open Inference Protocol at `http` until cancelled, or until SIGTERM or SIGINT in the main thread.

    After the first signal no connection is accepted, and requests that have begun are answered. The second one ends them.

    Arguments:
        server: the address of the server, or several, as `shapestream.connect` takes them.
        http: `HOST:PORT`. Port 0 lets the system choose one.
        access: further arguments of `shapestream.connect`.
        limits: of connections and requests.
        default_priority_level: the level of requests that state no priority; 1 is the highest.
        task_status: is told the addresses of the port.

    Raises:
        ConfigurationError: the port, or a key, cannot be used.
        Unavailable: no server answers in time.
    """
    # The port is tried first, since a server may take long to answer.
    listeners = await open_listeners(http)
    async with AsyncExitStack() as stack:
        for listener in listeners:
            stack.push_async_callback(trio.aclose_forcefully, listener)
        client = await stack.enter_async_context(shapestream.connect(server, **(access or {})))
        routes = Routes(client, default_priority_level=default_priority_level)
        http_server = HttpServer(routes.handle, limits)
        addresses = tuple(map(_address, listeners))
        async with trio.open_nursery() as watching:
            async with trio.open_nursery() as serving:
                await serving.start(http_server.run, listeners)
                await watching.start(_stop_at_signals, http_server, serving.cancel_scope)
                log.info("gateway ready", http=addresses, server=server)
                task_status.started(addresses)
            watching.cancel_scope.cancel()
    log.info("gateway ended")


async def _stop_at_signals(
    http_server: HttpServer, scope: trio.CancelScope, *, task_status: trio.TaskStatus[None]
) -> None:
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        task_status.started()
        await anext(signals)
        log.info("gateway stops", open_connections=http_server.open_connections)
        http_server.stop()
        await anext(signals)
        scope.cancel()


def _address(listener: HttpListener) -> str:
    plain = listener.transport_listener if isinstance(listener, trio.SSLListener) else listener
    assert isinstance(plain, trio.SocketListener)  # what `open_listeners` makes
    host, port = plain.socket.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
