"""A gateway process that speaks HTTP: one client of the server, and an HTTP server whose requests it forwards."""

from __future__ import annotations

import signal
import socket
import ssl
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace

import trio

from shapestream.addresses import is_beyond_loopback
from shapestream.client import trio_client
from shapestream.client.async_face import Client
from shapestream.gateway.options import ForwardingOptions, TextService, log_end, log_left
from shapestream.gateway.routes import Routes
from shapestream.serving.allocator import give_back_freed_memory
from shapestream.telemetry.logging import get_logger
from shapestream.transport.http_listener import place_of
from shapestream.web.ending import LEAVE, Asked, AskedToEnd
from shapestream.web.messages import HttpLimits
from shapestream.web.server import HttpServer, listeners_of
from shapestream.web.turns import LoopTurns

log = get_logger()

LOOK_S = 0.1
"""Seconds between two looks whether connections are left."""
IDLE_LOOK_S = 1.0
"""Seconds between two looks whether a request is here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayOptions(ForwardingOptions):
    """The options of a gateway that speaks HTTP."""

    tls: ssl.SSLContext | None = None
    limits: HttpLimits = field(default_factory=HttpLimits)
    services: Mapping[str, TextService] = field(default_factory=dict)
    """The models of texts for clients of OpenAI's, Cohere's and TEI's APIs."""


async def run_gateway(
    options: GatewayOptions,
    listener: socket.socket,
    *,
    ready: Callable[[], None],
    obeys_signals: Callable[[], None] = lambda: None,
) -> None:
    """Serve HTTP until SIGTERM or SIGINT; the second one ends it at once, and so does any before it serves.

    SIGTERM begins the lame duck, as LEAVE does where the server's process tells it when to leave. Then SIGTERM ends that.
    `ready` is called once requests are answered. Raises Unavailable if the server does not answer at first.
    """
    serving, asked, stopping, ended = trio.Event(), trio.Event(), trio.Event(), trio.Event()
    end = AskedToEnd(is_told=options.is_told)
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT, LEAVE) as signals:
        obeys_signals()
        async with trio.open_nursery() as nursery:

            async def obey() -> None:
                async for number in signals:
                    if not end.take(number):
                        continue
                    log_end(end.state, number)
                    if end.state is Asked.END_NOW or not serving.is_set():
                        nursery.cancel_scope.cancel()
                    asked.set()
                    if end.state is Asked.STOP:
                        stopping.set()

            nursery.start_soon(obey)
            async with _connected(options) as client:
                routes = _routes(options, client, listener)
                limits = replace(options.limits, max_connection_s=options.max_connection_s)
                server = HttpServer(routes.admit, limits, LoopTurns())

                async def serve(*, task_status: trio.TaskStatus[None]) -> None:
                    await server.run(listeners_of(listener, options.tls), task_status=task_status)
                    ended.set()
                    nursery.cancel_scope.cancel()

                await nursery.start(serve)
                nursery.start_soon(_give_back_memory, server)
                serving.set()
                ready()
                await asked.wait()
                if end.state is Asked.LEAVE:
                    routes.leaves = True
                    await _leave(options, server, stopping, end)
                server.stop(options.grace_s)
                await ended.wait()


def _routes(options: GatewayOptions, client: Client, listener: socket.socket) -> Routes:
    return Routes(
        client,
        tokens=options.tokens,
        by_loopback=not is_beyond_loopback(f"tcp://{place_of(listener)}"),
        default_priority_level=options.default_priority_level,
        services=options.services,
    )


async def _give_back_memory(server: HttpServer) -> None:
    """Return freed memory to the kernel while no request is here.

    It takes 0.1 ms, and 5 ms after many large bodies, in a thread: a request that comes meanwhile does not wait for it.
    """
    while True:
        await trio.sleep(IDLE_LOOK_S)
        if not server.held_bytes and not server.handled_requests:
            await trio.to_thread.run_sync(give_back_freed_memory)


async def _leave(options: GatewayOptions, server: HttpServer, stopping: trio.Event, end: AskedToEnd) -> None:
    """Take requests for the time of the lame duck. Each connection ends with its next answer."""
    server.leave()
    lame = options.lame_duck(trio.current_time())
    while not stopping.is_set() and not lame.is_over(trio.current_time(), server.empty_since):
        with trio.move_on_after(LOOK_S):
            await stopping.wait()
    if end.state is Asked.LEAVE:
        log_left()


def _connected(options: GatewayOptions) -> AbstractAsyncContextManager[Client]:
    return trio_client.connect(
        options.server,
        connect_timeout=options.connect_timeout_s,
        unavailable_after=options.unavailable_after_s,
        key=options.key,
        server_key=options.server_key,
    )
