"""A gateway process that speaks gRPC: one client of the server, and grpcio's server, whose calls it forwards.

    connections ─▶ gRPC's own threads (C++) ─▶ pool of threads ─▶ InferenceService ─▶ blocking client ─▶ its thread

Each call that runs has a thread of the pool, which waits for its message and its answer. `RunningCalls` lets calls in by
their callers, and refuses others at once by RESOURCE_EXHAUSTED; the pool has threads for both. A connection gets half of
`max_calls` at most; its client keeps further calls back.

gRPC opens its port itself, and takes no open socket. So all gateways of a server listen at the same port (SO_REUSEPORT), and
the kernel gives each of them a share of the connections.

A lame duck has two halves. In the first, all goes on, and balancers see that the server is not ready. In the second, a
second server of grpcio's has the port: the first one stops, which sends GOAWAY over its connections, and peers that come
back are served all the same. gRPC cancels calls that meet its GOAWAY, so that is not sent at once.
"""

from __future__ import annotations

import queue
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType

import grpc

from shapestream.client import blocking_client
from shapestream.errors import ConfigurationError
from shapestream.gateway.grpc_calls import RunningCalls
from shapestream.gateway.grpc_service import InferenceService, OpenStreams
from shapestream.gateway.options import ForwardingOptions, log_end, log_left
from shapestream.telemetry.logging import get_logger
from shapestream.transport.http_listener import connections_at
from shapestream.web.ending import LEAVE, Asked, AskedToEnd

log = get_logger()

