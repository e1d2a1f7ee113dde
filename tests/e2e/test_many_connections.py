"""Two callers with hundreds of connections to a gateway, each with one request of a slow model, and a third beside them.

A gateway is one client of its server, so what it forwards is one queue's: the third caller's requests, of a model and a
worker that are idle, must not wait for those of the others, whose number nothing but their connections bounds.
"""

from __future__ import annotations

import http.client
import json
import select
import socket
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from typing import Any

import pytest
from tests.e2e.conftest import until
from tests.e2e.http_calls import BODY, TIMEOUT_S, ask, port_of
from tests.secret_files import write_secret

from shapestream.transport.guards import raise_descriptor_limit

pytestmark = pytest.mark.e2e

CONNECTIONS = 560
"""Of each of the two: together more than the 1,024 requests of a gateway, of which a quota is a third here."""
CALLS = 100
"""Of each of the two over gRPC, each over a connection of its own: together more than the threads for calls of a gateway."""
ASKED = 100
SERVED = """\
    server:
      listen: [ipc://s.sock]
      PORT: {address: "127.0.0.1:0", token_file: tokens}
    models:
      - name: gated
        function: gated:double_when_open
        trust: true
        calibration_s: 0
        inputs: {x: {shape: "batch:1..8, n:1..64", element_type: f32}}
        outputs: {y: {shape: "batch, n", element_type: f32}}
        batching: {max_batch: 1, hang_after_s: off}
      - name: idle
        function: gated:double
        trust: true
        calibration_s: 0
        inputs: {x: {shape: "batch:1..8, n:1..64", element_type: f32}}
        outputs: {y: {shape: "batch, n", element_type: f32}}
    workers: [{count: 1, slots: 1, threads: 1, models: [gated]}, {count: 1, slots: 1, threads: 1, models: [idle]}]
"""


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """What is closed after a test."""
    with ExitStack() as stack:
        yield stack


def serve(workplace: Any, port: str) -> Any:
    """A server with a gateway of this kind, which knows three callers."""
    write_secret(workplace.folder / "tokens", "shop one\nbank two\nhonest three\n")
    served = workplace.serve(workplace.write(SERVED.replace("PORT", port)))
    served.wait_for("gateways ready")
    served.wait_for("workers ready")
    return served


def flooding(stack: ExitStack, port: int, token: str) -> socket.socket:
    """A connection that has sent one request of the slow model."""
    connection = stack.enter_context(socket.create_connection(("127.0.0.1", port), TIMEOUT_S))
    body = json.dumps(BODY).encode()
    head = (
        f"POST /v2/models/gated/infer HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {token}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    connection.sendall(head.encode() + body)
    return connection


def answered(connections: Sequence[socket.socket]) -> int:
    """How many of them have something to read."""
    poll = select.poll()
    for connection in connections:
        poll.register(connection, select.POLLIN)
    return len(poll.poll(0))


def status_of(connection: socket.socket) -> int:
    """Of the one answer of a connection."""
    with closing(http.client.HTTPResponse(connection)) as answer:
        answer.begin()
        answer.read()
        return answer.status


def test_callers_with_hundreds_of_slow_requests_over_http_delay_no_other_caller(
    workplace: Any, stack: ExitStack
) -> None:
    """Over one connection and over new ones, while theirs are queued. Each of theirs is answered, or refused by 429."""
    raise_descriptor_limit()
    served = serve(workplace, "http")
    port = port_of(served)
    connections = [flooding(stack, port, token) for _ in range(CONNECTIONS) for token in ("one", "two")]
    client = stack.enter_context(served.client())

    def have_arrived() -> bool:
        queued = int(client.statistics()["scheduler"]["queued"])
        # One runs, and one may be queued behind it on the slot.
        return queued + answered(connections) >= len(connections) - 2

    until("all of their requests", have_arrived)
    kept = stack.enter_context(closing(http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)))
    statuses: Counter[int] = Counter()
    for _ in range(ASKED):
        kept.request(
            "POST", "/v2/models/idle/infer", json.dumps(BODY), headers={"Authorization": "Bearer three"}
        )
        answer = kept.getresponse()
        assert [2.0, 4.0] == json.loads(answer.read())["outputs"][0]["data"]
        statuses[answer.status] += 1
        statuses[ask(port, "POST", "/v2/models/idle/infer", BODY, token="three")[0]] += 1
        statuses[ask(port, "GET", "/v2/health/ready")[0]] += 1
    assert {200: 3 * ASKED} == statuses
    workplace.open_gate()
    theirs = Counter(map(status_of, connections))
    assert {200, 429} >= set(theirs)
    assert 1024 // 2 < theirs[200] <= 1024 * 2 // 3 + 1


def test_callers_with_many_slow_calls_over_grpc_refuse_no_other_caller(
    workplace: Any, stack: ExitStack
) -> None:
    """Each of their calls has a connection of its own, and ends; the third caller's are all answered before."""
    pytest.importorskip("grpc", reason="the extra [grpc] is not installed")
    from tests.e2e.grpc_calls import SERVICE, Caller, request
    from tests.e2e.grpc_frames import Frames

    raise_descriptor_limit()
    served = serve(workplace, "grpc")
    (line,) = served.events("grpc ready")
    theirs = [
        (stack.enter_context(Frames(line["address"])), token)
        for token in ("one", "two")
        for _ in range(CALLS)
    ]
    for connection, token in theirs:
        connection.begin(SERVICE + "ModelInfer", request(), token=token)
    workplace.wait_entered()
    for _ in range(ASKED // 5):
        with Caller(line["address"], token="three") as caller:
            for _ in range(5):
                assert [2.0, 4.0] == caller.infer(request(model="idle"))
    workplace.open_gate()
    assert [{1}] * len(theirs) == [connection.ends(1) for connection, _ in theirs]
