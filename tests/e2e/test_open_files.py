"""A server under a small limit of open files: it says how many clients fit, and refuses those beyond."""

from __future__ import annotations

import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psutil
import pytest
from tests.e2e.conftest import COMMAND, PATIENCE_S, Workplace, until

from shapestream import blocking
from shapestream.transport.guards import ADMIN_PART

pytestmark = pytest.mark.e2e

LIMIT = 128
CONFIG = """\
    models:
      - name: m
        function: soaked:plus_one
        inputs: {x: {shape: "batch:1..16, n:1..20000", element_type: f32}}
        outputs: {y: {shape: "batch, n", element_type: f32, rule: rows}}
        trust: true
        calibration_s: 0
    workers: [{count: 1, slots: 1, threads: 1}]
"""


@contextmanager
def limit_of_open_files(limit: int) -> Iterator[None]:
    """For the processes that are started meanwhile: both limits, so that they cannot raise theirs."""
    import tests.e2e.conftest as conftest

    script = f"import os, resource, sys; resource.setrlimit(resource.RLIMIT_NOFILE, ({limit}, {limit})); "
    script += "os.execv(sys.argv[1], sys.argv[1:])"
    plain = list(COMMAND)
    conftest.COMMAND[:] = [sys.executable, "-c", script, *plain]
    try:
        yield
    finally:
        conftest.COMMAND[:] = plain


def test_connections_beyond_the_limit_of_open_files_are_refused(workplace: Workplace) -> None:
    """Under a limit of 100, over ipc: the server says what fits at its start, lives, and serves again afterwards."""
    with limit_of_open_files(100):
        served = workplace.serve(CONFIG)
    (told,) = served.events("fewer clients fit than max_clients")
    assert (1024, 100, 1) == (told["max_clients"], told["limit"], told["workers"])
    assert 1 <= told["fits"] < 100
    served.wait_for("workers ready")
    path = served.address.removeprefix("ipc://")
    connections: list[socket.socket] = []

    def is_refused() -> bool:
        connection = socket.socket(socket.AF_UNIX)
        connection.setblocking(False)  # a full backlog is no refusal
        connections.append(connection)
        try:
            connection.connect(path)
        except (FileNotFoundError, ConnectionRefusedError):
            return True
        except BlockingIOError:
            connection.close()
        return False

    try:
        until("a connection that is refused", is_refused)
        assert len(connections) > told["fits"]
        assert served.process.poll() is None
    finally:
        for connection in connections:
            connection.close()
    with blocking.connect(served.address, connect_timeout=PATIENCE_S) as client:
        assert 0 < client.statistics()["uptime_s"]


def test_callers_of_the_admin_port_leave_descriptors_to_clients(workplace: Workplace) -> None:
    """Of 200 silent ones few are held, and they end within seconds. A check is answered, and a client served."""
    pytest.importorskip("prometheus_client", reason="the extra [admin] is not installed")
    with limit_of_open_files(LIMIT):
        served = workplace.serve("    server: {listen: [ipc://s.sock], admin: 127.0.0.1:0}\n" + CONFIG)
    (event,) = served.wait_for("admin port ready")
    port = int(event["address"].rpartition(":")[2])
    served.wait_for("workers ready")
    process = psutil.Process(served.process.pid)
    before = process.num_fds()
    silent = [socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) for _ in range(200)]
    try:
        most, answer = before, b""
        with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as check:
            check.sendall(b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
            check.settimeout(0.01)
            while not answer:
                most = max(most, process.num_fds())
                with suppress(TimeoutError):
                    answer = check.recv(64)
        assert b" 200 " in answer
        assert most <= before + LIMIT // ADMIN_PART + 8  # and what it opens for a moment
        with blocking.connect(served.address, connect_timeout=PATIENCE_S) as client:
            assert 0 < client.statistics()["uptime_s"]
        until("their end", lambda: process.num_fds() <= before + 2)
        assert [b""] * 200 == [connection.recv(1) for connection in silent]
    finally:
        for connection in silent:
            connection.close()
    assert [] == served.events("admin port failed")


def test_a_limit_that_no_client_fits_into_is_refused_at_the_start(workplace: Workplace) -> None:
    """With the number of workers and the limit, and no port was open before."""
    config = workplace.write(CONFIG)
    ran: subprocess.CompletedProcess[Any] = subprocess.run(
        [*COMMAND, "serve", str(config)],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40)),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert 3 == ran.returncode
    assert "no client fits beside 1 workers into 40 open files" in ran.stdout + ran.stderr
