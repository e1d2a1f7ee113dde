"""Ends of gateways under load, over HTTP and gRPC: by a reload, by a stop, and one server after the other."""

from __future__ import annotations

import signal
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

pytest.importorskip("grpc", reason="the extra [grpc] is not installed")
from tests.e2e.grpc_calls import TIMEOUT_S, Caller
from tests.e2e.test_gateways import infer, port_of

pytestmark = pytest.mark.e2e

SERVED = """\
    server: {listen: [ipc://s.sock], MORE}
    models:
      - name: gated
        function: gated:MODEL
        trust: true
        calibration_s: 0
        inputs: {x: {shape: "batch:1..8, n:1..64", element_type: f32}}
        outputs: {y: {shape: "batch, n", element_type: f32}}
        batching: {max_batch: 1, hang_after_s: off}
    workers: [{count: 1, slots: 2, threads: 1}]
"""
BOTH = 'http: "127.0.0.1:0", grpc: "127.0.0.1:0"'
ONCE_KILLED_AFTER_S = 5.0
"""The time that a replaced gateway had to end, whatever the grace was."""


def serve(workplace: Any, more: str = BOTH, model: str = "double") -> Any:
    """A server whose gateways are ready."""
    served = workplace.serve(workplace.write(SERVED.replace("MORE", more).replace("MODEL", model)))
    served.wait_for("gateways ready")
    served.wait_for("workers ready")
    return served


def grpc_place(served: Any) -> str:
    """HOST:PORT of its gRPC."""
    (line,) = served.events("grpc ready")
    return str(line["address"])


def infer_by_grpc(served: Any) -> list[float]:
    """The answer of the model, over a channel of its own."""
    with Caller(grpc_place(served)) as caller:
        return caller.infer()


@pytest.mark.parametrize("kind", ["http", "grpc"])
def test_a_reload_waits_for_a_request_as_long_as_the_grace_says(workplace: Any, kind: str) -> None:
    """It runs for longer than a gateway has to end otherwise."""
    served = serve(workplace, f'{kind}: "127.0.0.1:0"', model="double_when_open")
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(infer, port_of(served)) if kind == "http" else pool.submit(infer_by_grpc, served)
        workplace.wait_entered()
        served.send(signal.SIGHUP)
        served.wait_for("gateway stops")
        time.sleep(ONCE_KILLED_AFTER_S + 2.0)
        workplace.open_gate()
        assert [2.0, 4.0] == answer.result(TIMEOUT_S)
    assert [] == served.events("gateway killed")
    assert "ok" == served.wait_for("reload ended")[0]["result"]
