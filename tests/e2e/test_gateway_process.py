"""`shapestream gateway` as a process: it answers, and ends at SIGTERM after what has begun."""

from __future__ import annotations

import http.client
import json
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tests.e2e.admin import MODELS
from tests.e2e.conftest import PATIENCE_S

pytest.importorskip("httptools", reason="the extra [http] is not installed")
pytest.importorskip("orjson", reason="the extra [http] is not installed")
pytestmark = pytest.mark.e2e

SERVER = "{listen: [ipc://s.sock]}"


def infer(port: int, value: float) -> tuple[int, Any]:
    """Status and content of the answer of the model `gated`."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    try:
        entry = {"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [value]}
        connection.request("POST", "/v2/models/gated/infer", json.dumps({"inputs": [entry]}))
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


def test_a_gateway_answers_what_has_begun_before_it_ends(workplace: Any) -> None:
    """A request waits in the model while SIGTERM comes; its answer arrives, and the status is 0."""
    served = workplace.serve(MODELS.replace("SERVER", SERVER))
    gateway = workplace.start("gateway", served.address, "--http", "127.0.0.1:0")
    (ready,) = gateway.wait_for("gateway ready")
    port = int(ready["address"].rpartition(":")[2])
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(infer, port, 3.0)
        workplace.wait_entered()
        gateway.send(signal.SIGTERM)
        gateway.wait_for("gateway stops")
        workplace.open_gate()
        status, content = asked.result(PATIENCE_S)
    assert (200, [6.0]) == (status, content["outputs"][0]["data"])
    assert 0 == gateway.wait()


def test_a_gateway_without_a_server_says_so(workplace: Any) -> None:
    """No server at the address, and an address that cannot be used."""
    ran = workplace.run("gateway", "tcp://127.0.0.1:9", "--http", "127.0.0.1:0", "--timeout", "0.2")
    assert (1, True) == (ran.returncode, "unavailable" in ran.stderr)
    ran = workplace.run("gateway", "tcp://127.0.0.1:9", "--http", "127.0.0.1:70000")
    assert (3, True) == (ran.returncode, "127.0.0.1:70000" in ran.stderr)


def test_a_gateway_that_other_machines_reach_asks_for_tokens(workplace: Any) -> None:
    """Unless its user says that the network keeps strangers away; then it looks for its server."""
    arguments = ("gateway", "tcp://127.0.0.1:9", "--http", "0.0.0.0:0", "--timeout", "0.2")
    ran = workplace.run(*arguments)
    assert (3, True) == (ran.returncode, "open to other machines (add --token-file" in ran.stderr)
    ran = workplace.run(*arguments, "--open")
    assert (1, True) == (ran.returncode, "unavailable" in ran.stderr)


@pytest.mark.parametrize("kind", ["http", "grpc"])
def test_a_gateway_that_waits_for_its_server_obeys_sigterm(workplace: Any, kind: str) -> None:
    """It has connected to a program that never answers, and would wait for an hour. Its status is 0."""
    if kind == "grpc":
        pytest.importorskip("grpc", reason="the extra [grpc] is not installed")
    with socket.create_server(("127.0.0.1", 0)) as mute:
        mute.settimeout(PATIENCE_S)
        address = f"tcp://127.0.0.1:{mute.getsockname()[1]}"
        gateway = workplace.start("gateway", address, f"--{kind}", "127.0.0.1:0", "--timeout", "3600")
        connection, _ = mute.accept()
        with connection:
            gateway.send(signal.SIGTERM)
            assert 0 == gateway.wait()
