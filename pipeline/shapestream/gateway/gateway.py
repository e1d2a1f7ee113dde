"""A gateway process that speaks HTTP: one client of the server, and an HTTP server whose requests it forwards."""

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
from shapestream.gateway.options import ForwardingOptions, TextServices
from shapestream.gateway.routes import Routes
from shapestream.transport.http_listener import place_of
from shapestream.web.messages import HttpLimits
from shapestream.web.server import HttpServer, listeners_of

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayOptions(ForwardingOptions):
    """The options of a gateway that speaks HTTP."""

    tls: ssl.SSLContext | None = None
    limits: HttpLimits = field(default_factory=HttpLimits)
    services: TextServices = field(default_factory=TextServices)
    """The models that embed texts for clients of OpenAI's and TEI's APIs."""


async def run_gateway(
    options: GatewayOptions,
    listener: socket.socket,
    *,
    ready: Callable[[], None],
    obeys_signals: Callable[[], None] = lambda: None,
) -> None:
    """Serve HTTP until SIGTERM or SIGINT; the second one ends it at once, and so does any before it serves.

    `ready` is called once requests are answered. Raises Unavailable if the server does not answer at first.
    """
    serving, stopping, ended = trio.Event(), trio.Event(), trio.Event()
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        obeys_signals()
        async with trio.open_nursery() as nursery:

            async def obey() -> None:
                async for number in signals:
                    log.info("gateway stops", signal=signal.Signals(number).name)
                    if stopping.is_set() or not serving.is_set():
                        nursery.cancel_scope.cancel()
                    stopping.set()

            nursery.start_soon(obey)
            async with _connected(options) as client:
                routes = Routes(
                    client,
                    tokens=options.tokens,
                    by_loopback=not is_beyond_loopback(f"tcp://{place_of(listener)}"),
                    default_priority_level=options.default_priority_level,
                    services=options.services,
                )
                server = HttpServer(routes.admit, options.limits)

                async def serve(*, task_status: trio.TaskStatus[None]) -> None:
                    await server.run(listeners_of(listener, options.tls), task_status=task_status)
                    ended.set()
                    nursery.cancel_scope.cancel()

                await nursery.start(serve)
                serving.set()
                ready()
                await stopping.wait()
                server.stop(options.grace_s)
                await ended.wait()


def _connected(options: GatewayOptions) -> AbstractAsyncContextManager[Client]:
    return trio_client.connect(
        options.server,
        connect_timeout=options.connect_timeout_s,
        unavailable_after=options.unavailable_after_s,
        key=options.key,
        server_key=options.server_key,
    )
