"""Ends of gateways under load, over HTTP and gRPC: by a reload, by a stop, and one server after the other."""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from http.client import HTTPConnection
from typing import Any

import pytest

grpc = pytest.importorskip("grpc", reason="the extra [grpc] is not installed")
from tests.e2e.balancing import BODY, KINDS, PATH, PAUSE_S, Backend, Balancer, ConnectionBalancer  # noqa: E402
from tests.e2e.conftest import until  # noqa: E402
from tests.e2e.grpc_calls import TIMEOUT_S, Caller  # noqa: E402
from tests.e2e.http_calls import infer, port_of  # noqa: E402

from shapestream.gateway import open_inference_pb2 as protocol  # noqa: E402

pytestmark = pytest.mark.e2e

SERVED = """\
    server: {listen: [ipc://NAME.sock], MORE}
    models:
      - name: gated
        function: gated:MODEL
        trust: true
        calibration_s: 0
        inputs: {x: {shape: "batch:1..8, n:1..64", element_type: f32}}
        outputs: {y: {shape: "batch, n", element_type: f32}}
        batching: {max_batch: 1, hang_after_s: off}
    workers: [{count: 1, slots: 1, threads: 1}]
"""
BOTH = 'http: "127.0.0.1:0", grpc: "127.0.0.1:0"'
REQUESTS = int(os.environ.get("RESTART_REQUESTS", "300"))
"""Requests of a rolling restart, at least, by callers of each kind."""
MAX_CONNECTION_S = 1.0
ONCE_KILLED_AFTER_S = 5.0
"""The time that a replaced gateway had to end, whatever the grace was."""


def serve(workplace: Any, more: str = BOTH, model: str = "double", name: str = "s") -> Any:
    """A server whose gateways are ready."""
    text = SERVED.replace("NAME", name).replace("MORE", more).replace("MODEL", model)
    served = workplace.serve(workplace.write(text, f"{name}.yaml"))
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


@pytest.mark.parametrize("kind", ["http", pytest.param("grpc", marks=pytest.mark.thorough)])
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


def backend_of(served: Any) -> Backend:
    """The same, for a balancer."""
    return Backend(http_port=port_of(served), grpc_place=grpc_place(served))


def test_a_rolling_restart_behind_a_balancer_fails_no_request(workplace: Any) -> None:
    """Two servers in turn; callers that keep connections, that do not, and over gRPC. Nothing is tried again."""
    more = f"lame_duck_s: 10, {BOTH}"
    servers = {name: serve(workplace, more, name=name) for name in ("a", "b")}
    balancer = Balancer({name: backend_of(served) for name, served in servers.items()})

    def answers_more(count: int) -> None:
        wanted = {name: balancer.answered.get(name, 0) + count for name in KINDS}
        until("answers", lambda: all(balancer.answered.get(name, 0) >= wanted[name] for name in KINDS))

    with balancer.balancing():
        for name, served in servers.items():
            answers_more(REQUESTS // 4)
            served.send(signal.SIGTERM)
            assert 0 == served.wait()
            balancer.backends[name] = backend_of(serve(workplace, more, name=name))
            until("the new server", lambda name=name: balancer.backends[name].ready)
        answers_more(REQUESTS // 4)
    assert [] == balancer.failures
    for served in servers.values():
        assert [] == served.events("gateway killed")


@pytest.mark.parametrize(
    "kept_open", [True, pytest.param(False, marks=pytest.mark.thorough)], ids=["keep-alive", "raw"]
)
def test_sigterm_resets_no_connection_and_loses_no_answer(workplace: Any, kept_open: bool) -> None:
    """Sixteen busy callers, whose connections end with an answer that says so; one more is idle, and asks at last."""
    served = serve(workplace, 'lame_duck_s: 20, http: "127.0.0.1:0"')
    port = port_of(served)
    told = threading.Event()
    ask_until_told = kept_until_told if kept_open else raw_until_told
    with (
        ThreadPoolExecutor(16) as pool,
        closing(HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)) as idle,
    ):
        assert "keep-alive" == told_by(idle)
        callers = [pool.submit(ask_until_told, port, told.is_set) for _ in range(16)]
        until("answers", lambda: count_of(served) >= 200)
        told.set()
        served.send(signal.SIGTERM)
        served.wait_for("gateway leaves")
        answered = [caller.result(TIMEOUT_S) for caller in callers]
        assert "close" == told_by(idle)
    assert 16 == len(answered)
    assert sum(answered) >= 200
    assert 0 == served.wait()
    assert [] == served.events("gateway killed")


def test_ctrl_c_has_no_lame_duck_and_an_idle_server_ends_at_once(workplace: Any) -> None:
    """Although it is configured for an hour; and nobody is connected by the second time."""
    for number in (signal.SIGINT, signal.SIGTERM):
        served = serve(workplace, f"lame_duck_s: 3600, {BOTH}")
        with closing(HTTPConnection("127.0.0.1", port_of(served), timeout=TIMEOUT_S)) as connection:
            if number == signal.SIGINT:
                assert "keep-alive" == told_by(connection)
            served.send(number)
            assert 0 == served.wait()


def test_over_grpc_connections_are_told_to_go_while_calls_are_taken(workplace: Any) -> None:
    """By GOAWAY, after which a channel is idle; its next call is answered, until the time is over."""
    served = serve(workplace, 'lame_duck_s: 20, grpc: "127.0.0.1:0"')
    with Caller(grpc_place(served)) as caller:
        seen: list[Any] = []
        caller.channel.subscribe(seen.append)
        assert [2.0, 4.0] == caller.infer()
        until("the connection", lambda: seen[-1:] == [grpc.ChannelConnectivity.READY])
        served.send(signal.SIGTERM)
        until("GOAWAY", lambda: seen[-1] == grpc.ChannelConnectivity.IDLE)
        assert not protocol.ServerReadyResponse.FromString(caller.call("ServerReady")).ready
        assert [2.0, 4.0] == caller.infer()
        assert [] == served.events("server drains")
    assert 0 == served.wait()


@pytest.mark.parametrize("kind", ["http", pytest.param("grpc", marks=pytest.mark.thorough)])
def test_a_new_server_gets_its_part_of_connections_that_are_kept(workplace: Any, kind: str) -> None:
    """A balancer of connections knows nothing of requests; callers keep theirs for as long as they may."""
    old = serve(workplace, 'http: "127.0.0.1:0"', name="a")

    def port(served: Any) -> int:
        return port_by_hand(workplace, served, kind)

    with closing(ConnectionBalancer([port(old)])) as balancer, ThreadPoolExecutor(8) as pool:
        over = threading.Event()
        callers = [pool.submit(ask_by[kind], balancer.port, over.is_set) for _ in range(8)]
        try:
            until("answers", lambda: count_of(old) >= 100)
            new = serve(workplace, 'http: "127.0.0.1:0"', name="b")
            balancer.ports.append(port(new))
            time.sleep(2 * MAX_CONNECTION_S)
            before = [count_of(old), count_of(new)]
            until("answers", lambda: count_of(old) + count_of(new) >= sum(before) + 400)
            after = [count_of(old), count_of(new)]
        finally:
            over.set()
        assert sum(caller.result(TIMEOUT_S) for caller in callers) >= 500, "and none of them failed"
    parts = [now - then for now, then in zip(after, before, strict=True)]
    assert min(parts) >= 0.25 * sum(parts), parts


def kept_until_told(port: int, told: Callable[[], bool]) -> int:
    """Ask over one connection, until an answer after `told` ends it; how often."""
    with closing(HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)) as connection:
        for asked in itertools.count(1):
            said = told_by(connection)
            assert said == "keep-alive" or told()
            if said == "close":
                return asked
            time.sleep(PAUSE_S)
    raise AssertionError


