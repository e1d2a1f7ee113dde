"""A gateway process: one client of the server, and an HTTP server whose requests it forwards."""

from __future__ import annotations

import signal
import socket
import ssl
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field

import structlog
import trio

from shapestream.addresses import is_beyond_loopback
from shapestream.client import trio_client
from shapestream.client.async_face import Client
from shapestream.gateway.http_limits import HttpLimits
from shapestream.gateway.http_server import HttpServer, listeners_of
from shapestream.gateway.infer_options import DEFAULT_PRIORITY_LEVEL
from shapestream.gateway.routes import Routes
from shapestream.gateway.tokens import Tokens
from shapestream.transport.http_listener import place_of

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayOptions:
    """How a gateway reaches its server, and what it asks of its callers."""

    server: str
    """The server's address, `tcp://…` or `ipc://…`."""
    key: str | None = None
    server_key: str | None = None
    tokens: Tokens | None = None
    tls: ssl.SSLContext | None = None
    default_priority_level: int = DEFAULT_PRIORITY_LEVEL
    limits: HttpLimits = field(default_factory=HttpLimits)
    connect_timeout_s: float = 60.0
    """Seconds that the server may take to answer at first."""
    unavailable_after_s: float = 10.0
    """Seconds without a server, or with one that takes nothing new, after which requests are answered 503."""
    grace_s: float = 30.0
    """Seconds from SIGTERM, after which requests without an answer are answered 503."""


async def run_gateway(
    options: GatewayOptions,
    listener: socket.socket,
    *,
    ready: Callable[[], None],
    obeys_signals: Callable[[], None] = lambda: None,
) -> None:
    """Serve HTTP until SIGTERM or SIGINT; the second one ends it at once. `ready` is called once requests are answered.

    Raises Unavailable if the server does not answer at first.
    """
    # The HTTP server outlives the client: requests that end with it are still answered.
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        obeys_signals()
        async with trio.open_nursery() as nursery, _connected(options) as client:
            routes = Routes(
                client,
                tokens=options.tokens,
                by_loopback=not is_beyond_loopback(f"tcp://{place_of(listener)}"),
                default_priority_level=options.default_priority_level,
            )
            server, stopping, ended = HttpServer(routes.handle, options.limits), trio.Event(), trio.Event()

            async def serve(*, task_status: trio.TaskStatus[None]) -> None:
                await server.run(listeners_of(listener, options.tls), task_status=task_status)
                ended.set()
                nursery.cancel_scope.cancel()

            async def obey() -> None:
                async for number in signals:
                    log.info("gateway stops", signal=signal.Signals(number).name)
                    if stopping.is_set():
                        nursery.cancel_scope.cancel()
                    stopping.set()

            nursery.start_soon(obey)
            await nursery.start(serve)
            ready()
            await stopping.wait()
            server.stop()
            with trio.move_on_after(options.grace_s):
                await ended.wait()


def _connected(options: GatewayOptions) -> AbstractAsyncContextManager[Client]:
    return trio_client.connect(
        options.server,
        connect_timeout=options.connect_timeout_s,
        unavailable_after=options.unavailable_after_s,
        key=options.key,
        server_key=options.server_key,
    )