ABORT_S = 1.0
"""Seconds for calls to end after they were cancelled."""
MOST_UNREFUSED = 1024
"""Calls that wait for a thread, mostly to be refused; gRPC itself refuses more. A thread takes some 0.1 ms for one."""
LOOK_S = 0.1
"""Seconds between two looks for signals, and for the end of the last call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GrpcLimits:
    """Limits of connections and calls."""

    max_message_bytes: int = 64 * 1024 * 1024
    """Bytes of a message from a client, before and after it is decompressed (RESOURCE_EXHAUSTED)."""
    max_calls: int = 128
    """Calls and streams at once (RESOURCE_EXHAUSTED), besides those that ask for no token. A caller may have as many as it
    leaves free. Each has a thread, and a stream has one more."""
    max_metadata_bytes: int = 64 * 1024
    """Bytes of a call's metadata (RESOURCE_EXHAUSTED), as of the head of an HTTP request."""
    idle_s: float = 600.0
    """Seconds without a call, after which a connection is closed. Clients open another one by themselves."""
    handshake_s: float = 15.0
    """Seconds that a connection has to begin, with TLS or without."""
    ping_s: float = 30.0
    """Seconds without a sign of a peer, after which it is asked for one. Without an answer in as many, it is gone."""
    least_ping_s: float = 5.0
    """Seconds between the pings of a peer, at least. gRPC's own limit of 5 minutes cuts off clients that keep alive."""

    def options(self, max_connection_s: float) -> list[tuple[str, int]]:
        """Return the options of gRPC's server. A connection of that age is told to go."""
        return [
            ("grpc.so_reuseport", 1),
            ("grpc.max_receive_message_length", self.max_message_bytes),
            ("grpc.max_send_message_length", -1),
            ("grpc.max_concurrent_streams", max(1, self.max_calls // 2)),
            # gRPC's own protection counts calls that have ended until their objects are freed. A client that kept to the
            # limit had every tenth call refused (REFUSED_STREAM). All calls together are bounded by `max_calls`.
            ("grpc.http.overload_protection", 0),
            ("grpc.max_metadata_size", self.max_metadata_bytes),
            ("grpc.absolute_max_metadata_size", self.max_metadata_bytes),
            ("grpc.max_connection_idle_ms", round(self.idle_s * 1000)),
            # gRPC itself takes a tenth more or less. Calls that run then are answered, however long they take.
            ("grpc.max_connection_age_ms", round(max_connection_s * 1000)),
            ("grpc.server_handshake_timeout_ms", round(self.handshake_s * 1000)),
            ("grpc.keepalive_time_ms", round(self.ping_s * 1000)),
            ("grpc.keepalive_timeout_ms", round(self.ping_s * 1000)),
            ("grpc.keepalive_permit_without_calls", 1),
            # gRPC's constant for this name has `min_recv_ping` in it, and the name has not. An unknown name is ignored.
            ("grpc.http2.min_ping_interval_without_data_ms", round(self.least_ping_s * 1000)),
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class GrpcGatewayOptions(ForwardingOptions):
    """The options of a gateway that speaks gRPC."""

    address: str
    """HOST:PORT, which other processes of this user may share."""
    tls: tuple[bytes, bytes] | None = None
    """The secret key and the certificate, in PEM."""
    limits: GrpcLimits = field(default_factory=GrpcLimits)


def run_grpc_gateway(
    options: GrpcGatewayOptions,
    *,
    ready: Callable[[], None],
    obeys_signals: Callable[[], None] = lambda: None,
) -> None:
    """Serve gRPC until SIGTERM or SIGINT; the second one ends it at once.

    SIGTERM begins the lame duck, as LEAVE does where the server's process tells it when to leave. Then SIGTERM ends that.
    `ready` is called once calls are answered. Call it in the main thread. Raises Unavailable if the server does not answer
    at first, and `ConfigurationError` for an address or a certificate that cannot be used.
    """
    with _signals(options) as signals:
        obeys_signals()
        client = blocking_client.connect(
            options.server,
            connect_timeout=options.connect_timeout_s,
            unavailable_after=options.unavailable_after_s,
            key=options.key,
            server_key=options.server_key,
        )
        with client:
            calls = RunningCalls(options.limits.max_calls, options.limits.max_message_bytes)
            service = InferenceService(
                client,
                calls,
                tokens=options.tokens,
                default_priority_level=options.default_priority_level,
            )
            server = _server(options, service)
            server.start()
            with calls.watched():
                signals.serves = True
                ready()
                servers = [server]
                signals.wait(until=client.has_ended)
                if signals.end.state is Asked.LEAVE:
                    servers += _leave(options, service, calls, server, signals)
                if signals.end.state is Asked.LEAVE:
                    log_left()
                # No new calls from here on; those that run are answered.
                grace_s = 0.0 if signals.end.state is Asked.END_NOW else options.grace_s
                ended = [each.stop(grace_s) for each in servers]
                service.streams.end()
                signals.wait(until=lambda: all(each.is_set() for each in ended))
                for each in servers:
                    each.stop(0).wait(ABORT_S)


def _leave(
    options: GrpcGatewayOptions,
    service: InferenceService,
    calls: RunningCalls,
    first: grpc.Server,
    signals: _Signals,
) -> list[grpc.Server]:
    """Take calls for the time of the lame duck. Return the server that has taken the place of the first one, if any."""
    service.leaves = True
    lame = options.lame_duck(time.monotonic())
    second: list[grpc.Server] = []
    # Of callers that connect for each call there may be none just now.
    empty_since: float | None = calls.last_begun_at

    def is_over() -> bool:
        nonlocal empty_since
        now = time.monotonic()
        if lame.seconds > 0:
            if connections_at(options.address) != 0:
                empty_since = None
            elif empty_since is None:
                empty_since = now
        return lame.is_over(now, empty_since)

    def sends_goaway() -> bool:
        return is_over() or (lame.seconds > 0 and time.monotonic() >= lame.goaway_at)

    if signals.wait(until=sends_goaway) or is_over():
        return second
    second.append(_server(options, service))
    second[0].start()
    first.stop(lame.seconds / 2 + options.grace_s)
    # The streams of the first server end. Those of the second are others.
    streams, service.streams = service.streams, OpenStreams(service)
    streams.end()
    signals.wait(until=is_over)
    return second


def _server(options: GrpcGatewayOptions, service: InferenceService) -> grpc.Server:
    limits = options.limits
    threads = RunningCalls.threads(limits.max_calls)
    server = grpc.server(
        ThreadPoolExecutor(threads, thread_name_prefix="call"),
        options=limits.options(options.max_connection_s),
        maximum_concurrent_rpcs=threads + MOST_UNREFUSED,
    )
    for name, calls in service.handlers().items():
        server.add_registered_method_handlers(name, calls)
    try:
        if options.tls is None:
            server.add_insecure_port(options.address)
        else:
            server.add_secure_port(options.address, grpc.ssl_server_credentials([options.tls]))
    except RuntimeError as error:  # the reason stands in gRPC's own log
        raise ConfigurationError([f'"{options.address}": {error}']) from error
    return server


class _Signals:
    """SIGTERM and SIGINT in the main thread: they interrupt what it does, until it `serves` and waits for them."""

    def __init__(self, *, is_told: bool) -> None:
        self.end = AskedToEnd(is_told=is_told)
        self.serves = False
        self._news: queue.SimpleQueue[int] = queue.SimpleQueue()

    def obey(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal."""
        if number == LEAVE and not self.serves:
            return
        if not self.serves:
            raise KeyboardInterrupt
        self._news.put(number)

    def wait(self, until: Callable[[], bool]) -> bool:
        """Wait for a signal, or until something else has happened. Tell whether it was a signal."""
        while not until():
            # In short turns: a signal that comes just before a wait does not end it.
            try:
                number = self._news.get(timeout=LOOK_S)
            except queue.Empty:
                continue
            if self.end.take(number):
                log_end(self.end.state, number)
                return True
        return False


@contextmanager
def _signals(options: ForwardingOptions) -> Iterator[_Signals]:
    signals = _Signals(is_told=options.is_told)
    numbers = (signal.SIGTERM, signal.SIGINT, LEAVE)
    before = {number: signal.signal(number, signals.obey) for number in numbers}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
