"""`shapestream gateway`: one process that speaks HTTP, or gRPC, to clients of the Open Inference Protocol.

A gateway that a server started (`--supervised`) ends with that server, and accepts connections from a socket that it
inherits.
"""

from __future__ import annotations

import os
import socket
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog
import trio

from shapestream.addresses import is_beyond_loopback
from shapestream.errors import ConfigurationError
from shapestream.gateway.options import TextService
from shapestream.settings.server_settings import LAME_DUCK_S
from shapestream.transport.guards import raise_descriptor_limit
from shapestream.transport.http_listener import listen_at, place_of, reserve_at
from shapestream.web.tokens import read_tokens
from shapestream_workers import EXIT_OK
from shapestream_workers.gateways import BACKLOG, read_tls
from shapestream_workers.interruption import handed_over
from shapestream_workers.process import READY_LINE, keep_what_is_loaded

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayRequest:
    """The options of the command, for both kinds of gateways."""

    server: str
    token_file: Path | None
    certificate: Path | None
    certificate_key: Path | None
    default_priority_level: int
    key: Path | None
    server_key: str | None
    timeout_s: float
    grace_s: float
    """Seconds that requests have to end."""
    lame_duck_s: float | None
    """Seconds for which requests are taken before that. None: the default of `server.lame_duck_s`."""
    max_connection_s: float
    """Age of a connection from which it ends with its next answer."""
    is_open: bool
    """The network keeps strangers away."""
    supervised: bool
    """A server started it. It ends with its server: nobody waits for another one."""
    ready_channel: int | None

    def forwarding(self, address: str) -> dict[str, Any]:
        """Return the arguments of `ForwardingOptions` for a gateway at HOST:PORT.

        Raises `ConfigurationError` for a file that cannot be used.
        """
        return {
            "server": self.server,
            "key": None if self.key is None else str(self.key),
            "server_key": self.server_key,
            "tokens": None if self.token_file is None else read_tokens(self.token_file),
            "default_priority_level": self.default_priority_level,
            "connect_timeout_s": self.timeout_s,
            "grace_s": self.grace_s,
            "lame_duck_s": self._lame_duck_s(address),
            "is_told": self.supervised,
            "max_connection_s": self.max_connection_s,
            **({"unavailable_after_s": 1.0} if self.supervised else {}),
        }

    def _lame_duck_s(self, address: str) -> float:
        if self.lame_duck_s is not None:
            return self.lame_duck_s
        return LAME_DUCK_S if is_beyond_loopback(f"tcp://{address}") else 0.0

    def check_reach(self, address: str) -> None:
        """Raise `ConfigurationError` for an address that other machines reach, without tokens or a safe network.

        The server has checked the address of a gateway that it starts.
        """
        if self.supervised or self.is_open or self.token_file is not None:
            return
        if is_beyond_loopback(f"tcp://{address}"):
            advice = "add --token-file FILE, or --open where the network keeps strangers away"
            raise ConfigurationError([f'"{address}" is open to other machines ({advice})'])

    def tls_context(self) -> ssl.SSLContext | None:
        """Return a context for TLS, or None. Raises `ConfigurationError` for files that cannot be used."""
        if self.certificate is None or self.certificate_key is None:
            return None
        return read_tls(self.certificate, self.certificate_key)[0]

    def tls_files(self) -> tuple[bytes, bytes] | None:
        """Return the secret key and the certificate, or None. Raises `ConfigurationError` where they do not match."""
        if self.certificate is None or self.certificate_key is None:
            return None
        return read_tls(self.certificate, self.certificate_key)[1:]

    def ready(self, kind: str, address: str) -> None:
        """Say that requests are answered from now on: in the log, and to the server."""
        scheme = kind if self.certificate is None else f"{kind}s"
        log.info("gateway ready", address=f"{scheme}://{address}", server=self.server)
        keep_what_is_loaded()
        if self.ready_channel is not None:
            os.write(self.ready_channel, READY_LINE)


def run_http(
    request: GatewayRequest,
    address: str,
    *,
    inherited: int | None,
    max_body: int,
    services: Mapping[str, TextService],
) -> int:
    """Speak HTTP until told to stop, and return the exit status. `inherited`: the number of a socket that listens."""
    from shapestream.gateway.gateway import GatewayOptions, run_gateway
    from shapestream.web.messages import HttpLimits

    options = GatewayOptions(
        **request.forwarding(address),
        tls=request.tls_context(),
        limits=HttpLimits(max_body_bytes=max_body),
        services=services,
    )
    if inherited is None:
        request.check_reach(address)
        listener = listen_at(address, backlog=BACKLOG)
    else:
        listener = socket.socket(fileno=inherited)
    raise_descriptor_limit()

    def ready() -> None:
        request.ready("http", place_of(listener))

    async def run(obeys_signals: Callable[[], None]) -> None:
        await run_gateway(options, listener, ready=ready, obeys_signals=obeys_signals)

    with handed_over() as obeys_signals:
        trio.run(run, obeys_signals)
    return EXIT_OK


def run_grpc(request: GatewayRequest, address: str, *, max_message: int, max_calls: int) -> int:
    """Speak gRPC until told to stop, and return the exit status."""
    from shapestream.gateway.grpc_gateway import GrpcGatewayOptions, GrpcLimits, run_grpc_gateway

    request.check_reach(address)
    holder = None if request.supervised else reserve_at(address)
    place = address if holder is None else place_of(holder)
    options = GrpcGatewayOptions(
        **request.forwarding(address),
        address=place,
        tls=request.tls_files(),
        limits=GrpcLimits(max_message_bytes=max_message, max_calls=max_calls),
    )
    raise_descriptor_limit()

    def ready() -> None:
        request.ready("grpc", place)

    try:
        with handed_over() as obeys_signals:
            run_grpc_gateway(options, ready=ready, obeys_signals=obeys_signals)
    finally:
        if holder is not None:
            holder.close()
    return EXIT_OK
