"""Calls of a gateway by plain `http.client`, each over a connection of its own."""

from __future__ import annotations

import http.client
import json
import ssl
from contextlib import closing
from typing import Any

TIMEOUT_S = 120.0
BODY = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1, 2]}]}


def port_of(served: Any) -> int:
    """Of its HTTP."""
    (line,) = served.events("http ready")
    return int(line["address"].rpartition(":")[2])


def ask(
    port: int,
    method: str,
    path: str,
    body: Any = None,
    *,
    token: str = "",
    context: ssl.SSLContext | None = None,
) -> tuple[int, Any]:
    """Status and answer, over a connection of its own."""
    connection = (
        http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
        if context is None
        else http.client.HTTPSConnection("127.0.0.1", port, timeout=TIMEOUT_S, context=context)
    )
    with closing(connection):
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        connection.request(method, path, body=None if body is None else json.dumps(body), headers=headers)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())


def infer(port: int, token: str = "", context: ssl.SSLContext | None = None) -> list[float]:
    """What the model answers."""
    status, answer = ask(port, "POST", "/v2/models/gated/infer", BODY, token=token, context=context)
    assert 200 == status, answer
    found: list[float] = answer["outputs"][0]["data"]
    return found
