"""`shapestream gateway`: one process that speaks HTTP, or gRPC, to clients of the Open Inference Protocol.

A gateway that a server started (`--supervised`) ends with that server, and accepts connections from a socket that it
inherits.
"""

from __future__ import annotations

import os
import socket
import ssl
from collections.abc import Callable
from typing import Any

import structlog
import trio
import typer

from shapestream.addresses import is_beyond_loopback
from shapestream.errors import ConfigurationError
from shapestream.gateway.options import text_service
from shapestream.settings.server_settings import LAME_DUCK_S
from shapestream.transport.guards import raise_descriptor_limit
from shapestream.transport.http_listener import listen_at, place_of, reserve_at
from shapestream.web.tokens import read_tokens
from shapestream_workers import EXIT_OK
from shapestream_workers.gateway_options import GatewayCommand
from shapestream_workers.gateways import BACKLOG, read_tls
from shapestream_workers.interruption import handed_over
from shapestream_workers.process import READY_LINE, keep_what_is_loaded

log = structlog.get_logger()


class GatewayProcess:
    """One gateway, as the command line wants it."""

    def __init__(self, options: GatewayCommand, channel: int | None) -> None:
        """`channel`: the descriptor for messages to the server that started it, if one did."""
        self._options = options
        self._channel = channel

    def run(self) -> int:
        """Speak HTTP, or gRPC, until told to stop, and return the exit status."""
        options = self._options
        if (options.certificate is None) != (options.certificate_key is None):
            raise typer.BadParameter("--certificate and --certificate-key belong together")
        if options.http is not None and options.grpc is not None:
            raise typer.BadParameter("a gateway speaks one of --http and --grpc: start two")
        if options.grpc is not None:
            self._run_grpc(options.grpc)
        else:
            self._run_http(options.http or "127.0.0.1:8000")
        return EXIT_OK

    def _run_http(self, address: str) -> None:
        from shapestream.gateway.gateway import GatewayOptions, run_gateway
        from shapestream.serving.allocator import return_large_buffers
        from shapestream.web.messages import HttpLimits

        return_large_buffers()
        asked = self._options
        try:
            services = {service.name: service for service in map(text_service, asked.texts or ())}
        except ValueError as error:
            raise typer.BadParameter(f"--texts: {error}") from None
        options = GatewayOptions(
            **self._forwarding(address),
            tls=self._tls_context(),
            limits=HttpLimits(max_body_bytes=asked.max_body),
            services=services,
        )
        if asked.listener is None:
            self._check_reach(address)
            listener = listen_at(address, backlog=BACKLOG)
        else:
            listener = socket.socket(fileno=asked.listener)
        raise_descriptor_limit()

        def ready() -> None:
            self._ready("http", place_of(listener))

        async def run(obeys_signals: Callable[[], None]) -> None:
            await run_gateway(options, listener, ready=ready, obeys_signals=obeys_signals)

        with handed_over() as obeys_signals:
            trio.run(run, obeys_signals)

    def _run_grpc(self, address: str) -> None:
        from shapestream.gateway.grpc_gateway import GrpcGatewayOptions, GrpcLimits, run_grpc_gateway

        asked = self._options
        self._check_reach(address)
        holder = None if asked.supervised else reserve_at(address)
        place = address if holder is None else place_of(holder)
        options = GrpcGatewayOptions(
            **self._forwarding(address),
            address=place,
            tls=self._tls_files(),
            limits=GrpcLimits(max_message_bytes=asked.max_body, max_calls=asked.max_calls),
        )
        raise_descriptor_limit()

        def ready() -> None:
            self._ready("grpc", place)

        try:
            with handed_over() as obeys_signals:
                run_grpc_gateway(options, ready=ready, obeys_signals=obeys_signals)
        finally:
            if holder is not None:
                holder.close()

    def _forwarding(self, address: str) -> dict[str, Any]:
        """Return the arguments of `ForwardingOptions` for a gateway at HOST:PORT.

        Raises `ConfigurationError` for a file that cannot be used.
        """
        asked, lame_duck_s = self._options, self._options.lame_duck
        if lame_duck_s is None:
            lame_duck_s = LAME_DUCK_S if is_beyond_loopback(f"tcp://{address}") else 0.0
        return {
            "server": asked.address,
            "key": None if asked.key is None else str(asked.key),
            "server_key": asked.server_key,
            "tokens": None if asked.token_file is None else read_tokens(asked.token_file),
            "default_priority_level": asked.default_priority_level,
            "connect_timeout_s": asked.timeout,
            "grace_s": asked.grace,
            "lame_duck_s": lame_duck_s,
            "is_told": asked.supervised,
            "max_connection_s": asked.max_connection,
            **({"unavailable_after_s": 1.0} if asked.supervised else {}),
        }

    def _check_reach(self, address: str) -> None:
        """Raise `ConfigurationError` for an address that other machines reach, without tokens or a safe network.

        The server has checked the address of a gateway that it starts.
        """
        asked = self._options
        if asked.supervised or asked.opened or asked.token_file is not None:
            return
        if is_beyond_loopback(f"tcp://{address}"):
            advice = "add --token-file FILE, or --open where the network keeps strangers away"
            raise ConfigurationError([f'"{address}" is open to other machines ({advice})'])

    def _tls_context(self) -> ssl.SSLContext | None:
        """Return a context for TLS, or None. Raises `ConfigurationError` for files that cannot be used."""
        certificate, key = self._options.certificate, self._options.certificate_key
        if certificate is None or key is None:
            return None
        return read_tls(certificate, key)[0]

    def _tls_files(self) -> tuple[bytes, bytes] | None:
        """Return the secret key and the certificate, or None. Raises `ConfigurationError` where they do not match."""
        certificate, key = self._options.certificate, self._options.certificate_key
        if certificate is None or key is None:
            return None
        return read_tls(certificate, key)[1:]

    def _ready(self, kind: str, address: str) -> None:
        """Say that requests are answered from now on: in the log, and to the server."""
        scheme = kind if self._options.certificate is None else f"{kind}s"
        log.info("gateway ready", address=f"{scheme}://{address}", server=self._options.address)
        keep_what_is_loaded()
        if self._channel is not None:
            os.write(self._channel, READY_LINE)
