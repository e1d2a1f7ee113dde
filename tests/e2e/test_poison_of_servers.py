"""Requests that end the server's own process, and kills that no request is to blame for, in real processes.

The model runs in the server's process, so nothing on its machine says which request ended it: the client finds it out.
"""

from __future__ import annotations

import http.client
import json
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from tests.e2e.conftest import PATIENCE_S, Served, Workplace, alive, until
from tests.e2e.importable.poisonous import EXIT
from tests.e2e.poison import ENDS

from shapestream import blocking
from shapestream.client.opened_models import Failed

pytestmark = pytest.mark.e2e

IN_SERVER = """\
    server: {{listen: [ipc://{name}.sock], heartbeat_s: 0.2}}
    models:
      - name: poisonous
        function: poisonous:double
        inputs: {{x: {{shape: "batch:1..8, n:1..64", element_type: f32}}}}
        outputs: {{y: {{shape: "batch, n", element_type: f32, rule: rows}}}}
        batching: {{max_batch: {max_batch}}}
        idempotent: {idempotent}
        trust: true
        calibration_s: 0
    in_process: true
"""
HARMLESS = range(50)
"""The numbers of the requests beside a poison."""


def serve(workplace: Workplace, name: str, *, idempotent: bool = True) -> Served:
    """Start a server of this name whose model runs in its own process."""
    text = IN_SERVER.format(name=name, idempotent=str(idempotent).lower(), max_batch=8 if idempotent else 1)
    return workplace.serve(workplace.write(text, f"{name}.yaml"))


def address(workplace: Workplace, name: str) -> str:
    """Return the address of the server of this name, whether it is there or not."""
    return f"ipc://{workplace.folder}/{name}.sock"


def row(value: float) -> dict[str, Any]:
    """Return the inputs of a request."""
    return {"x": np.full((1, 3), value, np.float32)}


def ends_of(client: blocking.Client, values: list[int]) -> dict[int, object]:
    """Return how each request ended, by its number: the first number of its result, or the code of its error."""
    ends: dict[int, object] = {}
    with client.stream("poisonous", [row(value) for value in values], on_error="yield") as results:
        for value, result in zip(values, results, strict=True):
            ends[value] = result.error.code if isinstance(result, Failed) else float(result["y"][0, 0])
    return ends


@contextmanager
def restarted(workplace: Workplace, name: str, **options: Any) -> Iterator[list[Served]]:
    """Start a server of this name, and another one whenever it has ended, as systemd does. Yields all of them so far."""
    servers = [serve(workplace, name, **options)]
    over = threading.Event()

    def restart() -> None:
        while not over.is_set():
            if not alive(servers[-1].pid):
                servers.append(serve(workplace, name, **options))
            over.wait(0.02)

    thread = threading.Thread(target=restart)
    thread.start()
    try:
        yield servers
    finally:
        over.set()
        thread.join()


def test_a_poison_does_not_end_every_server_that_its_client_knows(workplace: Any) -> None:
    """Of three servers two end; it alone is `poisoned`, and the last server answers all others."""
    names = ("one", "two", "three")
    servers = [serve(workplace, name) for name in names]
    values = [*HARMLESS[:20], EXIT, *HARMLESS[20:]]
    with blocking.connect([address(workplace, name) for name in names], unavailable_after=10) as client:
        ends = ends_of(client, values)
    assert {value: 2.0 * value for value in HARMLESS} | {EXIT: "poisoned"} == ends
    assert 2 == sum(not alive(server.pid) for server in servers)


def test_a_poison_ends_a_server_that_is_started_again_three_times_at_most(workplace: Any) -> None:
    """It ends it once among others, and twice alone; all others are answered."""
    values = [*HARMLESS[:20], EXIT, *HARMLESS[20:]]
    with restarted(workplace, "one") as servers, blocking.connect(address(workplace, "one")) as client:
        ends = ends_of(client, values)
        until("another server", lambda: alive(servers[-1].pid), PATIENCE_S)
    assert {value: 2.0 * value for value in HARMLESS} | {EXIT: "poisoned"} == ends
    assert [ENDS[EXIT]] * 3 == [server.wait() for server in servers[:-1]]


def test_a_poison_that_must_not_run_twice_ends_one_server(workplace: Any) -> None:
    """Nothing that the server had is sent again, so it is lost with it; nothing else ever ends."""
    with restarted(workplace, "one", idempotent=False) as servers:
        with blocking.connect(address(workplace, "one")) as client:
            assert {EXIT: "worker_lost"} == ends_of(client, [EXIT])
            assert {value: 2.0 * value for value in HARMLESS} == ends_of(client, list(HARMLESS))
    assert [ENDS[EXIT]] == [server.wait() for server in servers[:-1]]


@pytest.mark.parametrize("kills", [2, pytest.param(20, marks=pytest.mark.thorough)])
def test_kills_under_harmless_load_fail_nothing(workplace: Any, kills: int) -> None:
    """Each comes while suspects of the one before run, or soon after: no request is blamed for a coincidence."""
    between = 25  # answers; 16 of them are suspects'
    values = [number % len(HARMLESS) for number in range(between * (kills + 1))]
    killed, answered = 0, []
    with restarted(workplace, "one") as servers, blocking.connect(address(workplace, "one")) as client:
        with client.stream("poisonous", map(row, values), max_in_flight=16, ordered=False) as results:
            for result in results:
                answered.append((values[result.key], float(result["y"][0, 0])))
                if len(answered) % between == 0 and killed < kills:
                    killed += 1
                    servers[-1].send(signal.SIGKILL)
                    until("another server", lambda killed=killed: len(servers) > killed, PATIENCE_S)
    assert sorted((value, 2.0 * value) for value in values) == sorted(answered)
    assert [-signal.SIGKILL] * kills == [server.wait() for server in servers[:kills]]


def ask_over_http(port: int, value: float) -> tuple[int, Any]:
    """Return status and content of an answer that is no 503: a server that starts for long is waited for again."""
    while True:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
        try:
            entry = {"name": "x", "datatype": "FP32", "shape": [1, 3], "data": [value] * 3}
            connection.request("POST", "/v2/models/poisonous/infer", json.dumps({"inputs": [entry]}))
            answer = connection.getresponse()
            content = json.loads(answer.read())
        finally:
            connection.close()
        if answer.status != 503:
            return answer.status, content


def test_a_gateway_tells_a_poison_from_what_its_other_callers_ask(workplace: Any) -> None:
    """Its caller gets 500, at once where it asks the same again; the others get their answers."""
    pytest.importorskip("httptools", reason="the extra [http] is not installed")
    pytest.importorskip("orjson", reason="the extra [http] is not installed")
    with restarted(workplace, "one") as servers:
        gateway = workplace.start("gateway", address(workplace, "one"), "--http", "127.0.0.1:0")
        (ready,) = gateway.wait_for("gateway ready")
        port = int(ready["address"].rpartition(":")[2])
        with ThreadPoolExecutor(9) as pool:
            harmless = [pool.submit(ask_over_http, port, value) for value in range(8)]
            status, content = pool.submit(ask_over_http, port, EXIT).result(PATIENCE_S)
            assert (500, True) == (status, "servers vanished" in content["error"])
            for value, asked in enumerate(harmless):
                status, content = asked.result(PATIENCE_S)
                assert (200, [2.0 * value] * 3) == (status, content["outputs"][0]["data"])
        until("another server", lambda: alive(servers[-1].pid), PATIENCE_S)
        ended = len(servers)
        assert 500 == ask_over_http(port, EXIT)[0]
        assert 200 == ask_over_http(port, 1.0)[0]
        assert ended == len(servers)
