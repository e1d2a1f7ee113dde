"""A server under a small limit of open files: it says how many clients fit, and refuses those beyond."""

from __future__ import annotations

import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from tests.e2e.conftest import COMMAND, PATIENCE_S, Workplace

from shapestream import blocking

pytestmark = pytest.mark.e2e

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


@pytest.mark.alone
def test_connections_beyond_the_limit_of_open_files_are_refused(workplace: Workplace) -> None:
    """150 under a limit of 100, over ipc: the server says what fits at its start, lives, and serves again afterwards."""
    with limit_of_open_files(100):
        served = workplace.serve(CONFIG)
    (told,) = served.events("fewer clients fit than max_clients")
    assert (1024, 100, 1) == (told["max_clients"], told["limit"], told["workers"])
    assert 1 <= told["fits"] < 100
    served.wait_for("workers ready")
    path = served.address.removeprefix("ipc://")
    connections = []
    refused = 0
    try:
        for _ in range(150):
            connection = socket.socket(socket.AF_UNIX)
            connections.append(connection)
            try:
                connection.connect(path)
            except (FileNotFoundError, ConnectionRefusedError):
                refused += 1
            time.sleep(0.03)  # the server looks often, but not at each connection
        assert served.process.poll() is None
        assert refused > 0
    finally:
        for connection in connections:
            connection.close()
    with blocking.connect(served.address, connect_timeout=PATIENCE_S) as client:
        assert 0 < client.statistics()["uptime_s"]


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
