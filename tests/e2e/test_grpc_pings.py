"""Peers of a gRPC gateway that ping to keep their connections: those that keep to the limit stay, others are told to go."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

grpc = pytest.importorskip("grpc", reason="the extra [grpc] is not installed")
from tests.e2e.grpc_calls import SERVICE, TIMEOUT_S, Caller  # noqa: E402
from tests.e2e.grpc_frames import Frames  # noqa: E402

from shapestream.gateway.grpc_gateway import GrpcLimits  # noqa: E402

pytestmark = pytest.mark.e2e

PINGS = 8
"""More than gRPC forgives: with the third that comes too early it ends the connection."""
LONG_S = 600.0
SERVED = """\
    server: {listen: [ipc://s.sock], grpc: "127.0.0.1:0"}
    models:
      - name: gated
        function: gated:double
        trust: true
        calibration_s: 0
        inputs: {x: {shape: "batch:1..8, n:1..64", element_type: f32}}
        outputs: {y: {shape: "batch, n", element_type: f32}}
    workers: [{count: 1, slots: 1, threads: 1}]
"""


class Held(grpc.GenericRpcHandler):
    """Answers each call once it may."""

    def __init__(self) -> None:
        self.may = threading.Event()

    def service(self, handler_call_details: Any) -> Any:
        """Any call."""
        return grpc.unary_unary_rpc_method_handler(self._answer)

    def _answer(self, request: bytes, context: Any) -> bytes:
        assert self.may.wait(TIMEOUT_S)
        return request


@contextmanager
def server(least_ping_s: float) -> Iterator[tuple[str, Held]]:
    """gRPC's server with a gateway's options, and this limit of pings."""
    held = Held()
    options = GrpcLimits(least_ping_s=least_ping_s).options(LONG_S)
    started = grpc.server(ThreadPoolExecutor(4), handlers=[held], options=options)
    port = started.add_insecure_port("127.0.0.1:0")
    started.start()
    try:
        yield f"127.0.0.1:{port}", held
    finally:
        held.may.set()
        started.stop(0).wait()


def test_pings_of_a_connection_without_a_call_are_answered_as_far_apart_as_the_limit() -> None:
    """gRPC's own limit is 5 minutes, or 2 hours without a call."""
    with server(0.05) as (place, _), Frames(place) as frames:
        for _ in range(PINGS):
            frames.ping()
            time.sleep(0.1)


def test_pings_that_come_faster_end_the_connection() -> None:
    """Each comes at once after the answer to the one before."""
    with server(LONG_S) as (place, _), Frames(place) as frames:

        def ping_on() -> None:
            for _ in range(PINGS):
                frames.ping()

        with pytest.raises(AssertionError, match="too_many_pings"):
            ping_on()


def test_a_client_that_keeps_its_connection_alive_has_its_call_answered() -> None:
    """grpcio's client pings once a second, which is as often as it can, while its call waits for seven."""
    options = (
        ("grpc.keepalive_time_ms", 1000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    )
    with server(0.5) as (place, held), Caller(place, options=options) as caller:
        answer = caller.channel.unary_unary(SERVICE + "ServerLive").future(b"here", timeout=TIMEOUT_S)
        time.sleep(7)
        held.may.set()
        assert b"here" == answer.result()


@pytest.mark.thorough
def test_a_gateway_keeps_a_client_that_pings_every_six_seconds(workplace: Any) -> None:
    """Its limit is five, for connections without a call too."""
    served = workplace.serve(workplace.write(SERVED))
    served.wait_for("gateways ready")
    (line,) = served.events("grpc ready")
    with Frames(line["address"]) as frames:
        for _ in range(5):
            frames.ping()
            time.sleep(6)
        frames.ping()


def test_grpc_knows_each_option_of_a_gateway() -> None:
    """It ignores names that it does not know. Each stands in its library, where a string ends with 0."""
    from grpc._cython import cygrpc

    library = Path(cygrpc.__file__).read_bytes()
    names = [name for name, _ in GrpcLimits().options(LONG_S)]
    assert 10 < len(names)
    assert [] == [name for name in names if name.encode() + b"\0" not in library]
