"""`shapestream gateway`: one process that speaks HTTP to clients of the Open Inference Protocol, for a server elsewhere.

A gateway that a server started (`--supervised`) ends with that server, and accepts connections from a socket that it
inherits.
"""

from __future__ import annotations

import os
import socket
import ssl
from collections.abc import Callable
from pathlib import Path

import structlog
import trio

from shapestream.addresses import is_beyond_loopback
from shapestream.errors import ConfigurationError
from shapestream.gateway.gateway import GatewayOptions, run_gateway
from shapestream.gateway.http_limits import HttpLimits
from shapestream.gateway.tokens import read_tokens
from shapestream.transport.guards import raise_descriptor_limit
from shapestream.transport.http_listener import listen_at, place_of
from shapestream_workers.exit_codes import EXIT_OK
from shapestream_workers.gateways import BACKLOG
from shapestream_workers.interruption import handed_over
from shapestream_workers.process import READY_LINE, keep_what_is_loaded

log = structlog.get_logger()


def tls_context(certificate: Path, key: Path) -> ssl.SSLContext:
    """Return a context for HTTPS. Raises `ConfigurationError` for files that cannot be used."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigurationError([f"{certificate}, {key}: {error}"]) from error
    return context


def gateway_options(
    address: str,
    *,
    max_body: int,
    token_file: Path | None,
    certificate: Path | None,
    certificate_key: Path | None,
    default_priority_level: int,
    key: Path | None,
    server_key: str | None,
    timeout_s: float,
    supervised: bool,
) -> GatewayOptions:
    """Return the options of a gateway. Raises `ConfigurationError` for files that cannot be used.

    A supervised one ends with its server: nobody waits for another server.
    """
    waits = {"unavailable_after_s": 1.0, "grace_s": 1.0} if supervised else {}
    return GatewayOptions(
        server=address,
        key=None if key is None else str(key),
        server_key=server_key,
        tokens=None if token_file is None else read_tokens(token_file),
        tls=None
        if certificate is None or certificate_key is None
        else tls_context(certificate, certificate_key),
        default_priority_level=default_priority_level,
        limits=HttpLimits(max_body_bytes=max_body),
        connect_timeout_s=timeout_s,
        **waits,
    )


def listening_socket(address: str, inherited: int | None, *, may_be_reached: bool) -> socket.socket:
    """Return the socket that this process inherited, or one that listens at HOST:PORT.

    `may_be_reached`: callers show a token, or the network keeps strangers away. Raises `ConfigurationError` for an address
    that cannot be used, or that other machines reach without either.
    """
    if inherited is not None:  # the server has checked its address
        return socket.socket(fileno=inherited)
    if not may_be_reached and is_beyond_loopback(f"tcp://{address}"):
        advice = "add --token-file FILE, or --open where the network keeps strangers away"
        raise ConfigurationError([f'"{address}" is open to other machines ({advice})'])
    return listen_at(address, backlog=BACKLOG)


def run_gateway_process(options: GatewayOptions, listener: socket.socket, ready_channel: int | None) -> int:
    """Serve until told to stop, and return the exit status."""
    raise_descriptor_limit()
    scheme = "http" if options.tls is None else "https"

    def ready() -> None:
        log.info("gateway ready", address=f"{scheme}://{place_of(listener)}", server=options.server)
        keep_what_is_loaded()
        if ready_channel is not None:
            os.write(ready_channel, READY_LINE)

    with handed_over() as obeys_signals:
        trio.run(_run, options, listener, ready, obeys_signals)
    return EXIT_OK


async def _run(
    options: GatewayOptions,
    listener: socket.socket,
    ready: Callable[[], None],
    obeys_signals: Callable[[], None],
) -> None:
    await run_gateway(options, listener, ready=ready, obeys_signals=obeys_signals)
