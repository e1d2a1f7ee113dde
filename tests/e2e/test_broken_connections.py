"""Connections that break while libzmq holds more of them than the event loop has read: no process ends of it.

The peers share no code with ours: plain sockets that speak ZMTP by hand, and bare pyzmq.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from tests.e2e.conftest import IMPORTABLE, PATIENCE_S
from tests.e2e.zmtp import HEARTBEAT, MOST_SENT, PING, STUCK_S, Raw, dialled, message
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from shapestream.transport.curve_keys import new_key_pair, write_key_pair

pytestmark = pytest.mark.e2e

# Longer than the interval (5 s) of the heartbeats that libzmq sent for us until they were turned off.
HELD_S = 6.0


def quiet(address: str) -> Raw:
    """A client that sends messages only."""
    return Raw(dialled(address), b"DEALER", message(HEARTBEAT) * 1000)


def pinging(address: str) -> Raw:
    """A client with a PING among its messages, wherever libzmq stops to read."""
    return Raw(dialled(address), b"DEALER", (message(HEARTBEAT) * 8 + PING) * 200)


# ---------------------------------------------------------------- bare pyzmq


class Bare:
    """One connection of a bare DEALER or ROUTER, with keys or without."""

    def __init__(self, kind: int, address: str, keys: dict[str, str] | None = None, me: str = "peer") -> None:
        self.context = zmq.Context()
        _contexts.append(self.context)
        self._socket: zmq.Socket[bytes] = self.context.socket(kind)
        self._socket.set(zmq.LINGER, 0)
        self._socket.set(zmq.SNDHWM, 1000)
        self._socket.set(zmq.RCVTIMEO, int(PATIENCE_S * 1000))
        if keys is not None:
            self._socket.set(zmq.CURVE_PUBLICKEY, keys[f"{me}_public"].encode())
            self._socket.set(zmq.CURVE_SECRETKEY, keys[f"{me}_secret"].encode())
            if kind == zmq.DEALER:
                self._socket.set(zmq.CURVE_SERVERKEY, keys["server_public"].encode())
            else:
                self._socket.set(zmq.CURVE_SERVER, 1)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_CONNECTED | zmq.EVENT_ACCEPTED)
        self._to: list[bytes] = []
        if kind == zmq.DEALER:
            self._socket.connect(address)
        else:
            self._socket.bind(address)
        self.address = self._socket.get(zmq.LAST_ENDPOINT).decode()

    def greet(self) -> None:
        """Sends one message and waits for the answer: the event loop knows this peer."""
        self._socket.send(HEARTBEAT)
        self._socket.recv_multipart()

    def hear(self) -> None:
        """Waits for a first message, and answers that peer from then on."""
        self._to = [self._socket.recv_multipart()[0]]

    def fill(self) -> None:
        """Sends until nothing more is taken."""
        sent, tried_at = 0, time.monotonic()
        while sent < MOST_SENT and time.monotonic() < tried_at + STUCK_S:
            try:
                self._socket.send_multipart([*self._to, HEARTBEAT * 20], zmq.NOBLOCK)
                sent, tried_at = sent + 20 * len(HEARTBEAT), time.monotonic()
            except zmq.Again:
                time.sleep(0.01)

    def break_off(self) -> None:
        """Ends the connection by a reset, and the socket."""
        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(event["value"])) as connection:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._monitor.close(0)
        self.context.destroy(0)


_contexts: list[zmq.Context[Any]] = []


@pytest.fixture(autouse=True)
def no_context_is_left() -> Iterator[None]:
    """Ends the sockets of a test that failed."""
    yield
    while _contexts:
        _contexts.pop().destroy(0)


# ---------------------------------------------------------------- the victims


class Victim:
    """The process that must live."""

    def __init__(self, folder: Path, role: str, place: str, keys: dict[str, str] | None = None) -> None:
        arguments = [role, place]
        if keys is not None:
            (folder / "keys.json").write_text(json.dumps(keys))
            arguments.append(str(folder / "keys.json"))
        self._log = folder / f"{role}.log"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(IMPORTABLE / "victim.py"), *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
            )

    def hear(self) -> dict[str, Any]:
        """What it says next."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"exit status {self.process.wait(PATIENCE_S)}: {self._log.read_text()}"
        heard: dict[str, Any] = json.loads(line)
        return heard

    def tell(self, word: str) -> None:
        """A line to its stdin."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(f"{word}\n".encode())
            self.process.stdin.flush()

    def block(self) -> None:
        """Its event loop stands still when this returns."""
        self.tell("block")
        assert {"state": "blocked"} == self.hear()

    def assert_lives(self, still: Callable[[], None] = lambda: None) -> None:
        """Its loop goes on, it does what `still` asks of it, and ends when told to."""
        self.tell("go")
        assert {"state": "free"} == self.hear()
        still()
        self.tell("end")
        assert 0 == self.process.wait(PATIENCE_S), self._log.read_text()

    def close(self) -> None:
        """The end of the test, however it went."""
        self.process.kill()
        self.process.wait(PATIENCE_S)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


Start = Callable[..., Victim]


@pytest.fixture
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Starts victims, and ends them."""
    victims = []

    def starter(role: str, place: str | None = None, keys: dict[str, str] | None = None) -> Victim:
        folder = tmp_path_factory.mktemp("b")
        victims.append(Victim(folder, role, place or str(folder), keys))
        return victims[-1]

    yield starter
    for victim in victims:
        victim.close()


