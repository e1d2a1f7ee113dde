"""`shapestream health`: its answer depends on the server, and costs little."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import Any

import msgpack
import pytest
import zmq
from tests.e2e.conftest import COMMAND, PATIENCE_S
from tests.entries import Goodbye, Hello, Role

from shapestream.wire.codec import decode
from shapestream.wire.limits import CLIENT_LIMITS
from shapestream_workers.health import goodbye, greeting

pytestmark = pytest.mark.e2e

SORT = """\
    models:
      - name: sort
        function: numpy:sort
        inputs: {a: {shape: "batch:1..8, n:0..64", element_type: f32}}
        outputs: {sorted: {shape: "batch, n", element_type: f32, rule: rows}}
        trust: true
        calibration_s: 0
    in_process: true
"""
# For a server that is there: long, so that a busy machine is not taken for a dead server.
PATIENTLY = ("--timeout", str(PATIENCE_S))


LIGHT = """\
import runpy, sys
sys.argv = ["shapestream", "health", *sys.argv[1:]]
try:
    runpy.run_module("shapestream_workers", run_name="__main__")
except SystemExit as end:
    print(end.code, *sorted(sys.modules.keys() & {"numpy", "typer", "trio", "pydantic", "openvino", "shapestream"}))
"""


def test_it_follows_the_server(workplace: Any) -> None:
    """No answer before the server, one from it by address and by YAML, none while it stands still or after its end.

    Asked for an address it imports ZeroMQ and msgpack alone. Each asks as a client of its own and says goodbye: the
    server's places are not used up.
    """
    config = workplace.write(SORT)
    address = f"ipc://{workplace.folder}/s.sock"
    before = workplace.run("health", address, "--timeout", "0.3")
    assert (1, "") == (before.returncode, before.stdout)
    assert f"unavailable: no server at {address} answers within 0.3 s\n" == before.stderr
    served = workplace.serve(config)
    for target in (address, str(config)):
        ran = workplace.run("health", target, *PATIENTLY)
        assert (0, f"{address} answers\n", "") == (ran.returncode, ran.stdout, ran.stderr)
    served.send(signal.SIGSTOP)
    try:
        assert 1 == workplace.run("health", address, "--timeout", "0.3").returncode
    finally:
        served.send(signal.SIGCONT)
    light = subprocess.run(
        [sys.executable, "-c", LIGHT, address, *PATIENTLY], capture_output=True, text=True, check=False
    )
    assert f"{address} answers\n0\n" == light.stdout, light.stderr
    left = served.wait_for("client left", 3)
    assert ["goodbye"] * 3 == [event["why"] for event in left[-3:]]
    served.send(signal.SIGTERM)
    assert 0 == served.wait()
    assert 1 == workplace.run("health", address, "--timeout", "0.3").returncode


def test_a_socket_that_says_nothing_is_no_server(workplace: Any) -> None:
    """Something accepts the connection and never answers: status 1 within the limit."""
    address = f"ipc://{workplace.folder}/mute.sock"
    with zmq.Context() as context, context.socket(zmq.ROUTER) as mute:
        mute.set(zmq.LINGER, 0)
        mute.bind(address)
        ran = workplace.run("health", address, "--timeout", "0.5")
        assert mute.poll(0)
    assert 1 == ran.returncode


def test_it_proves_its_key_to_a_server_that_asks_for_one(workplace: Any) -> None:
    """By options or by environment; without a key there is no answer, with a file that is none status 3."""
    for name in ("server", "probe"):
        assert 0 == workplace.run("keys", "new", name).returncode
    served = workplace.serve(
        "    server: {listen: ['tcp://127.0.0.1:*'],"
        " security: {key: keys/server.secret, clients: [keys/probe.pub], admins: [], workers: []}}\n" + SORT
    )
    (ready,) = served.wait_for("server ready")
    (address,) = ready["listen"]
    keys = ["--key", "keys/probe.secret", "--server-key", "keys/server.pub"]
    assert 0 == workplace.run("health", address, *PATIENTLY, *keys).returncode
    stranger = workplace.run("health", address, "--timeout", "0.5")
    assert 1 == stranger.returncode
    assert "--key and --server-key" in stranger.stderr
    unreadable = workplace.run("health", address, "--key", "gone.secret", "--server-key", "keys/server.pub")
    assert 3 == unreadable.returncode
    assert "gone.secret" in unreadable.stderr
    assert 3 == workplace.run("health", address, "--key", "keys/probe.secret").returncode
    environment = {
        **os.environ,
        "SHAPESTREAM_KEY": "keys/probe.secret",
        "SHAPESTREAM_SERVER_KEY": "keys/server.pub",
    }
    by_environment = subprocess.run(
        [*COMMAND, "health", address, *PATIENTLY], cwd=workplace.folder, env=environment, check=False
    )
    assert 0 == by_environment.returncode


@pytest.mark.parametrize("arguments", [[], ["ipc://s", "--timeout", "soon"], ["ipc://s", "--tiemout", "3"]])
def test_wrong_usage_is_status_2(workplace: Any, arguments: list[str]) -> None:
    """As of every command."""
    ran = workplace.run("health", *arguments)
    assert (2, "") == (ran.returncode, ran.stdout)
    assert "shapestream health" in ran.stderr


def test_what_is_no_address_and_no_file_is_said(workplace: Any) -> None:
    """A message and a status, no traceback."""
    odd = workplace.run("health", "tcp://nowhere")
    assert 1 == odd.returncode
    assert odd.stderr.startswith("unavailable: tcp://nowhere: ")
    gone = workplace.run("health", "gone.yaml")
    assert 3 == gone.returncode
    assert "gone.yaml" in gone.stderr
    assert "Traceback" not in odd.stderr + gone.stderr


def test_it_is_listed_and_explains_itself(workplace: Any) -> None:
    """`--help` of the command line, and of the command."""
    assert "health" in workplace.invoke("--help").stdout
    assert "--timeout SECONDS" in workplace.run("health", "--help").stdout


def test_its_two_messages_are_those_of_the_protocol() -> None:
    """They are written by hand; the codec reads them as a client's."""
    (hello,) = decode([greeting()], role=Role.SERVER_OF_CLIENTS, limits=CLIENT_LIMITS).entries
    assert isinstance(hello, Hello)
    assert (16, "shapestream health") == (len(hello.client), hello.software)
    (farewell,) = decode([goodbye()], role=Role.SERVER_OF_CLIENTS, limits=CLIENT_LIMITS).entries
    assert isinstance(farewell, Goodbye)
    assert msgpack.unpackb(greeting()) != msgpack.unpackb(greeting()), "a client id is used once"
