"""A client that stops reading: it alone is cut off, and what the server keeps for it is bounded."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import psutil
import pytest
import zmq
from tests.e2e.conftest import PATIENCE_S, until

from shapestream.wire.codec import decode, encode
from shapestream.wire.messages import Heartbeat, Hello, ModelOpened, OpenModel, Request, Role
from shapestream_engine.layout import Tensors

pytestmark = pytest.mark.e2e

CONFIG = """\
    server:
      listen: [ipc://s.sock, "tcp://127.0.0.1:*"]
      kept_bytes: 1 MiB
      client_silence_s: 3600   # that it does not read is to be what ends it
    models:
      - name: m
        function: soaked:plus_one
        inputs: {x: {shape: "batch:1..16, n:1..20000", element_type: f32}}
        outputs: {y: {shape: "batch, n", element_type: f32, rule: rows}}
        trust: true
        calibration_s: 0
    workers: [{count: 1, slots: 1, threads: 1}]
"""
NUMBERS = 20_000
MOST_GROWTH_MB = 800
"""Of the server: 256 MiB of outbox, 32 messages that libzmq holds, each of what was ready in one turn, and what runs."""


class Deaf:
    """Speaks the protocol, and reads nothing any more once it asks."""

    def __init__(self, address: str) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RCVHWM, 1)
        self._socket.setsockopt(zmq.SNDHWM, 200)
        self._socket.setsockopt(zmq.RCVBUF, 64 * 1024)
        self._socket.setsockopt(zmq.RCVTIMEO, 60_000)
        self._socket.connect(address)
        self._say(Hello(client=os.urandom(16), software="deaf"), OpenModel(name="m"))
        self._model = self._opened()
        self._sequence = 0

    def _say(self, *entries: Any) -> None:
        self._socket.send_multipart(encode(entries), zmq.NOBLOCK)

    def _opened(self) -> int:
        while True:
            for entry in decode(self._socket.recv_multipart(), role=Role.CLIENT).entries:
                if isinstance(entry, ModelOpened):
                    return entry.number

    def ask(self) -> bool:
        """One request with a large answer; False while the server takes no more."""
        x = np.full((1, NUMBERS), 1, np.float32)
        tensors = Tensors(layout=((0, "f32", x.shape),), buffers=(x.tobytes(),))
        request = Request(
            sequence=self._sequence + 1, model=self._model, remaining_ms=None, priority=0, tensors=tensors
        )
        try:
            self._say(Heartbeat(), request)
        except zmq.Again:
            return False
        self._sequence += 1
        return True

    def close(self) -> None:
        """The end."""
        self._socket.close()


def test_a_client_that_stops_reading_is_cut_off_and_an_honest_one_is_served_meanwhile(workplace: Any) -> None:
    """Its answers fill its outbox, it is cut off once, and the memory comes back; every answer of the other is right."""
    served = workplace.serve(CONFIG)
    served.wait_for("workers ready")
    (ready,) = served.events("server ready")
    (address,) = (address for address in ready["listen"] if address.startswith("tcp://"))
    server = psutil.Process(served.pid)
    deaf = Deaf(address)
    try:
        with served.client() as honest:
            answers = 0
            most = before = server.memory_info().rss

            def cut_off() -> bool:
                nonlocal answers, most
                for _ in range(100):
                    deaf.ask()
                result = honest.infer("m", {"x": np.full((1, 5), answers, np.float32)}, deadline=PATIENCE_S)
                assert [answers + 1.0] * 5 == result["y"].tolist()[0]
                answers += 1
                most = max(most, server.memory_info().rss)
                return bool(served.events("client left"))

            until("the deaf client is cut off", cut_off)
            (left,) = served.events("client left")
            assert "does not read" == left["why"]
            assert 1 == honest.statistics()["clients"]
            assert answers > 10
            assert (most - before) / 1e6 < MOST_GROWTH_MB
    finally:
        deaf.close()