@pytest.fixture
def keys(tmp_path: Path) -> dict[str, str]:
    """A server's keys, and those of a listed peer."""
    values: dict[str, str] = {}
    for whose in ("server", "peer"):
        pair = new_key_pair()
        secret, public = write_key_pair(tmp_path, whose, pair)
        values |= {f"{whose}_public": pair.public, f"{whose}_secret": pair.secret}
        values[f"{whose}_file"] = str(secret if whose == "peer" else public)
    assert 32 == len(z85.decode(values["peer_public"]))
    return values


def break_all(victim: Victim, peers: list[Raw] | list[Bare] | list[Raw | Bare]) -> None:
    """Fills what libzmq holds for each of them while the victim's loop stands still, and resets the connections."""
    victim.block()
    for peer in peers:
        peer.fill()
    for peer in peers:
        peer.break_off()
    deadline = time.monotonic() + HELD_S
    while time.monotonic() < deadline and victim.process.poll() is None:
        time.sleep(0.05)


def assert_answers(address: str, keys: dict[str, str] | None = None) -> None:
    """A newcomer is heard at this port."""
    newcomer = Bare(zmq.DEALER, address, keys)
    newcomer.greet()
    newcomer.break_off()


@pytest.mark.parametrize(
    "make",
    [
        quiet,
        *[
            pytest.param(each, marks=pytest.mark.thorough)
            for each in (pinging, lambda address: Bare(zmq.DEALER, address))
        ],
    ],
    ids=["plain", "pinging", "pyzmq"],
)
def test_a_server_outlives_peers_that_break_off_with_full_pipes(
    start: Start, make: Callable[[str], Raw | Bare]
) -> None:
    """At the clients' and the workers' port, over tcp and ipc: it goes on, and newcomers are served."""
    victim = start("server")
    where = victim.hear()
    addresses = [*where["clients"], *where["workers"]]
    assert 4 == len(addresses)
    peers = [make(address) for address in addresses]
    for peer in peers:
        peer.greet()
    break_all(victim, peers)
    victim.assert_lives(lambda: [assert_answers(address) for address in addresses] and None)


def test_a_protected_server_outlives_listed_peers_that_break_off_with_full_pipes(
    start: Start, keys: dict[str, str]
) -> None:
    """A listed key buys nothing: client or worker, the server goes on."""
    victim = start("server", keys=keys)
    where = victim.hear()
    addresses = [
        address for address in (*where["clients"], *where["workers"]) if address.startswith("tcp://")
    ]
    assert 2 == len(addresses)
    peers = [Bare(zmq.DEALER, address, keys) for address in addresses]
    for peer in peers:
        peer.greet()
    break_all(victim, peers)
    victim.assert_lives(lambda: [assert_answers(address, keys) for address in addresses] and None)


@pytest.mark.parametrize(
    "transport",
    [
        pytest.param("tcp", marks=pytest.mark.thorough),
        pytest.param("ipc", marks=pytest.mark.thorough),
        "curve",
    ],
)
@pytest.mark.parametrize("role", ["client", "worker"])
def test_a_client_and_a_worker_outlive_a_server_that_dies_with_many_answers_under_way(
    start: Start, tmp_path: Path, keys: dict[str, str], role: str, transport: str
) -> None:
    """Its loop was blocked meanwhile; afterwards it finds the next server at that address."""
    given = keys if transport == "curve" else None
    address = f"ipc://{tmp_path}/s" if transport == "ipc" else "tcp://127.0.0.1:*"
    server = Bare(zmq.ROUTER, address, given, "server")
    victim = start(role, server.address, given)
    server.hear()
    break_all_of(victim, server)
    successor = Bare(zmq.ROUTER, server.address, given, "server")
    victim.assert_lives(successor.hear)
    successor.break_off()


def break_all_of(victim: Victim, server: Bare) -> None:
    """The same for a victim that has connected to this server."""
    break_all(victim, [server])


@pytest.mark.parametrize("transport", ["tcp", pytest.param("ipc", marks=pytest.mark.thorough)])
@pytest.mark.parametrize("role", ["client", "worker"])
def test_a_client_and_a_worker_outlive_a_server_that_pings_and_dies(
    start: Start, tmp_path: Path, role: str, transport: str
) -> None:
    """A PING behind messages that were not read, then a reset: the process goes on."""
    if transport == "tcp":
        listener = socket.create_server(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
    else:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        address = f"ipc://{tmp_path}/s"
    with listener:
        listener.settimeout(PATIENCE_S)
        victim = start(role, address)
        server = Raw(listener.accept()[0], b"ROUTER", (message(HEARTBEAT) * 8 + PING) * 200)
        break_all(victim, [server])
    victim.assert_lives()
