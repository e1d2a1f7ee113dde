"""The admin port of a real server: its configuration, and a client that shares nothing with it."""

from __future__ import annotations

import http.client
import json
import socket
from typing import Any

from tests.e2e.conftest import PATIENCE_S

ADMIN = "{listen: [ipc://s.sock], admin: 127.0.0.1:0}"


MODELS = """\
    server: SERVER
    models:
      - name: gated
        function: gated:double_when_open
        inputs: {x: {shape: "batch:1..8, n:1..64", element_type: f32}}
        outputs: {y: {shape: "batch, n", element_type: f32, rule: rows}}
        trust: true
        calibration_s: 0
    in_process: true
"""


DIALS_IN = MODELS.replace("in_process: true", "workers: []")


METERED = MODELS.replace(
    "    in_process: true",
    """\
      - name: other
        function: gated:double
        inputs: {x: {shape: "batch:1..8, n:1..64", element_type: f32}}
        outputs: {y: {shape: "batch, n", element_type: f32, rule: rows}}
        trust: true
        calibration_s: 0
    in_process: true""",
).replace("SERVER", ADMIN)


def port_of(command: Any) -> int:
    """The port that the log names."""
    (event,) = command.wait_for("admin port ready")
    return int(event["address"].rpartition(":")[2])


def get(
    port: int, path: str, method: str = "GET", body: bytes | None = None, **headers: str
) -> tuple[int, dict[str, Any]]:
    """Status and JSON of one answer; no JSON is an empty one."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    try:
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        body = answer.read()
        is_json = answer.headers.get_content_type() == "application/json"
        return answer.status, json.loads(body) if is_json and body else {}
    finally:
        connection.close()


def scrape(port: int) -> dict[str, float]:
    """All series of one answer, by name and labels as they stand there."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    try:
        connection.request("GET", "/metrics")
        answer = connection.getresponse()
        assert (200, "text/plain") == (answer.status, answer.headers.get_content_type())
        lines = answer.read().decode().splitlines()
    finally:
        connection.close()
    return {
        name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")
    }


def connected(port: int) -> socket.socket:
    """A bare connection."""
    return socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S)