def told_by(connection: HTTPConnection) -> str:
    """Whether a connection goes on after a right answer."""
    connection.request("POST", PATH, BODY)
    answer = connection.getresponse()
    assert (200, [2.0, 4.0]) == (answer.status, json.loads(answer.read())["outputs"][0]["data"])
    return answer.headers.get("Connection", "keep-alive")


def raw_until_told(port: int, told: Callable[[], bool]) -> int:
    """The same by a socket of its own, which reads to the end: no reset, and nothing after the last answer."""
    text = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(BODY)}\r\n\r\n{BODY}".encode()
    with socket.create_connection(("127.0.0.1", port), TIMEOUT_S) as raw:
        for asked in itertools.count(1):
            raw.sendall(text)
            received = b""
            while not received.endswith(b"[2.0,4.0]}]}"):
                piece = raw.recv(65536)
                assert piece, (asked, received)
                received += piece
            if b"Connection: close\r\n" in received:
                assert told()
                assert b"" == raw.recv(1)
                return asked
            time.sleep(PAUSE_S)
    raise AssertionError


def http_until(port: int, over: Callable[[], bool]) -> int:
    """Right answers over HTTP/1.1, on connections that are kept until they are told to end."""
    asked = 0
    with closing(HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)) as connection:
        while not over():
            told_by(connection)
            asked += 1
            time.sleep(PAUSE_S)
    return asked


def grpc_until(port: int, over: Callable[[], bool]) -> int:
    """Right answers over one channel."""
    asked = 0
    with Caller(f"127.0.0.1:{port}") as caller:
        while not over():
            assert [2.0, 4.0] == caller.infer()
            asked += 1
            time.sleep(PAUSE_S)
    return asked


ask_by = {"http": http_until, "grpc": grpc_until}


def port_by_hand(workplace: Any, served: Any, kind: str) -> int:
    """The port of a gateway that is started by hand, with the least age of connections."""
    address = f"ipc://{served.config.with_suffix('.sock')}"
    options = [f"--{kind}", "127.0.0.1:0", "--max-connection", str(MAX_CONNECTION_S)]
    (line,) = workplace.start("gateway", address, *options).wait_for("gateway ready")
    return int(line["address"].rpartition(":")[2])


def count_of(served: Any) -> int:
    """Inferences of a server so far."""
    with closing(HTTPConnection("127.0.0.1", port_of(served), timeout=TIMEOUT_S)) as connection:
        connection.request("GET", "/v2/models/gated/stats")
        told = json.loads(connection.getresponse().read())
    return int(told["model_stats"][0]["inference_stats"]["success"]["count"])
