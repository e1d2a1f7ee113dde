"""What peers make the server hold: messages without end, and answers that nobody reads. Bounded, and given back."""

from __future__ import annotations

import os
from contextlib import suppress

import numpy as np
import psutil
import pytest
import zmq
from tests.e2e.conftest import PATIENCE_S, Served, Workplace, until
from tests.e2e.zmtp import Raw, dialled
from tests.entries import Hello, ModelOpened, OpenModel, Role, request_of

from shapestream.wire.codec import decode, encode
from shapestream_engine.layout import Tensors

pytestmark = pytest.mark.e2e

MODEL = """\
    models:
      - name: m
        function: soaked:plus_one
        inputs: {x: {shape: "batch:1..16, n:1..300000", element_type: f32}}
        outputs: {y: {shape: "batch, n", element_type: f32, rule: rows}}
        trust: true
        calibration_s: 0
    workers: [{count: 1, slots: 1, threads: 1}]
"""
SERVER = """\
    server:
      listen: [ipc://s.sock, "tcp://127.0.0.1:*"]
      window_bytes: 2 GiB
      client_silence_s: 3600   # that they do not read is to be what ends them
"""
MIB = 1 << 20
KEPT = {"kept_bytes": MIB}


def tcp_of(served: Served) -> str:
    """Where it listens for strangers."""
    (ready,) = served.events("server ready")
    (address,) = (address for address in ready["listen"] if address.startswith("tcp://"))
    return str(address)


def resident(served: Served) -> int:
    """Of the server itself."""
    return int(psutil.Process(served.pid).memory_info().rss)


@pytest.fixture(scope="module")
def served(module_workplace: Workplace) -> Served:
    """A server for the tests that do not fill it."""
    served = module_workplace.serve(SERVER + MODEL, **KEPT)
    served.wait_for("workers ready")
    return served


def test_a_message_of_endless_parts_ends_its_connection_and_its_memory_comes_back(served: Served) -> None:
    """Four million parts of one byte, then the last: the connection is closed, and what they took is given back."""
    before = resident(served)
    sock = dialled(tcp_of(served))
    peer = Raw(sock, b"DEALER", b"")
    parts = b"\x01\x01x" * 100_000
    for _ in range(40):
        sock.sendall(parts)
    sock.sendall(b"\x00\x01x")
    try:
        while sock.recv(4096):
            pass
    except ConnectionResetError:
        pass
    peer.break_off()
    with served.client() as honest:
        result = honest.infer("m", {"x": np.ones((1, 5), np.float32)}, deadline=PATIENCE_S)
        assert [2.0] * 5 == result["y"].tolist()[0]
        assert 1 == honest.statistics()["bad_messages"]["clients"]
        until("the memory", lambda: resident(served) < before + 150 * MIB)


def test_a_connection_that_says_nothing_is_closed(served: Served) -> None:
    """Not one byte of a greeting: it is closed after some seconds, over tcp and over ipc."""
    silent = [dialled(tcp_of(served)), dialled(served.address)]
    for sock in silent:
        sock.settimeout(PATIENCE_S)
        heard = b"?"
        while heard:
            heard = sock.recv(4096)
        sock.close()


class Slow:
    """A bare DEALER that asks for large answers and reads none."""

    def __init__(self, address: str) -> None:
        self.socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self.socket.set(zmq.LINGER, 0)
        self.socket.set(zmq.RCVHWM, 1)
        self.socket.set(zmq.RCVBUF, 64 * 1024)
        self.socket.set(zmq.RCVTIMEO, int(PATIENCE_S * 1000))
        self.socket.connect(address)
        hello = Hello(client=os.urandom(16), software="slow")
        self.socket.send_multipart(encode([hello, OpenModel(name="m")]))
        self.model = self._opened()
        self._sequence = 0

    def _opened(self) -> int:
        while True:
            for entry in decode(self.socket.recv_multipart(), role=Role.CLIENT).entries:
                if isinstance(entry, ModelOpened):
                    return entry.number

    def ask(self) -> None:
        """One request with an answer of 1 MiB; nothing, where the server takes no more."""
        self._sequence += 1
        x = np.ones((1, MIB // 4), np.float32)
        tensors = Tensors(layout=((0, "f32", x.shape),), buffers=(x.tobytes(),))
        request = request_of(self._sequence, tensors, model=self.model)
        with suppress(zmq.Again):
            self.socket.send_multipart(encode([request]), zmq.NOBLOCK)


@pytest.mark.parametrize(
    ("readers", "asked", "outbox_mib", "most_mib"),
    [
        # 256 MiB of outbox, 32 messages that libzmq holds, and what is on its way in and out.
        pytest.param(1, 400, 1024, 800, id="one fills its own outbox"),
        # 64 MiB of outboxes, and the same of each.
        pytest.param(3, 200, 64, 500, id="three fill what all may hold together"),
    ],
)
def test_what_slow_readers_hold_is_bounded(
    workplace: Workplace, readers: int, asked: int, outbox_mib: int, most_mib: int
) -> None:
    """Those that hold most are cut off, each once, the memory is bounded, and an honest client is served meanwhile."""
    served = workplace.serve(SERVER + MODEL, max_outbox_bytes=outbox_mib * MIB, **KEPT)
    served.wait_for("workers ready")
    before = most = resident(served)
    slow = [Slow(tcp_of(served)) for _ in range(readers)]
    try:
        with served.client() as honest:
            for number in range(asked):
                for each in slow:
                    each.ask()
                result = honest.infer("m", {"x": np.full((1, 5), number, np.float32)}, deadline=PATIENCE_S)
                assert [number + 1.0] * 5 == result["y"].tolist()[0]
                most = max(most, resident(served))
            left = until("some are cut off", lambda: served.events("client left"))
            assert {"does not read"} == {event["why"] for event in left}
            assert 1 + readers - len(left) == honest.statistics()["clients"]
            assert most - before < most_mib * MIB
    finally:
        for each in slow:
            each.socket.close()
